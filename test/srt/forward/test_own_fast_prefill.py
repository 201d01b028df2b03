"""An SGLang with a fast prefill of its own: it serves with its flag on, this package with it off.

The rows show which of them served: SGLang cuts before the first KV-shared layer, this package in
the layer before it.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from packaging.version import Version

from harness import own_fast_prefill
from harness.checking import result_of_check
from harness.fixtures import Said
from harness.forwards import ENGINE, TWO_PROMPTS, assert_fast, outcomes, state_of
from harness.layer_rows import FIRST_SHARED, LAYERS, whole
from harness.observe import TOLERANCE, assert_same_answers, run
from harness.own_fast_prefill import MODEL, started
from sglang_gemma4_reference import releases
from sglang_gemma4_yoco import compat, counters, metrics, plugin
from sglang_gemma4_yoco.admission import arguments
from sglang_gemma4_yoco.commands import preflight, status
from sglang_gemma4_yoco.commands.console import Report
from sglang_gemma4_yoco.models import gemma4
from sglang_gemma4_yoco.patched import patched
from sglang_gemma4_yoco.startup import patch

pytestmark = pytest.mark.usefixtures("forgotten_reports")

ROWS = 43  # of the two prompts


def test_with_the_flag_off_this_package_serves(tiny_checkpoint: Path, said: Said) -> None:
    """SGLang's forward is then a stock forward, whose loop ends before the cut."""
    with started(tiny_checkpoint, flag=False) as engine:
        assert not engine.text_model.fast_prefill_supported
        assert result_of_check(state_of(engine))["unchecked"] is None
        assert_fast(engine)
        assert outcomes() == {counters.TAIL_EAGER: 1}
    assert [line for line in said() if "for this server" in line] == []


def test_with_the_flag_on_sglang_serves(tiny_checkpoint: Path, said: Said) -> None:
    """This package plans nothing, and one line says which setting to remove."""
    with started(tiny_checkpoint, flag=True) as engine:
        scheduled = engine.schedule(TWO_PROMPTS)
        with patched(engine.text_model, _enable_fast_prefill=lambda _: False):
            stock = run(engine, scheduled, "1")
        fast = run(engine, scheduled, "1")
        state = metrics.describe_state()
        assert state_of(engine).backends is None
    assert stock.rows == whole(ROWS)
    assert fast.rows == [ROWS] * FIRST_SHARED + [len(TWO_PROMPTS)] * (LAYERS - FIRST_SHARED)
    assert_same_answers(stock, fast, TOLERANCE)
    assert outcomes() == {arguments.SGLANG_SERVES: 2}
    [line] = [line for line in said() if " is installed" not in line]
    assert line.endswith(f"for this server: {arguments.SGLANG_SERVES}")
    assert "--kv-sharing-fast-prefill" in line
    assert state["active"] is False
    assert status.verdict([state]) == (False, arguments.SGLANG_SERVES.text)


def test_with_the_flag_on_sglang_serves_in_any_release(tiny_checkpoint: Path) -> None:
    """A release after the last tested one counts too: it is likely to have the flag."""
    newer = mock.patch.object(compat.release, "LAST_TESTED", Version("0.5.0"))
    with newer, started(tiny_checkpoint, flag=True) as engine:
        assert state_of(engine).off_because == arguments.SGLANG_SERVES
    with newer, started(tiny_checkpoint, flag=False) as engine:
        assert state_of(engine).off_because == arguments.find_release_reason()


@pytest.mark.parametrize("flag", [False, True])
def test_doctor_says_which_one_serves(tiny_checkpoint: Path, flag: bool) -> None:
    report, given = Report(), ENGINE | {compat.server.FAST_PREFILL: flag}
    args = own_fast_prefill.Arguments(model_path=str(tiny_checkpoint), **given)
    with own_fast_prefill.added(), releases.serving(args):
        preflight._judge(report, gemma4, compat.server.read_argument)
    assert report.refusals == [arguments.SGLANG_SERVES.text] * flag


@pytest.mark.usefixtures("not_loaded", "outside_of_a_server")
class TestLoading:
    def test_sglangs_helpers_stay(self) -> None:
        """The package adds none of its own beside them."""
        with own_fast_prefill.added():
            sglangs = MODEL._yoco_truncate_to_last_tokens
            plugin.load()
            assert plugin.why_not_installed is None
            assert patch.installed
            assert MODEL._yoco_truncate_to_last_tokens is sglangs
            assert not hasattr(MODEL, "_yoco_eligibility")

    def test_patched_twice(self) -> None:
        """This is noticed even where the package has added no helpers that would show it."""
        with own_fast_prefill.added():
            patch.patch_sglang()
            with pytest.raises(compat.release.IncompatibleError, match="patched already"):
                patch.patch_sglang()

    def test_helpers_without_the_flag(self) -> None:
        """An earlier version of that change had no flag and was on."""
        without = mock.patch.object(compat.server, "ServerArgs", SimpleNamespace)
        refused = pytest.raises(compat.release.IncompatibleError, match="already has")
        with own_fast_prefill.added(), without, refused:
            patch.patch_sglang()
