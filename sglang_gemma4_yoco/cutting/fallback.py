"""When the fast path fails: the stock forward serves the same batch, and the server lives on.

An exception in a forward ends SGLang's scheduler, and with it the whole server. An operator must
never lose a server to an optimisation, so a failure of the fast path costs time and nothing else:

- The batch is run once more, as stock. It finds all as the first try did: the batch's fields, the
  attention state and the model are put back by whoever changed them; K and V go to the same slots
  with the same values; and the input embeddings, which layer 0's fused add-norm overwrites, are
  put back here from a copy.
- When stock fails as well, its exception goes to the scheduler, as without this package.
- After ``LIMIT`` failures without a success between them the fast path is off in this process.
- With other ranks nothing is run again: they might have had no failure, and wait in collectives
  that this rank's second run would answer wrongly.
"""

from __future__ import annotations

import logging
import traceback

import torch
from torch import distributed

from sglang_gemma4_yoco import log

LIMIT = 8
GIVEN_UP = f"it failed {LIMIT} times in a row and is off in this process"

_failures_in_a_row = 0


def given_up() -> bool:
    """Whether the fast path has failed so often that it is off in this process."""
    return _failures_in_a_row >= LIMIT


def succeeded() -> None:
    """A forward took the fast path to its end."""
    global _failures_in_a_row
    _failures_in_a_row = 0


def failed(error: Exception, rows: int = 0) -> None:
    """A forward of so many rows failed on the fast path, and stock is about to serve it."""
    global _failures_in_a_row
    _failures_in_a_row += 1
    log.failed(error, rows)
    if given_up():
        log.server_refused(GIVEN_UP, logging.ERROR)
    # The traceback keeps the first try's tensors alive, memory that the second one needs.
    traceback.clear_frames(error.__traceback__)


def reset() -> None:
    """Forget all failures."""
    global _failures_in_a_row
    _failures_in_a_row = 0


def is_alone() -> bool:
    """Whether no other rank computes its part of the same forward."""
    return not distributed.is_initialized() or distributed.get_world_size() == 1


def copy_of(embeds: torch.Tensor | None) -> torch.Tensor | None:
    """A copy of the input embeddings, [T, hidden], that a forward was given, for ``put_back``.

    One read and one write of one layer's input: about a thousandth of what the layers take.
    """
    return None if embeds is None else embeds.clone()


def put_back(embeds: torch.Tensor | None, copy: torch.Tensor | None) -> None:
    """Give the caller's very tensor its values back, in case a forward has overwritten them."""
    if embeds is not None and copy is not None:
        embeds.copy_(copy)
