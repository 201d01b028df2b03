"""Eligibility: why SGLang's batches run as stock, and from which threshold a cut pays.

Batches are SGLang's own ``ForwardBatch``; the model is a stand-in with the real class's fields.
Every reason for which a batch is refused has a row here. ``forward/test_refused`` shows that a
refused batch runs as stock.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from enum import IntEnum
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

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

from harness.fixtures import Change
from harness.stand_ins import eligible_batch, model, reason_of, refusal_of, state_of
from sglang_gemma4_yoco.core import eligibility, kept_batch, planning, worth
from sglang_gemma4_yoco.core.backend_pair import BackendPair
from sglang_gemma4_yoco.core.interfaces import Eligible
from sglang_gemma4_yoco.core.kept_batch import KeptBatch, KeptRows
from sglang_gemma4_yoco.core.plan import Plan
from sglang_gemma4_yoco.core.state import ModelState
from sglang_gemma4_yoco.models import gemma4
from sglang_gemma4_yoco.prefill_exits import graph_exits
from sglang_gemma4_yoco.refusal import Refusal

pytestmark = pytest.mark.usefixtures("outside_of_a_server")


class OtherMode(IntEnum):
    """Another package's mode, whose number is one of SGLang's."""

    EXTEND = int(ForwardMode.EXTEND)


def a_mode(name: str) -> Refusal:
    """Return why a batch in this mode is refused."""
    return Refusal(f"forward mode {name}", is_logged=False)


SUFFIXES = {"return_logprob": True, "extend_logprob_start_lens_cpu": [1, 3, 2]}
ONES = {"extend_seq_lens_cpu": [1, 1, 1], "extend_num_tokens": 3, "input_ids": torch.arange(3)}
FULL = {"capture_hidden_mode": CaptureHiddenMode.FULL}
# A value of each field with which a batch is refused.
FIELDS = {
    "spec_info": SimpleNamespace(),
    "return_hidden_states_before_norm": True,
    "multi_item_delimiter_indices": [torch.tensor([1])],
    "token_indices_to_pool": [torch.tensor([1])],
    "input_embeds": torch.zeros(9, 4),
    "replace_embeds": torch.zeros(2, 4),
    "full_prefill_cuda_graph_capture": True,
}
# Missing or contradictory lengths on the host, for prompts of 3, 4 and 2 new tokens.
UNKNOWN: dict[str, dict[str, Any]] = {
    "no list of new tokens": {"extend_seq_lens_cpu": (3, 4, 2)},
    "no list of cached ones": {"extend_prefix_lens_cpu": None},
    "fewer that are cached": {"extend_prefix_lens_cpu": [0, 10]},
    "more requests": {"seq_lens": torch.tensor([3, 14, 2, 1])},
    "a request without new tokens": {"extend_seq_lens_cpu": [5, 4, 0]},
    "fewer tokens in all": {"extend_num_tokens": 8},
    "more input ids": {"input_ids": torch.arange(10)},
    "no list of logprobs": SUFFIXES | {"extend_logprob_start_lens_cpu": None},
    "fewer logprobs": SUFFIXES | {"extend_logprob_start_lens_cpu": [0]},
}
REFUSED: dict[str, tuple[dict[str, Any], Refusal]] = {
    "no mode": ({"forward_mode": None}, a_mode("None")),
    "another package's mode": ({"forward_mode": OtherMode.EXTEND}, a_mode("EXTEND")),
    "nothing to skip": (ONES, eligibility.NOTHING_TO_SKIP),
    "all input logprobs": (
        SUFFIXES | {"extend_logprob_start_lens_cpu": [0, 0, 0]},
        eligibility.NOTHING_TO_SKIP,
    ),
    "input logprobs of an embedded image prompt": (
        SUFFIXES | {"mm_input_embeds": torch.zeros(9, 4)},
        eligibility.IMAGE_LOGPROBS,
    ),
    "input logprobs of an image prompt": (
        SUFFIXES | {"mm_inputs": [None, object(), None]},
        eligibility.IMAGE_LOGPROBS,
    ),
    "hidden states": (FULL, eligibility.HIDDEN_STATES),
    "hidden states beside EAGLE": (
        FULL | {"spec_algorithm": SpeculativeAlgorithm.EAGLE},
        eligibility.SPECULATIVE,
    ),
    "hidden states beside NGRAM": (
        FULL | {"spec_algorithm": SpeculativeAlgorithm.NGRAM},
        eligibility.HIDDEN_STATES,
    ),
    "a LoRA row": ({"lora_ids": [None, "adapter", None]}, eligibility.LORA),
}


def refused_batches() -> dict[str, tuple[dict[str, Any], Refusal]]:
    """Return by name the changes to an eligible batch, and the reason to refuse it then."""
    found = dict(REFUSED)
    for mode in ForwardMode:
        if mode not in (ForwardMode.EXTEND, ForwardMode.MIXED):
            found[mode.name] = ({"forward_mode": mode}, a_mode(mode.name))
    assert FIELDS.keys() == eligibility.INELIGIBLE_FIELDS.keys()
    for name, reason in eligibility.INELIGIBLE_FIELDS.items():
        found[name] = ({name: FIELDS[name]}, reason)
    for name, changes in UNKNOWN.items():
        found[name] = (changes, eligibility.UNKNOWN_LENGTHS)
    return found


@pytest.mark.parametrize(
    ("changes", "reason"), refused_batches().values(), ids=refused_batches().keys()
)
def test_refused_batches(changes: dict[str, Any], reason: Refusal) -> None:
    assert reason_of(model(), eligible_batch(**changes)) == reason


def test_a_capture_that_is_unset() -> None:
    """None, the default of SGLang's field, captures no row."""
    assert reason_of(model(), eligible_batch(capture_hidden_mode=None)) is None


@pytest.mark.parametrize(("layer", "reason"), [(13, None), (14, eligibility.CAPTURED_LAYERS)])
def test_the_first_captured_layer_that_is_refused(layer: int, reason: Refusal | None) -> None:
    """The input of layer S-1 is already that of the kept rows."""
    assert reason_of(model(captured=[2, layer]), eligible_batch()) == reason


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
        assert reason_of(model(), eligible_batch()) == eligibility.CAPTURING
    assert reason_of(model(), eligible_batch()) is None


# ---------------------------------------------------------------- threshold

# Rows in all, rows that are read, where and how the tail runs, and whether it is worth it.
CPU: dict[str, bool] = {}
GPU, CAPTURED = {"on_gpu": True}, {"eager": False}
WORTH = [
    (4, 1, CPU, True),
    (3, 1, CPU, False),
    (48, 45, CPU, True),  # three rows are a sixteenth of 48
    (49, 46, CPU, False),
    (1024, 1, GPU, False),
    (1025, 1, GPU, True),
    (20000, 18751, GPU, False),  # less than a sixteenth
    (2, 1, CAPTURED, True),
    (33, 32, CAPTURED | GPU, True),
    (20, 10, {"minimum": 10} | GPU, True),
    (20, 10, {"minimum": 11} | CAPTURED, False),
]


@pytest.mark.parametrize(("total", "read", "how", "pays"), WORTH)
def test_the_rule(total: int, read: int, how: dict[str, Any], pays: bool) -> None:
    assert worth.is_worth_cutting(total, read, **how) is pays


FEW_SKIPPED = SUFFIXES | {"extend_logprob_start_lens_cpu": [1, 1, 0]}
UNFINISHED = {"contains_last_prefill_chunk": False}


@pytest.mark.parametrize(
    ("minimum", "on_gpu", "captured", "changes", "reason"),
    [
        (None, False, False, {}, None),
        (None, False, False, FEW_SKIPPED, eligibility.TOO_LITTLE),
        (6, False, False, {}, None),
        (7, False, False, {}, eligibility.TOO_LITTLE),
        (9, False, False, UNFINISHED, None),  # all its rows are skipped
        (None, False, True, {}, None),
        (None, True, False, {}, eligibility.TOO_LITTLE),  # its tail runs eagerly
        (None, True, False, UNFINISHED, None),  # it has none
        (None, True, True, {}, None),
        (None, True, True, SUFFIXES, eligibility.TOO_LITTLE),  # no bucket has room for these
    ],
)
def test_too_few_rows_to_skip(
    setting: Change,
    minimum: int | None,
    on_gpu: bool,
    captured: bool,
    changes: dict[str, Any],
    reason: Refusal | None,
) -> None:
    """It depends on how the tail runs."""

    def bucket_for(kept: KeptRows) -> int | None:
        if kept.one_per_request:
            return 4
        return None

    setting(min_skipped_rows=minimum)
    state = state_of(model())
    state.on_gpu = on_gpu
    if captured:
        state.captured = SimpleNamespace(bucket_for=bucket_for)
    assert refusal_of(state, eligible_batch(**changes)) == reason


@pytest.mark.parametrize(
    ("device", "on_gpu"), [("cpu", False), ("cuda", True), ("cuda:1", True), ("xpu", True)]
)
def test_an_eager_tail_pays_later_on_a_gpu(device: str, on_gpu: bool) -> None:
    """On GPUs of any vendor the host launches kernels one by one, as with CUDA."""
    backends: Any = SimpleNamespace(tail_backend=SimpleNamespace(device=device))
    assert ModelState(model(), gemma4, None, backends).on_gpu is on_gpu


# ---------------------------------------------------------------- plan, then forward


class PlansNothing:
    """Attention backend without a plan, like that of the tests' platform."""

    device = "cpu"
    forward_metadata = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        pass


@pytest.fixture
def attached() -> Iterator[ModelState]:
    """Yield the state of a model in a runner, which plans its batches."""
    main, tail = PlansNothing(), PlansNothing()
    state = ModelState(model(), gemma4, None, BackendPair(main, tail))
    vars(state)["tail_layers"] = []  # of a model that has none
    state.attach(planning.plan_batch)
    with forward_context(ForwardContext(attn_backend=main)):
        yield state
    state.close()


def planned(state: ModelState, **changes: Any) -> ForwardBatch:
    """Return a batch whose attention SGLang has planned."""
    assert state.backends is not None
    batch = eligible_batch(**changes)
    state.backends.main_backend.init_forward_metadata(batch)
    return batch


class TestDecisions:
    """Decisions of the plan, and changes between the plan and the forward."""

    def test_it_is_taken_from_the_very_batch(self, attached: ModelState) -> None:
        batch, later = planned(attached), planned(attached)
        decided = planning.take_plan(attached, batch)
        assert isinstance(decided, Plan)
        assert decided.kept_batch.batch is batch
        assert planning.take_plan(attached, batch) == planning.NOT_PLANNED
        assert isinstance(planning.take_plan(attached, later), Plan)

    def test_batches_that_were_not_planned(self, attached: ModelState) -> None:
        planned(attached)  # another one, which never runs
        assert planning.take_plan(attached, eligible_batch()) == planning.NOT_PLANNED
        batch = eligible_batch(spec_info=SimpleNamespace())
        assert planning.take_plan(attached, batch) == eligibility.SPECULATIVE

    def test_a_graph_that_is_captured_now(self, attached: ModelState) -> None:
        """On AMD, SGLang begins to capture after planning."""
        batch = planned(attached)
        with capture_mode.model_capture_mode():
            assert planning.take_plan(attached, batch) == eligibility.CAPTURING

    def test_another_backend_that_is_current(self, attached: ModelState) -> None:
        batch = planned(attached)
        with forward_context(ForwardContext(attn_backend=PlansNothing())):
            assert planning.take_plan(attached, batch) == planning.NOT_PLANNED


# ---------------------------------------------------------------- completeness


#: Between them, eligibility reads all of its fields.
BATCHES: list[dict[str, Any]] = [{}, SUFFIXES, {"contains_last_prefill_chunk": False}]


def read_fields(module: ModuleType) -> set[str]:
    """Return the fields of a batch that a module reads as attributes."""
    return set(re.findall(r"\b(?:forward_)?batch\.([a-z]\w*)", inspect.getsource(module)))


@pytest.mark.parametrize("name", sorted(read_fields(eligibility) | {*FIELDS}))
def test_a_field_that_another_release_has_renamed(name: str) -> None:
    """It raises an error, which the check at start finds; it does not pass as unset."""
    raised = 0
    for changes in BATCHES:
        renamed = SimpleNamespace(**vars(eligible_batch(**changes)))
        delattr(renamed, name)
        try:
            eligibility.check_eligibility(state_of(model()), renamed)
        except AttributeError as missing:
            raised += missing.name == name
    assert raised > 0


@pytest.mark.parametrize("decodes", [False, True])
def test_a_field_that_is_only_written_is_checked_at_load(decodes: bool) -> None:
    batch = eligible_batch()
    kept_rows = eligibility.find_kept_rows(batch)
    written = {*KeptBatch.of(batch, kept_rows, decodes=decodes).fields, "positions"}
    read = read_fields(eligibility) | read_fields(kept_batch)
    assert written - read <= eligibility.FIELDS_BY_NAME


SHORT_ON_A_GPU = [
    (128, None, False, eligibility.TOO_LITTLE),
    (129, None, False, None),
    (128, 127, False, None),  # the operator's minimum
    (128, None, True, None),
]


@pytest.mark.parametrize(("tokens", "minimum", "intermediate", "reason"), SHORT_ON_A_GPU)
def test_an_exit_on_a_gpu_skips_128_rows(
    setting: Change,
    tokens: int,
    minimum: int | None,
    intermediate: bool,
    reason: Refusal | None,
) -> None:
    """All but the last row of a prompt are skipped, and all of an intermediate chunk."""
    setting(min_skipped_rows=minimum)
    exits = graph_exits.Exits()
    exits.are_open = True
    prompt = Eligible(KeptRows.suffixes([tokens], [0]), intermediate, mock.Mock())
    assert exits.find_refusal(prompt, on_gpu=True) == reason
