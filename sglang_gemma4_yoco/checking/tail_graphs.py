"""Comparison of each graph of the tail with an eager run of its layers; failing graphs are dropped.

Each graph is replayed on random inputs, over the synthetic requests: full, and with the most
padding that a batch can have. Adjacent rows differ in every input, including request, position and
length, so a graph that mixes up rows gives other results.

The eager layers get the same inputs, padding included, in other memory. So both run the same
kernels on the same shapes. Both have metadata for the same widened window, which the comparisons
with stock cover (``checking.self_check``).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from sglang_gemma4_yoco import log
from sglang_gemma4_yoco.captured import graphs
from sglang_gemma4_yoco.captured.graphs import Inputs, Replay, TailGraphs
from sglang_gemma4_yoco.checking import rounding
from sglang_gemma4_yoco.checking.rounding import Difference, Tolerance
from sglang_gemma4_yoco.checking.synthetic_requests import (
    NotComparableError,
    Request,
    make_synthetic_requests,
)
from sglang_gemma4_yoco.compat.server import ModelRunner
from sglang_gemma4_yoco.core import ranks

# For the last layer's normed rows, as if its last products used another kernel.
TAIL = "the captured tail"
_TOLERANCE = Tolerance(2.0)
DIFFERS = "no graph agrees with the eager layers"


def check_graphs(captured: TailGraphs, runner: ModelRunner) -> str | None:
    """Compare every graph with the eager layers, and drop those that differ, on all ranks.

    Returns:
        The reason why none of them may be used, or None.
    """
    for size in captured.sizes:  # ascending: the next larger graph serves those of a dropped one
        try:
            largest = rounding.find_worst(compare_graph(captured, runner, size))
        except NotComparableError as why:
            return str(why)
        agrees = largest.is_rounding
        if not agrees:
            log.log_error(
                f"YOCO fast prefill: the tail captured for {size} rows differs from the "
                f"eager one (relative error {largest.error:.1e}, tolerance "
                f"{largest.allowed:.1e}) and is not used"
            )
        differ = ranks.find_difference(f"the graph for {size} rows agrees: {agrees}")
        if not agrees or differ:
            del captured.buckets[size]
    if not captured.sizes:
        return DIFFERS
    return None


def compare_graph(captured: TailGraphs, runner: ModelRunner, size: int) -> list[Difference]:
    """Compare the graph for ``size`` rows with the eager layers, with the most padding and none."""
    generator = torch.Generator(runner.device).manual_seed(size)
    fewest = max((smaller for smaller in captured.sizes if smaller < size), default=0) + 1
    bucket = captured.buckets[size]
    found = []
    with make_synthetic_requests(runner, captured.state) as synthetic:
        for rows in sorted({fewest, size}):
            inputs = captured.inputs[rows]
            _fill_inputs(inputs, synthetic.requests, generator)
            replay = bucket.fill(inputs.make_decode_step(), torch.arange(rows))
            found.append(compare_eager(replay, bucket.replay()[:rows]))
    return found


def compare_eager(replay: Replay, found: Tensor, **others: Tensor | None) -> Difference:
    """Compare a replay's result [B, hidden] with an eager run of the same layers.

    Args:
        others: fields of ``Inputs`` that replace those of the kept rows.
    """
    return rounding.compare_rows(TAIL, run_eagerly(replay, **others), found, _TOLERANCE)


@torch.no_grad()
def run_eagerly(replay: Replay, **others: Tensor | None) -> Tensor:
    """Run the captured layers eagerly, padding included: [B, hidden], normed."""
    bucket = replay.bucket
    kept = replay.index.shape[0]
    inputs = bucket.inputs.change(torch.clone)
    inputs.first(kept).fill(**others)
    batch = inputs.make_decode_step()
    batch.seq_lens_sum = int(inputs.lengths.sum())
    backends = bucket.state.get_backends()
    with backends.running_tail(batch, {}, backends.init_tail_metadata(batch, {})):
        return graphs.run_layers(bucket.state, inputs, batch)[:kept]


def _fill_inputs(inputs: Inputs, requests: Sequence[Request], generator: torch.Generator) -> None:
    """Fill in random rows, from the requests in turn: row i of n at (n - i) / n of its request.

    With requests of 7, 514 and 1030 tokens, 4 rows have 1030, 385, 3 and 257 keys.
    """
    for tensor in (inputs.rows, inputs.embeds, inputs.embedded):
        if tensor is not None:
            tensor.normal_(generator=generator)
    rows = inputs.rows.shape[0]
    for row in range(rows):
        request = requests[-1 - row % len(requests)]
        inputs.requests[row] = request.row
        inputs.lengths[row] = max(1, len(request.slots) * (rows - row) // rows)
    inputs.positions.copy_(inputs.lengths - 1)
