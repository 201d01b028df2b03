"""The tail, recorded once per row count in CUDA graphs, and replayed.

On a GPU the host launches 20 layers kernel by kernel, for one row as for thousands, and for a short
prompt that is what a prefill takes. The tail has few rows and always the same shapes: one per
request. So it is recorded when the server starts, after SGLang's own decode steps and by the same
machinery, for 1, 2, 4, ... rows, and a batch costs the host one launch for all of its tail.

What is recorded are the layers behind the cut and the model's norm, as they are launched for other
batches (``layers``). It reads and writes static tensors: ``Inputs``, the weights, the pools, and
the tail's backend's own buffers. A batch of B rows is replayed with the graph of b >= B rows; the
b - B rows that pad it are requests of one token, the reserved row and slot 0, and nobody reads what
becomes of them. With graphs for 1, 2 and 4 rows, three prompts run as lengths [40, 3, 700, 1].

Before any batch is replayed with it, a graph must give what the same layers give when they are
launched (``proof``).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from sglang_gemma4_yoco import seams, settings
from sglang_gemma4_yoco.core import limits
from sglang_gemma4_yoco.deciding.rows import KeptRows
from sglang_gemma4_yoco.tail import layers, per_layer
from sglang_gemma4_yoco.tail.attention import OwnBackend
from sglang_gemma4_yoco.tail.batch import Tail

_ROWS = (1, 2, 4, 8, 16, 32)

NOT_YET = "it is not recorded yet"
OFF = f"{settings.name_of('graph_rows')}=0"
NO_GRAPHS = "SGLang has recorded no decode steps in full CUDA graphs"
NOT_DECODING = "its rows are no decode step on this attention backend"
QUANTISED = "the per-layer inputs are quantised"
NONE_GOOD = "no graph gave what the launched layers give"
BACKED_LATER = "K and V get their memory after recording"
LOADED_MEANWHILE = "another thread writes or reads K and V of layers while they run"
# Server arguments with which memory is not what it was when it was recorded.
_REFUSED = {
    "enable_hierarchical_cache": LOADED_MEANWHILE,
    "enable_memory_saver": "memory may be taken away and given back",
    "enable_symm_mem": "collectives need memory of their own",
    "disable_cuda_graph_padding": "rows must not be padded",
}
_RESERVE = 1 << 30  # bytes that recording leaves free, beside three times what it needs


def row_counts(most: int | None, requests: int) -> tuple[int, ...]:
    """The row counts to record, ascending.

    Args:
        most: the operator's largest; None for all of ours.
        requests: the largest number of requests that run at a time.

    >>> row_counts(None, 5), row_counts(3, 100), row_counts(100, 100)
    ((1, 2, 4), (1, 2), (1, 2, 4, 8, 16, 32))
    """
    largest = requests if most is None else min(most, requests)
    return tuple(rows for rows in _ROWS if rows <= largest)


def why_not(runner: Any, model: Any, attention: OwnBackend) -> str | None:
    """Why the tail of this server is not recorded, or None.

    Args:
        attention: the tail's own backend.
    """
    if settings.current.graph_rows == 0:
        return OFF
    if seams.recorded_decode_steps(runner) is None:
        return NO_GRAPHS
    kind = type(attention.tail)
    if limits.Ability.CAPTURED not in limits.abilities(kind):
        return f"attention by {kind.__name__} is not known to be recordable"
    if not seams.decodes_like_extend(attention.tail):
        return NOT_DECODING
    if getattr(model, "per_layer_model_projection", None) is not None and not (
        per_layer.can_be_split(model)
    ):
        return QUANTISED
    refused = refused_by_arguments()
    if refused is not None:
        return refused
    if seams.is_backed_later(attention.tail.token_to_kv_pool):
        return BACKED_LATER
    if seams.loads_by_layer(attention.tail.token_to_kv_pool):  # when it is recorded anew
        return LOADED_MEANWHILE
    return _no_memory(runner, attention.tail)


def refused_by_arguments() -> str | None:
    """Why the tail of a server with these arguments and settings is never recorded, or None."""
    argument = seams.server_arguments()
    assert argument is not None, "SGLang has recorded its own graphs"
    for name, reason in _REFUSED.items():
        if argument(name):
            return f"--{name.replace('_', '-')}: {reason}"
    return "SGLang lends the memory of its graphs" if seams.lends_graph_memory() else None


def _no_memory(runner: Any, backend: Any) -> str | None:
    free = seams.free_device_memory(torch.device(runner.device))
    if free is None:
        return None
    rows = max(row_counts(settings.current.graph_rows, runner.req_to_token_pool.size))
    slots = runner.req_to_token_pool.req_to_token.shape[1]
    # The backend lists every token of every request, in numbers of 8 bytes, and keeps the partial
    # sums of each part of their keys in fp32; all else is small.
    needed = rows * (8 * slots + 4 * seams.partial_sums(backend)) + (64 << 20)
    if free >= _RESERVE + 3 * needed:
        return None
    return f"only {free >> 20} MiB of the GPU's memory are free"


# ---------------------------------------------------------------- what a graph reads


@dataclass(frozen=True)
class Inputs:
    """Static inputs, for as many rows as the largest graph has; a smaller one reads the first.

    Attributes:
        rows: [n, hidden], the residual of the kept rows at the input of the first recorded layer.
        positions: [n] int64.
        requests: [n], the requests' rows in SGLang's table of tokens; 0 is nobody's.
        lengths: [n], tokens of each request.
        input_ids: [n] int64; only its shape is read.
        embeds: [n, hidden], the kept rows' input embeddings; None without per-layer inputs.
        embedded: [n, recorded layers, width], their per-layer embeddings; None without any.
    """

    rows: torch.Tensor
    positions: torch.Tensor
    requests: torch.Tensor
    lengths: torch.Tensor
    input_ids: torch.Tensor
    embeds: torch.Tensor | None
    embedded: torch.Tensor | None

    @classmethod
    @torch.inference_mode(False)  # they are written in forwards of any mode
    def of(cls, runner: Any, model: Any, buffers: Any, layers: int, rows: int) -> Inputs:
        """For graphs of up to ``rows`` rows, whose last ``layers`` layers are recorded.

        Args:
            buffers: static inputs of SGLang's own decode steps, whose types are taken over.
        """
        config, device = model.config, runner.device

        def floats(*shape: int) -> torch.Tensor:
            return torch.zeros(rows, *shape, dtype=runner.dtype, device=device)

        def numbers(like: torch.Tensor | None, value: int) -> torch.Tensor:
            dtype = torch.int64 if like is None else like.dtype
            return torch.full((rows,), value, dtype=dtype, device=device)

        embeds = embedded = None
        if getattr(model, "per_layer_model_projection", None) is not None:
            embeds = floats(config.hidden_size)
        if embeds is not None and model.embed_tokens_per_layer is not None:
            embedded = floats(layers, model.hidden_size_per_layer_input)
        return cls(
            rows=floats(config.hidden_size),
            positions=numbers(None, 0),
            requests=numbers(buffers.req_pool_indices, 0),
            lengths=numbers(buffers.seq_lens, 1),
            input_ids=numbers(None, 0),
            embeds=embeds,
            embedded=embedded,
        )

    def first(self, rows: int) -> Inputs:
        """The same memory, of the first rows."""
        return replace(self, **{name: t[:rows] for name, t in vars(self).items() if t is not None})

    def pad(self, kept: int) -> None:
        """Make the rows behind the first ``kept`` ones nobody's."""
        self.requests[kept:].zero_()
        self.lengths[kept:].fill_(1)
        # Else a scale that is taken over all rows would hang on the batch before.
        for floats in (self.rows, self.embeds, self.embedded):
            if floats is not None:
                floats[kept:].zero_()


# ---------------------------------------------------------------- graphs


@dataclass
class _Graph:
    """One row count.

    Attributes:
        inputs: of so many rows.
        batch: the decode step that is recorded. What it holds is read whenever it is replayed.
        metadata: its attention metadata, over the backend's buffers for graphs.
    """

    inputs: Inputs
    batch: Any
    metadata: Any = None


@dataclass(frozen=True)
class Replay:
    """A graph, planned for one batch.

    Attributes:
        inputs: of the batch's kept rows, to be filled.
        room: those of them that come before the first layer; None without per-layer inputs.
        run: runs it, and returns [B, hidden], normed, which the next replay overwrites.
    """

    inputs: Inputs
    room: per_layer.Room | None
    run: Callable[[], torch.Tensor]


class ReplayError(Exception):
    """The graph could not be run; its cause says why."""


class TailGraphs:
    """All recorded tails of one model.

    Attributes:
        first: the first recorded layer, K-1 or K.
        layers: the recorded layers; of layer K-1 K and V are not recorded.
        seconds: how long recording took.
    """

    def __init__(self, runner: Any, model: Any, first: int, attention: OwnBackend) -> None:
        """Prepare for recording; nothing is recorded yet.

        Args:
            first: the first layer behind the cut, K-1 or K.
        """
        self.seconds = 0.0
        self._model = model
        self.first = first
        self.layers = list(model.layers)[self.first :]
        self._read = {layer.self_attn.attn.layer_id for layer in self.layers}
        self._backend = attention.tail
        self._runner = runner
        self._counts = row_counts(settings.current.graph_rows, runner.req_to_token_pool.size)
        decode_steps = seams.recorded_decode_steps(runner)
        assert decode_steps is not None, "the tail is recorded after them"
        self._inputs = Inputs.of(
            runner, model, decode_steps.buffers, len(self.layers), self._counts[-1]
        )
        self._of_first = [self._inputs.first(rows) for rows in range(self._counts[-1] + 1)]
        self._graphs: dict[int, _Graph] = {}
        self._replays: dict[tuple[int, int], Replay] = {}
        self._recorded = seams.GraphBackend(decode_steps)

    @property
    def rows(self) -> tuple[int, ...]:
        """The recorded row counts, ascending."""
        return tuple(sorted(self._graphs))

    def describe(self) -> str:
        """From where it is recorded, and for what, for the log."""
        rows = ", ".join(map(str, self.rows))
        return f"from layer {self.first} on for {rows} rows in {self.seconds:.1f} s"

    @torch.no_grad()
    def record(self) -> None:
        """Record all of them, the largest first; when this raises, ``close`` is still due."""
        began = time.monotonic()
        with seams.whole_window(self._backend):
            self._backend.init_cuda_graph_state(self._counts[-1], self._counts[-1])
        try:
            with self._recorded.session():
                for rows in reversed(self._counts):
                    graph = self._graph(self._of_first[rows])
                    graph.metadata = seams.plan_recorded(self._backend, graph.batch)
                    self._recorded.record(rows, partial(self._tail, graph))
                    self._graphs[rows] = graph
        except BaseException:
            seams.end_failed_capture(torch.device(self._runner.device), self._recorded)
            raise
        finally:
            self._backend.forward_metadata = None
        self.seconds = time.monotonic() - began

    def drop(self, rows: int) -> None:
        """Never replay the graph of this row count again."""
        del self._graphs[rows]

    def close(self) -> None:
        """Let go of all graphs, and of the backend's buffers for them."""
        self._graphs.clear()
        self._replays.clear()
        self._recorded.close()
        seams.drop_graph_buffers(self._backend)

    # -- one batch ---------------------------------------------------------------------------

    def size_for(self, kept: KeptRows) -> int | None:
        """The rows of the smallest graph with room for these, if they are one per request."""
        if not kept.one_per_request:
            return None
        return min((rows for rows in self._graphs if rows >= len(kept.lens)), default=None)

    def planned(self, forward_batch: Any, tail: Tail) -> Replay | None:
        """Plan the tail of this batch for a graph; None if there is none for it."""
        rows, size = len(tail.kept.lens), self.size_for(tail.kept)
        if size is None:
            return None
        self._plan(size, rows, forward_batch)
        # Nothing in it is the batch's own, so each is made once.
        if (size, rows) not in self._replays:
            self._replays[size, rows] = self._replay(size, rows)
        return self._replays[size, rows]

    def _replay(self, size: int, rows: int) -> Replay:
        inputs, room = self._of_first[rows], None
        if inputs.embeds is not None:
            room = per_layer.Room(inputs.embeds, inputs.embedded)
        return Replay(inputs, room, partial(self._run, size, rows))

    def _run(self, size: int, rows: int) -> torch.Tensor:
        # A cache that loads prefixes layer by layer makes whoever asks for a layer's K and V wait
        # until they are there. A replay asks for nothing.
        seams.await_loads(self._backend.token_to_kv_pool, self._read)
        try:
            output: torch.Tensor = self._recorded.replay(size)
        except Exception as failure:
            raise ReplayError("the recorded tail could not be run") from failure
        return output[:rows]

    def _plan(self, size: int, rows: int, forward_batch: Any) -> None:
        graph, inputs = self._graphs[size], self._of_first[rows]
        inputs.requests.copy_(forward_batch.req_pool_indices)
        inputs.lengths.copy_(forward_batch.seq_lens)
        if rows < size:
            graph.inputs.pad(rows)
        seams.plan_recorded(self._backend, graph.batch, live=forward_batch)
        # A tail that is launched after all finds its metadata there: of at least as many rows.
        self._backend.forward_metadata = graph.metadata

    # -- proof -------------------------------------------------------------------------------

    def inputs_for(self, size: int, rows: int, fill: Callable[[Inputs], None]) -> Inputs:
        """Inputs of ``size`` rows in memory of their own, padded behind the first ``rows``.

        Args:
            fill: sets the inputs of those.
        """
        fields = {name: t[:size].clone() for name, t in vars(self._inputs).items() if t is not None}
        inputs = replace(self._inputs, **fields)
        fill(inputs.first(rows))
        inputs.pad(rows)
        return inputs

    @torch.no_grad()
    def launched(self, inputs: Inputs) -> torch.Tensor:
        """What the recorded layers give when they are launched on these inputs: [rows, hidden]."""
        graph = self._graph(inputs)
        graph.batch.seq_lens_sum = int(inputs.lengths.sum())
        try:
            seams.plan(self._backend, graph.batch)
            return self._tail(graph)
        finally:
            self._backend.forward_metadata = None

    @torch.no_grad()
    def replayed(self, size: int, inputs: Inputs) -> torch.Tensor:
        """What the graph for ``size`` rows gives for these inputs: [rows, hidden].

        The next replay overwrites it.

        Args:
            inputs: of as many rows, or less.
        """
        rows = inputs.rows.shape[0]
        static = self._of_first[rows]
        for name, tensor in vars(inputs).items():
            if tensor is not None:
                getattr(static, name).copy_(tensor)
        try:
            self._plan(size, rows, self._graph(inputs).batch)
            return self._run(size, rows)
        finally:
            self._backend.forward_metadata = None

    # -- recording ---------------------------------------------------------------------------

    def _graph(self, inputs: Inputs) -> _Graph:
        """A tail of these rows, not planned."""
        batch = seams.decode_batch(
            input_ids=inputs.input_ids,
            req_pool_indices=inputs.requests,
            seq_lens=inputs.lengths,
            positions=inputs.positions,
        )
        return _Graph(inputs, batch)

    def _tail(self, graph: _Graph) -> torch.Tensor:
        """The recorded layers and the model's norm, launched: [rows, hidden]."""
        model, inputs = self._model, graph.inputs
        projected = None
        if inputs.embeds is not None:
            stop = len(model.layers)
            projected = per_layer.project(model, inputs.embeds, inputs.embedded, self.first, stop)
        # Layers add into their input in place, and what pads would grow from replay to replay.
        rows = inputs.rows.clone()
        with seams.attn_backend_switched(self._backend):
            return layers.run(
                model, self.first, graph.batch, rows, inputs.positions, projected, model.norm
            )
