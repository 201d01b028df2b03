"""What decides whether a forward is cut, each by itself: fields, arguments, backends, plans.

SGLang sets most arguments together with others, or in servers that a CPU cannot start. Here one is
published while the package decides: while the batch is planned, or from the call of the model to
that of its first layer, so that SGLang's own code never meets it; whether the forward was cut shows
by the rows of its layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from packaging.version import Version
from sglang.srt.environ import envs
from sglang.srt.layers.quantization.kv_cache import BaseKVCacheMethod
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.model_executor.runner_utils import capture_mode
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from harness.batches import batch_of
from harness.forwards import CHUNKS, MARKS_CHUNKS, TWO_PROMPTS, assert_fast, assert_stock
from harness.layer_rows import FIRST_CUT, LAYERS
from harness.layer_rows import cut as cut_rows
from harness.observe import TOLERANCE, batch_in, both_ways, run
from harness.stand_ins import skip_on_older
from reviewed_arguments import installed
from sglang_gemma4_reference import releases
from sglang_gemma4_reference.engine import Engine, Prompt
from sglang_gemma4_yoco import compat, log
from sglang_gemma4_yoco.core import gate
from sglang_gemma4_yoco.core.replaced import replaced
from sglang_gemma4_yoco.loading import limits, start

pytestmark = pytest.mark.usefixtures("forgotten_reports")


PLANNED, CALLED = "while it is planned", "when the model is called"


@contextmanager
def while_deciding(
    engine: Engine, entered: Callable[[Any], AbstractContextManager[None]], when: str = PLANNED
) -> Iterator[None]:
    """Have every forward enter ``entered(forward_batch)`` for one of the two spans.

    What is known of the server is determined anew there.
    """
    model, backend = engine.text_model, engine.runner.attn_backend
    with ExitStack() as hooks, ExitStack() as deciding:

        def decide(batch: Any) -> None:
            deciding.enter_context(entered(batch))
            start.of(model).refused = start.model_reason(model)

        stock = backend.init_forward_metadata

        def planning(batch: Any) -> None:
            with deciding:
                decide(batch)
                stock(batch)

        def called(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            decide(batch_in(args, kwargs))

        def decided(*_: Any) -> None:
            deciding.close()

        if when == PLANNED:
            hooks.enter_context(replaced(backend, init_forward_metadata=planning))
        else:
            hooks.enter_context(model.register_forward_pre_hook(called, with_kwargs=True))
            hooks.enter_context(model.layers[0].register_forward_pre_hook(decided))
        yield
    start.of(model).refused = start.model_reason(model)


def assert_decided(
    engine: Engine,
    reason: str | None,
    entered: Callable[[Any], AbstractContextManager[None]],
    when: str = PLANNED,
) -> None:
    """No layer leaves out a row, for this reason; or, without one, the forward is cut."""
    total, kept = sum(len(prompt.new) for prompt in TWO_PROMPTS), len(TWO_PROMPTS)
    with while_deciding(engine, entered, when):
        seen = run(engine, engine.schedule(TWO_PROMPTS), "1")
    assert seen.rows == (cut_rows(total, kept) if reason is None else [total] * LAYERS)
    assert log.forwards[log.FAILED] == 0
    assert reason is None or log.forwards == {reason: 1}


class NotGiven(torch.Tensor):
    """Embeddings that the model is not given: it takes ids or embeddings, and has ids."""

    def bfloat16(self) -> None:  # type: ignore[override]
        """What SGLang gives it."""


FULL = {"capture_hidden_mode": CaptureHiddenMode.FULL}
# What refuses a batch that has it, and the reason.
BATCHES: dict[str, tuple[dict[str, Any], str]] = {
    "hidden states": (FULL, gate.HIDDEN_STATES),
    **{
        f"hidden states beside {kind.name}": (FULL | {"spec_algorithm": kind}, reason)
        for kind, reason in (
            (SpeculativeAlgorithm.EAGLE, gate.SPECULATIVE),
            (SpeculativeAlgorithm.DFLASH, gate.SPECULATIVE),
            (SpeculativeAlgorithm.NGRAM, gate.HIDDEN_STATES),
        )
    },
    "a LoRA row": ({"lora_ids": [None, "adapter"]}, gate.LORA),
}


@pytest.mark.parametrize("what", BATCHES)
def test_refused_batches(engine: Engine, batches_with: Callable[..., None], what: str) -> None:
    fields, reason = BATCHES[what]
    batches_with(**fields)
    assert_stock(engine, reason)


# What refuses a batch where it is set: a value, and the reason.
FIELDS: dict[str, tuple[object, str]] = {
    "spec_info": (SimpleNamespace(), gate.SPECULATIVE),
    "return_hidden_states_before_norm": (True, gate.HIDDEN_STATES),
    "multi_item_delimiter_indices": ([torch.tensor([1]), torch.tensor([2])], "multi-item scoring"),
    "token_indices_to_pool": ([torch.tensor([1]), torch.tensor([2])], "setwise scoring"),
    "input_embeds": (torch.zeros(43, 64).as_subclass(NotGiven), "input embeddings"),
    "replace_embeds": (torch.zeros(2, 64), "replaced embeddings"),
    "full_prefill_cuda_graph_capture": (True, gate.CAPTURING),
}


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_of_the_batch(engine: Engine, batches_with: Callable[..., None], name: str) -> None:
    """As SGLang sets it on a server that passed its start."""
    skip_on_older("ForwardBatch", {name} - ForwardBatch.__dataclass_fields__.keys())
    value, reason = FIELDS[name]
    batches_with(**{name: value})
    assert_stock(engine, reason)


def test_each_field_refuses_for_its_reason() -> None:
    assert {name: reason for name, (_, reason) in FIELDS.items()} == gate.REFUSING_FIELDS


@pytest.mark.parametrize("name", ["engram_history", "encoder_lens", "dimensions"])
def test_a_field_of_another_model_that_is_renamed(
    engine: Engine,
    restarted: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    """Nothing of Gemma 4 hangs on it: the package loads, and cuts."""
    monkeypatch.delitem(ForwardBatch.__dataclass_fields__, name, raising=False)
    monkeypatch.delattr(ForwardBatch, name, raising=False)
    assert [lack for lack in compat._missing() if "ForwardBatch" in lack] == []
    restarted()
    assert_fast(engine)


# What the host would know of two prompts of 40 and of 3 tokens -> what it says instead.
LENGTHS: dict[str, dict[str, Any]] = {
    "no list of new tokens": {"extend_seq_lens_cpu": (40, 3)},
    "no list of cached ones": {"extend_prefix_lens_cpu": None},
    "fewer that are cached": {"extend_prefix_lens_cpu": [0]},
    "more requests": {"seq_lens": torch.tensor([40, 3, 1])},
    "a request without new tokens": {"extend_seq_lens_cpu": [43, 0]},
    "fewer tokens in all": {"extend_num_tokens": 42},
    "more input ids": {"input_ids": torch.arange(44)},
    "no list of logprobs": {"return_logprob": True, "extend_logprob_start_lens_cpu": None},
    "fewer logprobs": {"return_logprob": True, "extend_logprob_start_lens_cpu": [0]},
}


@pytest.mark.parametrize("what", LENGTHS)
def test_lengths_that_the_host_does_not_know(engine: Engine, what: str) -> None:
    assert_decided(engine, gate.UNKNOWN_LENGTHS, lambda batch: replaced(batch, **LENGTHS[what]))


@pytest.mark.parametrize("when", [PLANNED, CALLED])
def test_a_graph_that_is_captured(engine: Engine, when: str) -> None:
    assert_decided(engine, gate.CAPTURING, lambda _: capture_mode.model_capture_mode(), when)


DRAFTS = {"speculative_algorithm": "FROZEN_KV_MTP"}
HIDDEN_STATES_OF_DRAFTS = f"{gate.HIDDEN_STATES}, beside speculative decoding"
DRAFTS_BESIDE_ROLES = f"{gate.SPECULATIVE} beside prefill-decode disaggregation"
LAST = {"return_hidden_states_mode": "last"}
# An argument, or in capitals an environment variable -> what it is set to; each refuses alone.
REFUSING: dict[str, Any] = {
    "attn_cp_size": 2,
    "attn_dp_size": 2,
    "cpu_offload_gb": 1,
    "dcp_size": 2,
    "debug_tensor_dump_output_folder": "/dumps",
    "disable_attn_tp_gather": True,
    "dllm_algorithm": "LowConfidence",
    "dwdp_size": 2,
    "elastic_ep_backend": "mooncake",
    "enable_amd_monokernel": True,
    "enable_attn_tp_input_scattered": True,
    "enable_dense_mlp_attn_tp": True,
    "enable_deterministic_inference": True,
    "enable_dp_attention": True,
    "enable_dp_lm_head": True,
    "enable_flexkv": True,
    "enable_kv_cache_sharding": True,
    "enable_layernorm_sp": True,
    "enable_layerwise_nvtx_marker": True,
    "enable_lmcache": True,
    "enable_lora": True,
    "enable_nvidia_megakernel": True,
    "enable_page_major_kv_layout": True,
    "enable_pdmux": True,
    "enable_prefill_cp": True,
    "enable_quant_communications": True,
    "enable_single_batch_overlap": True,
    "enable_two_batch_overlap": True,
    "enable_unified_cache_external_linker": True,
    "enable_unified_memory": True,
    "ep_size": 2,
    "forward_hooks": [{"name": "a"}],
    "moe_dense_tp_size": 1,
    "moe_dp_size": 2,
    "msprobe_dump_config": "dump.json",
    "nnodes": 2,
    "offload_group_size": 1,
    "pp_size": 2,
    "radix_cache_backend": "flexkv",
    "use_ray": True,
    "SGLANG_CRASH_ON_TRITON_LOAD_AFTER_READY": True,
    "SGLANG_SKIP_SOFTMAX_PREFILL_THRESHOLD_SCALE_FACTOR": 0.5,
}
ARGUMENTS: list[tuple[dict[str, Any], str | None]] = [
    *(
        ({name: REFUSING.get(name)}, reason)
        for reason, names in limits.REFUSING_ARGUMENTS.items()
        for name in names
    ),
    ({"enable_return_hidden_states": True}, gate.HIDDEN_STATES),
    ({"return_hidden_states_mode": "full"}, gate.HIDDEN_STATES),
    *(
        ({"speculative_algorithm": kind}, gate.SPECULATIVE)
        for kind in ("EAGLE", "EAGLE3", "DFLASH")
    ),
    *((DRAFTS | {"disaggregation_mode": r}, DRAFTS_BESIDE_ROLES) for r in ("decode", "prefill")),
    (DRAFTS | {"enable_return_hidden_states": True}, HIDDEN_STATES_OF_DRAFTS),
    (DRAFTS | {"enable_return_aux_hidden_states": True}, HIDDEN_STATES_OF_DRAFTS),
    (DRAFTS | LAST, HIDDEN_STATES_OF_DRAFTS),
    # These refuse nothing.
    ({"enable_return_hidden_states": True, **LAST}, None),
    ({"offload_group_size": -1}, None),
    ({"disaggregation_mode": "prefill", "enable_pd_role_switch": True}, None),
    *(({"speculative_algorithm": kind}, None) for kind in ("FROZEN_KV_MTP", "NGRAM", "STANDALONE")),
    (DRAFTS | {"disaggregation_mode": "null"}, None),
]


@contextmanager
def given(arguments: dict[str, Any]) -> Iterator[None]:
    """A server with these arguments and, in capitals, environment variables."""
    variables = {name: value for name, value in arguments.items() if name.isupper()}
    others = {name: value for name, value in arguments.items() if name not in variables}
    with ExitStack() as stack:
        for name, value in variables.items():
            stack.enter_context(getattr(envs, name).override(value))
        stack.enter_context(releases.published(**others))
        yield


@pytest.mark.parametrize(("arguments", "reason"), ARGUMENTS)
def test_an_argument_of_the_server(
    engine: Engine, arguments: dict[str, Any], reason: str | None
) -> None:
    skip_on_older("SGLang", arguments.keys() - installed())
    assert_decided(engine, reason, lambda _: given(arguments))


def test_every_argument_that_refuses_has_a_row() -> None:
    assert {*REFUSING} == {name for names in limits.REFUSING_ARGUMENTS.values() for name in names}
    beside = {name for given, why in ARGUMENTS if why == HIDDEN_STATES_OF_DRAFTS for name in given}
    assert beside - DRAFTS.keys() == limits._HIDDEN_STATE_ARGUMENTS


AS_IN_A_NEWER_ONE = pytest.mark.skipif(
    not limits.judged_arguments() <= installed(),
    reason="a release newer than 0.5.23 has what 0.5.23 has",
)


@contextmanager
def newer(*unknown: str, **arguments: Any) -> Iterator[None]:
    """A later release, in which these arguments are not known; a server that sets others."""
    reviewed = limits.REVIEWED_ARGUMENTS - set(unknown)
    # SGLang's override for tests does not change what was typed.
    is_set = compat.arguments_set() | dict.fromkeys(arguments, True)
    with (
        mock.patch.object(compat, "arguments_set", return_value=is_set),
        mock.patch.object(compat, "LAST_TESTED", Version("0.5.16")),
        mock.patch.object(limits, "REVIEWED_ARGUMENTS", reviewed),
        releases.published(**arguments),
    ):
        yield


@AS_IN_A_NEWER_ONE
def test_an_argument_that_is_not_judged(engine: Engine) -> None:
    """As a server of a later release might set what is new there."""
    reason = "--max-total-tokens is set, which this version has not judged"
    assert_decided(engine, reason, lambda _: newer("max_total_tokens", max_total_tokens=9))


@AS_IN_A_NEWER_ONE
@pytest.mark.parametrize(("value", "refuses"), [("1", True), ("0", False)])  # 0 is its default
def test_a_variable_that_is_not_judged(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, value: str, refuses: bool
) -> None:
    monkeypatch.setenv("SGLANG_LOG_MS", value)
    reason = "SGLANG_LOG_MS is set, which this version has not judged"
    assert_decided(engine, reason if refuses else None, lambda _: newer("SGLANG_LOG_MS"))


@AS_IN_A_NEWER_ONE
@pytest.mark.parametrize(
    "arguments", [{}, DRAFTS, {"disaggregation_mode": "prefill"}, {"offload_group_size": 0}]
)
def test_arguments_of_a_newer_release(engine: Engine, arguments: dict[str, Any]) -> None:
    """Those that are known refuse nothing there that they do not refuse here."""
    assert_decided(engine, None, lambda _: newer(**arguments))


# ---------------------------------------------------------------- the layers of the tail


def method(name: str, module: str = "sglang.srt.a", **values: Any) -> UnquantizedLinearMethod:
    """What computes a linear layer, in a class of this name and module."""
    made = type(name, (UnquantizedLinearMethod,), {"__module__": module})()
    vars(made).update(values)
    return made


@dataclass(frozen=True)
class Kind:
    """A linear layer of the tail.

    Attributes:
        apart: whether its rows are known to be independent.
        computes: what computes it.
        values: what it has besides.
        place: the layer whose last projection it is.
        amd: whether the test is of an AMD GPU.
    """

    apart: bool
    computes: UnquantizedLinearMethod
    values: dict[str, Any] = field(default_factory=dict)
    place: int = -1
    amd: bool = False


def scheme(name: str) -> dict[str, Any]:
    """What a layer has whose method has schemes; nothing without a name."""
    return {"scheme": type(name, (), {})()} if name else {}


# As SGLang names them: methods, and the schemes of those that have some.
KNOWN = (
    "BlockInt8LinearMethod",
    "Fp8LinearMethod",
    "ModelOptFp4LinearMethod",
    "ModelOptFp8LinearMethod",
    "ModelOptNvFp4A16LinearMethod",
    "PetitNvFp4LinearMethod",
    "W8A8Fp8LinearMethod",
    "W8A8Int8LinearMethod",
    "AWQLinearMethod.AWQIntelAMXLinearScheme",
    "AWQLinearMethod.AWQLinearScheme",
    "AWQLinearMethod.AWQMarlinLinearScheme",
    "AWQLinearMethod.AWQXPULinearScheme",
    "CompressedTensorsLinearMethod.CompressedTensorsW4A16Fp4",
    "CompressedTensorsLinearMethod.CompressedTensorsW4A4Fp4",
    "CompressedTensorsLinearMethod.CompressedTensorsW8A16Fp8",
    "CompressedTensorsLinearMethod.CompressedTensorsW8A8Fp8",
    "CompressedTensorsLinearMethod.CompressedTensorsW8A8Int8",
    "CompressedTensorsLinearMethod.CompressedTensorsWNA16",
    "CompressedTensorsLinearMethod.XPUCompressedTensorsWNA16",
    "GPTQLinearMethod.GPTQIntelAMXLinearScheme",
    "GPTQLinearMethod.GPTQLinearScheme",
    "GPTQLinearMethod.GPTQXPULinearScheme",
    "GPTQMarlinLinearMethod.GPTQMarlinLinearScheme",
    "QuarkLinearMethod.QuarkW4A4MXFP4",
    "QuarkLinearMethod.QuarkW8A8Fp8",
)
EIGHT_BITS, FOUR_BITS = (SimpleNamespace(load_in_8bit=eight) for eight in (True, False))
FP8, UNKNOWN = method("Fp8LinearMethod"), method("NewLinearMethod")
BITS = "BitsAndBytesLinearMethod"
QUARK = method("QuarkLinearMethod")
KINDS: dict[str, Kind] = {
    **{
        name: Kind(True, method(name.split(".")[0]), scheme(name.partition(".")[2]))
        for name in KNOWN
    },
    "fp8 on AMD, where one scale for the batch is usual": Kind(False, FP8, amd=True),
    "Quark's fp8 on AMD": Kind(False, QUARK, scheme("QuarkW8A8Fp8"), amd=True),
    "Quark's mxfp4 on AMD": Kind(True, QUARK, scheme("QuarkW4A4MXFP4"), amd=True),
    "plain on AMD": Kind(True, UnquantizedLinearMethod(), amd=True),
    "4 bits of bitsandbytes": Kind(True, method(BITS, quant_config=FOUR_BITS)),
    "8 bits of bitsandbytes": Kind(False, method(BITS, quant_config=EIGHT_BITS)),
    "AWQ by a scheme that is not known": Kind(
        False, method("AWQLinearMethod"), {"scheme": object()}
    ),
    "AWQ by another method's scheme": Kind(
        False, method("AWQLinearMethod"), scheme("GPTQLinearScheme")
    ),
    "GGUF, which rounds few rows otherwise": Kind(False, method("GGUFLinearMethod")),
    "another package's": Kind(False, method("Fp8LinearMethod", "another")),
    "an image model's": Kind(False, method("Fp8LinearMethod", "sglang.multimodal_gen.a")),
    "one that is not known": Kind(False, UNKNOWN),
    "one that is not known, in the last donor": Kind(False, UNKNOWN, place=FIRST_CUT),
    "one that is not known, before the last donor": Kind(True, UNKNOWN, place=FIRST_CUT - 1),
    "a class of tensors": Kind(
        False, UnquantizedLinearMethod(), {"weight": SimpleNamespace(data=object())}
    ),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_of_linear_layer(engine: Engine, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Each computes what the plain layer does; the gate goes by what it is."""
    kind, known = KINDS[name], start.of(engine.text_model)
    layer = engine.text_model.layers[kind.place].mlp.down_proj
    with monkeypatch.context() as changed:
        changed.setattr(torch.version, "hip", "7.0" if kind.amd else None)
        for attribute, value in ({"quant_method": kind.computes} | kind.values).items():
            changed.setitem(vars(layer), attribute, value)
        known.refused = refused = start.model_reason(engine.text_model)
        assert (refused is None) == kind.apart
    try:
        seen = run(engine, engine.schedule(TWO_PROMPTS), "1")
    finally:
        known.refused = start.model_reason(engine.text_model)
    total, kept = sum(len(prompt.new) for prompt in TWO_PROMPTS), len(TWO_PROMPTS)
    assert seen.rows == (cut_rows(total, kept) if kind.apart else [total] * LAYERS)


def test_the_method_of_a_cache_refuses_nothing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As attentions of fp8 checkpoints have one; the pools are judged by themselves."""
    for layer in engine.text_model.layers:
        monkeypatch.setattr(layer.self_attn.attn, "quant_method", BaseKVCacheMethod(None))
    assert start.model_reason(engine.text_model) is None


def test_no_other_kind_is_known() -> None:
    assert set(KNOWN) == limits._INDEPENDENT_ROWS


def test_another_backend_than_the_one_that_was_planned_on(engine: Engine) -> None:
    another = engine.runner._get_attention_backend()
    assert_decided(
        engine, gate.NOT_PLANNED, lambda _: compat.attn_backend_switched(another), CALLED
    )


def test_a_chunk_whose_last_rows_are_captured_is_read(
    engine: Engine, batches_with: Callable[..., None]
) -> None:
    batches_with(capture_hidden_mode=CaptureHiddenMode.LAST)
    stock, fast = both_ways(engine, engine.schedule(CHUNKS))
    assert (stock.rows[-1], fast.rows[-1]) == (90, len(CHUNKS))
    captured = [seen.output.hidden_states for seen in (stock, fast)]
    torch.testing.assert_close(captured[1], captured[0], atol=TOLERANCE, rtol=1e-4)


def test_a_mixed_batch_that_stays_one(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang 0.5.23 calls it an extend before the model sees it, older releases do not."""
    decoding = Prompt((30, 31), (32,), decodes=True)
    scheduled = engine.schedule([*batch_of((20, 30)), decoding])
    assert scheduled.forward_mode is ForwardMode.MIXED
    monkeypatch.setattr(ForwardMode, "is_mixed", lambda _: False)
    _, fast = both_ways(engine, scheduled)
    assert fast.before["forward_mode"] is ForwardMode.MIXED
    assert fast.rows == cut_rows(31, 2)


@MARKS_CHUNKS
def test_three_rows_of_an_intermediate_chunk_pay(
    engine: Engine, setting: Callable[..., None]
) -> None:
    """All three are skipped; of a prompt of three tokens two would be, which is too few."""
    setting(min_skipped_rows=None)
    assert_fast(engine, batch_of((20, 3), to_come=(21,)))
    assert log.forwards[log.TAIL_SKIPPED] == 1
    assert_stock(engine, gate.TOO_LITTLE, batch_of((20, 3)))


# ---------------------------------------------------------------- the measured rule: 3 rows, 1/16


@pytest.mark.parametrize(
    ("total", "kept", "pays"),
    [
        (3, 1, False),  # two rows are too few, whatever their share
        (4, 1, True),
        (48, 45, True),
        (49, 46, False),
        (64, 60, True),
        (65, 61, False),
        (68, 64, False),
    ],
)
def test_rows_that_are_worth_skipping(
    engine: Engine, setting: Callable[..., None], total: int, kept: int, pays: bool
) -> None:
    setting(min_skipped_rows=None)
    prompts = batch_of((0, total), logprob_start=total - kept)
    if pays:
        assert_fast(engine, prompts)
        assert log.forwards[gate.TOO_LITTLE] == 0
    else:
        assert_stock(engine, gate.TOO_LITTLE, prompts)


@pytest.mark.parametrize(("kept", "pays"), [(1, True), (2, False)])
def test_an_operators_own_number(
    engine: Engine, setting: Callable[..., None], kept: int, pays: bool
) -> None:
    setting(min_skipped_rows=2)
    prompts = batch_of((0, 3), logprob_start=3 - kept)
    if pays:
        assert_fast(engine, prompts)
    else:
        assert_stock(engine, gate.TOO_LITTLE, prompts)


def test_what_a_layer_had_of_its_own_is_used_and_put_back(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another plugin's method on a single layer, of the front's last and of the tail."""
    for layer in engine.text_model.layers[FIRST_CUT : FIRST_CUT + 2]:
        calls: list[int] = []
        stock = layer.forward

        def theirs(*args: Any, _calls: list[int] = calls, _stock: Any = stock, **kw: Any) -> Any:
            _calls.append(len(_calls))
            return _stock(*args, **kw)

        with monkeypatch.context() as plugin:
            plugin.setattr(layer, "forward", theirs)
            seen = run(engine, engine.schedule(TWO_PROMPTS), "1")
            assert seen.rows[-1] == len(TWO_PROMPTS)
            assert calls == [0]
            assert layer.__dict__["forward"] is theirs
        layer.__dict__.pop("forward", None)  # where it was on the class, it stays there
    assert_fast(engine)
