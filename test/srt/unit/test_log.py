"""Lines that are logged once, and the identity of an error."""

from __future__ import annotations

import pytest

from harness.fixtures import Said
from sglang_gemma4_yoco import log

pytestmark = pytest.mark.usefixtures("forgotten_reports")


def test_an_error_is_logged_with_each_line(said: Said) -> None:
    """An error that was logged with one line is logged again with another line."""
    lines = ["a prefill failed", "an audit failed"]
    for line in (*lines, *lines):
        log.log_failure(line, MemoryError())
    assert said() == [f"{line}: MemoryError()" for line in lines]


def test_another_type_or_place_is_another_failure(said: Said) -> None:
    """An error is logged once for its type and the line that raises it, whatever its message."""

    def fail(error: Exception, *, early: bool) -> None:
        try:
            if early:
                raise error
            raise error
        except Exception as raised:  # noqa: BLE001 - of any type
            log.log_failure("a prefill failed", raised)

    for size in ("1 MiB", "2 MiB"):
        fail(MemoryError(size), early=True)
        fail(MemoryError(size), early=False)
        fail(ValueError(size), early=False)
    of_memory = "a prefill failed: MemoryError('1 MiB')"
    assert said() == [of_memory, of_memory, "a prefill failed: ValueError('1 MiB')"]
