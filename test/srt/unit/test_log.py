"""What is logged once, and what counts as the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sglang_gemma4_yoco import log

pytestmark = pytest.mark.usefixtures("forgotten_reports")


def test_an_error_is_logged_with_each_line(said: Callable[..., list[str]]) -> None:
    """What has failed is said, though the same error was logged with another line."""
    lines = ["a prefill failed", "an audit failed"]
    for line in (*lines, *lines):
        log.log_failure(line, MemoryError())
    assert said() == [f"{line}: MemoryError()" for line in lines]
