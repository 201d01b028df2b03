"""Tensor-parallel ranks cut a batch together, or not at all.

The ranks of one group meet in an all-reduce after every attention and FFN, each with the same
rows. A rank that cut a batch while another did not would hang both, or add up rows of different
tokens. So a rank may only act on what all of them know:

- per batch, the gate looks at host fields that the scheduler hands to every rank alike;
- what each rank finds out for itself (is the package installed here, did the tail's backend fit
  into this GPU's memory?) is compared once, when the server starts;
- whatever fails on one rank after that is raised, as SGLang raises its own failures: the other
  ranks are in the middle of the same forward, and the server goes down loudly.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from itertools import count
from typing import Any

import torch
from torch import distributed
from torch.distributed import DistStoreError

from sglang_gemma4_yoco import seams

NOT_ALIKE = "the tensor-parallel ranks were not set up alike"
NOT_ALL = "a tensor-parallel rank does not take part"
_ALIKE = "alike"
_PATIENCE = timedelta(seconds=60)  # ranks come here out of step by what loading took them

# Every rank counts the same comparisons, so each has keys of its own in the store.
_comparisons = count()


def disagreement(findings: str) -> str | None:
    """Compare what this rank found out with the others of its group; at start, once per model.

    Args:
        findings: what must be the same on every rank.

    Returns:
        Why no batch may be cut, the same on every rank that asks, or None.
    """
    group = seams.tensor_parallel_group()
    if group is None:
        return None
    return compare(
        seams.rendezvous_store(),
        f"sglang_gemma4_yoco/{next(_comparisons)}/{min(group.ranks)}",
        group.ranks,
        group.ranks[group.rank_in_group],
        findings,
        _PATIENCE,
    )


def largest(number: float) -> float:
    """The largest of this rank's and its group's numbers.

    All ranks of the group ask at the same time: in a forward that all of them cut.
    """
    group = seams.tensor_parallel_group()
    if group is None:
        return number
    told = torch.tensor(number, dtype=torch.float64)
    distributed.all_reduce(told, distributed.ReduceOp.MAX, group=group.cpu_group)
    return float(told)


def compare(
    store: Any,
    name: str,
    ranks: Sequence[int],
    rank: int,
    findings: str,
    patience: timedelta,
) -> str | None:
    """``disagreement`` over a ``torch.distributed.Store``.

    A collective would hang where a rank does not take part; waiting for keys ends. The verdict is
    whatever the first rank to make up its mind writes down, so that one that waited in vain and
    one that did not still act alike.
    """
    store.set(f"{name}/{rank}", findings)
    keys = [f"{name}/{other}" for other in ranks]
    try:
        store.wait(keys, patience)
    except DistStoreError:
        verdict = NOT_ALL
    else:
        verdict = _ALIKE if len({store.get(key) for key in keys}) == 1 else NOT_ALIKE
    verdict = store.compare_set(f"{name}/verdict", "", verdict).decode()
    return None if verdict == _ALIKE else verdict
