"""What ranks tell each other before they cut anything, over a real store, each rank a thread.

No verdict hangs on time: where all ranks come they have all the time they need, and where one never
comes any time is too short.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from sglang_gemma4_yoco.deciding import ranks

LONG, SHORT = timedelta(seconds=300), timedelta(seconds=0.1)


def verdicts(findings: dict[int, str], missing: Sequence[int] = ()) -> list[str | None]:
    """What each rank of ``findings`` is told; those of ``missing`` say nothing."""
    store, everybody = HashStore(), sorted({*findings, *missing})
    patience = SHORT if missing else LONG
    with ThreadPoolExecutor(len(findings)) as pool:
        return list(
            pool.map(
                lambda rank: ranks.compare(store, "k", everybody, rank, findings[rank], patience),
                findings,
            )
        )


@pytest.mark.parametrize("members", [(0, 1), (0, 1, 2), (2, 3), (5, 3, 1)])
def test_ranks_with_the_same_findings_go_on(members: tuple[int, ...]) -> None:
    assert verdicts(dict.fromkeys(members, "a")) == [None] * len(members)


@pytest.mark.parametrize("other", [0, 1, 2])
def test_ranks_with_different_findings_all_step_aside(other: int) -> None:
    findings = dict.fromkeys(range(3), "a") | {other: "b"}
    assert verdicts(findings) == [ranks.NOT_ALIKE] * 3


@pytest.mark.parametrize("missing", [0, 2, 7])
def test_ranks_that_wait_in_vain_all_step_aside(missing: int) -> None:
    present = [rank for rank in (0, 1, 2, 7) if rank != missing]
    assert verdicts(dict.fromkeys(present, "a"), [missing]) == [ranks.NOT_ALL] * 3


def test_a_rank_that_comes_late_gets_the_verdict_of_those_before() -> None:
    store = HashStore()
    assert ranks.compare(store, "k", [0, 1], 0, "a", SHORT) == ranks.NOT_ALL
    assert ranks.compare(store, "k", [0, 1], 1, "a", LONG) == ranks.NOT_ALL


def test_groups_of_one_store_do_not_meet() -> None:
    """Two tensor-parallel groups, and two comparisons of one group, each have keys of their own."""
    store = HashStore()
    assert ranks.compare(store, "first", [0], 0, "a", SHORT) is None
    assert ranks.compare(store, "second", [0], 0, "b", SHORT) is None
    assert ranks.compare(store, "third", [0, 1], 0, "a", SHORT) == ranks.NOT_ALL


def test_a_rank_alone_asks_nobody() -> None:
    assert ranks.disagreement("anything") is None
