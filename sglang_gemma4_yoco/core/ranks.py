"""Tensor-parallel ranks cut a batch together, or not at all.

After every attention and FFN the ranks of a group add up the same rows. A rank that cut a batch
while another did not would hang both, or add up rows of different tokens. So a batch is judged by
host fields that the scheduler hands to all ranks alike, and what each rank finds out for itself (is
there memory for a second attention backend?) is compared when the server starts.

All ranks of a group call these functions in the same order. A rank that raises instead ends the
server, which is what should happen: its scheduler process sends SIGQUIT to the server's parent
(``run_scheduler_process``), which kills all processes, and its end closes the connections on which
the others wait, so that gloo raises there at once. A rank that neither comes nor ends is waited for
as long as by SGLang's own collectives on that group: two hours (``GroupCoordinator``'s
``gloo_timeout``). All ranks are on one machine with one installation, so none lacks the package.
"""

from __future__ import annotations

import torch
from torch import distributed

from sglang_gemma4_yoco import seams

NOT_ALIKE = "the tensor-parallel ranks were not set up alike"


def reason_ranks_differ(findings: str) -> str | None:
    """Compare what this rank found out with the others of its group.

    Args:
        findings: what must be the same on every rank.

    Returns:
        Why no batch may be cut, the same on every rank of the group, or None.
    """
    group = seams.tensor_parallel_group()
    if group is None:
        return None
    everyone: list[str] = [""] * len(group.ranks)
    distributed.all_gather_object(everyone, findings, group=group.cpu_group)
    return None if len(set(everyone)) == 1 else NOT_ALIKE


def largest(number: float) -> float:
    """The largest of this rank's and its group's numbers."""
    group = seams.tensor_parallel_group()
    if group is None:
        return number
    shared = torch.tensor(number, dtype=torch.float64)
    distributed.all_reduce(shared, distributed.ReduceOp.MAX, group=group.cpu_group)
    return float(shared)
