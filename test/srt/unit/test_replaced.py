"""Patches of attributes on one object, which are restored."""

from __future__ import annotations

import pytest

from sglang_gemma4_yoco.patched import patched


class Thing:
    number = 1

    def value(self) -> int:
        return self.number


def test_replaces_on_the_instance_only() -> None:
    thing, other = Thing(), Thing()
    with patched(thing, value=lambda: 11, number=7, more=3):
        assert (thing.value(), thing.number, vars(thing)["more"]) == (11, 7, 3)
        assert (other.value(), other.number) == (1, 1)
        with patched(thing, number=8):
            assert (thing.value(), thing.number) == (11, 8)
        assert thing.number == 7
    assert vars(thing) == {}


def test_puts_back_what_somebody_else_put_there() -> None:
    thing = Thing()
    theirs = vars(thing)["value"] = lambda: 5
    with pytest.raises(MemoryError), patched(thing, value=lambda: 6, number=None):
        assert thing.value() == 6
        assert vars(thing)["number"] is None
        raise MemoryError
    assert vars(thing) == {"value": theirs}
