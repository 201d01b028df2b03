"""What decides whether a forward is cut, each by itself: fields, arguments, backends, plans.

SGLang sets most of these together with others, or in servers that a CPU cannot start. Here one is
set on an ordinary batch, or published, while the package decides: while the batch is planned, or
from the call of the model to that of its first layer, so that SGLang's own code never meets it;
whether the forward was cut shows by the rows of its layers.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from packaging.version import Version
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.model_executor.runner_utils import capture_mode
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from batches import BATCHES, batch_of
from forwards import (
    TWO_PROMPTS,
    assert_fast,
)
from layer_rows import FIRST_CUT, LAYERS
from layer_rows import cut as cut_rows
from observe import TOLERANCE, assert_same_answers, assert_same_cache, run, switched
from sglang_gemma4_reference import releases
from sglang_gemma4_reference.engine import Engine, Prompt
from sglang_gemma4_yoco import log, seams
from sglang_gemma4_yoco.loading import limits
from sglang_gemma4_yoco.core import forward, gate
from sglang_gemma4_yoco.loading import start
from sglang_gemma4_yoco.core.replaced import replaced
from stand_ins import skip_on_older

pytestmark = pytest.mark.usefixtures("forgotten_reports")


PLANNED, CALLED = "while it is planned", "when the model is called"
WHEN = (PLANNED, CALLED)


@contextmanager
def while_deciding(
    engine: Engine, entered: Callable[[Any], AbstractContextManager[None]], when: str = PLANNED
) -> Iterator[None]:
    """Have every forward enter ``entered(forward_batch)`` for one of the two spans.

    What is known of the server is found out anew there.
    """
    model, backend = engine.text_model, engine.runner.attn_backend
    with ExitStack() as hooks, ExitStack() as deciding:

        def decide(batch: Any) -> None:
            deciding.enter_context(entered(batch))
            start.of(model).refused = gate.refused(model)

        def planning(stock: Callable[[Any], None]) -> Callable[[Any], None]:
            def init_forward_metadata(batch: Any) -> None:
                with deciding:
                    decide(batch)
                    stock(batch)

            return init_forward_metadata

        def called(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            decide(kwargs["forward_batch"] if "forward_batch" in kwargs else args[2])

        def decided(*_: Any) -> None:
            deciding.close()

        if when == PLANNED:
            hooks.enter_context(Shadows()).add(backend, "init_forward_metadata", planning)
        else:
            hooks.callback(model.register_forward_pre_hook(called, with_kwargs=True).remove)
            hooks.callback(model.layers[0].register_forward_pre_hook(decided).remove)
        yield
    start.of(model).refused = gate.refused(model)


def assert_stock(
    engine: Engine,
    entered: Callable[[Any], AbstractContextManager[None]],
    when: str = PLANNED,
) -> None:
    """No layer leaves out a row; without it, the next forward is cut."""
    with while_deciding(engine, entered, when):
        seen = run(engine, engine.schedule(TWO_PROMPTS), "1")
    assert seen.rows == [sum(len(prompt.new) for prompt in TWO_PROMPTS)] * LAYERS
    assert log.forwards[log.TAIL_EAGER] == log.forwards[log.FAILED] == 0
    assert_fast(engine)


FIELDS = (
    "spec_info",
    "return_hidden_states_before_norm",
    "return_pooled_hidden_states",
    "dimensions",
    "token_indices_to_pool",
    "decision_layouts",
    "multi_item_delimiter_indices",
    "token_type_ids",
    "input_embeds",
    "replace_embeds",
    "encoder_lens",
    "global_num_tokens_cpu",
    "_original_forward_mode",
    "attn_tp_sequence_sharded",
    "attn_cp_metadata",
    "attn_dcp_metadata",
    "dcp_kv_mask",
    "kv_loc_cols",
    "tbo_split_seq_index",
    "tbo_parent_token_range",
    "tbo_children",
    "full_prefill_cuda_graph_capture",
    "encoder_swa_replay",
    "engram_history",
    "ngram_embedding_info",
)


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("name", FIELDS)
def test_a_field_of_the_batch(engine: Engine, name: str, when: str) -> None:
    """Also when it is set behind the plan's back."""
    skip_on_older("ForwardBatch", {name} - ForwardBatch.__dataclass_fields__.keys())

    @contextmanager
    def set_field(batch: Any) -> Iterator[None]:
        before = getattr(batch, name)
        assert before is None or before is False
        setattr(batch, name, True)
        try:
            yield
        finally:
            setattr(batch, name, before)

    assert_stock(engine, set_field, when)


# What a plan was made from besides those -> what stands there when the model is called. Each is
# what the gate would admit, but for the last two.
REPLACED: dict[str, Callable[[Any], object]] = {
    "extend_seq_lens_cpu": copy.copy,
    "extend_prefix_lens_cpu": copy.copy,
    "forward_mode": lambda _: ForwardMode.MIXED,
    "capture_hidden_mode": lambda _: CaptureHiddenMode.LAST,
    "spec_algorithm": lambda _: SpeculativeAlgorithm.FROZEN_KV_MTP,
    "lora_ids": lambda _: [None] * len(TWO_PROMPTS),
    "contains_last_prefill_chunk": lambda _: False,
    "extend_logprob_start_lens_cpu": lambda _: [0] * len(TWO_PROMPTS),
    "return_logprob": lambda _: True,
    "lora_ids of an adapter": lambda _: ["adapter"],
    "extend_num_tokens": lambda before: before + 1,
}


@pytest.mark.parametrize("what", REPLACED)
def test_what_a_plan_was_made_from_is_replaced(engine: Engine, what: str) -> None:
    """Nothing tells then whether the plan still fits."""
    name = what.partition(" ")[0]
    skip_on_older("ForwardBatch", {name} - ForwardBatch.__dataclass_fields__.keys())

    @contextmanager
    def replaced(batch: Any) -> Iterator[None]:
        before = getattr(batch, name)
        setattr(batch, name, REPLACED[what](before))
        assert getattr(batch, name) is not before
        try:
            yield
        finally:
            setattr(batch, name, before)

    assert_stock(engine, replaced, CALLED)
    assert log.forwards[gate.NOT_PLANNED] == (what not in list(REPLACED)[-2:])


def test_a_plan_was_made_from_nothing_else() -> None:
    fields = {name.partition(" ")[0] for name in REPLACED}
    assert set(gate._JUDGED) == fields.union(FIELDS)


def test_a_batch_that_does_not_tell_whether_it_finishes_is_read(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the batches of SGLang's first releases do not."""
    name = "contains_last_prefill_chunk"
    skip_on_older("ForwardBatch", {name} - ForwardBatch.__dataclass_fields__.keys())

    chunk = batch_of((20, 30), (0, 9), to_come=(21,))

    @contextmanager
    def without(batch: Any) -> Iterator[None]:
        before = batch.__dict__.pop(name)
        with monkeypatch.context() as absent:
            absent.delattr(ForwardBatch, name)
            yield
        setattr(batch, name, before)

    def count(_: Any, args: tuple[torch.Tensor, ...]) -> None:
        rows.append(args[0].shape[0])

    rows: list[int] = []
    scheduled = engine.schedule(chunk)
    hook = engine.text_model.layers[-1].mlp.register_forward_pre_hook(count)
    try:
        with (
            while_deciding(engine, without, PLANNED),
            while_deciding(engine, without, CALLED),
            switched("1"),
        ):
            engine.forward(scheduled)
    finally:
        hook.remove()
    assert rows == [len(chunk)]


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
    @contextmanager
    def said(batch: Any) -> Iterator[None]:
        before = {name: getattr(batch, name) for name in LENGTHS[what]}
        vars(batch).update(LENGTHS[what])
        try:
            yield
        finally:
            vars(batch).update(before)

    assert_stock(engine, said)
    assert log.forwards[gate.UNKNOWN_LENGTHS] == 1


@contextmanager
def with_an_image(batch: Any) -> Iterator[None]:
    batch.mm_input_embeds = torch.zeros(len(batch.input_ids), 1)
    try:
        yield
    finally:
        batch.mm_input_embeds = None


def test_an_image_that_comes_to_suffixes(engine: Engine) -> None:
    """Of last rows alone nothing changes: SGLang's model itself puts embeddings there."""
    suffixes = BATCHES["input logprobs"]
    with while_deciding(engine, with_an_image, CALLED):
        seen = run(engine, engine.schedule(suffixes), "1")
        assert seen.rows == [sum(len(prompt.new) for prompt in suffixes)] * LAYERS
        assert log.forwards[gate.IMAGE_LOGPROBS] == 1
        assert run(engine, engine.schedule(TWO_PROMPTS), "1").rows[-1] == len(TWO_PROMPTS)


@pytest.mark.parametrize("when", WHEN)
def test_a_graph_that_is_recorded(engine: Engine, when: str) -> None:
    assert_stock(engine, lambda _: capture_mode.model_capture_mode(), when)
    assert log.forwards[gate.CAPTURING] == 1


DRAFTS = {"speculative_algorithm": "FROZEN_KV_MTP"}
ARGUMENTS: tuple[dict[str, Any], ...] = (
    {"enable_deterministic_inference": True},
    {"enable_dp_attention": True},
    {"enable_dp_lm_head": True},
    {"enable_dense_mlp_attn_tp": True},
    {"moe_dense_tp_size": 1},
    {"enable_layernorm_sp": True},
    {"enable_attn_tp_input_scattered": True},
    {"disable_attn_tp_gather": True},
    {"enable_prefill_cp": True},
    {"enable_kv_cache_sharding": True},
    {"enable_quant_communications": True},
    {"elastic_ep_backend": "mooncake"},
    {"enable_two_batch_overlap": True},
    {"enable_single_batch_overlap": True},
    {"enable_pdmux": True},
    {"forward_hooks": [{"name": "a"}]},
    {"debug_tensor_dump_output_folder": "/dumps"},
    {"msprobe_dump_config": "dump.json"},
    {"cpu_offload_gb": 1},
    {"offload_group_size": 1},
    {"enable_unified_memory": True},
    {"enable_page_major_kv_layout": True},
    {"enable_lmcache": True},
    {"enable_flexkv": True},
    {"enable_unified_cache_external_linker": True},
    {"radix_cache_backend": "flexkv"},
    {"dllm_algorithm": "LowConfidence"},
    {"enable_nvidia_megakernel": True},
    {"enable_amd_monokernel": True},
    {"use_ray": True},
    {"enable_lora": True},
    {"attn_dp_size": 2},
    {"attn_cp_size": 2},
    {"dcp_size": 2},
    {"ep_size": 2},
    {"moe_dp_size": 2},
    {"dwdp_size": 2},
    {"nnodes": 2},
    {"pp_size": 2},
    {"enable_return_hidden_states": True},
    {"return_hidden_states_mode": "full"},
    {"speculative_algorithm": "EAGLE3"},
    {**DRAFTS, "disaggregation_mode": "decode"},
    {**DRAFTS, "disaggregation_mode": "prefill"},
    {**DRAFTS, "enable_return_hidden_states": True},
    {**DRAFTS, "enable_return_aux_hidden_states": True},
    {**DRAFTS, "return_hidden_states_mode": "last"},
)


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=lambda a: ", ".join(a))
def test_an_argument_of_the_server(engine: Engine, arguments: dict[str, Any]) -> None:
    skip_on_older("ServerArgs", releases.unknown_arguments(arguments))
    assert_stock(engine, lambda _: releases.published(**arguments))


AS_IN_A_NEWER_ONE = pytest.mark.skipif(
    not hasattr(ServerArgs, "__struct_fields__"), reason="as a release newer than 0.5.23 lists them"
)


@contextmanager
def newer(*unknown: str, **arguments: Any) -> Iterator[None]:
    """A later release, in which nobody knows these arguments; a server that sets others."""
    reviewed = limits.reviewed_arguments() - set(unknown)
    # SGLang's override for tests leaves the record of what was typed alone.
    is_set = seams.arguments_set() | dict.fromkeys(arguments, True)
    with (
        mock.patch.object(seams, "arguments_set", return_value=is_set),
        mock.patch.object(seams, "LAST_TESTED", Version("0.5.16")),
        mock.patch.object(limits, "reviewed_arguments", return_value=reviewed),
        releases.published(**arguments),
    ):
        yield


@AS_IN_A_NEWER_ONE
def test_an_argument_that_nobody_has_judged(engine: Engine) -> None:
    """As a server of a later release might set what is new there."""
    assert_stock(engine, lambda _: newer("max_total_tokens", max_total_tokens=9))


@AS_IN_A_NEWER_ONE
@pytest.mark.parametrize(
    "arguments", [{}, DRAFTS, {"disaggregation_mode": "prefill"}, {"offload_group_size": 0}]
)
def test_arguments_of_a_newer_release(engine: Engine, arguments: dict[str, Any]) -> None:
    """Those that are known refuse nothing there that they do not refuse here."""
    with while_deciding(engine, lambda _: newer(**arguments)):
        assert run(engine, engine.schedule(TWO_PROMPTS), "1").rows[-1] == len(TWO_PROMPTS)


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
        apart: whether its rows are known to be apart.
        computes: what computes it.
        values: what it has besides.
        place: the layer whose last projection it is.
        amd: whether it is looked at on an AMD GPU.
    """

    apart: bool
    computes: UnquantizedLinearMethod
    values: dict[str, Any] = field(default_factory=dict)
    place: int = -1
    amd: bool = False


def scheme(name: str) -> dict[str, Any]:
    """What a layer has whose method asks a scheme."""
    return {"scheme": type(name, (), {})()}


# As SGLang names them. Methods that know by themselves, and schemes beside their methods.
METHODS = (
    "BlockInt8LinearMethod",
    "Fp8LinearMethod",
    "ModelOptFp4LinearMethod",
    "ModelOptFp8LinearMethod",
    "ModelOptNvFp4A16LinearMethod",
    "PetitNvFp4LinearMethod",
    "W8A8Fp8LinearMethod",
    "W8A8Int8LinearMethod",
)
SCHEMES = (
    ("AWQLinearMethod", "AWQIntelAMXLinearScheme"),
    ("AWQLinearMethod", "AWQLinearScheme"),
    ("AWQLinearMethod", "AWQMarlinLinearScheme"),
    ("AWQLinearMethod", "AWQXPULinearScheme"),
    ("CompressedTensorsLinearMethod", "CompressedTensorsW4A16Fp4"),
    ("CompressedTensorsLinearMethod", "CompressedTensorsW4A4Fp4"),
    ("CompressedTensorsLinearMethod", "CompressedTensorsW8A16Fp8"),
    ("CompressedTensorsLinearMethod", "CompressedTensorsW8A8Fp8"),
    ("CompressedTensorsLinearMethod", "CompressedTensorsW8A8Int8"),
    ("CompressedTensorsLinearMethod", "CompressedTensorsWNA16"),
    ("CompressedTensorsLinearMethod", "XPUCompressedTensorsWNA16"),
    ("GPTQLinearMethod", "GPTQIntelAMXLinearScheme"),
    ("GPTQLinearMethod", "GPTQLinearScheme"),
    ("GPTQLinearMethod", "GPTQXPULinearScheme"),
    ("GPTQMarlinLinearMethod", "GPTQMarlinLinearScheme"),
    ("QuarkLinearMethod", "QuarkW4A4MXFP4"),
    ("QuarkLinearMethod", "QuarkW8A8Fp8"),
)
EIGHT_BITS, FOUR_BITS = (SimpleNamespace(load_in_8bit=eight) for eight in (True, False))
FP8, UNKNOWN = method("Fp8LinearMethod"), method("NewLinearMethod")
BITS = "BitsAndBytesLinearMethod"
QUARK = method("QuarkLinearMethod")
KINDS: dict[str, Kind] = {
    **{name: Kind(True, method(name)) for name in METHODS},
    **{name: Kind(True, method(of), scheme(name)) for of, name in SCHEMES},
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
        known.refused = refused = gate.refused(engine.text_model)
        assert (refused is None) == kind.apart
    try:
        seen = run(engine, engine.schedule(TWO_PROMPTS), "1")
    finally:
        known.refused = gate.refused(engine.text_model)
    total, kept = sum(len(prompt.new) for prompt in TWO_PROMPTS), len(TWO_PROMPTS)
    assert seen.rows == (cut_rows(total, kept) if kind.apart else [total] * LAYERS)


def test_no_other_kind_is_known() -> None:
    assert {*METHODS, *map(".".join, SCHEMES)} == limits._INDEPENDENT_ROWS


def test_drafts_alone_refuse_nothing(engine: Engine) -> None:
    with while_deciding(engine, lambda _: releases.published(**DRAFTS)):
        seen = run(engine, engine.schedule(TWO_PROMPTS), "1")
    assert seen.rows[-1] == len(TWO_PROMPTS)


def test_a_backend_that_is_not_proven(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as others:
        others.setattr(start.of(engine.text_model), "backend", None)
        key = limits.backend_key(type(engine.runner.attn_backend))
        others.setitem(limits.PROVEN_BACKENDS, key, frozenset({limits.Ability.MAIN}))
        seen = run(engine, engine.schedule(TWO_PROMPTS), "1")
    assert seen.rows == [sum(len(prompt.new) for prompt in TWO_PROMPTS)] * LAYERS
    assert_fast(engine)


def test_another_backend_than_the_one_that_was_planned_on(engine: Engine) -> None:
    another = engine.runner._get_attention_backend()
    assert_stock(engine, lambda _: seams.attn_backend_switched(another), CALLED)
    assert log.forwards[gate.NOT_PLANNED] == 1


def test_a_chunk_whose_last_rows_are_captured_is_read(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though it finishes no prompt."""
    chunk = batch_of((20, 60), (0, 30), to_come=(21, 22))
    make = ForwardBatch.init_new

    @functools.wraps(make)
    def capturing(*args: Any, **kwargs: Any) -> ForwardBatch:
        batch: ForwardBatch = make(*args, **kwargs)
        batch.capture_hidden_mode = CaptureHiddenMode.LAST
        return batch

    monkeypatch.setattr(ForwardBatch, "init_new", capturing)
    stock, fast = (run(engine, engine.schedule(chunk), switch) for switch in ("0", "1"))
    assert stock.rows[-1] == 90
    assert fast.rows[-1] == len(chunk)
    captured = [seen.output.hidden_states for seen in (stock, fast)]
    torch.testing.assert_close(captured[1], captured[0], atol=TOLERANCE, rtol=1e-4)


def test_a_mixed_batch_that_stays_one(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang 0.5.23 calls it an extend before the model sees it, older releases do not."""
    decoding = Prompt((30, 31), (32,), decodes=True)
    scheduled = engine.schedule([*batch_of((20, 30)), decoding])
    assert scheduled.forward_mode is ForwardMode.MIXED
    monkeypatch.setattr(ForwardMode, "is_mixed", lambda _: False)
    stock, fast = run(engine, scheduled, "0"), run(engine, scheduled, "1")
    assert fast.before["forward_mode"] is ForwardMode.MIXED
    assert fast.rows == cut_rows(31, 2)
    assert_same_cache(stock, fast)
    assert_same_answers(stock, fast, TOLERANCE)


@pytest.mark.skipif(
    not releases.tells_unread_chunks(), reason="this SGLang does not tell which rows are unread"
)
def test_three_rows_that_nobody_reads_pay(engine: Engine, setting: Callable[..., None]) -> None:
    """All three are skipped; of a prompt of three tokens two would be, which is too few."""
    setting(min_skipped_rows=None)
    unfinished, whole = batch_of((20, 3), to_come=(21,)), batch_of((20, 3))
    stock, fast = (run(engine, engine.schedule(unfinished), switch) for switch in ("0", "1"))
    assert fast.rows == [3] * FIRST_CUT
    assert_same_cache(stock, fast)
    assert log.forwards[log.TAIL_SKIPPED] == 1
    assert run(engine, engine.schedule(whole), "1").rows == [3] * LAYERS
    assert log.forwards[gate.TOO_LITTLE] == 1


def test_a_plan_that_fails_beside_other_ranks_ends_the_forward(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They go on with a tail, which this rank's stock forward would not fit."""
    attention = start.of(engine.text_model).attention
    assert attention is not None

    def out_of_memory(_: Any) -> None:
        raise MemoryError("planning")

    with monkeypatch.context() as broken:
        broken.setattr(attention.tail, "init_forward_metadata", out_of_memory)
        broken.setattr(fallback, "is_alone", lambda: False)
        with pytest.raises(MemoryError, match="planning"):
            run(engine, engine.schedule(TWO_PROMPTS), "1")
    assert_fast(engine)


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


def test_attached_twice_is_taken_away_as_a_whole(engine: Engine) -> None:
    known = start.of(engine.text_model)
    assert known.attention is not None
    known.attach(gate.plan_ahead)
    known.close()
    try:
        assert "init_forward_metadata" not in known.attention.main.__dict__
    finally:
        engine.runner.init_attention_backends()
    assert_fast(engine)
