"""Everything that depends on the installed SGLang, and the check that it is there.

Supported is SGLang 0.5.17 and later; ``plugin`` checks that before it imports this module. Where
these releases differ, the difference is handled here.
"""

from __future__ import annotations

from importlib.metadata import version

from packaging.version import Version
from sglang.srt.debug_utils.dumper import dumper as dumper
from sglang.srt.kv_canary.runner.canary_manager import CanaryManager as CanaryManager
from sglang.srt.layers.linear import LinearBase as LinearBase
from sglang.srt.managers.scheduler import Scheduler as Scheduler
from sglang.srt.model_executor.model_runner import ModelRunner as ModelRunner
from sglang.srt.models import gemma4_causal as gemma4_causal

LAST_TESTED = Version("0.5.23")


class IncompatibleError(RuntimeError):
    """The installed SGLang is not one that this package can patch."""


_INSTALLED = Version(version("sglang"))  # it is read from a file, and needed with every batch


def is_newer_than_tested() -> bool:
    """Whether the installed SGLang came out after the last release that was tested."""
    return _INSTALLED > LAST_TESTED
