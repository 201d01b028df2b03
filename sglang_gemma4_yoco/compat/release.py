"""The installed release of SGLang, and the releases that this package was tested with."""

from importlib.metadata import version

from packaging.version import Version

#: Captured prefills were tested from ``FIRST_WITH_EXITS`` on. Unnecessary without 0.5.22.
FIRST_TESTED, FIRST_WITH_EXITS, LAST_TESTED = map(Version, ("0.5.22", "0.5.23", "0.5.23"))
#: The installed version, read once from a file.
INSTALLED = version("sglang")


class IncompatibleError(RuntimeError):
    """The installed SGLang is not one that this package can patch."""


def find_release(installed: str) -> Version:
    """Return the release that a version belongs to.

    Local builds and post-releases belong to their base release, pre-releases to the release that
    they precede.

    >>> [str(find_release(name)) for name in ("0.5.23+cu129", "0.5.23.post1", "0.5.24rc1")]
    ['0.5.23', '0.5.23', '0.5.24']
    """
    return Version(Version(installed).base_version)


_RELEASE = find_release(INSTALLED)


def is_newer_than_tested() -> bool:
    """Return True if the installed SGLang belongs to a release after the last tested one."""
    return _RELEASE > LAST_TESTED


def has_exits() -> bool:
    """Return True if captured prefills of the installed release may be repaired, and have exits."""
    return FIRST_WITH_EXITS <= _RELEASE <= LAST_TESTED
