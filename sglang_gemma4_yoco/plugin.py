"""The entry point that SGLang calls in every process before it serves.

SGLang ignores a plugin that raises, so a failure is logged here as one error line. Before logging
is configured Python drops INFO lines, so lines that must be seen are warnings.
"""

import functools
import logging
import os
import sys
from importlib.metadata import requires, version
from multiprocessing import parent_process

from sglang_gemma4_yoco import __version__, settings
from sglang_gemma4_yoco.log import logger

GROUP = "sglang.srt.plugins"
NAME = "gemma4_yoco"
_SCHEDULER = "sglang.srt.managers.scheduler"

#: The reason why ``load`` left SGLang unpatched, or None.
why_not_installed: str | None = None


def check_version() -> None:
    """Raise a ``RuntimeError`` unless an SGLang in this package's range is installed."""
    installed = version("sglang")
    from packaging.requirements import Requirement  # a dependency of SGLang

    for requirement in map(Requirement, requires("sglang-gemma4-yoco") or ()):
        in_range = requirement.specifier.contains(installed, prereleases=True)
        if requirement.name == "sglang" and not in_range:
            raise RuntimeError(
                f"SGLang {installed} is not in the supported range {requirement.specifier}. "
                "Install a supported SGLang, or another sglang-gemma4-yoco"
            )


def is_from_this_package(missing: ImportError) -> bool:
    """Return True if the missing module belongs to this package, not to SGLang."""
    return (missing.name or "").partition(".")[0] == __package__


def _may_run_a_model() -> bool:
    """Return False in a subprocess of SGLang without a scheduler: the detokenizer.

    Importing the patched modules there would cost memory and time.
    """
    return not parent_process() or _SCHEDULER in sys.modules


def _install() -> None:
    check_version()
    try:  # imported here, so that SGLANG_GEMMA4_YOCO=0 imports no SGLang
        from sglang_gemma4_yoco.startup import arguments_resolved, patch
    except ImportError as missing:
        if is_from_this_package(missing):
            raise
        raise RuntimeError(
            f"SGLang {version('sglang')} lacks what the patch needs ({missing}). "
            "Install a supported SGLang, or a newer sglang-gemma4-yoco"
        ) from missing
    patch.patch_sglang()
    arguments_resolved.register_hook()
    logger.info("YOCO fast prefill %s is installed", __version__)


@functools.cache  # another call in this process does nothing
def load() -> None:
    """Patch this process's SGLang, or log one line with the reason why not. Never raises."""
    global why_not_installed
    try:
        settings.current = settings.read(os.environ)
        if settings.current.enabled:
            if _may_run_a_model():
                _install()
            return
        why_not_installed = f"{settings.SWITCH}=0"
        # One warning per server, from the main process.
        level = logging.INFO
        if not parent_process():
            level = logging.WARNING
        logger.log(level, "YOCO fast prefill %s is off: %s", __version__, why_not_installed)
    except Exception as refusal:  # noqa: BLE001 - a plugin must never take a server down
        why_not_installed = str(refusal) or repr(refusal)
        logger.error(
            "YOCO fast prefill %s is NOT installed, the server runs unpatched: %s",
            __version__,
            why_not_installed,
        )
