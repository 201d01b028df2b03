"""What the operator has set: read and judged once, when the plugin is loaded.

Settings are environment variables, because a plugin cannot add flags to SGLang's parser, and
because spawned ranks inherit the environment. ``current`` holds them from then on; a variable that
changes later changes nothing. Importing this module imports neither torch nor SGLang.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

SWITCH = "SGLANG_GEMMA4_YOCO"
_MEANING = {"1": True, "0": False}


@dataclass(frozen=True)
class Settings:
    """What holds in this process; the defaults are what holds where nothing is set.

    Attributes:
        enabled: the fast path is wanted.
        min_skipped_rows: so many rows a batch must be able to skip; None for the measured rule,
            ``threshold``.
        graph_rows: the tail is recorded for up to so many rows, 0 for none; None for as many as are
            worth it.
        self_check: prefills are compared with stock's when the server starts.
        audit: one of so many shortened prefills is run again as stock; 0 for none.
        audit_strict: an audit that finds a defect turns the fast path off.
        prefill_graphs: prefills that SGLang replays are shortened as well, and its recording of
            them is repaired where the operator has asked for them by name.
    """

    enabled: bool = True
    min_skipped_rows: int | None = None
    graph_rows: int | None = None
    self_check: bool = True
    audit: int = 0
    audit_strict: bool = False
    prefill_graphs: bool = True


@dataclass(frozen=True)
class Variable:
    """One environment variable.

    Attributes:
        name: its name.
        unset: what holds where it is unset, for people.
        remedy: which values it accepts, and what they do, for people.
        least: the smallest whole number that it accepts; None for one of ``1`` (yes) and ``0``.
    """

    name: str
    unset: str
    remedy: str
    least: int | None = None

    def read(self, value: str) -> int | bool:
        """What ``value`` means.

        Raises:
            ValueError: nothing; the message names the variable and what it accepts.
        """
        if self.least is None and value in _MEANING:
            return _MEANING[value]
        if self.least is not None and value.isascii() and value.isdecimal():
            number = int(value)
            if number >= self.least:
                return number
        raise ValueError(f"{self.name}={value!r} is not a valid value: {self.remedy}")


def _number(name: str, least: int, smallest: str, unset: str) -> Variable:
    remedy = f"use a whole number from {least} up ({least}: {smallest}), or leave it unset: {unset}"
    return Variable(name, unset, remedy, least)


#: Every variable, by the field of ``Settings`` that it sets.
VARIABLES: Mapping[str, Variable] = {
    "enabled": Variable(
        SWITCH,
        "on",
        "use 1 (or leave it unset) to turn Gemma 4 fast prefill on, 0 to turn it off",
    ),
    "min_skipped_rows": _number(
        f"{SWITCH}_MIN_SKIPPED_ROWS",
        1,
        "the fast path runs whenever it can skip a row",
        "the measured rule",
    ),
    "graph_rows": _number(
        f"{SWITCH}_GRAPH_ROWS",
        0,
        "the tail is never recorded",
        "as many as are worth recording",
    ),
    "self_check": Variable(
        f"{SWITCH}_SELF_CHECK",
        "prefills are compared with stock's at start",
        "use 1 (or leave it unset) to compare with stock at start, 0 not to",
    ),
    "audit": _number(f"{SWITCH}_AUDIT", 0, "no prefill is audited", "none is audited"),
    "audit_strict": Variable(
        f"{SWITCH}_AUDIT_STRICT",
        "an audit that differs is logged",
        "use 1 to turn the fast path off where an audit differs, 0 (or leave it unset) not to",
    ),
    "prefill_graphs": Variable(
        f"{SWITCH}_PREFILL_GRAPHS",
        "prefills that SGLang replays are shortened as well",
        "use 1 (or leave it unset) to shorten prefills that SGLang replays from CUDA graphs, and "
        "to repair their recording where --cuda-graph-backend-prefill asks for it; 0 for neither",
    ),
}

#: What holds in this process.
current = Settings()


def name_of(field: str) -> str:
    """The environment variable that sets this field of ``Settings``."""
    return VARIABLES[field].name


def read(environment: Mapping[str, str]) -> Settings:
    """What is set there. Where the fast path is switched off, nothing else is judged.

    Raises:
        ValueError: a variable has a value that it does not accept; the message names both.
    """
    chosen: dict[str, Any] = {}
    for field, variable in VARIABLES.items():
        if variable.name in environment:
            chosen[field] = variable.read(environment[variable.name])
        if chosen.get("enabled") is False:
            break
    return Settings(**chosen)


def unknown(environment: Mapping[str, str]) -> list[str]:
    """Variables that are named like a setting, and are none."""
    known = {variable.name for variable in VARIABLES.values()}
    return sorted(name for name in environment if name.startswith(SWITCH) and name not in known)


def load() -> Settings:
    """Read this process's environment; what is set there is ``current`` from now on.

    Raises:
        ValueError: as ``read``; ``current`` stays.
    """
    global current
    current = read(os.environ)
    return current


@contextmanager
def changed(**fields: Any) -> Iterator[None]:
    """Other settings in the span, by their fields."""
    global current
    before, current = current, replace(current, **fields)
    try:
        yield
    finally:
        current = before
