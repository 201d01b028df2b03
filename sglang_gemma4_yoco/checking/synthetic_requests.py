"""Prefills of synthetic requests, in KV slots of an idle server.

With a window of 512 and pages of one slot, the requests have 0 + 7, 508 + 6 and 1025 + 5 tokens
(cached + new): a few rows each, so that a forward takes milliseconds, and rows around the window's
edge. Requests that do not fit together run in separate batches. The cached K and V are random. All
slots that are written are restored at the end.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sglang_gemma4_yoco import compat, settings
from sglang_gemma4_yoco.compat.batch import ABSENT, CHUNK_MARK, ForwardBatch, ForwardMode
from sglang_gemma4_yoco.compat.pools import KeysAndValues
from sglang_gemma4_yoco.compat.server import ModelRunner
from sglang_gemma4_yoco.core.state import STATE_ENTRY, ModelState
from sglang_gemma4_yoco.counters import Counters, Outcome
from sglang_gemma4_yoco.patched import patched

NO_ROOM = "the pools have no room for a prompt longer than the window"
_NEW = 7  # tokens of a request

#: Tokens of a request: cached, and new.
Lengths = tuple[int, int]


class NotComparableError(Exception):
    """The two paths cannot be compared; the message is the reason."""


class Request(NamedTuple):
    """One synthetic request."""

    row: int  # its index into ``req_to_token``
    cached: int  # tokens before the new ones
    ids: Tensor  # [new] int64
    slots: Tensor  # [cached + new] int64, in the full pool
    window_slots: Tensor  # the same tokens', in the window's pool


class ForwardResult(NamedTuple):
    """The result of one forward."""

    logits: Tensor  # [requests, vocabulary]
    #: K and V of the new tokens, each [T, kv_heads, head_dim], by layer from 0 to S-1.
    caches: dict[int, KeysAndValues]
    outcome: Outcome | None  # None if it was not counted


class SyntheticRequests:
    """Requests with cached prefixes, for any number of forwards; ``lens``: new tokens."""

    def __init__(self, runner: ModelRunner, state: ModelState, requests: Sequence[Request]) -> None:
        self.lens = [len(request.ids) for request in requests]
        self.requests = requests
        self._runner = runner
        self._state = state
        new = _list_rows(requests)["out_cache_loc"]
        self._caches = {
            layer: compat.pools.get_cached_tokens(runner.token_to_kv_pool, layer, new)
            for layer in range(state.cut_layer + 1)
        }
        self._before = self._others()

    def run(
        self,
        state: ModelState,
        starts: Sequence[int] | None = None,
        *,
        finishes: bool = True,
        given: Mapping[int, KeysAndValues] = MappingProxyType({}),
    ) -> ForwardResult:
        """Run one forward, which the served model's counters do not count.

        Args:
            state: the model's, or a copy with other fields, which serves the forward.
            starts: each request's first new token with input logprobs, or None.
            finishes: some request's prompt ends here.
            given: ``ForwardResult.caches`` of layers that do not run, written to the pool first.
        """
        for layer, cached in self._caches.items():
            # Zeros, so that stale K and V cannot mask a missing write.
            cached.write(given.get(layer, (0, 0)))
        batch = make_prefill_batch(self._runner, self.requests, starts=starts, finishes=finishes)
        # A forward that fails may leave a plan behind.
        own = replace(state, planned_rows=None, counters=Counters(logs=False))
        with patched(own.model, **{STATE_ENTRY: own}):
            output: Any = self._runner.forward(batch).logits_output
            logits = output.next_token_logits.clone()
        if own.off_because and not state.off_because:  # no forward is cuttable
            self._state.turn_off(own.off_because)
        return ForwardResult(
            logits,
            {layer: cached.read() for layer, cached in self._caches.items()},
            next(iter(own.counters.forwards), None),
        )

    def others_changed(self) -> bool:
        """Return True if a slot was written that holds no new token of these requests."""
        return not all(map(torch.equal, self._before, self._others()))

    def _others(self) -> list[Tensor]:
        """Return copies of the restored slots after slot 0 (padding), with zeros for new tokens."""
        end = _find_end(self.requests)
        others = []
        for cached in self._caches.values():
            for cache in (cached.keys, cached.values):
                others.append(cache[1:end].index_fill(0, cached.slots - 1, 0))
        return others


@contextmanager
def make_synthetic_requests(
    runner: ModelRunner, state: ModelState, lengths: Sequence[Lengths] = ()
) -> Iterator[SyntheticRequests]:
    """Yield requests to run; in the block one row to skip is enough for a batch to be cut.

    Args:
        runner: SGLang's ``ModelRunner``; nothing else reads or writes its pools meanwhile.
        lengths: one of the batches of ``choose_batches``; if empty, the largest one.

    Raises:
        NotComparableError: they do not fit into the pools.
    """
    window = compat.attention.find_window(state.model.layers)
    lengths = lengths or max(choose_batches(runner, state), key=len)
    requests = _make_requests(runner, state, lengths)
    table = compat.pools.get_request_table(runner).req_to_token
    end = _find_end(requests)
    mapping = getattr(runner.token_to_kv_pool, "full_to_swa_index_mapping", None)
    places = [table[: len(requests) + 1]]
    for layer in range(state.cut_layer + 1):
        places += [cache[:end] for cache in runner.token_to_kv_pool.get_kv_buffer(layer)]
    if mapping is not None:
        places.append(mapping[:end])
    with (
        torch.no_grad(),
        settings.changed(min_skipped_rows=1),
        # SGLang's scheduler would take the event of these forwards for that of its own batch.
        patched(runner, shared_read_done_event=None),
        ExitStack() as restored,
    ):
        for place in places:  # each is restored even if another one fails
            restored.callback(place.copy_, place.clone())
        for r in requests:
            table[r.row, : len(r.slots)] = r.slots.to(table.dtype)
            if mapping is not None:
                mapping[r.slots] = r.window_slots.to(mapping.dtype)
        _fill_caches(runner, state, requests, window)
        yield SyntheticRequests(runner, state, requests)


def choose_batches(runner: ModelRunner, state: ModelState) -> list[list[Lengths]]:
    """Return a short request, one at the window's edge and one far beyond it, by batch.

    They share one batch, or run in separate ones if the table has too few rows or the pools too few
    slots: with two rows and 600 slots, for example, as [(595, 5)], [(508, 6)] and
    [(0, 7), (0, 7)]. Cached lengths are multiples of the page size. None exceeds the server's
    longest prompt.

    Raises:
        NotComparableError: the pools have no room for requests like the server's longest prompts.
    """
    window = compat.attention.find_window(state.model.layers)
    page = runner.page_size
    table = compat.pools.get_request_table(runner).req_to_token
    buffers = map(runner.token_to_kv_pool.get_key_buffer, range(state.cut_layer + 1))
    slots = list(map(len, buffers))
    # The first page of each pool and the first row of the table are reserved.
    pages = min(slots) // page - 1
    rows = len(table) - 1
    reach = min(max(slots) - page, table.shape[1])  # tokens of the longest prompt
    longest = min(pages * page, reach)
    if longest < min(window + 1, reach):
        raise NotComparableError(NO_ROOM)
    requests = []
    needed = 0
    far = max(2 * window + 1, page)
    for wanted, new in ((_NEW, _NEW), (window + 2, 6), (far + 5, 5)):
        length = min(wanted, longest)
        cached = max(0, length - new) // page * page
        requests.append((cached, length - cached))
        needed -= -length // page
    short, edge, beyond = requests
    separate = [[beyond], [edge], [short] * min(rows, 2)]
    if rows < len(requests) or needed > pages:
        return separate
    if state.captured and state.captured.sizes[-1] < len(requests):
        return [requests, *separate]  # no graph fits all
    return [requests]


def _make_requests(
    runner: ModelRunner, state: ModelState, batch: Sequence[Lengths]
) -> list[Request]:
    """Return requests of these lengths, with pages shuffled differently in each pool."""
    page = runner.page_size
    vocabulary = state.model.config.vocab_size
    draw = torch.Generator().manual_seed(0)
    requests = []
    first_page = 1  # the first one is reserved
    for row, (cached, new) in enumerate(batch, start=1):
        length = cached + new
        end_page = first_page - (-length // page)
        # From the middle of the vocabulary: Gemma has special tokens at both ends.
        ids = torch.randint(vocabulary // 2, vocabulary * 9 // 10, (new,), generator=draw)
        tensors = [ids]
        shuffled = first_page + torch.randperm(end_page - first_page, generator=draw)
        for order in (shuffled, shuffled.flip(0)):
            tensors.append((order[:, None] * page + torch.arange(page)).flatten()[:length])
        requests.append(Request(row, cached, *(tensor.to(runner.device) for tensor in tensors)))
        first_page = end_page
    return requests


def _find_end(requests: Sequence[Request]) -> int:
    return 1 + max(int(slots.max()) for r in requests for slots in (r.slots, r.window_slots))


def _fill_caches(
    runner: ModelRunner, state: ModelState, requests: Sequence[Request], window: int
) -> None:
    """Write random K and V into the requests' slots, at the scale of the model's own.

    At the edge of the last row's window, the values of the first token inside and the last one
    outside are as large as all others together: bf16 rounding would hide one of 512 equal values.
    """
    generator = torch.Generator(runner.device).manual_seed(0)
    end = _find_end(requests)
    for number in range(state.cut_layer + 1):
        keys, values = runner.token_to_kv_pool.get_kv_buffer(number)
        values[:end].normal_(generator=generator)
        # Gemma 4 does not scale scores: its weights keep keys small.
        scale = state.adapter.get_key_scale(state.model.layers[number])
        keys[:end].normal_(generator=generator).mul_(scale)
        most = torch.finfo(values.dtype).max / 8  # normal samples are below 8
        for request in requests:
            inside = len(request.slots) - window
            edge = [token for token in (inside - 1, inside) if 0 <= token < request.cached]
            own = compat.pools.get_cached_tokens(
                runner.token_to_kv_pool, number, request.slots[edge]
            )
            values[own.slots] *= min(window, most)


def make_prefill_batch(
    runner: ModelRunner,
    requests: Sequence[Request],
    *,
    starts: Sequence[int] | None,
    finishes: bool,
) -> ForwardBatch:
    """Return the batch of ``SyntheticRequests.run``, with SGLang's fields except for sampling.

    The start of a request without input logprobs is its length.
    """
    size = len(requests)
    fields = _list_rows(requests)
    nothing = [ABSENT] * size
    batch = ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=size,
        return_logprob=starts is not None,
        mm_inputs=nothing,
        lora_ids=nothing,
        spec_algorithm=compat.batch.SpeculativeAlgorithm.NONE,
        capture_hidden_mode=compat.batch.get_server_return_hidden_states_mode(),
        **fields,
    )
    batch.extend_logprob_start_lens_cpu = list(starts or fields["extend_seq_lens_cpu"])
    if compat.batch.MARKS_CHUNKS:
        setattr(batch, CHUNK_MARK, finishes)
    if starts is not None:
        batch.top_logprobs_nums = [0] * size
        batch.token_ids_logprobs = nothing
        # The token after each one, 0 after the last; the logprobs are not read.
        wanted = [
            torch.nn.functional.pad(r.ids[1:], (0, 1))[start:]
            for r, start in zip(requests, starts, strict=True)
        ]
        batch.extend_input_logprob_token_ids_gpu = torch.cat(wanted)
    translator = runner.kv_index_translator
    translator.own_plan(batch).bind(batch, translator)
    return batch


def _list_rows(requests: Sequence[Request]) -> dict[str, Any]:
    """Return the fields of a batch that describe the rows of these requests."""
    prefixes = [r.cached for r in requests]
    lens = [len(r.ids) for r in requests]
    input_ids = torch.cat([r.ids for r in requests])
    on_device = input_ids.new_tensor
    cached = on_device(prefixes)
    new = on_device(lens)
    positions, first_rows = compat.batch.compute_position_torch(cached, new)
    lengths = cached + new
    rows = on_device([r.row for r in requests])
    total = len(input_ids)
    return {
        "input_ids": input_ids,
        "req_pool_indices": rows,
        "req_pool_indices_cpu": rows.to("cpu", copy=True),
        "seq_lens": lengths,
        "seq_lens_cpu": lengths.to("cpu", copy=True),
        "orig_seq_lens": lengths.int(),
        "seq_lens_sum": sum(prefixes) + total,
        # The slots of the new tokens in the full pool.
        "out_cache_loc": torch.cat([r.slots[r.cached :] for r in requests]),
        "positions": positions,
        "extend_num_tokens": total,
        # A captured prefill separates rows from padding by it.
        "global_num_token_non_padded_cpu": total,
        "extend_seq_lens": new.int(),
        "extend_prefix_lens": cached.int(),
        "extend_start_loc": first_rows.int(),
        "extend_seq_lens_cpu": lens,
        "extend_prefix_lens_cpu": prefixes,
    }
