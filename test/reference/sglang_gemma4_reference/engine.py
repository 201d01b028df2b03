"""SGLang's ``ModelRunner`` in this process, without scheduler and server.

One process can so run hundreds of batches, look at every layer, and at the KV cache afterwards.
Real pieces of SGLang throughout: requests, batches, KV pools, attention backend, logits processor.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.models.gemma4_causal import Gemma4TextModel
from sglang.srt.plugins import load_plugins
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_gemma4_reference import releases


@dataclass(frozen=True)
class Prompt:
    """One request of a batch.

    Attributes:
        cached: token ids whose K/V is in the cache already.
        new: token ids of this forward, at least one.
        logprob_start: absolute position from which on input logprobs are wanted; -1 for none.
        to_come: token ids of the prompt that are left for later chunks.
    """

    cached: tuple[int, ...]
    new: tuple[int, ...]
    logprob_start: int = -1
    to_come: tuple[int, ...] = ()


class Engine:
    """A Gemma 4 on SGLang's ModelRunner.

    Several engines can live in one process, but only the one built last may run: SGLang's
    configuration is process-wide.
    """

    def __init__(self, model_path: str | Path, *, rank: int = 0, **server_args: Any) -> None:
        """Load the model.

        Args:
            model_path: the checkpoint.
            rank: of this process, where ``tp_size`` makes several run one model together; all
                call the same methods with the same arguments, ``nccl_port`` among them.
            server_args: SGLang's, for example ``max_total_tokens=4096``.
        """
        load_plugins()  # as every process of a server does first
        args = ServerArgs(model_path=str(model_path), **server_args)
        self.runner = releases.load_model(args, rank)
        self.text_model = next(
            module for module in self.runner.model.modules() if isinstance(module, Gemma4TextModel)
        )
        self._tree_cache = releases.tree_cache(self.runner)

    def schedule(self, prompts: Sequence[Prompt]) -> ScheduleBatch:
        """Fill the cache with the cached tokens of all prompts, then schedule their new ones.

        The pools are emptied first.
        """
        self.runner.req_to_token_pool.clear()
        self.runner.token_to_kv_pool_allocator.clear()
        reqs = []
        for rid, prompt in enumerate(prompts):
            ids = array("q", prompt.cached or prompt.new)
            req = Req(
                rid=str(rid),
                origin_input_text="",
                origin_input_ids=ids,
                sampling_params=SamplingParams(temperature=0, max_new_tokens=1),
                return_logprob=any(p.logprob_start >= 0 for p in prompts),
            )
            req.full_untruncated_fill_ids = ids
            req.logprob.top_logprobs_num = 3
            req.logprob.token_ids_logprob = [5, 17]
            req.logprob_start_len = -1
            releases.extend(req, self.runner, 0, len(ids))
            reqs.append(req)
        cached = [r for r, p in zip(reqs, prompts, strict=True) if p.cached]
        if cached:
            self.forward(self._batch(cached))
        for req, prompt in zip(reqs, prompts, strict=True):
            ids = array("q", prompt.cached + prompt.new + prompt.to_come)
            req.origin_input_ids = req.full_untruncated_fill_ids = ids
            req.logprob_start_len = prompt.logprob_start
            releases.extend(req, self.runner, len(prompt.cached), len(ids) - len(prompt.to_come))
        return self._batch(reqs)

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
    def forward(self, batch: ScheduleBatch, *, unread: bool = False) -> Any:
        """Run one forward of ``batch``, which may be run again; return SGLang's logits output.

        With ``unread`` the batch says that no request of it finishes its prompt.
        """
        forward_batch = releases.forward_batch(batch, self.runner)
        if unread:
            forward_batch.contains_last_prefill_chunk = False
        return self.runner.forward(forward_batch).logits_output

    @property
    def _layers_with_kv(self) -> range:
        config = self.text_model.config
        return range(config.num_hidden_layers - config.num_kv_shared_layers)

    def kv(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Copies of K and V of every layer that owns some, at all slots: [slots, heads, dim]."""
        pool = self.runner.token_to_kv_pool
        return [
            (pool.get_key_buffer(layer).clone(), pool.get_value_buffer(layer).clone())
            for layer in self._layers_with_kv
        ]

    def poison(self, batch: ScheduleBatch) -> None:
        """Overwrite K and V at the slots that ``batch`` must write, so that a skipped write shows.

        The poison is finite: masked keys of a softmax may be read.
        """
        pool = self.runner.token_to_kv_pool
        mapping = getattr(pool, "layers_mapping", None)
        for layer in self._layers_with_kv:
            slots = batch.out_cache_loc
            if mapping is not None and mapping[layer][1]:
                slots = pool.translate_loc_from_full_to_swa(slots)
            pool.get_key_buffer(layer)[slots] = 1e3
            pool.get_value_buffer(layer)[slots] = 1e3

    @torch.no_grad()
    def decode(self, batch: ScheduleBatch, tokens: Sequence[int]) -> Any:
        """Run one decode step of ``batch``, which has run its prefill, after these tokens."""
        batch.input_ids = torch.tensor(tokens, device=batch.device)
        batch.prepare_for_decode()
        return self.forward(batch)
