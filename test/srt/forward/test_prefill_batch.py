"""Batches of synthetic requests, compared field by field with SGLang's own batches.

A wrong field shows where no test looks: SGLang's own prefill graphs write the rows of their
padding into the cache, for example, unless the batch says how many of them are real.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import pytest
import torch
from sglang.srt.model_executor import forward_batch_info
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch

from harness.batches import batch_of
from sglang_gemma4_reference import releases
from sglang_gemma4_reference.engine import Engine, Prompt
from sglang_gemma4_yoco import compat
from sglang_gemma4_yoco.checking.synthetic_requests import Request, make_prefill_batch

#: Fields that may differ in any batch, and why.
ALWAYS = {
    "rids": "synthetic requests have no names",
    "sampling_info": "nothing is sampled from their logits",
}
# The tokens after an intermediate chunk are unknown, and none are made up.
_LONGER = {"orig_seq_lens": "SGLang counts the prompt's tokens to come"}
_NEXT = {"extend_input_logprob_token_ids_gpu": "the first token to come is the last row's"}


_CHUNK = batch_of((20, 30), to_come=(21, 22))

#: Kind of batch -> its requests, and further fields that may differ.
KINDS = {
    "one request": (batch_of((0, 9)), {}),
    "one token": (batch_of((40, 1)), {}),
    "several, some with prefixes": (batch_of((0, 7), (33, 6), (70, 5)), {}),
    "logprobs of all rows": (batch_of((0, 9), logprob_start=0), {}),
    "logprobs after a prefix": (
        batch_of((12, 8), logprob_start=15) + batch_of((0, 6)) + batch_of((4, 5), logprob_start=0),
        {},
    ),
    "an intermediate chunk": (_CHUNK, _LONGER),
    "an intermediate chunk beside a finished prompt": (batch_of((0, 7)) + _CHUNK, _LONGER),
    "logprobs of an intermediate chunk": (
        batch_of((5, 9), to_come=(21, 22), logprob_start=8),
        _LONGER | _NEXT,
    ),
}


def of_sglang(engine: Engine, prompts: list[Prompt]) -> ForwardBatch:
    """Return SGLang's batch of requests that want no logprobs beyond those of inputs."""
    scheduled = engine.schedule(prompts)
    if scheduled.return_logprob:
        scheduled.top_logprobs_nums = [0] * len(prompts)
        scheduled.token_ids_logprobs = [None] * len(prompts)
    return releases.forward_batch(scheduled, engine.runner)


def of_ours(engine: Engine, theirs: Any, prompts: list[Prompt]) -> ForwardBatch:
    """Return the same requests' batch, made without a scheduler."""
    starts = theirs.extend_logprob_start_lens_cpu
    lens = [len(prompt.new) for prompt in prompts]
    requests = []
    for prompt, row, ids, slots in zip(
        prompts,
        theirs.req_pool_indices.tolist(),
        theirs.input_ids.split(lens),
        theirs.out_cache_loc.split(lens),
        strict=True,
    ):
        cached = len(prompt.cached)
        of_all = torch.cat([slots.new_zeros(cached), slots])
        requests.append(Request(row, cached, ids, of_all, of_all))
    return make_prefill_batch(
        engine.runner,
        requests,
        starts=starts if theirs.return_logprob else None,
        finishes=any(not prompt.to_come for prompt in prompts),
    )


def same(one: Any, other: Any) -> bool:
    """Return True if two values are equal in all parts, and of the same types."""
    if one is other or type(one) is not type(other):
        return one is other
    if isinstance(one, torch.Tensor):
        alike = (one.dtype, one.device, one.shape) == (other.dtype, other.device, other.shape)
        return alike and torch.equal(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if hasattr(one, "__dict__") and not isinstance(one, Enum):
        return same(vars(one), vars(other))
    return bool(one == other)


def unlike(theirs: ForwardBatch, ours: ForwardBatch) -> dict[str, tuple[Any, Any]]:
    """Return the fields that differ, as SGLang's value and ours."""
    ours_has, theirs_has = vars(ours), vars(theirs)
    assert ForwardBatch.__dataclass_fields__.keys() <= theirs_has.keys() == ours_has.keys()
    differ = [name for name, value in theirs_has.items() if not same(value, ours_has[name])]
    return {name: (theirs_has[name], ours_has[name]) for name in differ}


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_is_what_sglang_makes(engine: Engine, kind: str) -> None:
    prompts, others = KINDS[kind]
    theirs = of_sglang(engine, prompts)
    found = unlike(theirs, of_ours(engine, theirs, prompts))
    may_differ = ALWAYS | others
    assert {name: pair for name, pair in found.items() if name not in may_differ} == {}
    assert found.keys() == may_differ.keys()  # what does not differ needs no excuse


@pytest.mark.parametrize("mode", [CaptureHiddenMode.LAST, CaptureHiddenMode.FULL])
def test_what_every_batch_of_a_server_captures(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, mode: CaptureHiddenMode
) -> None:
    """All batches of a server that may return hidden states have the same mode."""
    of_server = "get_server_return_hidden_states_mode"
    for module in (forward_batch_info, compat.batch):
        monkeypatch.setattr(module, of_server, lambda: mode)
    prompts, _ = KINDS["one request"]
    theirs = of_sglang(engine, prompts)
    assert theirs.capture_hidden_mode is mode
    assert unlike(theirs, of_ours(engine, theirs, prompts)).keys() == ALWAYS.keys()
