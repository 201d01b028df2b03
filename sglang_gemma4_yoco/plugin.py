"""The entry point that SGLang calls in every process before it serves.

SGLang's loader catches every exception of a plugin and goes on without it, so a failure here is one
error line of its own. Lines that must be seen are warnings or errors: no process of a server has
configured logging yet, and Python then drops INFO lines.
"""

from __future__ import annotations

import functools
import logging
from importlib.metadata import PackageNotFoundError, requires, version
from multiprocessing import parent_process

from packaging.requirements import Requirement

from sglang_gemma4_yoco import __version__, settings

DISTRIBUTION = "sglang-gemma4-yoco"
GROUP, NAME = "sglang.srt.plugins", "gemma4_yoco"

logger = logging.getLogger(__package__)

#: Why ``load`` has left SGLang as it was; None while it has not.
left_alone: str | None = None


class UnsupportedError(RuntimeError):
    """The installed SGLang cannot be patched; the message names what it lacks and the remedy."""


def check_version() -> None:
    """Compare the installed SGLang with the range in this package's metadata; import nothing of it.

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


def _install() -> None:
    """Patch SGLang's classes.

    Raises:
        Exception: this SGLang cannot be patched; nothing is changed.
    """
    check_version()
    try:  # with the switch at 0 nothing of SGLang is imported
        from sglang_gemma4_yoco import seams
        from sglang_gemma4_yoco.loading import patch
    except ImportError as missing:
        raise UnsupportedError(
            f"SGLang {version('sglang')} lacks what the patch needs ({missing}). "
            "Install a supported SGLang, or a newer sglang-gemma4-yoco"
        ) from missing
    patch.install()
    if seams.is_newer_than_tested():
        logger.warning(
            "Gemma 4 fast prefill %s is installed; SGLang %s is newer than %s, the last release "
            "that it was tested with",
            *(__version__, version("sglang"), seams.LAST_TESTED),
        )
    else:
        logger.info("Gemma 4 fast prefill %s is installed", __version__)


@functools.cache  # another call in this process does nothing
def load() -> None:
    """Patch this process's SGLang, or log in one line why it is left as it is. Never raises."""
    global left_alone
    try:
        if settings.load().enabled:
            _install()
            return
        left_alone = f"{settings.SWITCH}=0"
        # A server has the line once: from the process that starts the others.
        level = logging.WARNING if parent_process() is None else logging.INFO
        logger.log(level, "Gemma 4 fast prefill %s is off: %s", __version__, left_alone)
    except Exception as refusal:  # noqa: BLE001 - a plugin must never take a server down
        left_alone = str(refusal) or repr(refusal)
        logger.error(
            "Gemma 4 fast prefill %s is NOT installed, the server runs unpatched: %s",
            *(__version__, left_alone),
        )
