"""Methods replaced on one object, and put back whatever was there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_gemma4_yoco.core.replaced import replaced


class Thing:
    def value(self) -> int:
        return 1


def plus_ten(method: Callable[..., Any]) -> Callable[..., Any]:
    return lambda: method() + 10


def test_replaces_on_the_instance_only() -> None:
    thing, other, shadows = Thing(), Thing(), Shadows()
    shadows.add(thing, "value", plus_ten)
    assert (thing.value(), other.value()) == (11, 1)
    shadows.close()
    assert thing.value() == 1
    assert vars(thing) == {}


def test_stacks_and_unwinds() -> None:
    thing, shadows = Thing(), Shadows()
    shadows.add(thing, "value", plus_ten)
    shadows.add(thing, "value", plus_ten)
    assert thing.value() == 21
    shadows.close()
    shadows.close()
    assert vars(thing) == {}


def test_leaves_what_somebody_else_put_there() -> None:
    thing, shadows = Thing(), Shadows()

    def theirs() -> int:
        return 5

    vars(thing)["value"] = theirs
    shadows.add(thing, "value", plus_ten)
    assert thing.value() == 15
    shadows.close()
    assert vars(thing) == {"value": theirs}
