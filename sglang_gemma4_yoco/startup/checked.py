"""The moment before a server serves: compare with stock, open exits, and begin audits."""

from sglang_gemma4_yoco import __version__, compat, log
from sglang_gemma4_yoco.checking import audit, self_check
from sglang_gemma4_yoco.checking.self_check import CheckResult
from sglang_gemma4_yoco.core import ranks
from sglang_gemma4_yoco.core.state import ModelState
from sglang_gemma4_yoco.prefill_exits import exit_setup


def check_before_serving(runner: compat.server.ModelRunner, state: ModelState) -> None:
    """Run the checks; unless one turns the fast path off, log that it is on."""
    checked = _check_model(runner, state)
    if not state.off_because:
        exit_setup.open_exits(runner, state)
    if state.off_because:
        return
    state.after_cut = audit.make_auditor(runner, state)
    log.log_once(f"YOCO fast prefill {__version__} is on: {state.describe()}, {checked}")


def _check_model(runner: compat.server.ModelRunner, state: ModelState) -> CheckResult:
    """Compare with stock, unless the self-check is disabled; one failing rank turns all off.

    The path is also off if nothing could be compared. With several ranks an exception is raised:
    the others wait for this rank.
    """
    try:
        checked = self_check.check_model(runner, state)
    except Exception as failure:
        if not compat.server.is_single_rank():
            raise
        log.log_failure("YOCO fast prefill: its self-check could not be run", failure)
        checked = CheckResult(unchecked=f"it failed: {type(failure).__name__}")
    state.report.check = checked.to_json()
    differ = ranks.find_difference(f"agrees with stock: {checked.agrees}")
    if state.off_because:  # a forward of the check turned it off, and logged why
        return checked
    found: object | None = None
    if not checked.agrees:
        found = checked.worst or "nothing was compared"
    elif differ:
        found = "another rank's result differs"
    if found:
        state.turn_off_after(found, checked.refusal)
    return checked
