"""The contract of the two helpers of SGLang's open PR, on SGLang's own batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.models.gemma4_causal import Gemma4TextModel

from harness.fixtures import Change
from harness.stand_ins import eligible_batch, model, reason_of
from sglang_gemma4_reference import releases
from sglang_gemma4_yoco import compat, plugin
from sglang_gemma4_yoco.admission import order

DECODES = pytest.mark.skipif(
    compat.release.is_newer_than_tested(),
    reason="on an untested release the tail runs in extend mode, which reads more fields",
)


Lengths = tuple[list[int], list[int], list[int], list[int], int]
#: New and cached tokens of the prompts, on the device and on the host, and new tokens in all.
WHOLE = ([3, 4, 2], [0, 10, 0], [3, 4, 2], [0, 10, 0], 9)
LAST_ROWS = ([1, 1, 1], [2, 13, 1], [1, 1, 1], [2, 13, 1], 3)


def lengths_of(batch: Any) -> Lengths:
    """Return the lengths that a batch says its prompts have."""
    return (
        batch.extend_seq_lens.tolist(),
        batch.extend_prefix_lens.tolist(),
        list(batch.extend_seq_lens_cpu),
        list(batch.extend_prefix_lens_cpu),
        batch.extend_num_tokens,
    )


class RecordingBackend:
    """Attention backend that records each batch that it plans for."""

    def __init__(self) -> None:
        self.planned: list[Lengths] = []

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.planned.append(lengths_of(forward_batch))


@pytest.fixture(autouse=True)
def _installed(setting: Change) -> Iterator[None]:
    """Install the patch in a process that serves nothing."""
    setting(min_skipped_rows=None)
    plugin.load()  # as any process of SGLang's does, once
    with releases.unpublished():
        yield


@pytest.mark.parametrize(
    ("served", "forward_batch", "reason"),
    [
        (model(), eligible_batch(), None),
        (model(shared=0), eligible_batch(), order.NO_SHARED_LAYERS),
        (model(), eligible_batch(forward_mode=ForwardMode.DECODE), "forward mode DECODE"),
    ],
)
def test_eligibility(served: Any, forward_batch: ForwardBatch, reason: object) -> None:
    assert Gemma4TextModel._yoco_eligibility(served, forward_batch) is (reason is None)
    assert str(reason_of(served, forward_batch)) == str(reason)


def test_eligibility_env_kill_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    for switch, eligible in (("0", False), ("1", True)):
        monkeypatch.setenv("SGLANG_GEMMA4_YOCO", switch)
        assert Gemma4TextModel._yoco_eligibility(model(), eligible_batch()) is eligible


@DECODES
def test_truncate_to_last_tokens_indices_and_restore() -> None:
    forward_batch, backend = eligible_batch(), RecordingBackend()
    before = dict(vars(forward_batch))
    hidden = torch.arange(9.0)[:, None].repeat(1, 8)
    positions = torch.tensor([0, 1, 2, 10, 11, 12, 13, 0, 1])
    per_layer = torch.arange(9.0)[:, None, None].repeat(1, 35, 16)
    with forward_context(ForwardContext(attn_backend=backend)):
        rows, row_positions, row_inputs, index, restore = (
            Gemma4TextModel._yoco_truncate_to_last_tokens(
                model(), hidden, positions, per_layer, forward_batch
            )
        )
        assert index.tolist() == [2, 6, 8]
        assert rows[:, 0].tolist() == [2.0, 6.0, 8.0]
        assert row_positions.tolist() == [2, 13, 1]
        assert row_inputs[:, 0, 0].tolist() == [2.0, 6.0, 8.0]
        assert row_inputs.shape == (3, 35, 16)
        assert backend.planned == [lengths_of(forward_batch)] == [LAST_ROWS]

        restore()
        for name, value in before.items():
            assert vars(forward_batch)[name] is value
        restore()
        assert backend.planned[1:] == [WHOLE]
    # The rows are copies: a layer may overwrite its input.
    rows.zero_()
    assert hidden[2, 0] == 2.0


def test_another_order_of_arguments() -> None:
    """The PR was published with this order too."""
    with pytest.raises(TypeError, match="expected hidden_states, positions, per_layer_inputs"):
        Gemma4TextModel._yoco_truncate_to_last_tokens(
            model(), eligible_batch(), torch.zeros(9, 8), torch.arange(9), None
        )


@DECODES
def test_truncate_that_fails_leaves_the_batch_alone() -> None:
    class Failing(RecordingBackend):
        def init_forward_metadata(self, forward_batch: Any) -> None:
            super().init_forward_metadata(forward_batch)
            if len(self.planned) == 1:
                raise MemoryError("no room")

    forward_batch, backend = eligible_batch(), Failing()
    before = dict(vars(forward_batch))
    with (
        forward_context(ForwardContext(attn_backend=backend)),
        pytest.raises(MemoryError, match="no room"),
    ):
        Gemma4TextModel._yoco_truncate_to_last_tokens(
            model(), torch.zeros(9, 8), torch.arange(9), None, forward_batch
        )
    for name, value in before.items():
        assert vars(forward_batch)[name] is value
    assert backend.planned[-1] == WHOLE
