"""Exits from SGLang's captured prefills: at the attention of the layer that is cut inside.

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
from typing import Any, ClassVar

import torch

from sglang_gemma4_yoco import compat
from sglang_gemma4_yoco.captured.graphs import Replay
from sglang_gemma4_yoco.compat.captured_prefills import ExitPoint
from sglang_gemma4_yoco.core.eligibility import is_multimodal
from sglang_gemma4_yoco.core.forward import serve_forward
from sglang_gemma4_yoco.core.plan import Plan
from sglang_gemma4_yoco.core.state import ModelState

#: Where SGLang's runner of captured prefills has its exits.
EXITS_ENTRY = "_yoco_exits"


class PrefillGraphExits:
    """The exits of one model's captured prefills, one for each bucket; all are open, or none.

    SGLang's runner of captured prefills calls it for as long as it exists, and it alone holds it:
    graphs that SGLang drops are freed. Open or closed, it keeps media out of them.
    """

    def __init__(self, state: ModelState, config: Any, prefills: Any) -> None:
        """They are closed; ``config`` is the multimodal model's, ``prefills`` SGLang's runner."""
        self.are_open = False
        self._state, self._config = state, config
        self._batch: Any = None  # that SGLang serves by a captured prefill now
        prefills.can_run_graph = partial(self._can_run_graph, prefills.can_run_graph)
        prefills.execute = partial(self._execute, prefills.execute)
        prefills.backend.replay = partial(self._replay, prefills.backend.replay)
        setattr(prefills, EXITS_ENTRY, self)
        self.graphs = compat.captured_prefills.list_graphs(prefills)

    def _can_run_graph(self, stock: Callable[[Any], bool], forward_batch: Any) -> bool:
        return not is_multimodal(forward_batch) and bool(stock(forward_batch))

    def _execute(self, stock: Callable[..., Any], forward_batch: Any, **kwargs: Any) -> Any:
        self._batch, self._state.replayed_exits = forward_batch, self
        try:
            return stock(forward_batch, **kwargs)
        finally:
            self._batch = self._state.replayed_exits = None

    def _replay(self, stock: Callable[..., Any], bucket: Any, batch: Any, **kwargs: Any) -> Any:
        to_its_end = partial(stock, bucket, batch, **kwargs)
        forward = ExitForward(self._state, self._config, *self.graphs[bucket], batch, to_its_end)
        return serve_forward(self._state, self._batch, forward)


def get_exits(runner: Any) -> PrefillGraphExits | None:
    """Return the exits of what SGLang has captured; None if nothing was, or without the repair."""
    prefills = compat.server.get_captured_prefills(runner)
    exits: PrefillGraphExits | None = getattr(prefills, EXITS_ENTRY, None)
    return exits


@dataclass
class ExitForward:
    """A forward that SGLang runs by a captured prefill."""

    state: ModelState
    config: Any  # of the multimodal model
    graph: Any
    output: torch.Tensor  # [bucket, hidden], written by the graph, and on every path
    #: SGLang's static batch, which the graph reads: the live one's tokens first, up to the bucket.
    #: Gemma 4 has added 1 to its positions, in place.
    batch: Any
    stock: Callable[[], torch.Tensor]  # runs the graph to its end; returns ``output``
    point: ExitPoint | None = None  # what can be read until the next replay, after ``fast``
    is_replay: ClassVar[bool] = True

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
            plan.runner.inputs.fill(**self.embed(self.batch.input_ids, index))
            rows = plan.runner.run(point.rows, self.batch.positions, None)
            self.output.index_copy_(0, index, rows)
        return self.output

    def embed(self, ids: torch.Tensor, index: torch.Tensor) -> dict[str, Any]:
        """Embed the kept rows anew: the graph's own embeddings are overwritten by now.

        Args:
            ids: [T].
            index: [B], the kept rows.

        Returns:
            The inputs of a captured tail that are made of ids.
        """
        kept = ids.index_select(0, index)
        embeds, embedded = compat.captured_prefills.embed_text(self.state.model, self.config, kept)
        if embedded is not None:
            embedded = embedded[:, self.state.cut_layer :]
        return {"embeds": embeds, "embedded": embedded}
