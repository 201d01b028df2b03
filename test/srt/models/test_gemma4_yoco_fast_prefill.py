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
from sglang_gemma4_yoco.core import eligibility

DECODES = pytest.mark.skipif(
    compat.release.is_newer_than_tested(),
    reason="on an untested release the tail runs in extend mode, which reads more fields",
)


class RecordingBackend:
    """Attention backend that records each batch that it plans for."""

    def __init__(self) -> None:
        self.planned: list[tuple[list[int], list[int], list[int]]] = []

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.planned.append(
            (
                forward_batch.extend_seq_lens.tolist(),
                forward_batch.extend_prefix_lens.tolist(),
                list(forward_batch.extend_seq_lens_cpu),
            )
        )


def batch(new: list[int], total: list[int] | None = None, **changes: Any) -> ForwardBatch:
    """Return a batch of prompts of these new and total lengths."""
    total, rows = total or new, sum(new)
    cached = [s - n for s, n in zip(total, new, strict=True)]
    lengths = {
        "batch_size": len(new),
        "input_ids": torch.arange(rows),
        "out_cache_loc": torch.arange(rows),
        "extend_num_tokens": rows,
        "extend_seq_lens": torch.tensor(new, dtype=torch.int32),
        "extend_seq_lens_cpu": list(new),
        "extend_prefix_lens": torch.tensor(cached, dtype=torch.int32),
        "extend_prefix_lens_cpu": cached,
        "seq_lens": torch.tensor(total, dtype=torch.int32),
    }
    return eligible_batch(**lengths, **changes)


@pytest.fixture(autouse=True)
def _installed(setting: Change) -> Iterator[None]:
    """Install the patch in a process that serves nothing."""
    setting(min_skipped_rows=None)
    plugin.load()  # as any process of SGLang's does, once
    with releases.unpublished():
        yield


TWO = batch([10, 5])


@pytest.mark.parametrize(
    ("served", "forward_batch", "reason"),
    [
        (model(), batch([10, 5, 7]), None),
        (model(num_kv_shared_layers=0), batch([10, 5, 7]), order.NO_SHARED_LAYERS),
        (model(), batch([10], forward_mode=ForwardMode.DECODE), "forward mode DECODE"),
        (model(layers_to_capture=[14]), TWO, eligibility.CAPTURED_LAYERS),
    ],
)
def test_eligibility(served: Any, forward_batch: ForwardBatch, reason: object) -> None:
    assert Gemma4TextModel._yoco_eligibility(served, forward_batch) is (reason is None)
    assert str(reason_of(served, forward_batch)) == str(reason)


def test_eligibility_env_kill_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_GEMMA4_YOCO", "0")
    assert Gemma4TextModel._yoco_eligibility(model(), TWO) is False
    monkeypatch.setenv("SGLANG_GEMMA4_YOCO", "1")
    assert Gemma4TextModel._yoco_eligibility(model(), TWO) is True


@DECODES
def test_truncate_to_last_tokens_indices_and_restore() -> None:
    forward_batch, backend = batch([3, 4, 2], total=[3, 14, 2]), RecordingBackend()
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
        assert forward_batch.extend_seq_lens.tolist() == [1, 1, 1]
        assert forward_batch.extend_prefix_lens.tolist() == [2, 13, 1]
        assert forward_batch.extend_seq_lens_cpu == [1, 1, 1]
        assert forward_batch.extend_prefix_lens_cpu == [2, 13, 1]
        assert forward_batch.extend_num_tokens == 3
        assert backend.planned == [([1, 1, 1], [2, 13, 1], [1, 1, 1])]

        restore()
        for name, value in before.items():
            assert vars(forward_batch)[name] is value
        assert backend.planned[1:] == [([3, 4, 2], [0, 10, 0], [3, 4, 2])]
        restore()
        assert len(backend.planned) == 2
    # The rows are copies: a layer may overwrite its input.
    rows.zero_()
    assert hidden[2, 0] == 2.0


def test_another_order_of_arguments() -> None:
    """The PR was published with this order too."""
    with pytest.raises(TypeError, match="expected hidden_states, positions, per_layer_inputs"):
        Gemma4TextModel._yoco_truncate_to_last_tokens(
            model(), TWO, torch.zeros(15, 8), torch.arange(15), None
        )


@DECODES
def test_truncate_that_fails_leaves_the_batch_alone() -> None:
    class Failing(RecordingBackend):
        def init_forward_metadata(self, forward_batch: Any) -> None:
            super().init_forward_metadata(forward_batch)
            if len(self.planned) == 1:
                raise MemoryError("no room")

    forward_batch, backend = batch([3, 4, 2]), Failing()
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
    assert backend.planned[-1] == ([3, 4, 2], [0, 0, 0], [3, 4, 2])
