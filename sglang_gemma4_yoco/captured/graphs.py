"""CUDA graphs of the tail, one per bucket of rows.

Prefills of short prompts are bound by kernel launches on the host. The tail has few rows, one per
request. So it is captured for 1, 2, 4, ... rows, after SGLang's own decode steps and by the same
code, and the host replays it with one launch.

A graph reads static tensors: ``Inputs``, the weights, the pools, and the tail backend's buffers. A
batch of B rows is replayed with the smallest bucket b >= B. The b - B rows of padding are requests
of one token in the reserved row and slot 0, and their output is not read. With buckets of 1, 2 and
4 rows, three prompts run as lengths [40, 3, 700, 1].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sglang_gemma4_yoco import compat, settings
from sglang_gemma4_yoco.compat.batch import ABSENT, ForwardBatch
from sglang_gemma4_yoco.compat.decode_graphs import DecodeInputBuffers
from sglang_gemma4_yoco.compat.server import ModelRunner
from sglang_gemma4_yoco.core import per_layer
from sglang_gemma4_yoco.core.kept_batch import KeptRows
from sglang_gemma4_yoco.core.state import ModelState
from sglang_gemma4_yoco.patched import patched


@dataclass(frozen=True)
class Inputs:
    """Static inputs, sized for the largest bucket; a smaller one reads the first rows.

    Attributes:
        rows: [n, ...], the residual of the kept rows at the input of layer S-1.
        positions: [n] int64.
        requests: [n], the requests' indices into ``req_to_token``; 0 is reserved.
        lengths: [n], tokens of each request.
        embeds: [n, hidden], the kept rows' input embeddings; None without per-layer inputs.
        embedded: [n, L - S + 1, width], their per-layer embeddings, or None.
    """

    rows: Tensor
    positions: Tensor
    requests: Tensor
    lengths: Tensor
    embeds: Tensor | None
    embedded: Tensor | None

    @classmethod
    @torch.inference_mode(False)  # they are written in forwards of any mode
    def of(
        cls, runner: ModelRunner, state: ModelState, like: DecodeInputBuffers, rows: int
    ) -> Inputs:
        """Return inputs for up to ``rows`` rows, typed like SGLang's static inputs ``like``."""
        model = state.model

        def zeros(*shape: int, dtype: torch.dtype = runner.dtype) -> Tensor:
            return torch.zeros(rows, *shape, dtype=dtype, device=runner.device)

        embeds = embedded = None
        if state.splits_per_layer_inputs:
            embeds = zeros(model.config.hidden_size)
            if model.embed_tokens_per_layer is not None:
                embedded = zeros(len(state.tail_layers), model.hidden_size_per_layer_input)
        return cls(
            rows=zeros(*state.adapter.get_row_shape(model)),
            positions=zeros(dtype=torch.int64),
            requests=zeros(dtype=like.req_pool_indices.dtype),
            lengths=zeros(dtype=like.seq_lens.dtype).fill_(1),
            embeds=embeds,
            embedded=embedded,
        )

    def change(self, each: Callable[[Tensor], Tensor]) -> Inputs:
        """Return these inputs with ``each`` applied to every tensor."""
        return replace(self, **{name: each(t) for name, t in vars(self).items() if t is not None})

    def first(self, rows: int) -> Inputs:
        """Return views of the first rows."""
        return self.change(lambda tensor: tensor[:rows])

    def make_decode_step(self) -> ForwardBatch:
        """Return a decode step of these rows, one per request, without attention metadata."""
        return compat.batch.make_decode_step(self.requests, self.lengths, self.positions)

    def fill(self, **tensors: Tensor | None) -> None:
        """Copy these tensors into the inputs of the same names; inputs that are None are skipped.

        Per-layer embeddings are those of all layers, [n, L, width].
        """
        for name, tensor in tensors.items():
            own = getattr(self, name)
            if own is None:
                continue
            assert tensor is not None, name
            if name == "embedded":
                tensor = tensor[:, -own.shape[1] :]
            own.copy_(tensor)


def run_layers(state: ModelState, inputs: Inputs, batch: ForwardBatch) -> Tensor:
    """Run layers S-1 to L-1 and the model's norm: [rows, hidden]."""
    model = state.model
    projected = None
    if inputs.embeds is not None:
        projected = per_layer.project_layers(
            model, inputs.embeds, inputs.embedded, state.cut_layer, len(model.layers)
        )
    # Layers add into their input in place: padding would grow with each replay.
    rows = inputs.rows.clone()
    return state.adapter.run_tail(
        model, state.tail_layers, batch, rows, inputs.positions, projected
    )


@dataclass(frozen=True)
class Replay:
    """A graph, with its inputs filled for one batch; a ``TailRunner``.

    Attributes:
        inputs: the graph's static inputs of the kept rows.
        index: [B], the kept rows.
    """

    bucket: Bucket
    inputs: Inputs
    index: Tensor

    @property
    def buffers(self) -> per_layer.Buffers | None:
        """The memory from which the graph projects its per-layer inputs; None without these."""
        if self.inputs.embeds is None:
            return None
        return per_layer.Buffers(self.inputs.embeds, self.inputs.embedded)

    def run(self, rows: Tensor, positions: Tensor, _: object) -> Tensor:
        """Return the kept rows [B, hidden], normed, which the next replay overwrites.

        Args:
            rows: [T, ...], the residual of all rows at the cut.
            positions: [T] int64.
        """
        torch.index_select(rows, 0, self.index, out=self.inputs.rows)
        torch.index_select(positions, 0, self.index, out=self.inputs.positions)
        return self.bucket.replay()[: self.index.shape[0]]


class Bucket:
    """The tail for a number of rows, captured in one graph.

    Attributes:
        size: that number.
        inputs: the graph's static inputs, of that many rows.
    """

    def __init__(self, graphs: TailGraphs, size: int) -> None:
        """Capture the graph."""
        self.state, self.size, self.inputs = graphs.state, size, graphs.inputs[size]
        self._graphs = graphs
        # The captured decode step, whose tensors the graph reads.
        self._batch = self.inputs.make_decode_step()
        self._init_metadata()
        self._graphs.captured.capture_one(self.size, self._run)

    def fill(self, live: ForwardBatch, index: Tensor) -> Replay:
        """Fill the inputs that a batch has before its forward, and return a replay.

        Args:
            live: the batch.
            index: [B], its kept rows, one per request.
        """
        rows = index.shape[0]
        inputs = self._graphs.inputs[rows]
        inputs.fill(requests=live.req_pool_indices, lengths=live.seq_lens)
        if rows < self.size:
            self.inputs.requests[rows:].zero_()
            self.inputs.lengths[rows:].fill_(1)
        try:
            self._init_metadata(live)
        finally:
            # A replay reads the backend's buffers, and no metadata object.
            self._graphs.backend.forward_metadata = ABSENT
        return Replay(self, inputs, index)

    def replay(self) -> Tensor:
        """Replay the graph; return [size, hidden], which the next replay overwrites."""
        output: Tensor = self._graphs.captured.replay(self.size, None)
        return output

    def _init_metadata(self, live: ForwardBatch | None = None) -> None:
        """Fill the backend's buffers that the graph reads; ``live`` is None before the capture."""
        backend = self._graphs.backend
        with compat.attention.widen_window(backend):
            if live is not None:
                self._batch.kv_loc_plan = live.kv_loc_plan
            backend.init_forward_metadata_out_graph(self._batch, in_capture=live is None)

    def _run(self) -> Tensor:
        with compat.attention.use_backend(self._graphs.backend):
            return run_layers(self.state, self.inputs, self._batch)


class TailGraphs:
    """The captured tail of one model.

    Attributes:
        buckets: by size; the next larger one serves the rows of one that is removed.
        inputs: the static inputs, by number of rows.
        backend: the tail's attention backend.
        captured: SGLang's graph backend, which has the graphs by size.
    """

    def __init__(self, runner: ModelRunner, state: ModelState) -> None:
        """Allocate the inputs."""
        self.state = state
        self.backend = state.get_backends().tail_backend
        decode_steps = compat.decode_graphs.get_captured_steps(runner)
        assert decode_steps, "the tail is captured after them"
        self._decode_steps = decode_steps
        # Limited by the setting, and by the maximum number of running requests.
        most = compat.pools.get_request_table(runner).size
        if settings.current.graph_rows is not None:
            most = min(most, settings.current.graph_rows)
        self._wanted = [size for size in (1, 2, 4, 8, 16, 32) if size <= most]
        largest = Inputs.of(runner, state, decode_steps.buffers, self._wanted[-1])
        self.inputs = [largest.first(rows) for rows in range(self._wanted[-1] + 1)]
        self.buckets: dict[int, Bucket] = {}
        self.captured = compat.decode_graphs.make_graph_backend(decode_steps)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The buckets' sizes, in rows, ascending."""
        return tuple(sorted(self.buckets))

    @torch.no_grad()
    def capture(self) -> None:
        """Capture all buckets, the largest first; call ``close`` even if this raises."""
        with (
            # SGLang allocates masks to verify drafts, which the tail does not read. Unnecessary
            # once init_cuda_graph_state takes the number of draft tokens.
            patched(self.backend, num_draft_tokens=None),
            compat.attention.widen_window(self.backend),
        ):
            self.backend.init_cuda_graph_state(self._wanted[-1], self._wanted[-1])
        try:
            with compat.decode_graphs.capture_session(self._decode_steps, self.captured):
                for size in reversed(self._wanted):
                    self.buckets[size] = Bucket(self, size)
        finally:
            self.backend.forward_metadata = ABSENT
            # If this failed, the memory of warm-ups that may still run is freed next.
            compat.server.wait_for_device(self.backend.device)

    def close(self) -> None:
        """Free all graphs, and the backend's buffers for them."""
        self.buckets.clear()
        self.captured.cleanup()
        # Unnecessary once an attention backend can free its buffers for graphs.
        for name in list(vars(self.backend)):
            if name.startswith("cuda_graph_"):
                delattr(self.backend, name)

    def bucket_for(self, kept: KeptRows) -> Bucket | None:
        """Return the smallest bucket for these rows; None unless they are one per request."""
        if not kept.one_per_request:
            return None
        sizes = [size for size in self.buckets if size >= kept.count]
        return self.buckets.get(min(sizes, default=0))
