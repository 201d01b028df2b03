"""Thresholds: an eligible batch is cut if its skipped rows save more than the cut costs.

The setting ``min_skipped_rows`` replaces all of these.
"""

# An eager tail must skip a minimum number of rows, and one in ``_PART`` rows of the batch.
_PART = 16
# Measured: benchmark/results/threshold_e2b-mini_cpu_sglang-*.json.
_ROWS_ON_CPU = 3
# On a GPU the device must be slower than the host, whose launches of the tail cost the same for one
# row as for thousands. With h seconds of host time per layer, w weights per layer and F FLOP/s this
# holds from h * F / (2 * w) rows on: 1050 for h = 0.35 ms, w = 5e7 (E2B) and F = 3e14. On an H200
# h was 0.83 ms: 2500 rows. Measured there (benchmark/results/gpu_eager_*.json), prompts of up to
# 1024 tokens lose up to a sixth, those of 1350 and 2048 neither gain nor lose, and those of
# 8192 are 2.5 times as fast.
_ROWS_ON_GPU = 1024


def is_worth_cutting(
    total: int, read: int, minimum: int | None = None, *, eager: bool = True, on_gpu: bool = False
) -> bool:
    """Return True if skipping ``total - read`` rows saves more than the cut costs.

    Args:
        total: rows of the batch, T.
        read: rows whose output is used; 0 for an intermediate chunk.
        minimum: the operator's own number of rows to skip.
        eager: the tail runs layer by layer; otherwise it is captured or skipped.
        on_gpu: the device is an accelerator, where the launches of an eager tail cost host time.

    >>> is_worth_cutting(2048, 1), is_worth_cutting(16, 14), is_worth_cutting(100, 95)
    (True, False, False)
    >>> is_worth_cutting(2, 1, eager=False), is_worth_cutting(800, 1, on_gpu=True)
    (True, False)
    """
    skipped = total - read
    if minimum is not None:
        return skipped >= minimum
    if not eager:
        # A captured tail saves host time too: the launches of 21 of 35 layers (E2B). Batches that
        # skip no row are refused before.
        return True
    fewest = _ROWS_ON_CPU
    if on_gpu:
        fewest = _ROWS_ON_GPU
    return skipped >= fewest and skipped * _PART >= total
