"""Prefills of synthetic requests, in slots borrowed from a server that serves nobody yet.

With a window of 512 and pages of one slot, the requests have 0 + 7, 508 + 6 and 1025 + 5 tokens
(cached + new): a few rows each, so that a forward takes milliseconds, and rows around the window's
edge. What is cached is random K and V. All that was written is put back in the end.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.model_executor import forward_batch_info
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_gemma4_yoco import log, seams, settings
from sglang_gemma4_yoco.checking.borrowed import borrowed, random_like
from sglang_gemma4_yoco.core.replaced import replaced
from sglang_gemma4_yoco.core.state import ModelState

NO_ROOM = "the pools are too small for it"
_NEW = 7  # tokens of a request
_BEYOND = 2  # tokens of one, after the window of its first one

_Places = tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]


class NotComparableError(Exception):
    """There are not two ways to compare; the message says why."""


@dataclass(frozen=True)
class Request:
    """One synthetic request.

    Attributes:
        row: in SGLang's table of tokens.
        cached: tokens that precede the new ones.
        ids: [new] int64, its new tokens.
        slots: [cached + new] int64, in the full pool.
        window_slots: the same tokens', in the window's pool.
    """

    row: int
    cached: int
    ids: torch.Tensor
    slots: torch.Tensor
    window_slots: torch.Tensor

    @property
    def length(self) -> int:
        """Tokens, cached and new."""
        return len(self.slots)


@dataclass(frozen=True)
class Run:
    """What came of one forward.

    Attributes:
        logits: [requests, vocabulary].
        caches: by each layer with K and V of its own these of all new tokens, each
            [T, kv_heads, head_dim].
        outcome: what it was counted as; None where it was not seen to run.
    """

    logits: torch.Tensor
    caches: dict[int, list[torch.Tensor]]
    outcome: str | None


class SyntheticRequests:
    """Requests whose prefix is in the pools, for any number of forwards.

    Attributes:
        lens: their new tokens.
        requests: they themselves.
        device: the runner's.
    """

    def __init__(self, runner: Any, state: ModelState, requests: Sequence[Request]) -> None:
        self.lens = [len(request.ids) for request in requests]
        self.requests = requests
        self.device = runner.device
        self._runner = runner
        self._generator = torch.Generator(runner.device).manual_seed(1)
        self._caches = self._new_tokens(state)
        self._before = self._others()

    def run(self, starts: Sequence[int] | None = None, *, finishes: bool = True) -> Run:
        """Run one forward, which is counted nowhere.

        Args:
            starts: the new token from which on a request wants input logprobs; None without any.
            finishes: some request's prompt ends here.
        """
        for pair, slots in self._caches.values():
            for cache in pair:  # what is not written must not look as if it were
                cache[slots] = random_like(cache[slots], self._generator).to(cache.dtype)
        batch = prefill_batch(self._runner, self.requests, starts=starts, finishes=finishes)
        with log.not_counted() as outcomes:
            logits = self._runner.forward(batch).logits_output.next_token_logits.clone()
        items = self._caches.items()
        caches = {layer: [cache[slots] for cache in pair] for layer, (pair, slots) in items}
        return Run(logits, caches, next(iter(outcomes), None))

    def write(self, caches: Mapping[int, Sequence[torch.Tensor]], layers: Iterable[int]) -> None:
        """Write K and V that another run has left, for the new tokens in these layers."""
        for layer in layers:
            pair, slots = self._caches[layer]
            for cache, values in zip(pair, caches[layer], strict=True):
                cache[slots] = values

    def others_changed(self) -> bool:
        """Whether any slot that is not for a new token of these has been written to."""
        return not all(map(torch.equal, self._before, self._others()))

    def _new_tokens(self, state: ModelState) -> dict[int, _Places]:
        """By layer K and V, and where the new tokens are in them."""
        pool, found = self._runner.token_to_kv_pool, {}
        for layer in _layers_with_keys(state):
            window = seams.is_in_window_pool(pool, layer)
            slots = [(r.window_slots if window else r.slots)[r.cached :] for r in self.requests]
            found[layer] = pool.get_kv_buffer(layer), torch.cat(slots)
        return found

    def _others(self) -> list[torch.Tensor]:
        """Copies of what is borrowed; zeros for the new tokens, and for slot 0 of the padding."""
        end, copies = _last_slot(self.requests) + 1, []
        for pair, slots in self._caches.values():
            for cache in pair:
                copies.append(cache[:end].clone())
                copies[-1][slots] = 0
                copies[-1][0] = 0
        return copies


@contextmanager
def synthetic_requests(runner: Any, state: ModelState) -> Iterator[SyntheticRequests]:
    """Requests to run in the span, on whichever path is on, each row that can be skipped skipped.

    Args:
        runner: SGLang's ``ModelRunner``, which serves nobody at the moment.

    Raises:
        NotComparableError: there is no room for them.
    """
    window = max(seams.keys_in_window(layer.self_attn.attn) for layer in state.model.layers)
    requests = _requests(runner, state, window)
    if not requests:
        raise NotComparableError(NO_ROOM)
    placed = _placed(runner, state, requests, window)
    with torch.no_grad(), placed, settings.changed(min_skipped_rows=1):
        yield SyntheticRequests(runner, state, requests)


def prefills_eagerly(runner: Any) -> Any:
    """In the span SGLang replays no captured prefill."""
    if not seams.replays_prefills(runner):
        return nullcontext()
    return replaced(runner.prefill_cuda_graph_runner, can_run_graph=lambda _: False)


# -- their tokens and slots ------------------------------------------------------------------------


def _lengths(window: int, page: int) -> list[tuple[int, int]]:
    """Tokens cached and new, of each request; what is cached ends with a page.

    >>> _lengths(512, 1), _lengths(32, 64)
    ([(0, 7), (508, 6), (1025, 5)], [(0, 7), (0, 34), (128, 5)])
    """
    before = max(0, window - _NEW // 2 - 1) // page * page
    beyond = -(-(2 * window + 1) // page) * page
    return [(0, _NEW), (before, window + _BEYOND - before), (beyond, _NEW - 2)]


def _requests(runner: Any, state: ModelState, window: int) -> list[Request]:
    """Those that fit into the pools; slots follow each other in a page, and pages do not."""
    page, pool = runner.token_to_kv_pool_allocator.page_size, runner.token_to_kv_pool
    table = runner.req_to_token_pool.req_to_token
    slots = min(pool.get_kv_buffer(layer)[0].shape[0] for layer in _layers_with_keys(state))
    found: list[tuple[int, int, int]] = []
    taken = 0
    for cached, new in _lengths(window, page):
        pages = -(-(cached + new) // page)
        fits = taken + pages <= slots // page - 1  # the first one is reserved
        if fits and cached + new <= table.shape[1] and len(found) + 1 < table.shape[0]:
            found.append((cached, new, pages))
            taken += pages
    draw = torch.Generator().manual_seed(0)
    free = [torch.randperm(taken, generator=draw) + 1 for _ in range(2)]
    vocabulary, requests = state.model.config.vocab_size, []
    for row, (cached, new, pages) in enumerate(found, start=1):
        mine, free = [some[:pages, None] for some in free], [some[pages:] for some in free]
        both = [(some * page + torch.arange(page)).flatten()[: cached + new] for some in mine]
        # In the middle of the vocabulary: Gemma keeps special tokens at both ends.
        ids = torch.randint(vocabulary // 2, vocabulary * 9 // 10, (new,), generator=draw)
        requests.append(Request(row, cached, *(t.to(runner.device) for t in (ids, *both))))
    return requests


def _layers_with_keys(state: ModelState) -> list[int]:
    """Layers with K and V of their own, 0 to S-1, by their numbers in the pools."""
    return [layer.self_attn.attn.layer_id for layer in state.model.layers[: state.first_shared]]


def _last_slot(requests: Sequence[Request]) -> int:
    return max(int(slots.max()) for r in requests for slots in (r.slots, r.window_slots))


@contextmanager
def _placed(
    runner: Any, state: ModelState, requests: Sequence[Request], window: int
) -> Iterator[None]:
    """SGLang's tables say where these requests' tokens are, and their K and V are random."""
    pool, table = runner.token_to_kv_pool, runner.req_to_token_pool.req_to_token
    mapping, end = getattr(pool, "full_to_swa_index_mapping", None), _last_slot(requests) + 1
    layers = _layers_with_keys(state)
    caches = [[cache[:end] for cache in pool.get_kv_buffer(layer)] for layer in layers]
    places = [cache for pair in caches for cache in pair]
    places += [] if mapping is None else [mapping[:end]]
    with borrowed([*places, *(table[r.row, : r.length] for r in requests)]):
        generator = torch.Generator(runner.device).manual_seed(0)
        for number, (layer, (keys, values)) in enumerate(zip(layers, caches, strict=True)):
            # As large as the model's own: Gemma 4 scales no scores, its weights keep them small.
            of_channels = state.model.layers[number].self_attn.k_norm.weight.float()
            keys.copy_(random_like(keys, generator) * of_channels)
            values.copy_(random_like(values, generator))
            in_window_pool = seams.is_in_window_pool(pool, layer)
            for r in requests:
                _mark_edges(values, r.window_slots if in_window_pool else r.slots, r, window)
        for r in requests:
            table[r.row, : r.length] = r.slots.to(table.dtype)
            if mapping is not None:
                mapping[r.slots] = r.window_slots.to(mapping.dtype)
        yield


def _mark_edges(values: torch.Tensor, slots: torch.Tensor, request: Request, window: int) -> None:
    """Have one token too few or too many in the window of the last row change all of its output.

    One value of 512 that are averaged would be lost in bf16's rounding: so the values of the first
    token within, and of the last one without, are as large as all of the others together.
    """
    most = torch.finfo(values.dtype).max / 8  # normally distributed numbers are below 8
    first = request.length - window
    for token in (first - 1, first):
        if 0 <= token < request.cached:
            at = slots[token]
            values[at] = (values[at].float() * min(window, most)).to(values.dtype)


# -- their batch -----------------------------------------------------------------------------------


def prefill_batch(
    runner: Any, requests: Sequence[Request], *, starts: Sequence[int] | None, finishes: bool
) -> Any:
    """An extend batch, field by field what SGLang makes of a scheduled one.

    It names no requests, and nothing is sampled from it. ``starts`` and ``finishes`` are those of
    ``SyntheticRequests.run``; a request that wants no input logprobs starts at its length.
    """
    device = requests[0].ids.device

    def numbers(values: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    size, rows, prefixes = len(requests), [r.row for r in requests], [r.cached for r in requests]
    lens, lengths = [len(r.ids) for r in requests], [r.length for r in requests]
    input_ids = torch.cat([r.ids for r in requests])
    batch = ForwardBatch(
        forward_mode=seams.ForwardMode.EXTEND,
        batch_size=size,
        input_ids=input_ids,
        req_pool_indices=numbers(rows, torch.int64),
        seq_lens=numbers(lengths, torch.int64),
        seq_lens_cpu=torch.tensor(lengths, dtype=torch.int64),
        orig_seq_lens=numbers(lengths, torch.int32),
        seq_lens_sum=sum(lengths),
        out_cache_loc=torch.cat([r.slots[r.cached :] for r in requests]),
        positions=torch.cat([torch.arange(r.cached, r.length) for r in requests]).to(device),
        extend_num_tokens=sum(lens),
        extend_seq_lens=numbers(lens, torch.int32),
        extend_prefix_lens=numbers(prefixes, torch.int32),
        extend_start_loc=numbers([sum(lens[:i]) for i in range(size)], torch.int32),
        extend_seq_lens_cpu=lens,
        extend_prefix_lens_cpu=prefixes,
        extend_logprob_start_lens_cpu=list(lens if starts is None else starts),
        return_logprob=starts is not None,
        mm_inputs=[None] * size,
        lora_ids=[None] * size,
        spec_algorithm=SpeculativeAlgorithm.NONE,
        capture_hidden_mode=_captured_by_every_batch(runner),
    )
    for name, value in {
        "contains_last_prefill_chunk": finishes,
        "req_pool_indices_cpu": torch.tensor(rows, dtype=torch.int64),
        # By these a captured prefill tells its rows from its padding, up to 0.5.19 and since.
        "num_token_non_padded_cpu": sum(lens),
        "global_num_token_non_padded_cpu": sum(lens),
    }.items():
        if hasattr(batch, name):
            setattr(batch, name, value)
    if starts is not None:
        batch.top_logprobs_nums = [0] * size
        batch.token_ids_logprobs = [None] * size
        # The token after each one from the start on; 0 after the last.
        following = [torch.cat([r.ids[1:], r.ids.new_zeros(1)]) for r in requests]
        wanted = [tokens[start:] for tokens, start in zip(following, starts, strict=True)]
        batch.extend_input_logprob_token_ids_gpu = torch.cat(wanted)
    # Before 0.5.22 only pools translate that are refused.
    translator = getattr(runner, "kv_index_translator", None)
    if translator is not None and hasattr(translator, "own_plan"):
        translator.own_plan(batch).bind(batch, translator)
    return batch


def _captured_by_every_batch(runner: Any) -> Any:
    """Which hidden states every batch of this server returns, whatever its requests want."""
    of_server = forward_batch_info.get_server_return_hidden_states_mode
    takes_arguments = inspect.signature(of_server).parameters  # until 0.5.17
    return of_server(runner.server_args) if takes_arguments else of_server()
