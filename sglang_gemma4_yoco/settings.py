"""The settings: environment variables, read and validated once when the plugin is loaded.

A plugin cannot add flags to SGLang's parser, and spawned ranks inherit the environment. Importing
this module imports neither torch nor SGLang.
"""

import re
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import Field, dataclass, field, fields, replace
from typing import Any, NamedTuple, TypeVar

from sglang_gemma4_yoco.patched import patched

SWITCH = "SGLANG_GEMMA4_YOCO"
T = TypeVar("T")


class SettingType(NamedTuple):
    """The type of a setting: a description of its values, their pattern, and their parser."""

    accepted: str
    pattern: str
    parse: Callable[[str], object]


_FLAG = SettingType("1 or 0", "[01]", lambda value: value == "1")
_FROM_0 = SettingType("an integer >= 0", "[0-9]+", int)
_FROM_1 = SettingType("an integer >= 1", "0*[1-9][0-9]*", int)
_NAMES = SettingType(
    "names of Python modules or classes, separated by commas",
    r"\w+(\.\w+)*(, *\w+(\.\w+)*)*",
    lambda value: tuple(re.split(", *", value)),
)


def _setting(default: T, kind: SettingType, explanation: str) -> T:
    return field(default=default, metadata={"kind": kind, "help": explanation})


@dataclass(frozen=True)
class Settings:
    """The settings of a process, each with its type, default and explanation."""

    enabled: bool = _setting(
        True,
        _FLAG,
        "1 to turn YOCO fast prefill on, 0 to turn it off and leave SGLang unpatched",
    )
    min_skipped_rows: int | None = _setting(
        None,
        _FROM_1,
        "the minimum number of rows that a batch must skip in the KV-shared layers to run on the "
        "fast path; unset: the rule in docs/operating.md",
    )
    graph_rows: int | None = _setting(
        None,
        _FROM_0,
        "the maximum number of kept rows of a prefill for which the KV-shared layers are captured "
        "in CUDA graphs; 0: they are not captured; unset: up to 32 rows",
    )
    self_check: bool = _setting(
        True, _FLAG, "1 to compare prefills with stock SGLang when the server starts, 0 to skip it"
    )
    audit: int = _setting(
        0,
        _FROM_0,
        "N: one of N prefills on the fast path is run again as stock and compared; 0: none",
    )
    audit_strict: bool = _setting(
        False,
        _FLAG,
        "1 to turn the fast path off when an audit finds a defect, 0 to log the defect only",
    )
    prefill_graphs: bool | None = _setting(
        None,
        _FLAG,
        "1 to turn SGLang's prefill CUDA graphs on for Gemma 4 E2B and E4B on CUDA, fix their "
        "capture, and cut the prefills that are replayed; 0 to leave all three to SGLang; unset: "
        "graphs that a flag turns on are fixed and cut",
    )
    untested: bool = _setting(
        False,
        _FLAG,
        "1 to run on an SGLang release newer than the last tested one if its self-check passes; "
        "0 to run as stock there",
    )
    trust: tuple[str, ...] = _setting(
        (),
        _NAMES,
        "third-party code that reads only the kept rows: `module` or `module.Class`; see "
        "docs/not_active.md",
    )


def name_of(setting: str) -> str:
    """Return the environment variable that sets this field of ``Settings``."""
    if setting == "enabled":
        return SWITCH
    return f"{SWITCH}_{setting.upper()}"


#: Every setting, by its environment variable.
VARIABLES = {name_of(each.name): each for each in fields(Settings)}


def describe_default(setting: Field[Any]) -> str:
    """Return the default of a setting in words."""
    if setting.default is None:
        return "automatic"
    if setting.default == ():
        return "none"
    return f"{setting.default:d}"


def parse(variable: str, value: str) -> Any:
    """Parse a variable's value; raise ``ValueError`` with the accepted values if it is invalid."""
    setting = VARIABLES[variable]
    kind: SettingType = setting.metadata["kind"]
    if re.fullmatch(kind.pattern, value):
        return kind.parse(value)
    raise ValueError(
        f"{variable}={value!r} is not a valid value: use {kind.accepted}, or leave it unset "
        f"({describe_default(setting)}): {setting.metadata['help']}"
    )


#: The settings of this process.
current = Settings()


def changed(**values: Any) -> AbstractContextManager[None]:
    """Change these fields of the settings in the ``with`` block."""
    return patched(sys.modules[__name__], current=replace(current, **values))


def read(environment: Mapping[str, str]) -> Settings:
    """Return the settings in ``environment``; raise ``ValueError`` like ``parse``."""
    if environment.get(SWITCH) == "0":  # no other variable is read
        return Settings(enabled=False)
    given = (name for name in VARIABLES if name in environment)
    return Settings(**{VARIABLES[name].name: parse(name, environment[name]) for name in given})
