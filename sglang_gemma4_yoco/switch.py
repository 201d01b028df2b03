"""The one setting: the environment variable ``SGLANG_GEMMA4_YOCO``.

An environment variable and not a server flag, because a plugin cannot add flags to SGLang's
parser, and because spawned ranks inherit the environment.
"""

from __future__ import annotations

import os

VARIABLE = "SGLANG_GEMMA4_YOCO"
_MEANING = {"1": True, "0": False}


def enabled() -> bool:
    """Whether the fast path is wanted now. Unset means yes.

    Raises:
        ValueError: the variable has a value other than ``0`` or ``1``; the message names both
            the variable and the accepted values.
    """
    value = os.environ.get(VARIABLE, "1")
    try:
        return _MEANING[value]
    except KeyError:
        raise ValueError(
            f"{VARIABLE}={value!r} is not a valid value: "
            "use 1 (or leave it unset) to turn Gemma 4 fast prefill on, 0 to turn it off"
        ) from None
