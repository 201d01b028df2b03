"""The entry point that SGLang calls in every process before it serves.

SGLang's loader catches every exception of a plugin and goes on without it, so a failure here
must speak for itself: one line that says whether the fast path is installed, and why not.
Refusals are errors, because at this point a spawned rank has not configured logging yet and
would drop an INFO line. That the path is on, or is switched off, is said when a model is served.
"""

from __future__ import annotations

import functools
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any

from packaging.requirements import Requirement

from sglang_gemma4_yoco import __version__, log, settings
from sglang_gemma4_yoco.log import logger

DISTRIBUTION = "sglang-gemma4-yoco"
GROUP, NAME = "sglang.srt.plugins", "gemma4_yoco"

#: Why SGLang was left as it was when the plugin was loaded here; None while it was not.
left_alone: str | None = None


class UnsupportedError(RuntimeError):
    """The installed SGLang cannot be patched; the message names what it lacks and the remedy."""


def check_version() -> None:
    """Compare the installed SGLang with the range that this package's metadata asks for.

    Nothing of SGLang is imported: a release out of range may lack the very modules.

    Raises:
        UnsupportedError: SGLang is missing, or out of the range.
    """
    try:
        installed = version("sglang")
    except PackageNotFoundError:
        raise UnsupportedError("no SGLang is installed in this environment") from None
    for requirement in map(Requirement, requires(DISTRIBUTION) or ()):
        in_range = requirement.specifier.contains(installed, prereleases=True)
        if requirement.name == "sglang" and not in_range:
            raise UnsupportedError(
                f"SGLang {installed} is not in the supported range {requirement.specifier}. "
                "Install a supported SGLang, or another sglang-gemma4-yoco"
            )


def _say_so_when_a_model_is_served() -> None:
    """Wrap the one method that a runner calls when its model is loaded. Raises what imports raise.

    By then logging is configured: a log without a line would look like one without the package.
    """
    from sglang.srt.model_executor.model_runner import ModelRunner

    stock = ModelRunner.init_attention_backends

    @functools.wraps(stock)
    def init_attention_backends(self: Any, *args: Any, **kwargs: Any) -> Any:
        names = {type(module).__name__ for module in self.model.modules()}
        if "Gemma4TextModel" in names and not getattr(self, "is_draft_worker", False):
            log.once(f"Gemma 4 fast prefill {__version__} is off: {settings.SWITCH}=0")
        return stock(self, *args, **kwargs)

    ModelRunner.init_attention_backends = init_attention_backends


def _say_so_in_server_info(reason: str) -> None:
    """Have schedulers answer that the path is not active, and why. Raises what imports raise.

    What a server with the patch answers is ``metrics.state``, of which this has every entry.
    """
    from sglang.srt.managers.scheduler import Scheduler

    stock = Scheduler.get_internal_state
    nothing = dict.fromkeys(("cut", "tail", "doors", "check", "audits"))
    state = {"version": __version__, "active": False, "reason": reason, **nothing}

    @functools.wraps(stock)
    def get_internal_state(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = stock(self, *args, **kwargs)
        with suppress(Exception):  # SGLang's answer is worth more than ours
            output.internal_state[NAME] = {**state, "forwards": {}, "rows": {}}
        return output

    Scheduler.get_internal_state = get_internal_state


def _leave_alone(reason: str) -> None:
    """Remember why, and answer so. Never raises: what the patch lacks may be missing here too."""
    global left_alone
    left_alone = reason
    with suppress(Exception):
        _say_so_in_server_info(reason)


def _is_installed() -> bool:
    """Whether this process's SGLang is patched already. Imports nothing."""
    patch = sys.modules.get("sglang_gemma4_yoco.loading.patch")
    return patch is not None and bool(patch.is_installed())


def load() -> None:
    """Install the patch into this process's SGLang, or say in one line why not. Never raises."""
    if _is_installed():
        logger.warning(
            "Gemma 4 fast prefill %s is loaded a second time; the first stays installed",
            __version__,
        )
        return
    try:
        if not settings.load().enabled:
            logger.info("Gemma 4 fast prefill %s is off: %s=0", __version__, settings.SWITCH)
            _leave_alone(f"{settings.SWITCH}=0")
            _say_so_when_a_model_is_served()
            return
        check_version()
        # Imported late: with the switch off no model of SGLang's is touched.
        try:
            from sglang_gemma4_yoco.loading import patch
        except ImportError as missing:
            raise UnsupportedError(
                f"SGLang {version('sglang')} lacks what the patch needs ({missing}). "
                "Install a supported SGLang, or a newer sglang-gemma4-yoco"
            ) from missing

        patch.install()
    except Exception as refusal:  # noqa: BLE001 - a plugin must never take a server down
        logger.error(
            "Gemma 4 fast prefill %s is NOT installed, the server runs unpatched: %s",
            __version__,
            refusal or repr(refusal),
        )
        _leave_alone(str(refusal) or repr(refusal))
    else:
        from sglang_gemma4_yoco import seams

        if seams.is_newer_than_tested():
            logger.warning(
                "Gemma 4 fast prefill %s is installed; SGLang %s is newer than %s, the last "
                "release that it was tested with",
                __version__,
                version("sglang"),
                seams.LAST_TESTED,
            )
        else:
            logger.info("Gemma 4 fast prefill %s is installed", __version__)
