"""SGLang's capture of prefills, repaired for these models where the operator has asked for it.

SGLang 0.5.19 to 0.5.23 cannot capture prefills of E2B and E4B: two layers that share K and V count
as an error, and a multimodal model is captured with ids and embeddings at once (``docs/upstream``
has both reports). With ``--cuda-graph-backend-prefill=breakable`` such a server does not start.

So while SGLang captures, layers that it cannot index are left unindexed, and text is captured from
its ids alone, which become what they become eagerly (``inputs``). Such a graph would answer a
prompt with images as if it were text: those run eagerly.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from sglang_gemma4_yoco import compat, log, settings
from sglang_gemma4_yoco.core.replaced import replaced
from sglang_gemma4_yoco.prefill_graphs import inputs, sglang

OFF = f"{settings.name_of('prefill_graphs')}=0"
NO_BREAKS = "it is captured without breaks"


def needed(*, multimodal: bool) -> str | None:
    """What keeps SGLang from capturing prefills and is to be repaired, or None."""
    # The flag itself: SGLang may choose breakable graphs without it.
    named = getattr(compat._published(), "cuda_graph_backend_prefill", None)
    if named != sglang.BREAKABLE or exits_refused() is not None:
        return None
    return sglang.capture_error(multimodal=multimodal)


def exits_refused() -> str | None:
    """Why no prefill may leave SGLang's graphs, whatever is captured; None if some may."""
    if not settings.current.prefill_graphs:
        return OFF
    if compat.cuda_graph_backend("prefill") != sglang.BREAKABLE:
        return NO_BREAKS
    return None


def forward_of_ids(model: Any, config: Any) -> Callable[..., Any]:
    """This ``Gemma4TextModel``'s forward, for ids; ``config`` is its multimodal model's."""
    return sglang.taking_ids(model.forward, partial(inputs.embed, model, config))


@contextmanager
def repaired(model: Any, config: Any, why: str) -> Iterator[None]:
    """SGLang can capture prefills of this ``Gemma4TextModel`` in the span."""
    log.once(
        "Gemma 4 fast prefill: SGLang's capture of prefill CUDA graphs is repaired for this "
        f"model ({why}), because --cuda-graph-backend-prefill asks for them; {OFF} leaves it"
    )
    of_ids = forward_of_ids(model, config)
    with sglang.indexing_shared_layers(), replaced(model, forward=of_ids):
        yield


def warn_that_capture_fails(*, multimodal: bool) -> None:
    """Log why SGLang cannot capture what it is about to: its own error names no remedy."""
    why = sglang.capture_error(multimodal=multimodal)
    if why is not None:
        log.once(
            f"Gemma 4 fast prefill: SGLang cannot capture prefill CUDA graphs of this model, and "
            f"may stop now ({why}); with --cuda-graph-backend-prefill=disabled it starts",
            logging.WARNING,
        )
