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

import torch

from sglang_gemma4_yoco import compat
from sglang_gemma4_yoco.captured.graphs import Replay
from sglang_gemma4_yoco.compat.captured_prefills import ExitPoint
from sglang_gemma4_yoco.core.eligibility import is_multimodal
from sglang_gemma4_yoco.core.forward import serve_forward
from sglang_gemma4_yoco.core.interfaces import Plan
from sglang_gemma4_yoco.core.state import ModelState, get_state


def add_exits(model: Any, config: Any, prefills: Any) -> None:
    """Patch ``prefills``, SGLang's runner of captured prefills, to leave them at their exits.

    It also keeps multimodal prompts out of the graphs, cut or not. Only SGLang's runner refers to
    what is added, so graphs that SGLang drops are freed.

    Args:
        config: the multimodal model's.
    """
    embed = partial(compat.captured_prefills.embed_text, model, config)
    graphs = compat.captured_prefills.list_graphs(prefills.backend)
    for _, output in graphs.values():
        output.zero_()  # rows that are no longer written must be finite
    stock_can_run_graph = prefills.can_run_graph
    stock_execute, stock_replay = prefills.execute, prefills.backend.replay

    def can_run_graph(forward_batch: Any) -> bool:
        return not is_multimodal(forward_batch) and bool(stock_can_run_graph(forward_batch))

    def execute(forward_batch: Any, **kwargs: Any) -> Any:
        state = get_state(model)
        state.replayed_batch = forward_batch
        try:
            return stock_execute(forward_batch, **kwargs)
        finally:
            state.replayed_batch = None

    def replay(bucket: Any, batch: Any, **kwargs: Any) -> Any:
        state, to_its_end = get_state(model), partial(stock_replay, bucket, batch, **kwargs)
        forward = ExitForward(state, embed, *graphs[bucket], batch, to_its_end)
        return serve_forward(state, state.replayed_batch, forward)

    prefills.can_run_graph = can_run_graph
    prefills.execute = execute
    prefills.backend.replay = replay


@dataclass
class ExitForward:
    """A forward that SGLang runs as a captured prefill."""

    state: ModelState
    embed: Callable[[torch.Tensor], tuple[torch.Tensor, Any]]  # ``embed_text`` of this model
    graph: Any
    output: torch.Tensor  # [bucket, hidden], the graph's output, which both paths write
    #: SGLang's static batch, which the graph reads: the live batch's tokens, padded to the bucket.
    #: Gemma 4 has added 1 to its positions, in place.
    batch: Any
    stock: Callable[[], torch.Tensor]  # replays the graph in full; returns ``output``
    point: ExitPoint | None = None  # set by ``fast``; valid until the next replay

    def fast(self, plan: Plan) -> torch.Tensor:
        """Run it up to the exit, write K and V, and replay the tail: [bucket, hidden]."""
        self.point = point = compat.captured_prefills.replay_to_exit(self.graph)
        # Rows after those of the live batch are padding, of which nothing may be written.
        total = plan.tail.kept.total
        keys, values = point.keys[:total], point.values[:total]
        main, tail = plan.attention.main, plan.attention.tail
        layer = self.state.tail_layers[0].self_attn.attn
        compat.pools.write_keys_and_values(main, tail, layer, plan.batch, keys, values)
        if plan.runner is not None:
            assert isinstance(plan.runner, Replay)
            index = plan.tail.index
            # Embedded again: the graph's own embeddings are overwritten by now.
            embeds, embedded = self.embed(self.batch.input_ids.index_select(0, index))
            plan.runner.inputs.fill(embeds=embeds, embedded=embedded)
            rows = plan.runner.run(point.rows, self.batch.positions, None)
            self.output.index_copy_(0, index, rows)
        return self.output
