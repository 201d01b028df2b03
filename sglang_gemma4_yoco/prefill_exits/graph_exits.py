"""Exits from SGLang's captured prefills, at the attention of the layer with the cut.

SGLang captures a prefill as one CUDA graph for each stretch between two attentions, a *segment*,
and runs the attentions eagerly (its *breakable* graphs). With the cut inside layer S-1 of L::

    segment 0 | attention 0 | segment 1 | ... | segment S-1 | attention S-1 | ... | segment L
                                                            ^ the exit point

A batch that is cut runs SGLang's own segments up to the exit point; then its K and V of layer S-1
are written, its captured tail is replayed, and the tail's rows go into SGLang's output.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from sglang_gemma4_yoco import compat, settings
from sglang_gemma4_yoco.captured.graphs import Replay
from sglang_gemma4_yoco.compat.batch import ForwardBatch
from sglang_gemma4_yoco.compat.captured_prefills import ExitPoint, PrefillGraph, ShapeKey
from sglang_gemma4_yoco.compat.server import PrefillCudaGraphRunner
from sglang_gemma4_yoco.compat.text_model import Method, ModelOutput, TextModel
from sglang_gemma4_yoco.core import cut
from sglang_gemma4_yoco.core.eligibility import TOO_LITTLE, is_multimodal
from sglang_gemma4_yoco.core.forward import serve_forward
from sglang_gemma4_yoco.core.interfaces import Eligible
from sglang_gemma4_yoco.core.plan import Plan
from sglang_gemma4_yoco.core.state import ModelState, get_state
from sglang_gemma4_yoco.refusal import Refusal

EXITS_CLOSED = Refusal("SGLang runs its captured prefill to the end")
TAIL_NOT_CAPTURED = Refusal("its prefill is captured, and its tail is not")
# An exit saves device time only. Modelled, not measured: reading a layer's weights takes as long as
# computing up to 90 rows, and the tail's metadata as long as 45 rows of E2B.
_FEWEST_ROWS = 128


@dataclass(eq=False)
class Exits:
    """The exits of SGLang's captured prefills; a ``CapturedFront`` while one of these runs.

    Attributes:
        are_open: captured prefills may be cut.
        batch: the live batch that SGLang is serving with a captured prefill, or None.
    """

    are_open: bool = False
    batch: ForwardBatch | None = None

    def find_refusal(self, eligible: Eligible, *, on_gpu: bool) -> Refusal | None:
        """Return why an eligible batch does not leave its captured prefill, or None."""
        if not self.are_open:
            return EXITS_CLOSED
        if eligible.is_intermediate_chunk:
            return None
        if eligible.bucket is None:
            return TAIL_NOT_CAPTURED
        skipped = eligible.kept.total - eligible.kept.count
        has_own_rule = settings.current.min_skipped_rows is not None  # already checked
        if on_gpu and not has_own_rule and skipped < _FEWEST_ROWS:
            return TOO_LITTLE
        return None


def add_exits(model: TextModel, config: Any, prefills: PrefillCudaGraphRunner) -> Exits:
    """Patch ``prefills``, SGLang's runner of captured prefills, to leave them at their exits.

    The exits are closed. Multimodal prompts are kept out of the graphs, cut or not. Only SGLang's
    runner refers to what is added, so graphs that SGLang drops are freed.

    Args:
        config: the multimodal model's.
    """
    exits = Exits()
    embed = partial(compat.captured_prefills.embed_text, model, config)
    graphs = compat.captured_prefills.list_graphs(prefills)
    for _, output in graphs.values():
        output.zero_()  # rows that are no longer written must be finite
    stock_can_run_graph = prefills.can_run_graph
    stock_execute = prefills.execute
    stock_replay = prefills.backend.replay

    # Unnecessary once SGLang's own rejects batches with media
    # (docs/upstream/ids_and_embeddings.md).
    def can_run_graph(forward_batch: ForwardBatch) -> bool:
        return not is_multimodal(forward_batch) and bool(stock_can_run_graph(forward_batch))

    # Unnecessary once SGLang passes the live batch to the backend's ``replay``.
    def execute(forward_batch: ForwardBatch, **kwargs: object) -> object:
        state = get_state(model)
        state.front = exits
        exits.batch = forward_batch
        try:
            return stock_execute(forward_batch, **kwargs)
        finally:
            state.front = exits.batch = None

    def replay(bucket: ShapeKey, static_batch: ForwardBatch, **kwargs: object) -> ModelOutput:
        state = get_state(model)
        graph, output = graphs[bucket]
        stock = partial(stock_replay, bucket, static_batch, **kwargs)
        forward = ExitForward(state, embed, graph, output, static_batch, stock)
        assert exits.batch is not None, "``execute`` calls this"
        return serve_forward(state, exits.batch, forward)

    vars(prefills).update(can_run_graph=can_run_graph, execute=execute)
    vars(prefills.backend).update(replay=replay)
    return exits


@dataclass
class ExitForward:
    """A forward that SGLang runs as a captured prefill.

    Attributes:
        embed: ``embed_text`` of this model.
        graph: SGLang's graph of the bucket.
        output: [bucket, hidden], the graph's output, which both paths write.
        static_batch: the batch whose tensors the graph reads: the live batch's tokens, padded to
            the bucket. Gemma 4 has added 1 to its positions, in place.
        stock: replays the graph in full; returns ``output``.
        point: the exit point, set by ``fast`` and valid until the next replay.
    """

    state: ModelState
    embed: Method
    graph: PrefillGraph
    output: Tensor
    static_batch: ForwardBatch
    stock: Callable[[], Tensor]
    point: ExitPoint | None = None

    def fast(self, plan: Plan) -> Tensor:
        """Run it up to the exit, write K and V, and replay the tail: [bucket, hidden]."""
        self.point = point = compat.captured_prefills.replay_to_exit(self.graph)
        # Rows after those of the live batch are padding, of which nothing may be written.
        total = plan.kept_batch.kept.total
        keys, values = point.keys[:total], point.values[:total]
        cut.write_donor_keys_and_values(self.state, plan, keys, values)
        if plan.runner is not None:
            assert isinstance(plan.runner, Replay)
            index = plan.kept_batch.index
            # Embedded again: the graph's own embeddings are overwritten by now.
            embeds, embedded = self.embed(self.static_batch.input_ids.index_select(0, index))
            plan.runner.inputs.fill(embeds=embeds, embedded=embedded)
            rows = plan.runner.run(point.rows, self.static_batch.positions, None)
            self.output.index_copy_(0, index, rows)
        return self.output
