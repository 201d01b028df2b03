"""The entry point that SGLang calls in every process before it serves.

SGLang's loader catches every exception of a plugin and goes on without it, so a failure here
must speak for itself: one line that says whether the fast path is installed, and why not.
Refusals are errors, because at this point a spawned rank has not configured logging yet and
would drop an INFO line.
"""

from __future__ import annotations

from sglang_gemma4_yoco import __version__, switch
from sglang_gemma4_yoco.report import logger


def load() -> None:
    """Install the patch into this process's SGLang, or say in one line why not. Never raises."""
    try:
        if not switch.enabled():
            logger.info("Gemma 4 fast prefill %s is off: %s=0", __version__, switch.VARIABLE)
            return
        # Imported late: with the switch off nothing of SGLang is touched.
        from sglang_gemma4_yoco import patch

        if patch.is_installed():
            logger.warning(
                "Gemma 4 fast prefill %s is loaded a second time; the first stays installed",
                __version__,
            )
            return
        patch.install()
    except Exception as refusal:  # noqa: BLE001 - a plugin must never take a server down
        logger.error(
            "Gemma 4 fast prefill %s is NOT installed, the server runs unpatched: %s",
            __version__,
            refusal or repr(refusal),
        )
    else:
        logger.info("Gemma 4 fast prefill %s is installed", __version__)
