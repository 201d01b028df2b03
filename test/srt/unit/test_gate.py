"""The gate as tables: each row changes one thing of a fully eligible batch and names the reason.

Batches are SGLang's own ``ForwardBatch``, servers its own published arguments; the model is a
stand-in with the real class's fields. That every entry of the gate's tables and every reason that
the package can return has a row is itself tested, at the end.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import version
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.version import Version
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.layers.utils import PPMissingLayer
from sglang.srt.model_executor.cuda_graph_config import Backend, CudaGraphConfig, PhaseConfig
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.context import (
    enable_breakable_cuda_graph,
)
from sglang.srt.model_executor.runner_backend_utils.tc_piecewise_cuda_graph import (
    enable_tc_piecewise_cuda_graph,
)
from sglang.srt.model_executor.runner_utils import capture_mode
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from test_backends import MAINS, POOLS

from sglang_gemma4_reference import releases
from sglang_gemma4_yoco import seams
from sglang_gemma4_yoco.core import cut, forward, gate
from sglang_gemma4_yoco.cutting.gate import Refusal
from sglang_gemma4_yoco.core.state import ModelState
from sglang_gemma4_yoco.deciding import arguments, backends, harmless, quantised, ranks
from sglang_gemma4_yoco.core.kept import KeptRows
from sglang_gemma4_yoco.loading import start
from sglang_gemma4_yoco.core.attention import TailBackend
from stand_ins import eligible_batch, model, reason_of, skip_on_older

pytestmark = pytest.mark.usefixtures("outside_of_a_server")


def test_the_unchanged_batch_is_eligible() -> None:
    assert reason_of(model(), eligible_batch()) is None


ONES = {
    "extend_seq_lens_cpu": [1, 1, 1],
    "extend_num_tokens": 3,
    "input_ids": torch.arange(3),
}
BATCHES: list[tuple[str, dict[str, Any], str]] = [
    ("no mode", {"forward_mode": None}, gate.NO_MODE),
    (
        "another package's mode",
        {"forward_mode": SimpleNamespace(is_extend_without_speculative=lambda: False)},
        "the batch is no plain extend",
    ),
    *(
        (mode.name, {"forward_mode": mode}, f"forward mode {mode.name}")
        for mode in ForwardMode
        if mode not in (ForwardMode.EXTEND, ForwardMode.MIXED)
    ),
    ("nothing to skip", ONES, gate.NOTHING_TO_SKIP),
    (
        "all input logprobs",
        {"return_logprob": True, "extend_logprob_start_lens_cpu": [0, 0, 0]},
        gate.NOTHING_TO_SKIP,
    ),
    (
        "logprob starts unknown",
        {"return_logprob": True, "extend_logprob_start_lens_cpu": None},
        gate.UNKNOWN_LENGTHS,
    ),
    (
        "a logprob start missing",
        {"return_logprob": True, "extend_logprob_start_lens_cpu": [1, 1]},
        gate.UNKNOWN_LENGTHS,
    ),
    (
        "input logprobs of an image prompt",
        {
            "return_logprob": True,
            "extend_logprob_start_lens_cpu": [1, 4, 2],
            "mm_input_embeds": torch.zeros(9, 4),
        },
        gate.IMAGE_LOGPROBS,
    ),
    ("host lengths None", {"extend_seq_lens_cpu": None}, gate.UNKNOWN_LENGTHS),
    (
        "host lengths a tensor",
        {"extend_seq_lens_cpu": torch.tensor([3, 4, 2])},
        gate.UNKNOWN_LENGTHS,
    ),
    ("host prefixes None", {"extend_prefix_lens_cpu": None}, gate.UNKNOWN_LENGTHS),
    ("a prefix missing", {"extend_prefix_lens_cpu": [0, 10]}, gate.UNKNOWN_LENGTHS),
    ("a length of zero", {"extend_seq_lens_cpu": [5, 4, 0]}, gate.UNKNOWN_LENGTHS),
    ("sum is not the row count", {"extend_num_tokens": 10}, gate.UNKNOWN_LENGTHS),
    ("padded input ids", {"input_ids": torch.arange(16)}, gate.UNKNOWN_LENGTHS),
    ("padded requests", {"seq_lens": torch.tensor([3, 14, 2, 1])}, gate.UNKNOWN_LENGTHS),
    ("FULL capture", {"capture_hidden_mode": CaptureHiddenMode.FULL}, arguments.HIDDEN_STATES),
    ("before the norm", {"return_hidden_states_before_norm": True}, arguments.HIDDEN_STATES),
    ("spec info", {"spec_info": SimpleNamespace()}, arguments.SPECULATIVE),
    ("EAGLE", {"spec_algorithm": SpeculativeAlgorithm.EAGLE}, arguments.SPECULATIVE),
    ("EAGLE3", {"spec_algorithm": SpeculativeAlgorithm.EAGLE3}, arguments.SPECULATIVE),
    ("DFLASH", {"spec_algorithm": SpeculativeAlgorithm.DFLASH}, arguments.SPECULATIVE),
    ("a LoRA row", {"lora_ids": [None, "adapter", None]}, arguments.LORA),
    ("pooled", {"return_pooled_hidden_states": True}, "pooled hidden states"),
    ("matryoshka", {"dimensions": [64]}, "embeddings"),
    ("setwise", {"token_indices_to_pool": [torch.tensor([1])]}, "setwise pooling"),
    ("joint decision", {"decision_layouts": [[1]]}, "setwise pooling"),
    ("multi-item", {"multi_item_delimiter_indices": [torch.tensor([1])]}, "multi-item scoring"),
    ("token types", {"token_type_ids": torch.zeros(9)}, "token type ids"),
    ("input embeds", {"input_embeds": torch.zeros(9, 4)}, "input embeddings"),
    ("replaced embeds", {"replace_embeds": torch.zeros(1, 4)}, "replaced embeddings"),
    ("encoder", {"encoder_lens": torch.zeros(3)}, "an encoder-decoder batch"),
    ("DP attention", {"global_num_tokens_cpu": [9, 9]}, arguments.DP_ATTENTION),
    (
        "a mode that DP attention replaced",
        {"_original_forward_mode": ForwardMode.IDLE},
        arguments.DP_ATTENTION,
    ),
    ("sequence parallel", {"attn_tp_sequence_sharded": True}, "sequence parallelism"),
    ("context parallel", {"attn_cp_metadata": object()}, "context parallelism"),
    ("decode context parallel", {"attn_dcp_metadata": object()}, "context parallelism"),
    ("a rank's part of the keys", {"dcp_kv_mask": torch.ones(9)}, "context parallelism"),
    ("two-batch split", {"tbo_split_seq_index": 1}, "two-batch overlap"),
    ("two-batch child", {"tbo_parent_token_range": (0, 4)}, "two-batch overlap"),
    ("two-batch parent", {"tbo_children": [object(), object()]}, "two-batch overlap"),
    ("part of a window", {"kv_loc_cols": slice(0, 4)}, "two-batch overlap"),
    ("full graph", {"full_prefill_cuda_graph_capture": True}, gate.CAPTURING),
    ("a replayed window", {"encoder_swa_replay": object()}, "sliding-window replay"),
    ("n-grams of the history", {"engram_history": object()}, "n-gram embeddings"),
    ("n-grams", {"ngram_embedding_info": object()}, "n-gram embeddings"),
]


@pytest.mark.parametrize(
    ("changes", "reason"), [row[1:] for row in BATCHES], ids=[row[0] for row in BATCHES]
)
def test_refused_batches(changes: dict[str, Any], reason: str) -> None:
    assert reason_of(model(), eligible_batch(**changes)) == reason


@pytest.mark.parametrize(
    "changes",
    [
        {"forward_mode": ForwardMode.MIXED},
        {"return_logprob": True, "extend_logprob_start_lens_cpu": [3, 4, 2]},
        {"return_logprob": True, "extend_logprob_start_lens_cpu": [1, 4, 2]},
        {"capture_hidden_mode": CaptureHiddenMode.LAST},
        {"mm_input_embeds": torch.zeros(9, 4)},
        {"contains_last_prefill_chunk": False},
        {"is_prefill_only": True},
        {
            "spec_algorithm": SpeculativeAlgorithm.FROZEN_KV_MTP,
            "capture_hidden_mode": CaptureHiddenMode.FULL,
        },
    ],
    ids=[
        "mixed",
        "output logprobs",
        "some input logprobs",
        "LAST",
        "image",
        "unfinished",
        "prefill only",
        "frozen-KV MTP",
    ],
)
def test_admitted_batches(changes: dict[str, Any]) -> None:
    assert reason_of(model(), eligible_batch(**changes)) is None


MODELS: list[tuple[dict[str, Any], str | None]] = [
    ({"num_kv_shared_layers": 0}, gate.NO_SHARED_LAYERS),
    ({"num_kv_shared_layers": None}, gate.NO_SHARED_LAYERS),
    ({"num_kv_shared_layers": 35}, gate.NO_SHARED_LAYERS),
    ({"layers_to_capture": [15]}, gate.CAPTURE_IN_TAIL),
    ({"layers_to_capture": [2, 35]}, gate.CAPTURE_IN_TAIL),
    ({"layers_to_capture": [14]}, gate.CAPTURE_IN_TAIL),
    ({"layers_to_capture": [2, 13]}, None),
]


@pytest.mark.parametrize(("changes", "reason"), MODELS)
def test_models(changes: dict[str, Any], reason: str | None) -> None:
    assert reason_of(model(**changes), eligible_batch()) == reason


STAGES = [
    (0, 35, None),
    (0, 34, arguments.PIPELINE),
    (1, 35, arguments.PIPELINE),
    (13, 35, arguments.PIPELINE),  # the tail and its donors
    (0, 13, arguments.PIPELINE),
]


@pytest.mark.parametrize(("start", "end", "reason"), STAGES)
def test_pipeline_stages(start: int, end: int, reason: str | None) -> None:
    stage = model(start_layer=start, end_layer=end)
    assert reason_of(stage, eligible_batch()) == reason


def test_a_layer_that_is_on_another_stage() -> None:
    layers = [torch.nn.Linear(1, 1) for _ in range(35)]
    assert reason_of(model(layers=layers), eligible_batch()) is None
    layers[0] = PPMissingLayer()
    assert reason_of(model(layers=layers), eligible_batch()) == arguments.PIPELINE


def test_images_are_known_before_they_are_embedded() -> None:
    suffixes = {"return_logprob": True, "extend_logprob_start_lens_cpu": [1, 4, 2]}
    planned = {"mm_inputs": [None, object(), None], "mm_input_embeds": None}
    batch = eligible_batch(**suffixes, **planned)
    assert reason_of(model(), batch) == gate.IMAGE_LOGPROBS
    batch = eligible_batch(**suffixes, mm_inputs=[None, None, None])
    assert reason_of(model(), batch) is None


def test_switched_off(setting: Callable[..., None]) -> None:
    setting(enabled=False)
    assert reason_of(model(), eligible_batch()) == gate.OFF


HIDDEN_STATES_OF_DRAFTS = f"{arguments.HIDDEN_STATES}, beside speculative decoding"
DRAFTS_BESIDE_ROLES = f"{arguments.SPECULATIVE} beside prefill-decode disaggregation"
SERVERS: list[tuple[dict[str, Any], str | None]] = [
    ({"enable_deterministic_inference": True}, "deterministic inference"),
    ({"enable_two_batch_overlap": True}, "two-batch overlap"),
    ({"enable_lora": True}, arguments.LORA),
    ({"speculative_algorithm": "EAGLE"}, arguments.SPECULATIVE),
    ({"speculative_algorithm": "EAGLE3"}, arguments.SPECULATIVE),
    ({"speculative_algorithm": "DFLASH"}, arguments.SPECULATIVE),
    ({"speculative_algorithm": "NGRAM"}, arguments.SPECULATIVE),
    ({"tp_size": 2}, None),
    ({"pp_size": 2}, arguments.PIPELINE),
    ({"dp_size": 2}, None),
    ({"attn_dp_size": 2}, arguments.DP_ATTENTION),
    ({"enable_dp_attention": True}, arguments.DP_ATTENTION),
    ({"enable_dp_lm_head": True}, arguments.DP_ATTENTION),
    ({"enable_dense_mlp_attn_tp": True}, arguments.DP_ATTENTION),
    ({"moe_dense_tp_size": 1}, arguments.DP_ATTENTION),
    ({"attn_cp_size": 2}, arguments.CONTEXT_PARALLEL),
    ({"dcp_size": 2}, arguments.CONTEXT_PARALLEL),
    ({"enable_prefill_cp": True}, arguments.CONTEXT_PARALLEL),
    ({"enable_kv_cache_sharding": True}, arguments.CONTEXT_PARALLEL),
    ({"enable_layernorm_sp": True}, arguments.SEQUENCE_PARALLEL),
    ({"enable_attn_tp_input_scattered": True}, arguments.SEQUENCE_PARALLEL),
    ({"disable_attn_tp_gather": True}, arguments.SEQUENCE_PARALLEL),
    ({"ep_size": 2}, arguments.EXPERT_PARALLEL),
    ({"moe_dp_size": 2}, arguments.EXPERT_PARALLEL),
    ({"dwdp_size": 2}, arguments.EXPERT_PARALLEL),
    ({"elastic_ep_backend": "mooncake"}, arguments.EXPERT_PARALLEL),
    ({"enable_single_batch_overlap": True}, "single-batch overlap"),
    ({"enable_pdmux": True}, "PD multiplexing"),
    ({"forward_hooks": [{"name": "a"}]}, arguments.HOOKS),
    ({"debug_tensor_dump_output_folder": "/dumps"}, arguments.HOOKS),
    ({"msprobe_dump_config": "dump.json"}, arguments.HOOKS),
    ({"cpu_offload_gb": 1}, arguments.OFFLOADED),
    ({"offload_group_size": 1}, arguments.OFFLOADED),
    ({"offload_group_size": -1}, None),
    ({"enable_unified_memory": True}, "pools of K and V that share and move their memory"),
    ({"enable_page_major_kv_layout": True}, "K and V that lie page by page"),
    ({"enable_lmcache": True}, arguments.FOREIGN_CACHE),
    ({"enable_flexkv": True}, arguments.FOREIGN_CACHE),
    ({"enable_unified_cache_external_linker": True}, arguments.FOREIGN_CACHE),
    ({"radix_cache_backend": "flexkv"}, arguments.FOREIGN_CACHE),
    ({"dllm_algorithm": "LowConfidence"}, "a diffusion language model's forward modes"),
    ({"enable_nvidia_megakernel": True}, arguments.ONE_KERNEL),
    ({"enable_amd_monokernel": True}, arguments.ONE_KERNEL),
    ({"use_ray": True}, "ranks that Ray places, on several machines it may be"),
    ({"nnodes": 2}, "ranks on several machines"),
    (
        {"enable_quant_communications": True},
        "all-reduces that round prefill otherwise than decode",
    ),
    ({"disaggregation_mode": "decode"}, None),
    ({"disaggregation_mode": "prefill"}, None),
    ({"disaggregation_mode": "prefill", "enable_pd_role_switch": True}, None),
    (
        {"speculative_algorithm": "FROZEN_KV_MTP", "disaggregation_mode": "prefill"},
        DRAFTS_BESIDE_ROLES,
    ),
    (
        {"speculative_algorithm": "FROZEN_KV_MTP", "disaggregation_mode": "decode"},
        DRAFTS_BESIDE_ROLES,
    ),
    ({"speculative_algorithm": "FROZEN_KV_MTP", "disaggregation_mode": "null"}, None),
    ({"speculative_algorithm": "FROZEN_KV_MTP", "tp_size": 2}, None),
    *(
        ({"speculative_algorithm": "FROZEN_KV_MTP", name: value}, HIDDEN_STATES_OF_DRAFTS)
        for name, value in (
            ("enable_return_hidden_states", True),
            ("return_hidden_states_mode", "last"),
            ("enable_return_aux_hidden_states", True),
        )
    ),
    ({"speculative_algorithm": "FROZEN_KV_MTP"}, None),
    ({"enable_return_hidden_states": True}, arguments.HIDDEN_STATES),
    ({"return_hidden_states_mode": "full"}, arguments.HIDDEN_STATES),
    ({"enable_return_hidden_states": True, "return_hidden_states_mode": "last"}, None),
    ({}, None),
]


@pytest.mark.parametrize(("arguments", "reason"), SERVERS)
def test_servers(arguments: dict[str, Any], reason: str | None) -> None:
    skip_on_older("ServerArgs", releases.unknown_arguments(arguments))
    with releases.published(**arguments):
        assert reason_of(model(), eligible_batch()) == reason


@pytest.mark.parametrize("value", ["1", "0"])
@pytest.mark.parametrize("backend", [Backend.BREAKABLE, Backend.FULL, Backend.DISABLED, None])
def test_copied_positions_are_refused_beside_prefill_graphs(
    monkeypatch: pytest.MonkeyPatch, backend: str | None, value: str
) -> None:
    """Before anything else is looked at: stock's own answers are at stake."""
    monkeypatch.setenv(seams.POSITIONS_VARIABLE, value)
    config = None if backend is None else CudaGraphConfig(prefill=PhaseConfig(backend=backend))
    wrong = value == "1" and backend not in (None, Backend.DISABLED)
    with releases.published(cuda_graph_config=config):
        assert reason_of(model(), eligible_batch()) == (arguments.WRONG_REPLAYS if wrong else None)
    with releases.published(cuda_graph_config=config, enable_deterministic_inference=True):
        other = "deterministic inference"
        assert reason_of(model(), eligible_batch()) == (arguments.WRONG_REPLAYS if wrong else other)
    assert seams.POSITIONS_VARIABLE in arguments.WRONG_REPLAYS
    assert "unset it" in arguments.WRONG_REPLAYS


@pytest.mark.parametrize(
    "capturing",
    [
        pytest.param(enable_breakable_cuda_graph, id="breakable graph"),
        pytest.param(capture_mode.model_capture_mode, id="decode or full graph"),
        pytest.param(enable_tc_piecewise_cuda_graph, id="piecewise graph"),
    ],
)
def test_graph_capture(capturing: Any) -> None:
    with capturing():
        assert reason_of(model(), eligible_batch()) == gate.CAPTURING
    assert reason_of(model(), eligible_batch()) is None


SUFFIXES = {"return_logprob": True, "extend_logprob_start_lens_cpu": [1, 3, 2]}
UNREAD = {"contains_last_prefill_chunk": False}
FRONTS: list[tuple[str, dict[str, Any], dict[str, Any], str | None]] = [
    ("the last rows", {}, {}, None),
    ("no row", {}, UNREAD, None),
    ("no row, the tail is launched", {"rows": 0}, UNREAD, None),
    ("the tail is launched", {"rows": 0}, {}, gate.NOT_RECORDED),
    ("more prompts than the tail has rows", {"rows": 2}, {}, gate.NOT_RECORDED),
    ("suffixes", {}, SUFFIXES, gate.NOT_RECORDED),
    ("media", {}, {"mm_inputs": [None, SimpleNamespace(), None]}, gate.REPLAYED_MEDIA),
    ("an unread image", {}, {"mm_input_embeds": torch.zeros(9, 4)} | UNREAD, gate.REPLAYED_MEDIA),
    ("closed doors", {"closed": "some reason"}, {}, gate.REPLAYED),
    ("closed doors, no row", {"closed": "some reason"}, UNREAD, gate.REPLAYED),
    ("another reason first", {"closed": "some reason"}, {"lora_ids": ["a", None, None]}, "LoRA"),
]


@pytest.mark.parametrize(
    ("server", "changes", "reason"), [row[1:] for row in FRONTS], ids=[row[0] for row in FRONTS]
)
def test_a_front_that_is_replayed(
    server: dict[str, Any], changes: dict[str, Any], reason: str | None
) -> None:
    """Such a batch leaves SGLang's recording by an open door, and needs a recorded tail there."""
    known, batch = start.of(model()), eligible_batch(**changes)
    rows = server.get("rows", 32)

    def size_for(kept: KeptRows) -> int | None:
        return rows if kept.one_per_request and kept.count <= rows else None

    known.doors.closed = server.get("closed")
    known.captured = SimpleNamespace(size_for=size_for) if rows else None  # type: ignore[assignment]
    with enable_breakable_cuda_graph():  # as SGLang has it while it replays
        known.replaying = batch
        assert gate.ineligible_reason(known, batch) == reason
        known.replaying = eligible_batch()
        reason = gate.ineligible_reason(known, batch)
        assert reason == gate.CAPTURING, "SGLang replays another one"


def test_what_an_operator_hears_of_replayed_fronts() -> None:
    """Closed doors are said once, at start; of the rest a batch says more."""
    told = [reason for *_, reason in FRONTS if reason is not None and gate.is_news(reason)]
    assert {*told} == {gate.NOT_RECORDED, gate.REPLAYED_MEDIA, "LoRA"}


BACKENDS: list[tuple[type | None, str | None]] = [
    (TritonAttnBackend, None),
    (
        AttentionBackend,
        "the tail cannot run on the attention backend AttentionBackend",
    ),
    (None, None),  # outside of a forward
]


@pytest.mark.parametrize(("kind", "reason"), BACKENDS)
def test_attention_backends(kind: type | None, reason: str | None) -> None:
    context: AbstractContextManager[None] = nullcontext()
    if kind is not None:  # the gate asks for its class alone
        context = forward_context(ForwardContext(attn_backend=object.__new__(kind)))
    with context:
        assert reason_of(model(), eligible_batch()) == reason


def test_too_few_rows_to_skip(setting: Callable[..., None]) -> None:
    setting(min_skipped_rows=7)
    assert reason_of(model(), eligible_batch()) == gate.TOO_LITTLE
    setting(min_skipped_rows=6)
    assert reason_of(model(), eligible_batch()) is None


def test_failures_in_a_row() -> None:
    fallback.reset()
    try:
        for _ in range(forward.LIMIT):
            assert reason_of(model(), eligible_batch()) is None
            fallback.failed(RuntimeError("a failure"))
        assert reason_of(model(), eligible_batch()) == forward.GIVEN_UP
    finally:
        fallback.reset()
    assert reason_of(model(), eligible_batch()) is None


class PlansNothing(TorchNativeAttnBackend):
    """As that of the tests' platform."""

    gemma4_yoco = frozenset({backends.FRONT, backends.TAIL})

    def __init__(self) -> None:
        self.forward_metadata = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        pass


class TestUnplannedTails:
    """What the gate admits, and the plan refuses, for want of attention metadata."""

    def reason(self, served: Any, batch: Any) -> str | None:
        decided = gate.at_the_forward(start.of(served), batch)
        return decided.reason if isinstance(decided, Refusal) else None

    def model(self) -> Any:
        return model(layers=[SimpleNamespace(modules=tuple)] * 35)

    def test_models_that_no_runner_has(self) -> None:
        assert self.reason(self.model(), eligible_batch()) == gate.NOT_PLANNED

    def test_batches_that_were_not_planned(self) -> None:
        main, other, tail = (PlansNothing() for _ in range(3))
        planned = self.model()
        known = ModelState(planned, None, TailBackend(main, tail))
        known.attach(gate.plan_ahead)
        batch = eligible_batch()
        for current in (main, other):
            with forward_context(ForwardContext(attn_backend=current)):
                assert reason_of(planned, batch) is None
                assert self.reason(planned, batch) == gate.NOT_PLANNED
        main.init_forward_metadata(batch)
        with forward_context(ForwardContext(attn_backend=main)):
            assert self.reason(planned, batch) is None
            assert self.reason(planned, eligible_batch()) == gate.NOT_PLANNED
        with forward_context(ForwardContext(attn_backend=other)):
            assert self.reason(planned, batch) == gate.NOT_PLANNED


# ---------------------------------------------------------------- names that SGLang has renamed

ARGUMENTS = (
    *arguments._OTHER_ARGUMENTS,
    *arguments._HIDDEN_STATE_ARGUMENTS,
    *arguments._REFUSING_ARGUMENTS,
    *arguments._REFUSING_SIZES,
)
JUDGED = [
    *((ServerArgs, name) for name in ARGUMENTS),
    *((ForwardBatch, name) for name in gate._REFUSING_FIELDS),
]
NAMES = [f"{owner.__name__}.{name}" for owner, name in JUDGED]


def without(owner: type, name: str) -> type:
    """A class with all names of ``owner`` that are judged, but one."""
    names = [other for of, other in JUDGED if of is owner and other != name]
    return dataclasses.make_dataclass(owner.__name__, [(other, object, None) for other in names])


@pytest.mark.parametrize(("owner", "name"), JUDGED, ids=NAMES)
def test_a_name_that_is_gone_refuses_from_its_first_release_on(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    """Unknown means no; but what a release never had, nobody can have asked it for."""
    for of in (ServerArgs, ForwardBatch):
        monkeypatch.setattr(seams, of.__name__, without(of, name if of is owner else ""))
    full_name = f"{owner.__name__}.{name}"
    first = seams._SINCE.get(full_name, Version("0.5.17"))
    for release in (str(first), f"{first}.post1", str(seams.LAST_TESTED), "0.6.0"):
        monkeypatch.setattr(seams, "version", lambda _, release=release: release)
        lacks = f"SGLang {release} lacks {full_name}, which may go by another name now"
        assert reason_of(model(), eligible_batch()) == lacks
    if full_name in seams._SINCE:
        before = f"{first.major}.{first.minor}.{first.micro - 1}"
        monkeypatch.setattr(seams, "version", lambda _: before)
        assert reason_of(model(), eligible_batch()) is None


@pytest.mark.parametrize("table", ["_REFUSING_ARGUMENTS", "_REFUSING_SIZES", "_REFUSING_FIELDS"])
def test_an_entry_that_no_release_has_refuses(monkeypatch: pytest.MonkeyPatch, table: str) -> None:
    module = gate if table == "_REFUSING_FIELDS" else arguments
    monkeypatch.setitem(getattr(module, table), "enable_surprises", "surprises")
    reason = reason_of(model(), eligible_batch())
    owner = "ForwardBatch" if table == "_REFUSING_FIELDS" else "ServerArgs"
    assert reason is not None
    assert f" lacks {owner}.enable_surprises, " in reason


def test_names_are_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(seams, "unseen", lambda *_: asked.append("once"))
    served = model()
    for _ in range(3):
        assert reason_of(served, eligible_batch()) is None
    assert asked == ["once"]


@pytest.mark.parametrize(("owner", "name"), JUDGED, ids=NAMES)
def test_the_installed_release_has_the_names_that_it_should_have(owner: type, name: str) -> None:
    """On the last tested release that is every one."""
    installed = Version(version("sglang"))
    since = seams._SINCE.get(f"{owner.__name__}.{name}", Version("0.5.17"))
    fields = seams.argument_defaults() if owner is ServerArgs else ForwardBatch.__dataclass_fields__
    names = set(fields)
    assert (name in names) == (installed >= since)
    assert since <= seams.LAST_TESTED


def test_first_releases_are_told_of_judged_names_alone() -> None:
    assert seams._SINCE.keys() - set(NAMES) == set()


# ---------------------------------------------------------------- nothing is without a row


def test_every_entry_of_the_gates_tables_has_a_row() -> None:
    rows = [(list(changes.items()), reason) for _, changes, reason in BATCHES]
    alone = {changes[0][0]: reason for changes, reason in rows if len(changes) == 1}
    fields = {name: alone.get(name) for name in gate._REFUSING_FIELDS}
    assert fields == gate._REFUSING_FIELDS
    refused = {next(iter(row)): reason for row, reason in SERVERS if len(row) == 1}
    tables = arguments._REFUSING_ARGUMENTS | arguments._REFUSING_SIZES
    assert {name: refused.get(name) for name in tables} == tables
    with_drafts = {
        name for row, reason in SERVERS for name in row if reason == HIDDEN_STATES_OF_DRAFTS
    }
    assert with_drafts - {"speculative_algorithm"} == set(arguments._HIDDEN_STATE_ARGUMENTS)


def _literals(function: Any, call: str, position: int) -> set[str]:
    """The literal names that ``function`` hands to its calls of ``call``."""
    calls = [
        node
        for node in ast.walk(ast.parse(inspect.getsource(function)))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == call
    ]
    given = [node.args[position] for node in calls if len(node.args) > position]
    return {str(name.value) for name in given if isinstance(name, ast.Constant)}


def test_every_argument_that_is_asked_for_is_looked_for() -> None:
    asked = _literals(arguments.server_reason, "argument", 0)
    assert asked - set(arguments._HIDDEN_STATE_ARGUMENTS) == set(arguments._OTHER_ARGUMENTS)


def test_every_field_that_is_asked_for_must_exist() -> None:
    asked = _literals(gate, "getattr", 1)
    of_the_model = {"num_kv_shared_layers", "name"}
    # A batch without it counts as read, so that none is taken for one that nobody reads.
    safely_absent = {"contains_last_prefill_chunk"}
    assert asked - of_the_model - safely_absent <= set(seams._REQUIRED_FIELDS)


# ---------------------------------------------------------------- all arguments there are


def judged_once() -> list[str]:
    """The name of every argument, once for each place where it is judged."""
    groups = (*harmless.HARMLESS.values(), *harmless.ELSEWHERE.values())
    return [*arguments.judged(), *(name for group in groups for name in group)]


def test_every_argument_of_this_release_is_judged_in_one_place() -> None:
    """What SGLang has changed since shows here first: judge each by what its code does."""
    assert set(seams.argument_defaults()) - set(judged_once()) == set()
    assert [name for name, times in Counter(judged_once()).items() if times > 1] == []


def test_what_is_judged_is_unset_by_default() -> None:
    defaults = seams.argument_defaults()
    assert [name for name in arguments._REFUSING_ARGUMENTS if defaults.get(name)] == []


@pytest.fixture
def later_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang has arguments that have not been judged."""
    known = dict(seams.argument_defaults())
    unknown = {"enable_surprises": False, "surprise_sizes": [], "surprise_mode": None}
    monkeypatch.setattr(seams, "argument_defaults", lambda: known | unknown)


@pytest.mark.usefixtures("later_release")
@pytest.mark.parametrize(
    ("given", "flag"),
    [
        ({}, None),
        ({"enable_surprises": False, "surprise_sizes": [], "surprise_mode": None}, None),
        ({"enable_surprises": True}, "--enable-surprises"),
        ({"surprise_sizes": [1]}, "--surprise-sizes"),
        ({"surprise_mode": "auto"}, "--surprise-mode"),
        ({"stream_interval": 7}, None),
    ],
)
def test_an_argument_that_is_not_judged_refuses_when_it_is_set(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], flag: str | None
) -> None:
    monkeypatch.setattr(seams, "get_server_args", lambda: SimpleNamespace(**given))
    monkeypatch.setattr(seams, "resolution_result", None)
    wanted = flag and f"{flag} is set, an argument that this version has not judged"
    assert reason_of(model(), eligible_batch()) == wanted


def test_arguments_that_cannot_be_listed_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other:
        pass

    monkeypatch.setattr(seams, "get_server_args", SimpleNamespace)
    monkeypatch.setattr(seams, "resolution_result", None)
    monkeypatch.setattr(seams, "ServerArgs", Other)
    assert (
        arguments.server_reason()
        == "the server's arguments are no record whose fields can be listed"
    )


# Reasons that the tables above do not hold, and the test that shows each.
SHOWN_BY = {
    "--a is set, an argument that this version has not judged": (
        "unit/test_gate.py::test_an_argument_that_is_not_judged_refuses_when_it_is_set"
    ),
    "rows of A may depend on each other": (
        "unit/test_quantised.py::test_a_tail_of_layers_that_are_not_known_is_refused"
    ),
    gate.OFF: "unit/test_gate.py::test_switched_off",
    gate.CAPTURING: "unit/test_gate.py::test_graph_capture",
    arguments.WRONG_REPLAYS: (
        "unit/test_gate.py::test_copied_positions_are_refused_beside_prefill_graphs"
    ),
    gate.TOO_LITTLE: "unit/test_gate.py::test_too_few_rows_to_skip",
    **dict.fromkeys(
        (gate.REPLAYED, gate.NOT_RECORDED, gate.REPLAYED_MEDIA),
        "unit/test_gate.py::test_a_front_that_is_replayed",
    ),
    gate.IMAGE_LOGPROBS: "unit/test_gate.py::test_images_are_known_before_they_are_embedded",
    gate.EMBEDDINGS: "forward/test_other_models.py::test_an_embedding_server_is_refused",
    "SGLang 9 lacks a, which may go by another name now": (
        "unit/test_gate.py::test_a_name_that_is_gone_refuses_from_its_first_release_on"
    ),
    "a KV cache of A beside B": (
        "unit/test_backends.py::test_a_cache_of_another_type_is_read_beside_its_own_kind_alone"
    ),
    **dict.fromkeys(
        ("recorded by A, without breaks", "there are none", "what they return is no tensor"),
        "unit/test_seams.py::test_recordings_that_cannot_be_left",
    ),
    forward.GIVEN_UP: "unit/test_gate.py::test_failures_in_a_row",
    backends.NO_TAIL: (
        "forward/test_forward.py::test_without_a_backend_of_the_tails_own_stock_serves"
    ),
    gate.NOT_PLANNED: "unit/test_gate.py::test_batches_that_were_not_planned",
    cut.ENDLESS: "forward/test_forward.py::test_a_loop_that_does_not_end_where_it_is_told_to",
    cut.OTHER_INPUTS: (
        "forward/test_replayed_tail.py::test_without_per_layer_embeddings_stock_serves"
    ),
    cut.OTHER_NORM: (
        "forward/test_replayed_tail.py::test_something_else_before_the_norm_is_served_by_stock"
    ),
    cut.STREAM_PENDING: "forward/test_donor.py::test_a_residual_that_is_owed_an_update",
    cut.OTHER_ROWS: "forward/test_donor.py::test_rows_that_are_not_the_batchs",
    cut.NO_NORM: "forward/test_forward.py::test_a_forward_that_never_comes_to_the_cut",
    ranks.NOT_ALIKE: "unit/test_verdicts.py::test_ranks_with_different_findings_all_step_aside",
    ranks.NOT_ALL: "unit/test_verdicts.py::test_ranks_that_wait_in_vain_all_step_aside",
}


def _returned(module: ModuleType) -> Iterator[str]:
    """A pattern for each reason that a function of ``module`` spells out."""
    for function in ast.walk(ast.parse(inspect.getsource(module))):
        if not isinstance(function, ast.FunctionDef) or function.returns is None:
            continue
        if ast.unparse(function.returns) == "str | None":
            for node in ast.walk(function):
                if isinstance(node, ast.Return) and node.value is not None:
                    yield from _patterns(module, node.value)


def _patterns(module: ModuleType, value: ast.expr) -> Iterator[str]:
    if isinstance(value, ast.IfExp):
        yield from _patterns(module, value.body)
        yield from _patterns(module, value.orelse)
    elif isinstance(value, ast.Constant) and isinstance(value.value, str):
        yield re.escape(value.value)
    elif isinstance(value, ast.JoinedStr):
        yield "".join(_part(module, part) for part in value.values)


def _part(module: ModuleType, part: ast.expr) -> str:
    if isinstance(part, ast.Constant):
        return re.escape(str(part.value))
    assert isinstance(part, ast.FormattedValue)
    known = isinstance(part.value, ast.Name) and getattr(module, part.value.id, None)
    return re.escape(known) if isinstance(known, str) else ".+"


def _constants(module: ModuleType) -> list[str]:
    """The reasons that are a public constant of ``module``."""
    names = re.findall(r"^([A-Z][A-Z_]*) = ", inspect.getsource(module), re.MULTILINE)
    return [value for name in names if isinstance(value := getattr(module, name), str)]


def test_every_reason_has_a_row() -> None:
    shown: set[str | None] = {reason for _, _, reason in BATCHES}
    shown.update(SHOWN_BY)
    for table in (SERVERS, MODELS, STAGES, BACKENDS):
        shown |= {row[-1] for row in table}
    shown |= {row[1] for row in (*MAINS, *POOLS)}
    modules = (arguments, gate, cut, quantised, ranks, fallback)
    constants = {reason for module in modules for reason in _constants(module)}
    assert len(constants) > 20
    assert constants - shown == set()
    patterns = {
        pattern
        for module in (arguments, gate, cut, quantised, seams, backends)
        for pattern in _returned(module)
    }
    assert len(patterns) > 5
    reasons = [reason for reason in shown if reason is not None]
    assert [p for p in patterns if not any(re.fullmatch(p, reason) for reason in reasons)] == []


@pytest.mark.parametrize("named", SHOWN_BY.values(), ids=SHOWN_BY)
def test_every_test_that_shows_a_reason_exists(named: str) -> None:
    file, _, test = named.partition("::")
    source = (Path(__file__).parents[1] / file).read_text()
    assert re.search(rf"^ *def {test}\(", source, re.MULTILINE)
