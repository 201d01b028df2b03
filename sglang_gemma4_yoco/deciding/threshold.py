"""Does the fast path pay for this batch? A rule on its rows and on how its tail runs, or a setting.

The setting is ``settings.min_skipped_rows``.
"""

from __future__ import annotations

from enum import Enum

_FEWEST = 3  # rows
_FEWEST_LAUNCHED = 1024  # rows, on a GPU
_FEWEST_REPLAYED = 128  # rows, on a GPU whose fronts are replayed too
_LEAST = 16  # of so many rows one must be skipped


class TailCost(Enum):
    """What the tail of a batch costs besides its rows."""

    NOTHING = "replayed as one graph, or not run at all"
    PLANNED = "replayed behind a front that is replayed as well, on a GPU"
    LAUNCHES = "launched kernel by kernel on a GPU"
    ARITHMETIC = "computed on a CPU"


def pays(
    total: int, kept: int, minimum: int | None = None, cost: TailCost = TailCost.ARITHMETIC
) -> bool:
    """Whether skipping ``total - kept`` rows saves more than the cut itself costs.

    **On a CPU** the saving grows with the skipped rows: of a stock forward's time the tail takes a
    share f (0.7 in E2B, 0.43 in E4B), and skipping s of T rows saves f * s / T of it. Two costs
    stand against that.

    * Small batches: a layer reads all its weights for one row as for three, so few skipped rows
      save nothing, and the fixed work of the cut remains. Measured off/on with E2B proportions
      (T rows, k kept): 0.84 (4, 3), 0.96 (4, 2), 0.95 (16, 14), but 1.01 (16, 12), 1.06 (64, 58),
      1.45 (4, 1). Hence at least 3 skipped rows.
    * Large batches with nearly all rows kept: 1.00 (35, 34), 1.00 (35, 32), 1.02 (95, 79). Where
      f * s / T is within the scatter of a run nothing is won, and every batch that runs as stock
      is one that cannot go wrong. Hence at least 1/16 of the rows: 2.7 % of the time in E4B.

    Figures: ``benchmark/results/threshold_e2b-mini_cpu_sglang-0.5.23.json``, a CPU, fp32.

    **On a GPU** a forward takes as long as the longer of two: the device's work, which grows with
    the rows, and the host's, which launches each layer's kernels for one row as for a thousand.

    * A tail that is replayed, or that nobody reads, spares the host 20 layers of 35, or 18 of 42,
      whatever the rows: one skipped row is enough.
    * Where SGLang replays the front, stock's replay of the tail costs the host next to nothing
      either, and the device alone can win. A layer of few rows takes as long as its weights take to
      be read, which one row needs as well: at 3.3e12 bytes per second, and two bytes and two
      operations for each weight, up to 90 rows. Planning the tail takes 0.3 ms, in which the device
      does 45 rows of E2B's tail (1e9 weights). Hence at least 128 skipped rows; a model, too.
    * A tail that is launched spares the device alone, so that it pays only where the device is the
      slower of the two. With h seconds of the host per layer, w multiplied weights of a layer and a
      device of F operations per second, that is from T = h * F / (2 * w) rows on. A layer of E2B
      has w = 5e7; h = 0.35 ms and F = 3e14 (an H100) make 1050 rows; 0.25 ms 750, 0.5 ms 1500, and
      for E4B, whose layers are larger, 720. Hence at least 1024 skipped rows. This is a model until
      a GPU has been measured.

    Args:
        total: rows of the batch, T.
        kept: rows that somebody reads; 0 for a batch that only fills the cache.
        minimum: the operator's own number of rows to skip, which replaces the rule.
        cost: how the tail would run.

    >>> pays(total=2048, kept=1), pays(total=16, kept=14), pays(total=100, kept=95)
    (True, False, False)
    >>> pays(2, 1, cost=TailCost.NOTHING), pays(800, 1, cost=TailCost.LAUNCHES)
    (True, False)
    """
    skipped = total - kept
    if minimum is not None:
        return skipped >= minimum
    if cost is TailCost.NOTHING:
        return skipped >= 1
    if cost is TailCost.PLANNED:
        return skipped >= _FEWEST_REPLAYED
    if cost is TailCost.LAUNCHES:
        return skipped >= _FEWEST_LAUNCHED and skipped * _LEAST >= total
    return skipped >= _FEWEST and skipped * _LEAST >= total
