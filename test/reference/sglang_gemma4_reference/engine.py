"""SGLang's ``ModelRunner`` in this process, without scheduler and server.

So one process can run hundreds of batches, and read every layer's results and the KV cache. All
parts are SGLang's own: requests, batches, KV pools, attention backend, logits processor.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch
from sglang.benchmark.one_batch import TreeCacheNamespace
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.models.gemma3n_causal import Gemma3nTextModel
from sglang.srt.models.gemma4_causal import Gemma4TextModel
from sglang.srt.plugins import load_plugins
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_gemma4_reference import releases
from sglang_gemma4_yoco import counters, log
from sglang_gemma4_yoco.core import state
from sglang_gemma4_yoco.refusal import Refusal


@dataclass(frozen=True)
class Prompt:
    """One request of a batch.

    Attributes:
        cached: token ids whose K/V is in the cache already.
        new: token ids of this forward, at least one.
        logprob_start: the first absolute position with input logprobs; -1 for none.
        to_come: token ids of the prompt that are left for later chunks.
        decodes: it runs already. ``cached`` is its prompt and ``new`` the one token generated so
            far; its row is a decode step within a prefill batch.
        shares: the place in the batch of an earlier prompt that begins with the same ``cached``:
            both read the same slots.
    """

    cached: tuple[int, ...]
    new: tuple[int, ...]
    logprob_start: int = -1
    to_come: tuple[int, ...] = ()
    decodes: bool = False
    shares: int | None = None


def _poison_of(dtype: torch.dtype) -> float:
    """Return a finite value, since masked keys may be read, but one far from any computed value."""
    return min(1e3, torch.finfo(dtype).max)


#: The reason why a forward in a block of ``switched("0")`` is served by stock.
SWITCHED_OFF = Refusal("switched off for the span")


def switched(value: str) -> AbstractContextManager[object]:
    """Turn the fast path on (``1``) or off (``0``) in the ``with`` block."""
    span = ExitStack()
    if value == "0":
        for known in list(state._attached):  # an earlier engine may still be in memory
            span.enter_context(mock.patch.object(known, "off_because", SWITCHED_OFF))
    return span


def reset_log() -> None:
    """Reset the package's counters and its logged lines."""
    log._logged.clear()
    fresh = counters.Counters(observers=counters.served.observers)
    vars(counters.served).update(vars(fresh))


class Engine:
    """A Gemma 4 or Gemma 3n on SGLang's ModelRunner.

    Several engines can live in one process, but only the one built last may run: SGLang's
    configuration is process-wide. An older one refuses.
    """

    _last: ClassVar[weakref.ref[Engine]]

    def __init__(
        self,
        model_path: str | Path,
        *,
        rank: int = 0,
        text_model: type | tuple[type, ...] = (Gemma4TextModel, Gemma3nTextModel),
        **server_args: Any,
    ) -> None:
        """Load the model.

        Args:
            model_path: the checkpoint.
            rank: of this process, if ``tp_size`` makes several processes run one model; all of them
                call the same methods with the same arguments, ``nccl_port`` among them.
            text_model: the class of its text model.
            server_args: SGLang's, for example ``max_total_tokens=4096`` or ``page_size=16``.
        """
        Engine._last = weakref.ref(self)
        load_plugins()  # as every process of a server does at start
        args = ServerArgs(model_path=str(model_path), **server_args)
        self.runner = releases.load_model(args, rank)
        self.text_model: Any = next(
            module for module in self.runner.model.modules() if isinstance(module, text_model)
        )
        allocator = self.runner.token_to_kv_pool_allocator
        # A tree cache that caches nothing.
        self._tree_cache = TreeCacheNamespace(
            page_size=allocator.page_size,
            device=self.runner.device,
            token_to_kv_pool_allocator=allocator,
        )

    def _must_be_last(self) -> None:
        assert Engine._last() is self, "SGLang's configuration is a later engine's: build it again"

    def schedule(
        self, prompts: Sequence[Prompt], *, prefix: str = "0", slots: int | None = 0
    ) -> ScheduleBatch:
        """Fill the cache with the cached tokens of all prompts, then schedule their new ones.

        The pools are emptied first, and their K and V overwritten, so that a read of anything not
        written since shows.

        Args:
            prompts: those that decode come last, as SGLang puts them.
            prefix: the switch while the cached tokens are computed: ``0`` for the stock forward,
                ``1`` for the fast path.
            slots: seed of the order in which slots are given out. It differs between the two pools,
                so that no slot has the same number in both. None for ascending order in both.
        """
        self._must_be_last()
        fresh = [prompt for prompt in prompts if not prompt.decodes]
        assert list(prompts[: len(fresh)]) == fresh, "those that decode come last"
        self._empty_the_pools(slots)
        wants_logprobs = any(p.logprob_start >= 0 for p in prompts)
        reqs = [self._request(rid, p, wants_logprobs) for rid, p in enumerate(prompts)]
        running = None
        with switched(prefix):
            cached = [r for r, p in zip(reqs, fresh, strict=False) if p.cached]
            if cached:
                self.forward(self._batch(cached))
            if len(fresh) < len(prompts):
                running = self._batch(reqs[len(fresh) :])
                self.forward(running)
        self._share_slots(reqs, prompts)
        for req, prompt in zip(reqs, fresh, strict=False):
            ids = array("q", prompt.cached + prompt.new + prompt.to_come)
            req.origin_input_ids = req.full_untruncated_fill_ids = ids
            req.logprob_start_len = prompt.logprob_start
            req.prefix_len, req.extend_end = len(prompt.cached), len(ids) - len(prompt.to_come)
        batch = self._batch(reqs[: len(fresh)])
        if running is not None:
            _mix(batch, running, [prompt.new[0] for prompt in prompts[len(fresh) :]])
        return batch

    def next_chunk(self, batch: ScheduleBatch, prompts: Sequence[Prompt]) -> ScheduleBatch:
        """Schedule the rest of those prompts of ``batch`` that did not end in it.

        Args:
            batch: a batch that has run.
            prompts: the prompts that it was scheduled from.
        """
        reqs = []
        for req, prompt in zip(batch.reqs, prompts, strict=True):
            if prompt.to_come:
                done = len(prompt.cached) + len(prompt.new)
                req.prefix_len, req.extend_end = done, done + len(prompt.to_come)
                reqs.append(req)
        return self._batch(reqs)

    def _empty_the_pools(self, seed: int | None) -> None:
        self.runner.req_to_token_pool.clear()
        allocator = self.runner.token_to_kv_pool_allocator
        allocator.clear()
        for layer in self.layers_with_kv:
            for buffer in self._buffers(layer):
                buffer.fill_(_poison_of(buffer.dtype))
        if seed is None:
            return
        draw = torch.Generator().manual_seed(seed)
        full = getattr(allocator, "full_attn_allocator", allocator)
        full.free_pages = full.free_pages[torch.randperm(len(full.free_pages), generator=draw)]
        window = getattr(allocator, "swa_attn_allocator", None)
        if window is None:
            return
        both = min(len(full.free_pages), len(window.free_pages))
        ascending = window.free_pages
        while (window.free_pages[:both] == full.free_pages[:both]).any():
            window.free_pages = ascending[torch.randperm(len(ascending), generator=draw)]

    def _request(self, rid: int, prompt: Prompt, wants_logprobs: bool) -> Req:
        """Return the request of a prompt; its next prefill computes the cached tokens."""
        ids = array("q", prompt.cached or prompt.new)
        req = Req(
            rid=str(rid),
            origin_input_text="",
            origin_input_ids=ids,
            sampling_params=SamplingParams(temperature=0, max_new_tokens=1),
            return_logprob=wants_logprobs,
        )
        req.full_untruncated_fill_ids = ids
        req.logprob.top_logprobs_num = 3
        req.logprob.token_ids_logprob = [5, 17]
        req.logprob_start_len = -1
        req.prefix_len, req.extend_end = 0, len(ids)
        return req

    def _share_slots(self, reqs: Sequence[Req], prompts: Sequence[Prompt]) -> None:
        table = self.runner.req_to_token_pool.req_to_token
        for req, prompt in zip(reqs, prompts, strict=True):
            if prompt.shares is None:
                continue
            length = len(prompt.cached)
            assert prompts[prompt.shares].cached[:length] == prompt.cached, (
                "the prompts' prefixes differ"
            )
            donor = reqs[prompt.shares].kv.req_pool_idx
            table[req.kv.req_pool_idx, :length] = table[donor, :length]

    def _batch(self, reqs: list[Req]) -> ScheduleBatch:
        batch = ScheduleBatch.init_new(
            reqs=reqs,
            req_to_token_pool=self.runner.req_to_token_pool,
            token_to_kv_pool_allocator=self.runner.token_to_kv_pool_allocator,
            tree_cache=self._tree_cache,
            model_config=self.runner.model_config,
            enable_overlap=False,
            spec_algorithm=SpeculativeAlgorithm.NONE,
        )
        batch.prepare_for_extend()
        batch.input_ids = batch.prefill_input_ids_cpu.to(batch.device)
        return batch

    @torch.no_grad()
    def forward(self, batch: ScheduleBatch, *, intermediate: bool = False) -> Any:
        """Run one forward of ``batch``, which may be run again; return SGLang's logits output.

        With ``intermediate`` the batch is marked: no request of it finishes its prompt.
        """
        self._must_be_last()
        forward_batch = releases.forward_batch(batch, self.runner)
        if intermediate:
            forward_batch.contains_last_prefill_chunk = False
        return self.runner.forward(forward_batch).logits_output

    @property
    def layers_with_kv(self) -> range:
        """Return the indices of the layers that own K and V, which come first."""
        config = self.text_model.config
        return range(config.num_hidden_layers - config.num_kv_shared_layers)

    def _buffers(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        pool = self.runner.token_to_kv_pool
        return pool.get_key_buffer(layer), pool.get_value_buffer(layer)

    def kv_buffers(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return K and V of every layer that owns some, at all slots: [slots, heads, dim]."""
        return [self._buffers(layer) for layer in self.layers_with_kv]

    def kv(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return copies of ``kv_buffers``."""
        return [(keys.clone(), values.clone()) for keys, values in self.kv_buffers()]

    def poison(self, batch: ScheduleBatch) -> None:
        """Overwrite K and V at the slots that ``batch`` must write, so that a skipped write shows.

        The poison is finite: masked keys of a softmax may be read.
        """
        for layer in self.layers_with_kv:
            slots = self._written_slots(batch, layer)
            for buffer in self._buffers(layer):
                buffer[slots] = _poison_of(buffer.dtype)

    def written(self, batch: ScheduleBatch) -> list[torch.Tensor]:
        """Return copies of K and V, at the slots that ``batch`` writes, of layers that own some."""
        found = []
        for layer in self.layers_with_kv:
            slots = self._written_slots(batch, layer)
            found += [buffer[slots] for buffer in self._buffers(layer)]
        return found

    def _written_slots(self, batch: ScheduleBatch, layer: int) -> torch.Tensor:
        pool = self.runner.token_to_kv_pool
        slots: torch.Tensor = batch.out_cache_loc
        mapping = getattr(pool, "layers_mapping", None)
        if mapping is not None and mapping[layer][1]:
            slots = pool.translate_loc_from_full_to_swa(slots)
        return slots

    @torch.no_grad()
    def decode(self, batch: ScheduleBatch, tokens: Sequence[int]) -> Any:
        """Run one decode step of ``batch``, which has run its prefill, after these tokens."""
        batch.input_ids = torch.tensor(tokens, device=batch.device)
        batch.prepare_for_decode()
        return self.forward(batch)


def _mix(batch: ScheduleBatch, running: ScheduleBatch, tokens: list[int]) -> None:
    """Add one decode step of ``running``, which has run its prefill, to ``batch``."""
    for req, token in zip(running.reqs, tokens, strict=True):
        req.output_ids.append(token)
    running.input_ids = torch.tensor(tokens, device=batch.device)
    running.prepare_for_decode()
    input_ids = torch.cat([batch.input_ids, running.input_ids])
    batch.mix_with_running(running)
    batch.decoding_reqs = running.reqs
    batch.input_ids = input_ids  # which the scheduler fills in later
