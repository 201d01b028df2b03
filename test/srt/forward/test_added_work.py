"""Host work that a cut prefill adds, and the donor's kernels, which are compiled at start.

What the host reads, opens and launches in a forward: ``triton/test_planning`` and ``rehearsal/``.
"""

from __future__ import annotations

import sys
from collections import Counter
from types import CodeType
from typing import Any
from unittest import mock

import pytest

from harness.call_sites import is_of_package
from harness.forwards import TWO_PROMPTS, assert_fast
from harness.observe import run
from sglang_gemma4_reference.engine import Engine
from sglang_gemma4_yoco import log
from sglang_gemma4_yoco.core import eligibility
from sglang_gemma4_yoco.models import gemma4

pytestmark = pytest.mark.usefixtures("forgotten_reports")


def test_a_cut_prefill_enters_few_functions_of_the_package(engine: Engine) -> None:
    """Planning is included, and checks eligibility once; lambdas and generators count too."""
    scheduled = engine.schedule(TWO_PROMPTS)
    assert_fast(engine)  # the first one is logged
    entered = Counter[CodeType]()

    def entering(frame: Any, event: str, _: Any) -> None:
        if event == "call" and is_of_package(frame.f_code.co_filename):
            entered[frame.f_code] += 1

    sys.setprofile(entering)
    try:
        run(engine, scheduled, "1")
    finally:
        sys.setprofile(None)
    assert entered[eligibility.check_eligibility.__code__] == 1
    assert len(entered) <= 64, sorted(code.co_qualname for code in entered)
    assert len({code.co_filename for code in entered}) <= 15


def test_the_donors_kernels_are_compiled_at_start(engine: Engine) -> None:
    """SGLang uses another kernel from 257 rows on."""
    with mock.patch.object(
        gemma4, "compute_keys_and_values", wraps=gemma4.compute_keys_and_values
    ) as projected:
        engine.runner.init_attention_backends()
    assert [len(call.args[1]) for call in projected.call_args_list] == [257]
    assert_fast(engine)


def test_kernels_that_cannot_be_compiled_do_not_end_a_server(
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
