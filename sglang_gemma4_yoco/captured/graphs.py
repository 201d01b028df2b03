"""The tail, captured once per bucket of rows in CUDA graphs, and replayed.

On a GPU the host launches 21 layers kernel by kernel, for one row as for thousands, and for a short
prompt that is what a prefill takes. The tail has few rows and always the same shapes: one per
request. So it is captured when the server starts, after SGLang's own decode steps and by the same
machinery, for 1, 2, 4, ... rows, and a batch costs the host one launch for all of its tail.

A graph reads and writes static tensors: ``Inputs``, the weights, the pools, and the tail backend's
own buffers. A batch of B rows is replayed with the smallest bucket b >= B. The b - B rows that pad
it are requests of one token, the reserved row and slot 0, and nobody reads what becomes of them.
With buckets of 1, 2 and 4 rows, three prompts run as lengths [40, 3, 700, 1].

Before any batch is replayed with it, a graph must give what the same layers give when they run
eagerly (``proof``).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from sglang_gemma4_yoco import log, seams, settings
from sglang_gemma4_yoco.captured import backend
from sglang_gemma4_yoco.core import cut, per_layer
from sglang_gemma4_yoco.core.kept import KeptRows, TailBatch
from sglang_gemma4_yoco.core.state import ModelState

_BUCKETS = (1, 2, 4, 8, 16, 32)

NOT_YET = "it is not captured yet"
OFF = f"{settings.name_of('graph_rows')}=0"
NO_GRAPHS = "SGLang has captured no decode steps in full CUDA graphs"
NOT_DECODING = "its rows are no decode step on this attention backend"
QUANTISED = "the per-layer inputs are quantised"
NONE_GOOD = "no graph gave what the eager layers give"
ALLOCATED_LATER = "K and V get their memory after capture"
LOADED_MEANWHILE = "another thread writes or reads K and V of layers while they run"
# Server arguments with which memory is not what it was when it was captured.
_REFUSED = {
    "enable_hierarchical_cache": LOADED_MEANWHILE,
    "enable_memory_saver": "memory may be taken away and given back",
    "enable_symm_mem": "collectives need memory of their own",
    "disable_cuda_graph_padding": "rows must not be padded",
}
_RESERVE = 1 << 30  # bytes that must be free before the capture, which takes less than a tenth


def buckets(most: int | None, requests: int) -> tuple[int, ...]:
    """The numbers of rows to capture, ascending.

    Args:
        most: the operator's largest; None for all of ours.
        requests: the largest number of requests that run at a time.

    >>> buckets(None, 5), buckets(3, 100), buckets(100, 100)
    ((1, 2, 4), (1, 2), (1, 2, 4, 8, 16, 32))
    """
    largest = requests if most is None else min(most, requests)
    return tuple(rows for rows in _BUCKETS if rows <= largest)


def why_not(runner: Any, state: ModelState, *, can_be_captured: bool) -> str | None:
    """Why the tail of this server is not captured, or None.

    Args:
        can_be_captured: decode steps of its attention backend.
    """
    if settings.current.graph_rows == 0:
        return OFF
    if backend.captured_decode_steps(runner) is None:
        return NO_GRAPHS
    assert state.attention is not None
    tail = state.attention.tail
    if not can_be_captured:
        return f"attention by {type(tail).__name__} is not known to be capturable"
    if not state.attention.decodes:
        return NOT_DECODING
    has_inputs = getattr(state.model, "per_layer_model_projection", None) is not None
    if has_inputs and not state.splits_per_layer_inputs:
        return QUANTISED
    pool = tail.token_to_kv_pool
    if backend.is_allocated_after_capture(pool):
        return ALLOCATED_LATER
    if backend.loads_kv_layerwise(pool):  # when it is captured anew
        return LOADED_MEANWHILE
    return refused_by_arguments() or _no_memory(torch.device(runner.device))


def refused_by_arguments() -> str | None:
    """Why the tail of a server with these arguments and settings is never captured, or None."""
    argument = seams.server_arguments()
    assert argument is not None, "SGLang has captured its own graphs"
    for name, reason in _REFUSED.items():
        if argument(name):
            return f"--{name.replace('_', '-')}: {reason}"
    return "SGLang lends the memory of its graphs" if backend.borrows_graph_pool() else None


def _no_memory(device: torch.device) -> str | None:
    free = backend.free_device_memory(device)
    if free is None or free >= _RESERVE:
        return None
    return f"only {free >> 20} MiB of the GPU's memory are free"


# ---------------------------------------------------------------- what a graph reads


@dataclass(frozen=True)
class Inputs:
    """Static inputs, for as many rows as the largest bucket has; a smaller one reads the first.

    Attributes:
        rows: [n, hidden], the residual of the kept rows at the input of layer S-1.
        positions: [n] int64.
        requests: [n], the requests' rows in SGLang's table of tokens; 0 is reserved.
        lengths: [n], tokens of each request.
        input_ids: [n] int64; only its shape is read.
        embeds: [n, hidden], the kept rows' input embeddings; None without per-layer inputs.
        embedded: [n, L - S + 1, width], their per-layer embeddings; None without any.
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
    def of(cls, runner: Any, state: ModelState, like: Any, rows: int) -> Inputs:
        """For buckets of up to ``rows`` rows.

        Args:
            like: static inputs of SGLang's own decode steps, whose types are taken over.
        """
        model, device = state.model, runner.device

        def floats(*shape: int) -> torch.Tensor:
            return torch.zeros(rows, *shape, dtype=runner.dtype, device=device)

        def numbers(value: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.full((rows,), value, dtype=dtype, device=device)

        hidden, embeds, embedded = model.config.hidden_size, None, None
        if getattr(model, "per_layer_model_projection", None) is not None:
            embeds = floats(hidden)
            if model.embed_tokens_per_layer is not None:
                layers = len(model.layers) - state.cut
                embedded = floats(layers, model.hidden_size_per_layer_input)
        return cls(
            rows=floats(hidden),
            positions=numbers(0),
            requests=numbers(0, like.req_pool_indices.dtype),
            lengths=numbers(1, like.seq_lens.dtype),
            input_ids=numbers(0),
            embeds=embeds,
            embedded=embedded,
        )

    def first(self, rows: int) -> Inputs:
        """The same memory, of the first rows."""
        return replace(self, **{name: t[:rows] for name, t in vars(self).items() if t is not None})

    def copied(self) -> Inputs:
        """The same values in memory of their own."""
        return replace(self, **{name: t.clone() for name, t in vars(self).items() if t is not None})

    def fill(self, **tensors: torch.Tensor | None) -> None:
        """Overwrite these of them, each of as many rows; None of those that are None here."""
        for name, tensor in tensors.items():
            own = getattr(self, name)
            if own is not None:
                assert tensor is not None, name
                own.copy_(tensor)

    def pad(self, kept: int) -> None:
        """Make the rows after the first ``kept`` ones requests of one token."""
        self.requests[kept:].zero_()
        self.lengths[kept:].fill_(1)


# ---------------------------------------------------------------- graphs


@dataclass
class _Graph:
    """One bucket.

    Attributes:
        inputs: of so many rows.
        batch: the decode step that is captured. What it holds is read whenever it is replayed.
    """

    inputs: Inputs
    batch: Any


class Replay:
    """A graph, planned for the tail of one batch; a ``TailRunner``."""

    outcome = log.TAIL_CAPTURED

    def __init__(self, graphs: TailGraphs, bucket: int, inputs: Inputs, index: torch.Tensor):
        self._graphs = graphs
        self._bucket = bucket
        self._index = index
        self.inputs = inputs
        self.buffers = None
        if inputs.embeds is not None:
            self.buffers = per_layer.Buffers(inputs.embeds, inputs.embedded)

    def run(self, front: torch.Tensor, positions: torch.Tensor, _: Any) -> torch.Tensor:
        """The kept rows [B, hidden], normed, which the next replay overwrites."""
        torch.index_select(front, 0, self._index, out=self.inputs.rows)
        torch.index_select(positions, 0, self._index, out=self.inputs.positions)
        return self._graphs.replay(self._bucket)[: self._index.shape[0]]


class TailGraphs:
    """The captured tail of one model.

    Attributes:
        attentions: the ``RadixAttention`` of each layer of the tail.
        seconds: how long the capture took.
    """

    def __init__(self, runner: Any, state: ModelState) -> None:
        """Prepare for the capture; nothing is captured yet."""
        assert state.attention is not None
        self.attentions = [layer.self_attn.attn for layer in state.tail_layers]
        self.seconds = 0.0
        self._state = state
        self._backend = state.attention.tail
        self._device = torch.device(runner.device)
        self._buckets = buckets(settings.current.graph_rows, runner.req_to_token_pool.size)
        decode_steps = backend.captured_decode_steps(runner)
        assert decode_steps is not None, "the tail is captured after them"
        self._inputs = Inputs.of(runner, state, decode_steps.buffers, self._buckets[-1])
        self._of_first = [self._inputs.first(rows) for rows in range(self._buckets[-1] + 1)]
        self._graphs: dict[int, _Graph] = {}
        self._captured = backend.GraphBackend(decode_steps)

    @property
    def rows(self) -> tuple[int, ...]:
        """The buckets, ascending."""
        return tuple(sorted(self._graphs))

    @torch.no_grad()
    def capture(self) -> None:
        """Capture all of them, the largest first; when this raises, ``close`` is still due."""
        began = time.monotonic()
        with seams.whole_window(self._backend):
            self._backend.init_cuda_graph_state(self._buckets[-1], self._buckets[-1])
        try:
            with self._captured.session():
                for rows in reversed(self._buckets):
                    graph = self._graph(self._of_first[rows])
                    self._backend.forward_metadata = backend.plan_captured(
                        self._backend, graph.batch
                    )
                    self._captured.capture(rows, partial(self._tail, graph))
                    self._graphs[rows] = graph
        except BaseException:
            backend.end_failed_capture(self._device, self._captured)
            raise
        finally:
            self._backend.forward_metadata = None
        self.seconds = time.monotonic() - began

    def drop(self, rows: int) -> None:
        """Never replay the graph of this bucket again."""
        del self._graphs[rows]

    def close(self) -> None:
        """Let go of all graphs, and of the backend's buffers for them."""
        self._graphs.clear()
        self._captured.close()
        backend.drop_graph_buffers(self._backend)

    # -- one batch ---------------------------------------------------------------------------

    def bucket_for(self, kept: KeptRows) -> int | None:
        """The smallest bucket with room for these rows, if they are one per request."""
        if not kept.one_per_request:
            return None
        return min((rows for rows in self._graphs if rows >= kept.count), default=None)

    def plan(self, forward_batch: Any, tail: TailBatch, bucket: int) -> Replay:
        """Plan the tail of this batch for a graph."""
        inputs = self._of_first[tail.kept.count]
        self._plan(bucket, inputs, forward_batch)
        return Replay(self, bucket, inputs, tail.index)

    def _plan(self, bucket: int, inputs: Inputs, batch: Any) -> None:
        graph, rows = self._graphs[bucket], inputs.rows.shape[0]
        inputs.fill(requests=batch.req_pool_indices, lengths=batch.seq_lens)
        if rows < bucket:
            graph.inputs.pad(rows)
        backend.plan_captured(self._backend, graph.batch, live=batch)
        self._backend.forward_metadata = None  # a graph reads its buffers alone

    def replay(self, bucket: int) -> torch.Tensor:
        """What a planned graph gives, [bucket, hidden], normed; the next replay overwrites it.

        When it fails the tail runs eagerly from then on.
        """
        try:
            output: torch.Tensor = self._captured.replay(bucket)
        except Exception as failure:
            drop(self._state, f"a replay failed: {type(failure).__name__}")
            raise
        return output

    # -- proof -------------------------------------------------------------------------------

    def inputs(self, rows: int) -> Inputs:
        """Inputs of so many rows, in memory of their own, to be filled."""
        return self._of_first[rows].copied()

    def difference(self, bucket: int, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        """What the eager layers and the graph of ``bucket`` give for these inputs.

        Args:
            inputs: of as many rows, or less, in memory of their own.

        Returns:
            eager and captured, each [rows, hidden].
        """
        rows = inputs.rows.shape[0]
        static = self._of_first[rows]
        self._plan(bucket, static, self._graph(inputs).batch)
        static.fill(**vars(inputs))
        padded = self._graphs[bucket].inputs.copied()
        captured = self.replay(bucket)[:rows].clone()
        return self.eager(padded)[:rows], captured

    @torch.no_grad()
    def eager(self, inputs: Inputs) -> torch.Tensor:
        """What the captured layers give when they run eagerly on these inputs: [rows, hidden]."""
        graph = self._graph(inputs)
        graph.batch.seq_lens_sum = int(inputs.lengths.sum())
        assert self._state.attention is not None
        metadata = self._state.attention.plan(graph.batch, {})
        with self._state.attention.running(graph.batch, {}, metadata):
            return self._layers(graph)

    # -- capture -----------------------------------------------------------------------------

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
        with seams.attn_backend_switched(self._backend):
            return self._layers(graph)

    def _layers(self, graph: _Graph) -> torch.Tensor:
        """Layers S-1 to L-1 and the model's norm: [rows, hidden]."""
        model, inputs, projected = self._state.model, graph.inputs, None
        if inputs.embeds is not None:
            projected = per_layer.project(
                model, inputs.embeds, inputs.embedded, self._state.cut, len(model.layers)
            )
        # Layers add into their input in place, and what pads would grow from replay to replay.
        rows = inputs.rows.clone()
        return cut.run_layers(self._state, graph.batch, rows, inputs.positions, projected)


def drop(state: ModelState, reason: str) -> None:
    """Run the tail eagerly from now on, for this reason; let go of what was captured."""
    captured, state.captured = state.captured, None
    state.facts["tail"] = f"eager ({reason})"
    if isinstance(captured, TailGraphs):
        captured.close()
    if reason != NOT_YET:
        log.once(f"Gemma 4 fast prefill: the tail runs eagerly: {reason}")


def prepare(runner: Any, state: ModelState, *, can_be_captured: bool) -> str | None:
    """``why_not``; what was captured before is dropped."""
    drop(state, NOT_YET)
    return _attempt(lambda: why_not(runner, state, can_be_captured=can_be_captured))


def capture(
    runner: Any, state: ModelState, proven: Callable[[TailGraphs], None]
) -> TailGraphs | str:
    """Capture the tail, and have it ``proven``; or why there is none.

    Raises:
        Exception: it failed, and other ranks wait for this one.
    """
    tail: TailGraphs | None = None

    def both() -> str | None:
        nonlocal tail
        tail = TailGraphs(runner, state)
        tail.capture()
        proven(tail)
        return None if tail.rows else NONE_GOOD

    reason = _attempt(both)
    if reason is None and tail is not None:
        return tail
    if tail is not None:
        tail.close()
    return reason or NONE_GOOD


def use(state: ModelState, tail: TailGraphs) -> None:
    """Replay tails from now on."""
    state.captured = tail
    state.facts["tail"] = f"captured for up to {tail.rows[-1]} rows"
    log.once(
        f"Gemma 4 fast prefill: the tail is captured from layer {state.cut} on for "
        f"{', '.join(map(str, tail.rows))} rows in {tail.seconds:.1f} s"
    )


def _attempt(step: Callable[[], str | None]) -> str | None:
    """What ``step`` says; why it failed, if it did and no other rank waits for this one."""
    try:
        return step()
    except Exception as failure:
        if not seams.is_single_rank():
            raise
        log.failure("Gemma 4 fast prefill: capturing the tail failed", failure)
        return f"capturing failed: {type(failure).__name__}"
