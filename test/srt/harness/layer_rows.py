"""Rules for the rows that each layer computes in a prefill forward.

Of E2B_TINY's 8 layers the last 4 are KV-shared. The cut is inside layer 3, the last layer that
writes K/V: its FFN already computes kept rows only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from sglang_gemma4_reference import releases
from sglang_gemma4_reference.checkpoint import E2B_TINY, Gemma4Shape
from sglang_gemma4_reference.gemma3n import Gemma3nShape
from sglang_gemma4_reference.row_trace import Prefill
from sglang_gemma4_reference.workload import read_rows
from sglang_gemma4_yoco.core.worth import is_worth_cutting

LAYERS = E2B_TINY.layers
FIRST_SHARED = E2B_TINY.layers - E2B_TINY.kv_shared_layers
FIRST_CUT = FIRST_SHARED - 1
# Rows kept of an intermediate chunk, by whether SGLang marks it as such in the batch.
CHUNK_KEPT = int(not releases.marks_intermediate())


#: For Triton's interpreter, which runs a kernel once per layer and head, in Python: E2B_TINY with
#: fewer of both. Its layers are sf sf (s has a window), the last two of them KV-shared.
INTERPRETED = dataclasses.replace(
    E2B_TINY, layers=4, kv_shared_layers=2, sliding_per_full=1, heads=2
)


#: For the same: sfs fsf, the last three KV-shared, with a window shorter than most prompts.
TWO_POOLS = dataclasses.replace(INTERPRETED, layers=6, kv_shared_layers=3, sliding_window=5, seed=1)


def whole(rows: int, shape: Gemma4Shape = E2B_TINY) -> list[int]:
    """Return all rows for every layer: the stock forward."""
    return [rows] * shape.layers


def cut(rows: int, kept: int, shape: Gemma4Shape | Gemma3nShape = E2B_TINY) -> list[int]:
    """Return ``kept`` of ``rows`` rows for layers after the cut; 0 for an intermediate chunk."""
    front = shape.layers - shape.kv_shared_layers - 1
    return [rows] * front + [kept] * (shape.layers - front)


def rows_and_replays(
    prefill: Prefill,
    minimum: int | None = 1,
    captured: Sequence[int] = (),
    buckets: Sequence[int] = (),
) -> tuple[list[int], int]:
    """Return the rows that each layer must compute on the fast path, and the number of replays.

    Args:
        minimum: the server's threshold; None if none is set.
        captured: the row counts for which its tail is captured; others are padded to them.
        buckets: the row counts for which SGLang captures prefills, in ascending order.
    """
    total, replays = sum(prefill.extend_lens), 0
    kept, requests = read_rows(prefill), len(prefill.extend_lens)
    of_media = prefill.multimodal and kept > requests  # log-probabilities of a prompt with an image
    if of_media or not is_worth_cutting(total, kept, minimum):
        kept = total
    if kept == requests < total:
        large_enough = [rows for rows in captured if rows >= kept]
        if large_enough:
            kept, replays = min(large_enough), 1
    bucket = _bucket_of(prefill, buckets)
    if bucket is None:
        return cut(total, kept), replays
    if replays or kept == 0:
        return cut(bucket, kept), 1 + replays
    return whole(bucket), 1  # a tail that is not captured: the graph runs to its end


def _bucket_of(prefill: Prefill, buckets: Sequence[int]) -> int | None:
    """Return SGLang's graph for a prefill, at least half of whose bucket must be used."""
    total = sum(prefill.extend_lens)
    for bucket in buckets:
        if total <= bucket <= 2 * total and not prefill.multimodal:
            return bucket
    return None


def without_audit(prefill: Prefill) -> Prefill:
    """Return a forward as it was before its audit, if it was audited.

    An audit runs all rows as stock, and from layer S-1 on the kept ones once more, eagerly. A tail
    that is replayed for b rows is replayed again, and run eagerly on as many: b + T + B + 2 b rows.
    """
    total, requests = sum(prefill.extend_lens), len(prefill.extend_lens)
    if prefill.rows[0] != 2 * total:
        return prefill
    assert prefill.replays in (0, 2), prefill
    rows = []
    for layer, computed in enumerate(prefill.rows):
        audited, runs = computed - total, 1
        if layer >= FIRST_CUT and prefill.replays:
            audited, runs = audited - requests, 3
        elif layer >= FIRST_CUT:
            runs = 2
        audited, left = divmod(audited, runs)
        assert left == 0, prefill
        rows.append(audited)
    return dataclasses.replace(prefill, rows=rows, replays=prefill.replays // 2)


def assert_all_fast(
    prefills: Iterable[Prefill],
    minimum: int | None = 1,
    captured: Sequence[int] = (),
    buckets: Sequence[int] = (),
) -> None:
    """Assert that every forward computed exactly the rows that the fast path must.

    Every tail that can be replayed was, and no other. A forward whose requests have one new token
    each has nothing to skip, and computes all rows. At least one forward must keep some of its rows
    but not all.
    """
    ended = 0
    for prefill in prefills:
        due = rows_and_replays(prefill, minimum, captured, buckets)
        assert (prefill.rows, prefill.replays) == due, prefill
        ended += 0 < prefill.rows[-1] < sum(prefill.extend_lens)
    assert ended, "no prompt ended on the fast path"


def assert_all_stock(prefills: Iterable[Prefill]) -> None:
    """Assert that no forward skipped a row."""
    for prefill in prefills:
        total = sum(prefill.extend_lens)
        assert prefill.rows == [total] * len(prefill.rows), prefill
