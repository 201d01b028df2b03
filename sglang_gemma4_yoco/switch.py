"""The settings are environment variables; the switch, ``SGLANG_GEMMA4_YOCO``, is one of them.

Not server flags, because a plugin cannot add flags to SGLang's parser, and because spawned ranks
inherit the environment.
"""

from __future__ import annotations

import os

VARIABLE = "SGLANG_GEMMA4_YOCO"
_MEANING = {"1": True, "0": False}
_TURNS = "use 1 (or leave it unset) to turn Gemma 4 fast prefill on, 0 to turn it off"


def whole_number(variable: str, least: int, smallest: str, unset: str) -> int | None:
    """The value of an environment variable that holds a whole number; None where it is unset.

    Args:
        least: the smallest accepted number.
        smallest: what that one does, for the message.
        unset: what holds when it is unset, for the message.

    Raises:
        ValueError: it holds something else; the message names the variable and what it accepts.
    """
    value = os.environ.get(variable)
    if value is None:
        return None
    if value.isascii() and value.isdecimal() and int(value) >= least:
        return int(value)
    raise ValueError(
        f"{variable}={value!r} is not a valid value: use a whole number from {least} up "
        f"({least}: {smallest}), or leave it unset for {unset}"
    )


def yes_or_no(variable: str, unset: str, remedy: str) -> bool:
    """The value of an environment variable that holds ``1`` for yes, or ``0``.

    Args:
        unset: what it is when it is unset, ``1`` or ``0``.
        remedy: what to do about any other value, for the message.

    Raises:
        ValueError: it holds something else; the message names the variable and what it accepts.
    """
    value = os.environ.get(variable, unset)
    try:
        return _MEANING[value]
    except KeyError:
        raise ValueError(f"{variable}={value!r} is not a valid value: {remedy}") from None


def settings() -> dict[str, str]:
    """This package's environment variables that are set, whether they mean anything or not."""
    return {name: os.environ[name] for name in sorted(os.environ) if name.startswith(VARIABLE)}


def enabled() -> bool:
    """Whether the fast path is wanted now. Unset means yes.

    Raises:
        ValueError: the variable has a value other than ``0`` or ``1``; the message names both
            the variable and the accepted values.
    """
    return yes_or_no(VARIABLE, "1", _TURNS)
