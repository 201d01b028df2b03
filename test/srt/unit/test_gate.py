"""The gate as tables: each row changes one thing of a fully eligible batch and names the reason.

Batches are SGLang's own ``ForwardBatch``, servers its own published arguments; the model is a
stand-in with the real class's fields. That every entry of the gate's tables and every reason that
the package can return has a row is itself tested, at the end.
"""

from __future__ import annotations

import ast
import inspect
import re
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
from test_limits import MAINS, POOLS, SERVERS

from sglang_gemma4_yoco import seams
from sglang_gemma4_yoco.core import ranks
from sglang_gemma4_yoco.loading import limits
from sglang_gemma4_yoco.core import cut, forward, gate
from sglang_gemma4_yoco.cutting.gate import Refusal
from sglang_gemma4_yoco.core.state import ModelState
from sglang_gemma4_yoco.core.kept import KeptRows
from sglang_gemma4_yoco.loading import start
from sglang_gemma4_yoco.core.attention import TailBackend
from stand_ins import eligible_batch, model, reason_of

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
    ("FULL capture", {"capture_hidden_mode": CaptureHiddenMode.FULL}, limits.HIDDEN_STATES),
    ("before the norm", {"return_hidden_states_before_norm": True}, limits.HIDDEN_STATES),
    ("spec info", {"spec_info": SimpleNamespace()}, limits.SPECULATIVE),
    ("EAGLE", {"spec_algorithm": SpeculativeAlgorithm.EAGLE}, limits.SPECULATIVE),
    ("EAGLE3", {"spec_algorithm": SpeculativeAlgorithm.EAGLE3}, limits.SPECULATIVE),
    ("DFLASH", {"spec_algorithm": SpeculativeAlgorithm.DFLASH}, limits.SPECULATIVE),
    ("a LoRA row", {"lora_ids": [None, "adapter", None]}, limits.LORA),
    ("pooled", {"return_pooled_hidden_states": True}, "pooled hidden states"),
    ("matryoshka", {"dimensions": [64]}, "embeddings"),
    ("setwise", {"token_indices_to_pool": [torch.tensor([1])]}, "setwise pooling"),
    ("joint decision", {"decision_layouts": [[1]]}, "setwise pooling"),
    ("multi-item", {"multi_item_delimiter_indices": [torch.tensor([1])]}, "multi-item scoring"),
    ("token types", {"token_type_ids": torch.zeros(9)}, "token type ids"),
    ("input embeds", {"input_embeds": torch.zeros(9, 4)}, "input embeddings"),
    ("replaced embeds", {"replace_embeds": torch.zeros(1, 4)}, "replaced embeddings"),
    ("encoder", {"encoder_lens": torch.zeros(3)}, "an encoder-decoder batch"),
    ("DP attention", {"global_num_tokens_cpu": [9, 9]}, limits.DP_ATTENTION),
    (
        "a mode that DP attention replaced",
        {"_original_forward_mode": ForwardMode.IDLE},
        limits.DP_ATTENTION,
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
    (0, 34, limits.PIPELINE),
    (1, 35, limits.PIPELINE),
    (13, 35, limits.PIPELINE),  # the tail and its donors
    (0, 13, limits.PIPELINE),
]


@pytest.mark.parametrize(("start", "end", "reason"), STAGES)
def test_pipeline_stages(start: int, end: int, reason: str | None) -> None:
    stage = model(start_layer=start, end_layer=end)
    assert reason_of(stage, eligible_batch()) == reason


def test_a_layer_that_is_on_another_stage() -> None:
    layers = [torch.nn.Linear(1, 1) for _ in range(35)]
    assert reason_of(model(layers=layers), eligible_batch()) is None
    layers[0] = PPMissingLayer()
    assert reason_of(model(layers=layers), eligible_batch()) == limits.PIPELINE


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

    def __init__(self) -> None:
        self.forward_metadata = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        pass


class TestUnplannedTails:
    """What the gate admits, and the plan refuses, for want of attention metadata."""

    @pytest.fixture(autouse=True)
    def _proven(self, monkeypatch: pytest.MonkeyPatch) -> None:
        abilities = frozenset({limits.Ability.MAIN, limits.Ability.TAIL})
        monkeypatch.setitem(limits.PROVEN_BACKENDS, limits.backend_key(PlansNothing), abilities)

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


class TestRenamedFields:
    """Unknown means no; but what a tested release never had, nobody can have asked it for."""

    @pytest.fixture(autouse=True)
    def _surprises(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(gate._REFUSING_FIELDS, "surprises", "surprises")

    def test_in_a_tested_release(self) -> None:
        assert gate.unseen_reason() is None

    def test_in_a_newer_release(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(seams, "is_newer_than_tested", lambda: True)
        reason = reason_of(model(), eligible_batch())
        assert reason is not None
        assert " lacks ForwardBatch.surprises, which may go by another name now" in reason


def test_names_are_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(seams, "unseen", lambda *_: asked.append("once"))
    served = model()
    for _ in range(3):
        assert reason_of(served, eligible_batch()) is None
    assert asked == ["once"]


@pytest.mark.skipif(
    Version(version("sglang")) != seams.LAST_TESTED, reason="names come and go between releases"
)
def test_the_last_tested_release_has_all_names() -> None:
    assert set(gate._REFUSING_FIELDS) - set(ForwardBatch.__dataclass_fields__) == set()


# ---------------------------------------------------------------- nothing is without a row


def test_every_entry_of_the_gates_tables_has_a_row() -> None:
    rows = [(list(changes.items()), reason) for _, changes, reason in BATCHES]
    alone = {changes[0][0]: reason for changes, reason in rows if len(changes) == 1}
    fields = {name: alone.get(name) for name in gate._REFUSING_FIELDS}
    assert fields == gate._REFUSING_FIELDS


def _literals(function: Any, call: str, position: int) -> set[str]:
    """The literal names that ``function`` hands to its calls of ``call``."""
    calls = [
        node
        for node in ast.walk(ast.parse(inspect.getsource(function)))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == call
    ]
    given = [node.args[position] for node in calls if len(node.args) > position]
    return {str(name.value) for name in given if isinstance(name, ast.Constant)}


def test_every_field_that_is_asked_for_must_exist() -> None:
    asked = _literals(gate, "getattr", 1)
    of_the_model = {"num_kv_shared_layers", "name"}
    # A batch without it counts as read, so that none is taken for one that nobody reads.
    safely_absent = {"contains_last_prefill_chunk"}
    assert asked - of_the_model - safely_absent <= set(seams._REQUIRED_FIELDS)


# Reasons that the tables above do not hold, and the test that shows each.
SHOWN_BY = {
    **dict.fromkeys(
        (
            "--a is set, an argument that this version has not judged",
            "this SGLang lacks --a, which may go by another name now",
        ),
        "unit/test_limits.py::test_a_newer_release",
    ),
    "rows of A may depend on each other": (
        "unit/test_limits.py::test_a_tail_of_layers_that_are_not_known_is_refused"
    ),
    gate.OFF: "unit/test_gate.py::test_switched_off",
    gate.CAPTURING: "unit/test_gate.py::test_graph_capture",
    limits.WRONG_REPLAYS: (
        "unit/test_limits.py::test_copied_positions_are_refused_beside_prefill_graphs"
    ),
    gate.TOO_LITTLE: "unit/test_gate.py::test_too_few_rows_to_skip",
    **dict.fromkeys(
        (gate.REPLAYED, gate.NOT_RECORDED, gate.REPLAYED_MEDIA),
        "unit/test_gate.py::test_a_front_that_is_replayed",
    ),
    gate.IMAGE_LOGPROBS: "unit/test_gate.py::test_images_are_known_before_they_are_embedded",
    gate.EMBEDDINGS: "forward/test_other_models.py::test_an_embedding_server_is_refused",
    "SGLang 9 lacks a, which may go by another name now": (
        "unit/test_gate.py::test_in_a_newer_release"
    ),
    **dict.fromkeys(
        ("recorded by A, without breaks", "there are none", "what they return is no tensor"),
        "unit/test_seams.py::test_recordings_that_cannot_be_left",
    ),
    forward.GIVEN_UP: "unit/test_gate.py::test_failures_in_a_row",
    limits.NO_TAIL: (
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
    ranks.NOT_ALIKE: "forward/test_ranks.py::test_tensor_parallel_ranks_cut_alike_or_not_at_all",
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
    modules = (limits, gate, cut, ranks, fallback)
    constants = {reason for module in modules for reason in _constants(module)}
    assert len(constants) > 20
    assert constants - shown == set()
    patterns = {pattern for module in (limits, gate, cut, seams) for pattern in _returned(module)}
    assert len(patterns) > 5
    reasons = [reason for reason in shown if reason is not None]
    assert [p for p in patterns if not any(re.fullmatch(p, reason) for reason in reasons)] == []


@pytest.mark.parametrize("named", SHOWN_BY.values(), ids=SHOWN_BY)
def test_every_test_that_shows_a_reason_exists(named: str) -> None:
    file, _, test = named.partition("::")
    source = (Path(__file__).parents[1] / file).read_text()
    assert re.search(rf"^ *def {test}\(", source, re.MULTILINE)
