"""The settings: environment variables, read and checked once when the plugin is loaded.

A plugin cannot add flags to SGLang's parser, and spawned ranks inherit the environment. Importing
this module imports neither torch nor SGLang.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

SWITCH = "SGLANG_GEMMA4_YOCO"


def _setting(default: int | None, explanation: str, *, minimum: int | None = None) -> Any:
    unset = "automatic" if default is None else str(int(default))
    return field(
        default=default, metadata={"unset": unset, "help": explanation, "minimum": minimum}
    )


@dataclass(frozen=True)
class Settings:
    """Every setting of this process: its type, its default, and what its values do."""

    enabled: bool = _setting(
        True, "1 to turn Gemma 4 fast prefill on, 0 to turn it off: then SGLang is left as it is"
    )
    min_skipped_rows: int | None = _setting(
        None,
        "prefills run on the fast path if the KV-shared layers can skip so many rows of the batch; "
        "1: whenever they can skip one; unset: where measurements show it to be faster",
        minimum=1,
    )
    graph_rows: int | None = _setting(
        None,
        "the KV-shared layers are captured in CUDA graphs for up to so many rows of a prefill; "
        "0: they are not captured; unset: for as many rows as are worth it",
        minimum=0,
    )
    self_check: bool = _setting(
        True, "1 to compare prefills with stock SGLang's when the server starts, 0 not to"
    )
    audit: int = _setting(
        0,
        "one of so many prefills on the fast path is run again as stock, and compared; 0: none",
        minimum=0,
    )
    audit_strict: bool = _setting(
        False, "1 to turn the fast path off when an audit finds a defect, 0 to log the defect only"
    )
    prefill_graphs: bool = _setting(
        True,
        "1 to shorten prefills that SGLang replays from CUDA graphs as well, and to repair their "
        "capture where --cuda-graph-backend-prefill asks for it; 0 for neither",
    )


@dataclass(frozen=True)
class Variable:
    """The environment variable of a setting.

    Attributes:
        unset: what holds where it is not set, in words.
        minimum: the smallest whole number that it accepts; None where it accepts 1 and 0.
    """

    name: str
    unset: str
    help: str
    minimum: int | None

    def read(self, value: str) -> bool | int:
        """Parse ``value``; a ``ValueError`` names the variable and what it accepts."""
        if self.minimum is None and value in ("0", "1"):
            return value == "1"
        is_number = self.minimum is not None and value.isascii() and value.isdecimal()
        if is_number and int(value) >= (self.minimum or 0):
            return int(value)
        numbers = f"a whole number from {self.minimum} up"
        accepted = f"use {'1 or 0' if self.minimum is None else numbers}"
        remedy = f"{accepted}, or leave it unset ({self.unset}): {self.help}"
        raise ValueError(f"{self.name}={value!r} is not a valid value: {remedy}")


def name_of(setting: str) -> str:
    """The environment variable that sets this field of ``Settings``."""
    return SWITCH if setting == "enabled" else f"{SWITCH}_{setting.upper()}"


#: Every variable, by the field of ``Settings`` that it sets.
VARIABLES: Mapping[str, Variable] = {
    one.name: Variable(name_of(one.name), **one.metadata) for one in fields(Settings)
}

#: The settings of this process.
current = Settings()


def read(environment: Mapping[str, str]) -> Settings:
    """The settings in ``environment``; ``ValueError`` as of ``Variable.read``."""
    if environment.get(SWITCH) == "0":  # then no other variable is read
        return Settings(enabled=False)
    chosen: dict[str, Any] = {
        setting: variable.read(environment[variable.name])
        for setting, variable in VARIABLES.items()
        if variable.name in environment
    }
    return Settings(**chosen)


def unknown(environment: Mapping[str, str]) -> list[str]:
    """Variables that are named like a setting and are none."""
    known = {variable.name for variable in VARIABLES.values()}
    return sorted(name for name in environment if name.startswith(SWITCH) and name not in known)


@contextmanager
def changed(**values: Any) -> Iterator[None]:
    """Other settings in the span, by their fields."""
    global current
    before, current = current, replace(current, **values)
    try:
        yield
    finally:
        current = before
