"""Third-party code that sees rows: the server runs as stock and names it, unless trusted.

On SGLang's ModelRunner: building its attention backends judges the server again.
``server/test_foreign_code`` has what users see of it.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from sglang.srt.layers import layernorm, logits_processor, radix_attention
from sglang.srt.layers.attention import triton_backend
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.sampler import Sampler
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.batch_result_processor import (
    SchedulerBatchResultProcessor,
)
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.models import gemma4_causal, gemma4_mm
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

import triton
from harness.fixtures import Change, Said
from harness.forwards import CHUNKS, assert_fast, state_of
from harness.layer_rows import cut
from harness.observe import both_ways
from sglang_gemma4_reference.engine import Engine
from sglang_gemma4_yoco.admission import third_party
from sglang_gemma4_yoco.commands import preflight
from sglang_gemma4_yoco.commands.console import Report
from sglang_gemma4_yoco.patched import patched

pytestmark = pytest.mark.usefixtures("forgotten_reports")

MODEL = gemma4_causal.Gemma4TextModel
Foreign = Callable[[Engine], AbstractContextManager[object]]
Judge = Callable[[], str | None]


def wrapped(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Return a third-party wrapper, named after the function that it wraps."""

    @functools.wraps(stock)
    def theirs(*args: Any, **kwargs: Any) -> Any:
        return stock(*args, **kwargs)

    return theirs


def passed_on(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the result of a method: a third-party hook around it."""
    return forward(*args, **kwargs)


def seen(*_: Any, **__: Any) -> None:
    """Third-party hook that changes nothing."""


def copied(rows: torch.Tensor) -> torch.Tensor:
    """Third-party function of rows."""
    return rows.clone()


class Callback:
    """Third-party callable object."""

    def __call__(self, *_: Any) -> None:
        """Accept a module's output."""


@contextmanager
def another_class(part: Any, kind: type) -> Iterator[None]:
    """Change a module's class in the ``with`` block."""
    before = type(part)
    part.__class__ = kind
    try:
        yield
    finally:
        part.__class__ = before


def built_differently(runner: Any, build: Any = ATTENTION_BACKENDS["triton"]) -> Any:
    """Return an attention backend whose forward is wrapped."""
    backend = build(runner)
    backend.forward = wrapped(backend.forward)
    return backend


class MyModel(gemma4_mm.Gemma4ForConditionalGeneration):
    """Model class that overrides nothing."""


class MyNorm(layernorm.RMSNorm):
    """Norm that overrides a platform's method."""

    def forward_native(self, *args: Any, **kwargs: Any) -> Any:
        """Return normed rows."""
        return super().forward_native(*args, **kwargs)


def assigned(owner: Any, name: str, make: Callable[[Any], Any]) -> Foreign:
    """Return a patch of an attribute of a class or module with the result of ``make``."""
    return lambda _: mock.patch.object(owner, name, make(vars(owner)[name]))


@contextmanager
def hooked(kind: HookType, hook: Callable[..., Any]) -> Iterator[None]:
    """Register a plugin's hook of the model's forward, and let SGLang apply it."""
    target = "sglang.srt.models.gemma4_causal.Gemma4TextModel.forward"
    with ExitStack() as stack:
        for owner, name, value in (
            (MODEL, "forward", MODEL.forward),
            (HookRegistry, "_hooks", {target: [(kind, hook, None)]}),
            (HookRegistry, "_patched", set[str]()),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        HookRegistry.apply_hooks()
        assert MODEL.forward.__module__.startswith("sglang")  # it looks like SGLang's
        yield


def layer(engine: Engine) -> Any:
    return engine.text_model.layers[-1]


#: Third-party code, and the beginning of the reason.
CASES: dict[str, tuple[Foreign, str]] = {
    "a subclass of the model": (
        lambda engine: another_class(engine.runner.model, MyModel),
        "the model is a test_classes.MyModel",
    ),
    "a subclass of a norm": (
        lambda engine: another_class(engine.text_model.norm, MyNorm),
        "the model has a test_classes.MyNorm",
    ),
    "a method that is wrapped": (
        assigned(gemma4_causal.Gemma4DecoderLayer, "forward", wrapped),
        "Gemma4DecoderLayer.forward runs test_classes.theirs",
    ),
    "a method that is wrapped, in torch's wrapper": (
        assigned(MODEL, "project_per_layer_inputs", lambda f: torch.no_grad()(wrapped(f))),
        "Gemma4TextModel.project_per_layer_inputs runs test_classes.theirs",
    ),
    "a method of torch's": (
        assigned(torch.nn.Module, "_call_impl", wrapped),
        "Module._call_impl runs test_classes.theirs",
    ),
    "a method that is replaced by an object": (
        assigned(radix_attention.RadixAttention, "forward", lambda _: Callback()),
        "RadixAttention.forward runs test_classes.Callback",
    ),
    "a property": (
        assigned(gemma4_mm.Gemma4ForConditionalGeneration, "model", lambda _: property(seen)),
        "Gemma4ForConditionalGeneration.model runs test_classes.seen",
    ),
    "a static method": (
        assigned(
            logits_processor.LogitsMetadata,
            "from_forward_batch",
            lambda _: staticmethod(functools.partial(passed_on, seen)),
        ),
        "LogitsMetadata.from_forward_batch runs test_classes.",
    ),
    "a class": (
        assigned(gemma4_causal, "Gemma4RMSNorm", lambda _: MyNorm),
        "sglang.srt.models.gemma4_causal.Gemma4RMSNorm runs test_classes.MyNorm",
    ),
    "a kernel": (
        assigned(triton_backend, "get_num_kv_splits_triton", lambda _: triton.jit(seen)),
        "sglang.srt.layers.attention.triton_backend.get_num_kv_splits_triton runs test_classes.",
    ),
    "an operator": (
        assigned(
            gemma4_mm,
            "general_mm_embed_routine",
            lambda _: torch.library.custom_op("theirs::copied", copied, mutates_args=()),
        ),
        "sglang.srt.models.gemma4_mm.general_mm_embed_routine runs test_classes.copied",
    ),
    "a script": (
        assigned(gemma4_mm, "general_mm_embed_routine", lambda _: torch.jit.script(copied)),
        "sglang.srt.models.gemma4_mm.general_mm_embed_routine runs test_classes.copied",
    ),
    "a function": (
        assigned(gemma4_mm, "general_mm_embed_routine", wrapped),
        "sglang.srt.models.gemma4_mm.general_mm_embed_routine runs test_classes.theirs",
    ),
    "a method of the attention backend": (
        assigned(AttentionBackend, "forward", wrapped),
        "AttentionBackend.forward runs test_classes.theirs",
    ),
    "an attention backend's own method": (
        lambda _: mock.patch.dict(ATTENTION_BACKENDS, triton=built_differently),
        "WindowedTorchNativeBackend.forward runs test_classes.theirs",
    ),
    "a plugin's hook around a method": (
        lambda _: hooked(HookType.AROUND, passed_on),
        "Gemma4TextModel.forward runs test_classes.passed_on",
    ),
    "a plugin's hook after a method": (
        lambda _: hooked(HookType.AFTER, Callback()),
        "Gemma4TextModel.forward runs test_classes.Callback",
    ),
    "a plugin's hook in place of a method": (
        lambda _: hooked(HookType.REPLACE, functools.partial(seen)),
        "Gemma4TextModel.forward runs test_classes.seen",
    ),
    "a hook before a norm": (
        lambda engine: engine.text_model.norm.register_forward_pre_hook(seen),
        "language_model.norm._forward_pre_hooks runs test_classes.seen",
    ),
    "a hook of the head": (
        lambda engine: engine.runner.model.lm_head.register_forward_hook(Callback().__call__),
        "language_model.embed_tokens._forward_hooks runs test_classes.__call__",
    ),
    "a hook of all modules": (
        lambda _: torch.nn.modules.module.register_module_forward_hook(seen),
        "all modules._global_forward_hooks runs test_classes.seen",
    ),
    "an instance's method": (
        lambda engine: patched(layer(engine), forward=wrapped(layer(engine).forward)),
        "language_model.layers.7.forward runs test_classes.theirs",
    ),
    "what a norm's forward calls": (
        lambda engine: patched(
            layer(engine).self_attn.q_norm, _forward_method=functools.partial(passed_on, torch.abs)
        ),
        "language_model.layers.7.self_attn.q_norm._forward_method runs test_classes.passed_on",
    ),
    "a method of a linear layer's method": (
        lambda engine: patched(
            layer(engine).mlp.down_proj.quant_method,
            apply=wrapped(layer(engine).mlp.down_proj.quant_method.apply),
        ),
        "language_model.layers.7.mlp.down_proj.quant_method.apply runs test_classes.theirs",
    ),
}


@pytest.fixture
def judged(engine: Engine) -> Iterator[Judge]:
    """Yield a function that judges the server again and returns why it refuses, or None."""

    def decide() -> str | None:
        engine.runner.init_attention_backends()
        refusal = state_of(engine).off_because
        return getattr(refusal, "text", None)

    yield decide
    engine.runner.init_attention_backends()


@pytest.mark.parametrize("name", CASES)
def test_third_party_code_makes_a_server_stock(
    engine: Engine, judged: Judge, setting: Change, name: str
) -> None:
    """The reason has place, module and name, and the setting that accepts the code."""
    foreign, beginning = CASES[name]
    with foreign(engine):
        reason = judged() or ""
        module, accepts = reason.partition("_TRUST=")[::2]
        setting(trust=tuple(accepts.removesuffix(" accepts it").split(",")))
        trusted = judged()
    assert reason.startswith(beginning)
    assert "may read rows that are not computed" in module
    assert accepts
    assert trusted is None
    assert judged() is None


NORM = f"{__name__}.MyNorm"


@pytest.mark.parametrize(
    ("trust", "refused"),
    [
        (("another", NORM), ""),
        ((__name__,), ""),
        (("test", f"{NORM}s", f"{__name__}_2"), f"the model has a {NORM},"),
    ],
)
def test_names_that_are_trusted(
    engine: Engine,
    judged: Judge,
    setting: Change,
    trust: tuple[str, ...],
    refused: str,
) -> None:
    """A name stands for a module or for a class in it, and for nothing else."""
    setting(trust=trust)
    with another_class(engine.text_model.norm, MyNorm):
        reason = judged() or ""
    assert reason.partition(" which")[0] == refused


def test_all_third_party_code_is_named_at_once(engine: Engine, judged: Judge) -> None:
    """One start of the server names all of them."""
    norm = engine.text_model.norm
    with norm.register_forward_hook(mock.Mock()), another_class(norm, MyNorm):
        reason = judged() or ""
    assert reason.endswith(f"_TRUST={__name__},unittest.mock accepts it")


def test_what_is_trusted_vouches_for_nothing_else(
    engine: Engine, judged: Judge, setting: Change
) -> None:
    """Trust covers no other code.

    Another plugin's wrapper around their method or inside their wrapper, and other functions of a
    trusted class's module, still make the server run as stock.
    """
    setting(trust=(__name__,))
    calls = mock.Mock(wraps=MyNorm.forward_native)
    with another_class(engine.text_model.norm, MyNorm):
        assert judged() is None
        with mock.patch.object(MyNorm, "forward_native", calls):
            assert (judged() or "").startswith("MyNorm.forward_native runs unittest.mock.")
    with assigned(MODEL, "forward", lambda forward: wrapped(mock.Mock(wraps=forward)))(engine):
        assert (judged() or "").startswith("Gemma4TextModel.forward runs unittest.mock.")
    setting(trust=(NORM,))
    norm = engine.text_model.norm
    with another_class(norm, MyNorm), norm.register_forward_hook(seen):
        assert (judged() or "").partition(" runs ")[0].endswith("norm._forward_hooks")


def test_a_forward_that_is_not_ours_any_more(
    engine: Engine, judged: Judge, setting: Change
) -> None:
    """No prefill is cut after third-party code has restored the original method."""
    stock = inspect.unwrap(MODEL.forward)
    with mock.patch.object(MODEL, "forward", stock):
        assert judged() == third_party.REPLACED.text
    with mock.patch.object(MODEL, "forward", torch.no_grad()(MODEL.forward)):
        assert judged() is None


def test_what_cannot_be_judged(engine: Engine, judged: Judge, said: Said) -> None:
    """An object that raises when it is inspected makes the server run as stock, and not end."""

    def refuse(_: object) -> None:
        raise RuntimeError("not here")

    class Odd(logits_processor.LogitsMetadata):
        __dict__ = property(refuse)

    with patched(layer(engine), router=Odd.__new__(Odd)):
        assert [judged(), judged()] == [third_party.NOT_JUDGED.text] * 2
    failed = "YOCO fast prefill: third-party code detection failed: RuntimeError('not here')"
    assert said(logging.ERROR) == [failed]
    assert judged() is None


def test_what_sees_no_rows(engine: Engine, judged: Judge) -> None:
    """Hooks in the vision tower and wrappers of loading or starting a model are accepted."""
    outer = type(engine.runner.model)
    with ExitStack() as stack:
        for name in ("__init__", "load_weights", "get_image_feature"):
            stack.enter_context(assigned(outer, name, wrapped)(engine))
        tower = engine.runner.model.vision_tower
        stack.enter_context(tower.register_forward_hook(seen))
        stack.enter_context(assigned(type(engine.runner), "forward", wrapped)(engine))
        norm = engine.text_model.norm  # no hook, but named like one
        stack.enter_context(patched(norm, add_forward_hooks=norm.register_forward_hook))
        assert judged() is None
        assert_fast(engine)


class MySampler(Sampler):
    """Sampler that overrides nothing."""


#: Third-party code that may read the logits of unfinished chunks, or the tokens sampled from them.
CHUNK_READERS = {
    "a sampler": lambda engine: another_class(engine.runner.sampler, MySampler),
    "a hook of the sampler": lambda engine: engine.runner.sampler.register_forward_hook(seen),
    "a sampling observer's installer": assigned(ModelRunner, "__init__", wrapped),
    "samplers": assigned(Sampler, "forward", wrapped),
    "logit bias": assigned(SamplingBatchInfo, "apply_logits_bias", wrapped),
    "workers": assigned(TpModelWorker, "forward_batch_generation", wrapped),
    "the scheduler": assigned(Scheduler, "run_batch", wrapped),
    "results": assigned(SchedulerBatchResultProcessor, "move_logprobs_to_cpu", wrapped),
}


@pytest.mark.parametrize("name", CHUNK_READERS)
def test_third_party_code_that_may_read_chunks(
    engine: Engine, judged: Judge, setting: Change, name: str
) -> None:
    """Chunks keep their last row, with stock's logits, unless the code is trusted."""
    with CHUNK_READERS[name](engine):
        assert judged() is None
        _, read = both_ways(engine, engine.schedule(CHUNKS))
        setting(trust=(__name__,))
        assert judged() is None
        assert_fast(engine, CHUNKS)
    assert read.rows == cut(90, len(CHUNKS))


def test_doctor_judges_what_needs_no_weights(setting: Change, engine: Engine) -> None:
    """It reports the server's reasons that follow from code alone, in the same words."""
    setting(trust=("theirs", __name__))
    with assigned(logits_processor.LogitsProcessor, "forward", wrapped)(engine):
        trusting = examined()
        setting(trust=())
        refusing = examined()
        engine.runner.init_attention_backends()
        reason = state_of(engine).off_because
    engine.runner.init_attention_backends()
    assert trusting.refusals == []
    assert reason is not None
    assert refusing.refusals == [reason.text]
    assert examined().refusals == []


def examined() -> Report:
    """Return doctor's report on the class of the tiny model."""
    report = Report()
    preflight._judge_classes(report, ["Gemma4ForConditionalGeneration"])
    return report
