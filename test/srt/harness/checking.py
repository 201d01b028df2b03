"""The self-check, called directly; the forwards that it makes; and audited prefills."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from harness.forwards import assert_fast, assert_untouched, state_of
from harness.layer_rows import LAYERS
from harness.observe import assert_same_cache, run
from sglang_gemma4_reference.engine import Engine, Prompt
from sglang_gemma4_yoco import counters, settings
from sglang_gemma4_yoco.checking import audit
from sglang_gemma4_yoco.checking import self_check as check
from sglang_gemma4_yoco.checking.self_check import CheckResult
from sglang_gemma4_yoco.core.state import ModelState

REQUESTS = 3
NEW = [7, 6, 5]  # tokens of each, with pages of one


def checked(engine: Engine) -> CheckResult:
    """Return the result of the check of this engine's model, also if servers leave it out."""
    with settings.changed(self_check=True):
        return check.check_model(engine.runner, state_of(engine))


def result_of_check(state: ModelState) -> dict[str, Any]:
    """Return the result of the self-check, as /server_info has it."""
    assert state.report.check is not None
    return state.report.check


@contextmanager
def counted(engine: Engine) -> Iterator[list[list[int]]]:
    """Record the rows of each layer's FFN, for every forward in the ``with`` block."""
    model, forwards = engine.text_model, list[list[int]]()

    def begin(*_: Any) -> None:
        forwards.append([0] * LAYERS)

    def count(number: int, _: Any, args: tuple[Any, ...]) -> None:
        forwards[-1][number] += args[0].shape[0]

    with ExitStack() as hooks:
        hooks.enter_context(model.register_forward_pre_hook(begin))
        for number, layer in enumerate(model.layers):
            hook = layer.mlp.register_forward_pre_hook(partial(count, number))
            hooks.enter_context(hook)
        yield forwards


@contextmanager
def audited(engine: Engine, every: int = 1, *, strict: bool = False) -> Iterator[ModelState]:
    """Audit the engine's prefills in the ``with`` block."""
    state = state_of(engine)
    reason = state.off_because
    with settings.changed(audit=every, audit_strict=strict):
        state.after_cut = audit.make_auditor(engine.runner, state)
        try:
            yield state
        finally:
            state.after_cut = None
            state.off_because = reason


@contextmanager
def tensors_unchanged(engine: Engine) -> Iterator[None]:
    """Assert that the block leaves tables, pools and the free slots unchanged."""
    runner = engine.runner
    allocator = runner.token_to_kv_pool_allocator

    def everything() -> list[torch.Tensor]:
        found = [runner.req_to_token_pool.req_to_token]
        pool_map = getattr(runner.token_to_kv_pool, "full_to_swa_index_mapping", None)
        if pool_map is not None:
            found.append(pool_map)
        for name in ("full", "swa"):
            part = getattr(allocator, f"{name}_attn_allocator", None)
            if part is not None:
                found.append(part.free_pages)
        for pair in engine.kv_buffers():
            found += pair
        return list(map(torch.clone, found))

    before = everything()
    yield
    assert all(map(torch.equal, before, everything()))


def assert_audited(engine: Engine, prompts: Sequence[Prompt], first_cut: int) -> None:
    """Assert that an audited forward runs cut, then as stock, then its tail; stock answers."""
    stock, unaudited = assert_fast(engine, prompts)
    with audited(engine):
        both = run(engine, engine.schedule(prompts), "1")
    assert both.rows == [*unaudited.rows, *stock.rows, *unaudited.rows[first_cut:]]
    assert_same_cache(unaudited, both)
    assert torch.equal(both.output.next_token_logits, stock.output.next_token_logits)
    assert counts() == (1, 0)
    assert_untouched(engine)


def counts() -> tuple[int, int]:
    """Return the number of audits so far that agreed, and of those that found a defect."""
    return counters.served.audits["agrees"], counters.served.audits["differs"]


def find_defect(engine: Engine) -> str:
    """Return the defect that the check finds."""
    found = checked(engine)
    assert found.worst is not None
    assert found.worst.excess > 4
    return found.worst.what


@torch.no_grad()
def assert_keys_have_their_scale(engine: Engine) -> None:
    """Assert that a row of keys is about as long as ``get_key_scale`` implies.

    The tolerance of scores is proportional to it. In audits of a model with very sharp attention in
    fp32 the largest error is 8 % of its tolerance; with half the scale 16 %, with a tenth 60 %,
    and with a hundredth right prefills fail. So it may be off by a factor of 2. That of these
    models is off by 3 % at most.
    """
    state, draw = state_of(engine), torch.Generator().manual_seed(0)
    adapter, shape = state.adapter, state.adapter.get_row_shape(state.model)
    for layer in list(state.model.layers)[: state.cut_layer + 1]:
        rows = torch.randn(64, *shape, generator=draw).to(engine.runner.dtype)
        keys, _ = adapter.compute_keys_and_values(layer, rows, torch.arange(64))
        scale = adapter.get_key_scale(layer)
        assert scale.shape == keys.shape[-1:]
        size, implied = (float(each.float().square().mean().sqrt()) for each in (keys, scale))
        assert implied / 2 < size < implied * 2, f"get_key_scale of {layer}: {implied}, not {size}"
