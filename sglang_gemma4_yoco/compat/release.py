"""The installed release of SGLang."""

from importlib.metadata import version

from packaging.version import Version

LAST_TESTED = Version("0.5.23")


class IncompatibleError(RuntimeError):
    """The installed SGLang is not one that this package can patch."""


_INSTALLED = Version(version("sglang"))  # it is read from a file, and needed with every batch


def is_newer_than_tested() -> bool:
    """Whether the installed SGLang came out after the last release that was tested."""
    return _INSTALLED > LAST_TESTED
