"""Redaction: the flags that commands show, and the secrets that they replace in their output.

Commands show the names of flags, and the values without which a report cannot be read. SGLang's
errors and a server's log quote other values, and keys. ``learn_secrets`` collects these when a
command starts, and ``redact`` replaces them in all output. Standard library only.
"""

import os
import re
import shlex
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from sglang_gemma4_yoco.commands.https import API_KEY

#: SGLang's flags whose values are shown: the model, and how it is served. Each takes one value: a
#: number, a choice, or the model; never free text, JSON or an address.
SHOWN = (
    "--model-path",
    "--model",
    "--device",
    "--dtype",
    "--quantization",
    "--kv-cache-dtype",
    "--attention-backend",
    "--prefill-attention-backend",
    "--decode-attention-backend",
    "--tensor-parallel-size",
    "--tp-size",
    "--tp",
    "--page-size",
    "--context-length",
    "--chunked-prefill-size",
    "--max-running-requests",
    "--mem-fraction-static",
    "--speculative-algorithm",
    "--cuda-graph-backend-prefill",
)

_NAME = re.compile("--[a-z][a-z0-9_-]*")
# The parts of a text, of JSON or of an address that may be quoted alone.
_PART = re.compile(r"[^\s\"'{}\[\],:=@\\]+")
# Not replaced: reports have such words and numbers too.
_PLAIN = re.compile(
    r"(?is)\s*|.{1,3}|[-+.\d]{1,9}|https?|auto|b?float\d+|cuda|default|false|none|null|triton|true"
)

_secrets: list[str] = []  # patterns of this process's secrets, the longest secret first


def show_flags(flags: Iterable[str]) -> str:
    """Return the names of a server's flags, with the values of ``SHOWN``, quoted for a shell.

    A value that is an address is hidden: it may have a password.
    """
    shown, _ = _split(flags)
    return shlex.join(shown)


def learn_secrets(flags: Sequence[str]) -> None:
    """Register what ``redact`` replaces: values of hidden flags, and the API key.

    Those of an earlier call are forgotten.
    """
    _, found = _split([*flags, *_read_config(flags)])
    found.append(os.environ.get(API_KEY, ""))
    found += _PART.findall("\n".join(found))
    _secrets.clear()
    for secret in sorted(found, key=len, reverse=True):
        if not _PLAIN.fullmatch(secret):
            # A whole word; an escaped line end may precede it. The text comes before the lookbehind
            # because a pattern that begins with literal text is found fast.
            text = re.escape(secret)
            _secrets.append(rf"{text}(?:(?<![\w-]{text})|(?<=\\[nrt]{text}))(?![\w-])")


def redact(value: Any) -> Any:
    """Return a text or JSON document with ``...`` for each secret; a document's keys are kept."""
    if isinstance(value, str):
        for secret in _secrets:
            value = re.sub(secret, "...", value)
        return value
    if isinstance(value, dict):
        return {key: redact(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return list(map(redact, value))
    return value


def _split(flags: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return a server's flags as they are shown, and the values that are hidden."""
    shown = []
    hidden = []
    for before, word in pairwise(["", *flags]):
        name, _, value = word.partition("=")
        if name in SHOWN and "://" not in value:
            shown.append(word)
        elif _NAME.fullmatch(name):
            shown.append(name)
            hidden.append(value)
        elif before in SHOWN and "://" not in word:
            shown.append(word)
        else:
            hidden.append(word)
    return shown, hidden


def _read_config(flags: Sequence[str]) -> list[str]:
    """Return the flags in the file of SGLang's ``--config``, if it can be read."""
    with suppress(Exception):  # SGLang reports a missing or invalid file
        import yaml  # comes with SGLang

        file = Path(flags[flags.index("--config") + 1])
        entries = yaml.safe_load(file.read_bytes())
        return [f"--{name}={value}" for name, value in entries.items()]
    return []
