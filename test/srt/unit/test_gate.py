"""The gate as a table: each row changes one thing of a fully eligible batch and names the reason.

Batches are SGLang's own ``ForwardBatch``; the model is a stand-in with the real class's fields.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
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
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_gemma4_reference import releases
from sglang_gemma4_yoco import gate


def eligible_batch(**changes: Any) -> ForwardBatch:
    """Three prompts of 3, 4 and 2 new tokens. Skips where SGLang knows nothing of the changes."""
    unknown = changes.keys() - ForwardBatch.__dataclass_fields__
    if unknown:
        pytest.skip(f"this SGLang's batches have no {', '.join(unknown)}")
    lens = changes.get("extend_seq_lens_cpu", [3, 4, 2])
    fields: dict[str, Any] = {
        "forward_mode": ForwardMode.EXTEND,
        "batch_size": 3,
        "input_ids": torch.arange(9),
        "req_pool_indices": torch.arange(3),
        "seq_lens": torch.tensor([3, 14, 2]),
        "out_cache_loc": torch.arange(9),
        "seq_lens_sum": 19,
        "positions": torch.arange(9),
        "extend_num_tokens": 9,
        "extend_seq_lens": torch.tensor([3, 4, 2], dtype=torch.int32),
        "extend_prefix_lens": torch.tensor([0, 10, 0], dtype=torch.int32),
        "extend_start_loc": torch.tensor([0, 3, 7], dtype=torch.int32),
        "extend_seq_lens_cpu": lens,
        "extend_prefix_lens_cpu": [0, 10, 0],
        "capture_hidden_mode": CaptureHiddenMode.NULL,
        "spec_algorithm": SpeculativeAlgorithm.NONE,
        "lora_ids": [None, None, None],
    }
    return ForwardBatch(**(fields | changes))


def model(**changes: Any) -> SimpleNamespace:
    """A stand-in for E2B's text model."""
    config = {"num_hidden_layers": 35, "num_kv_shared_layers": 20}
    config |= {name: changes.pop(name) for name in list(changes) if name in config}
    return SimpleNamespace(
        **{
            "config": SimpleNamespace(**config),
            "layers_to_capture": [],
        }
        | changes
    )


def test_the_unchanged_batch_is_eligible() -> None:
    assert gate.ineligible_reason(model(), eligible_batch()) is None


ONES = {
    "extend_seq_lens_cpu": [1, 1, 1],
    "extend_num_tokens": 3,
    "input_ids": torch.arange(3),
}
BATCHES: list[tuple[str, dict[str, Any], str]] = [
    ("no mode", {"forward_mode": None}, gate.NO_MODE),
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
    ("FULL capture", {"capture_hidden_mode": CaptureHiddenMode.FULL}, gate.HIDDEN_STATES),
    ("before the norm", {"return_hidden_states_before_norm": True}, gate.HIDDEN_STATES),
    ("spec info", {"spec_info": SimpleNamespace()}, gate.SPECULATIVE),
    ("EAGLE", {"spec_algorithm": SpeculativeAlgorithm.EAGLE}, gate.SPECULATIVE),
    ("EAGLE3", {"spec_algorithm": SpeculativeAlgorithm.EAGLE3}, gate.SPECULATIVE),
    ("DFLASH", {"spec_algorithm": SpeculativeAlgorithm.DFLASH}, gate.SPECULATIVE),
    ("a LoRA row", {"lora_ids": [None, "adapter", None]}, gate.LORA),
    ("pooled", {"return_pooled_hidden_states": True}, "pooled hidden states"),
    ("matryoshka", {"dimensions": [64]}, "embeddings"),
    ("setwise", {"token_indices_to_pool": [torch.tensor([1])]}, "setwise pooling"),
    ("joint decision", {"decision_layouts": [[1]]}, "setwise pooling"),
    ("multi-item", {"multi_item_delimiter_indices": [torch.tensor([1])]}, "multi-item scoring"),
    ("token types", {"token_type_ids": torch.zeros(9)}, "token type ids"),
    ("input embeds", {"input_embeds": torch.zeros(9, 4)}, "input embeddings"),
    ("replaced embeds", {"replace_embeds": torch.zeros(1, 4)}, "replaced embeddings"),
    ("encoder", {"encoder_lens": torch.zeros(3)}, "an encoder-decoder batch"),
    ("DP attention", {"global_num_tokens_cpu": [9, 9]}, "data-parallel attention"),
    ("sequence parallel", {"attn_tp_sequence_sharded": True}, "sequence parallelism"),
    ("context parallel", {"attn_cp_metadata": object()}, "context parallelism"),
    ("decode context parallel", {"attn_dcp_metadata": object()}, "context parallelism"),
    ("two-batch split", {"tbo_split_seq_index": 1}, "two-batch overlap"),
    ("two-batch child", {"tbo_parent_token_range": (0, 4)}, "two-batch overlap"),
    ("two-batch parent", {"tbo_children": [object(), object()]}, "two-batch overlap"),
    ("part of a window", {"kv_loc_cols": slice(0, 4)}, "two-batch overlap"),
    ("full graph", {"full_prefill_cuda_graph_capture": True}, gate.CAPTURING),
]


@pytest.mark.parametrize(
    ("changes", "reason"), [row[1:] for row in BATCHES], ids=[row[0] for row in BATCHES]
)
def test_refused_batches(changes: dict[str, Any], reason: str) -> None:
    assert gate.ineligible_reason(model(), eligible_batch(**changes)) == reason


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
    assert gate.ineligible_reason(model(), eligible_batch(**changes)) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_kv_shared_layers": 0}, gate.NO_SHARED_LAYERS),
        ({"num_kv_shared_layers": None}, gate.NO_SHARED_LAYERS),
        ({"num_kv_shared_layers": 35}, gate.NO_SHARED_LAYERS),
        ({"layers_to_capture": [15]}, gate.CAPTURE_IN_TAIL),
        ({"layers_to_capture": [2, 35]}, gate.CAPTURE_IN_TAIL),
        ({"layers_to_capture": [14]}, gate.CAPTURE_IN_TAIL),
        ({"layers_to_capture": [2, 13]}, None),
    ],
)
def test_models(changes: dict[str, Any], reason: str | None) -> None:
    assert gate.ineligible_reason(model(**changes), eligible_batch()) == reason


def stage(start: int, end: int) -> SimpleNamespace:
    """A stand-in for the stage of E2B's text model that has layers [start, end)."""
    layers: list[Any] = [object()] * 35
    for i in range(start, end):
        # Four sliding layers, then a full one; 13 and 14 are the last of each that write K/V.
        read = i if i < 15 else 14 if i % 5 == 4 else 13
        layers[i] = SimpleNamespace(self_attn=SimpleNamespace(attn=SimpleNamespace(layer_id=read)))
    return model(start_layer=start, end_layer=end, layers=layers)


@pytest.mark.parametrize(
    ("start", "end", "reason"),
    [
        (0, 35, None),
        (13, 35, None),
        (8, 35, None),
        (14, 35, gate.SPLIT_TAIL),
        (15, 35, gate.SPLIT_TAIL),
        (17, 35, gate.SPLIT_TAIL),
        (0, 17, gate.SPLIT_TAIL),
        (0, 34, gate.SPLIT_TAIL),
        (17, 26, gate.SPLIT_TAIL),
        (0, 13, gate.NO_SHARED_LAYERS_HERE),
        (0, 15, gate.NO_SHARED_LAYERS_HERE),
        (7, 13, gate.NO_SHARED_LAYERS_HERE),
    ],
)
def test_pipeline_stages(start: int, end: int, reason: str | None) -> None:
    assert gate.ineligible_reason(stage(start, end), eligible_batch()) == reason


def test_images_are_known_on_every_pipeline_stage() -> None:
    suffixes = {"return_logprob": True, "extend_logprob_start_lens_cpu": [1, 4, 2]}
    behind_the_first = {"mm_inputs": [None, object(), None], "mm_input_embeds": None}
    batch = eligible_batch(**suffixes, **behind_the_first)
    assert gate.ineligible_reason(model(), batch) == gate.IMAGE_LOGPROBS
    batch = eligible_batch(**suffixes, mm_inputs=[None, None, None])
    assert gate.ineligible_reason(model(), batch) is None


@pytest.mark.parametrize(("value", "reason"), [("0", gate.OFF), ("1", None)])
def test_switch_is_read_per_forward(
    monkeypatch: pytest.MonkeyPatch, value: str, reason: str | None
) -> None:
    monkeypatch.setenv("SGLANG_GEMMA4_YOCO", value)
    assert gate.ineligible_reason(model(), eligible_batch()) == reason


def test_switch_turned_invalid_while_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_GEMMA4_YOCO", "maybe")
    reason = gate.ineligible_reason(model(), eligible_batch())
    assert reason is not None
    assert "SGLANG_GEMMA4_YOCO='maybe'" in reason


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"enable_deterministic_inference": True}, "deterministic inference"),
        ({"enable_two_batch_overlap": True}, "two-batch overlap"),
        ({"enable_lora": True}, gate.LORA),
        ({"speculative_algorithm": "EAGLE3"}, gate.SPECULATIVE),
        ({"tp_size": 2}, None),
        ({"pp_size": 2}, None),
        ({"dp_size": 2}, None),
        ({"tp_size": 2, "attn_dp_size": 2}, gate.DP_ATTENTION),
        ({"enable_dp_attention": True}, gate.DP_ATTENTION),
        ({"enable_dp_lm_head": True}, gate.DP_ATTENTION),
        ({"enable_dense_mlp_attn_tp": True}, gate.DP_ATTENTION),
        ({"moe_dense_tp_size": 1}, gate.DP_ATTENTION),
        ({"attn_cp_size": 2}, gate.CONTEXT_PARALLEL),
        ({"dcp_size": 2}, gate.CONTEXT_PARALLEL),
        ({"enable_prefill_cp": True}, gate.CONTEXT_PARALLEL),
        ({"enable_kv_cache_sharding": True}, gate.CONTEXT_PARALLEL),
        ({"enable_layernorm_sp": True}, gate.SEQUENCE_PARALLEL),
        ({"enable_attn_tp_input_scattered": True}, gate.SEQUENCE_PARALLEL),
        ({"disable_attn_tp_gather": True}, gate.SEQUENCE_PARALLEL),
        ({"ep_size": 2}, gate.EXPERT_PARALLEL),
        ({"moe_dp_size": 2}, gate.EXPERT_PARALLEL),
        ({"dwdp_size": 2}, gate.EXPERT_PARALLEL),
        ({"elastic_ep_backend": "mooncake"}, gate.EXPERT_PARALLEL),
        ({"enable_single_batch_overlap": True}, "single-batch overlap"),
        ({"nnodes": 2}, "ranks on several machines"),
        (
            {"enable_quant_communications": True},
            "all-reduces that round prefill otherwise than decode",
        ),
        ({"disaggregation_mode": "decode"}, "prefill-decode disaggregation"),
        ({"disaggregation_mode": "prefill"}, "prefill-decode disaggregation"),
        (
            {"speculative_algorithm": "FROZEN_KV_MTP", "pp_size": 2},
            "speculative decoding on several ranks",
        ),
        ({"speculative_algorithm": "FROZEN_KV_MTP"}, None),
        ({}, None),
    ],
)
def test_servers(arguments: dict[str, Any], reason: str | None) -> None:
    unknown = releases.unknown_arguments(arguments)
    if unknown:
        pytest.skip(f"this SGLang has no argument {', '.join(unknown)}")
    with releases.published(**arguments):
        assert gate.ineligible_reason(model(), eligible_batch()) == reason


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
        assert gate.ineligible_reason(model(), eligible_batch()) == gate.CAPTURING
    assert gate.ineligible_reason(model(), eligible_batch()) is None


class TritonAttnBackend:
    """By name one of the proven ones."""


class Derived(TritonAttnBackend):
    pass


class SomeOtherBackend:
    pass


@pytest.mark.parametrize(
    ("backend", "reason"),
    [
        (TritonAttnBackend(), None),
        (Derived(), None),
        (SomeOtherBackend(), "the attention backend SomeOtherBackend is not proven"),
        (None, None),
    ],
    ids=["proven", "derived", "unknown", "outside of a forward"],
)
def test_attention_backends(backend: Any, reason: str | None) -> None:
    context: AbstractContextManager[None] = (
        nullcontext() if backend is None else forward_context(ForwardContext(attn_backend=backend))
    )
    with context:
        assert gate.ineligible_reason(model(), eligible_batch()) == reason


@pytest.fixture(autouse=True)
def _on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_GEMMA4_YOCO", "1")
