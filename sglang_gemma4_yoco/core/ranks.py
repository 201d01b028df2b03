"""Tensor-parallel ranks cut a batch together, or not at all.

After every attention and FFN the ranks of a group add up the same rows. If one rank cut a batch and
another did not, both would hang, or add up rows of different tokens. So the decision on a batch
depends on host fields that the scheduler gives to all ranks alike; and what can differ between
ranks (is there memory for a second attention backend?) is compared when the server starts.

All ranks of a group call these functions in the same order. A rank that raises instead ends the
server, as in SGLang's own collectives: its closed connections make gloo raise in the others. All
ranks are on one machine with one installation, so none lacks the package.
"""

from torch import distributed

from sglang_gemma4_yoco import compat

NOT_ALIKE = "the tensor-parallel ranks were not set up alike"


def find_difference(found: str) -> str | None:
    """Compare what this rank has found with what the others of its group have found.

    Args:
        found: what must be the same on every rank. It holds no measured number, which differs
            where the cause is the same.

    Returns:
        Why no batch may be cut, the same on every rank of the group, or None.
    """
    group = compat.server.get_tensor_parallel_group()
    if group is None:
        return None
    everyone: list[str] = [""] * len(group.ranks)
    distributed.all_gather_object(everyone, found, group=group.cpu_group)
    different = sorted(set(everyone))
    if len(different) == 1:
        return None
    return f"{NOT_ALIKE}: {' / '.join(different)}"
