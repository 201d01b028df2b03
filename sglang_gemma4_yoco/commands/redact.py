"""Secrets stay out of all that a command prints or writes. Standard library only.

Which value is a secret cannot be known: a flag may be new, misspelt or shortened. So the value of
every flag is one that shown_flags.txt does not list, and so are the keys, tokens and passwords of
the environment and of addresses. ``learn_secrets`` collects them when a command starts; ``redact``
hides them wherever they occur, also where SGLang, a server or its log quotes them.
"""

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import filterfalse, pairwise
from pathlib import Path
from typing import Any

#: What stands in the place of a secret.
HIDDEN = "..."
_FILE = Path(__file__).with_name("shown_flags.txt")
_SHOWN = frozenset(re.findall("(?m)^--.*", _FILE.read_text("utf-8")))
# A flag begins so, also where an editor has made one long dash of two; a negative number does not.
_FLAG = re.compile(r"[-\u2010-\u2015\u2212]+[^\W\d]")
# Not of a number of tokens.
_VARIABLE = re.compile(
    r"(?i)(_|API|^)(KEYS?|TOKEN|PASS)$|_PWD$|SECRET|PASSW(OR)?D|PASSPHRASE|CREDENTIAL"
)
# Of an address, or a token in its place, which is longer than a name.
_PASSWORD = re.compile(r"://(?:[^:@\n]*:|(?=[^@\n]{8}))(.+)@")
# What may be quoted alone of JSON, of a list, or of several lines.
_PART = re.compile(r"[^\n\"'{}\[\],:]{8,}")
# Not searched for: what is too short, and words that reports need and new flags may have.
_PLAIN = re.compile(
    r"(?is)\s*|.{1,3}|auto|b?float\d+|cuda|default|exact|false|none|null|triton|true"
)
# What shows a secret, even one that was not on this command line; the secret follows.
_BEFORE = (
    re.compile(r"(://)[^\s\"'<>]*(?=@)"),
    re.compile(r"(://[^\s\"'<>?]+\?)[^\s\"'<>]+"),
    re.compile(r"(?i)((?:key|token|secret|password)[\"']?\s*[=:]\s*)([\"']).*?\2"),
    re.compile(r"(?i)((?<![\w-])--[\w-]*(?:key|token|secret|password)(?:=|\s+))\S+"),
)

_secrets: list[str] = []  # of this process's command, the longest first


def learn_secrets(words: Sequence[str], environment: Mapping[str, str]) -> None:
    """Have ``redact`` hide the secrets of a command line and of its environment, and no others."""
    for flag, file in pairwise(words):
        if flag == "--config":  # of SGLang
            words = [*words, *_flags_of_file(file)]
    found = [secret for _, secret in _split_flags(words)]
    found += [environment[name] for name in environment if _VARIABLE.search(name)]
    found += _PASSWORD.findall("\n".join((*words, *environment.values())))
    found += _PART.findall("\n".join(found))
    found += [repr(secret)[1:-1] for secret in found]
    found += [" ".join(secret.split()) for secret in found]  # messages are put on one line
    _secrets[:] = sorted(filterfalse(_PLAIN.fullmatch, found), key=len, reverse=True)


def _flags_of_file(path: str) -> Iterator[str]:
    with suppress(Exception):  # SGLang has its own message for what is not such a file
        import yaml  # comes with SGLang

        for name, value in yaml.safe_load(Path(path).read_text("utf-8")).items():
            yield f"--{name.replace('_', '-')}={value}"


def redact(value: Any) -> Any:
    """A text, or all texts of a JSON document but its keys, with each secret replaced."""
    if isinstance(value, str):
        for secret in _secrets:
            value = value.replace(secret, HIDDEN)
        for before in _BEFORE:
            value = before.sub(r"\1...", value)
        return value
    if isinstance(value, dict):
        return {key: redact(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return list(map(redact, value))
    return value


def redact_flags(flags: Iterable[str]) -> str:
    """The flags of a server, for a shell, with what may be a secret replaced."""
    return shlex.join(redact(shown) for shown, _ in _split_flags(flags))


def _split_flags(words: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Each word as it is shown, and what is hidden of it.

    Behind a flag that is not listed all words are hidden, up to one that is. Addresses are not,
    which may be what a command is for, unless they are the value of that flag.
    """
    hides = is_value = False
    for word in words:
        flag, equals, value = word.partition("=")
        if flag in _SHOWN:
            hides = is_value = False
            yield word, ""
        elif _FLAG.match(word) and not is_value:
            hides, is_value = True, not equals
            yield word.removesuffix(value) + HIDDEN * bool(value), value
        elif hides and (is_value or "://" not in word):
            is_value = False
            yield HIDDEN, word
        else:
            yield word, ""
