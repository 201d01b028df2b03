"""Kernels of the donor, which are compiled at start: in a forward an answer would wait for them.

What the host reads, opens and launches in a forward: ``triton/test_planning`` and ``rehearsal/``.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from harness.forwards import assert_fast
from sglang_gemma4_reference.engine import Engine
from sglang_gemma4_yoco import log
from sglang_gemma4_yoco.loading import runner_setup
from sglang_gemma4_yoco.models import gemma4

pytestmark = pytest.mark.usefixtures("forgotten_reports")


def test_the_donors_kernels_are_compiled_at_start(engine: Engine) -> None:
    """They are compiled for few rows and for many: SGLang uses another kernel from 257 rows on."""
    with mock.patch.object(
        gemma4, "compute_keys_and_values", wraps=gemma4.compute_keys_and_values
    ) as projected:
        engine.runner.init_attention_backends()
    few, many = runner_setup._FEW, runner_setup._MANY
    assert 1 < few <= 256 < many
    assert [len(call.args[1]) for call in projected.call_args_list] == [few, many]
    assert_fast(engine)


def test_kernels_that_cannot_be_compiled_are_no_servers_end(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def impossible(*_: Any) -> None:
        raise RuntimeError("no compiler")

    with monkeypatch.context() as broken:
        broken.setattr(gemma4, "compute_keys_and_values", impossible)
        engine.runner.init_attention_backends()
    [record] = [r for r in caplog.records if r.name == log.logger.name]
    assert "no compiler" in record.getMessage()
    assert record.exc_info
    assert_fast(engine)
