"""Agreement of tensor-parallel ranks: all of them cut a batch, or none.

The ranks of a group all-reduce the same rows after every attention and FFN. If one rank cut a batch
and another did not, both would hang, or add up rows of different tokens. So the decision on a batch
depends only on host fields, which the scheduler sends to all ranks alike. Anything that can differ
between ranks, such as memory for a second attention backend, is compared at start.

All ranks of a group call these functions in the same order. If a rank raises, the server ends, as
in SGLang's own collectives: its closed connections make gloo raise in the others. All ranks run on
one machine with one installation, so none lacks the package.
"""

from torch import distributed

from sglang_gemma4_yoco.compat import server

NOT_ALIKE = "the tensor-parallel ranks were not set up alike"


def find_difference(found: str) -> str | None:
    """Compare this rank's findings with those of the other ranks in its group.

    Args:
        found: text that must be equal on every rank; without measurements, which may differ even
            if the cause is the same.

    Returns:
        The reason why no batch may be cut, the same on every rank of the group, or None.
    """
    if server.is_single_rank():
        return None
    group = server.get_tensor_parallel_group()
    everyone: list[str] = [""] * len(group.ranks)
    distributed.all_gather_object(everyone, found, group=group.cpu_group)
    different = sorted(set(everyone))
    if len(different) == 1:
        return None
    return f"{NOT_ALIKE}: {' / '.join(different)}"
