"""Assertions of the shared test code, which show their values as a test's do."""

from __future__ import annotations

from typing import Any

import pytest

from harness import ask


def test_a_failed_assertion_shows_its_values() -> None:
    nobody: Any = None
    both = ask.Compared([[1, 2]], [[1]], [])
    with pytest.raises(AssertionError, match=r"assert 2 == 1\n.*where 2 = len\(\[1, 2\]\)"):
        ask.assert_same_tokens(both, [[5]], nobody)
