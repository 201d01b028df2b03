"""Secrets as users give them to a server, and a search of a command's output for them.

Each has a mark that occurs nowhere else; tests search everything printed or written for it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

MARK = "hunter2-Zq"
#: The mark of variables; another one, so that redacting variables hides no flag's secret.
OTHER_MARK = "swordfish-Zq"
_CASES = json.loads(Path(__file__).with_suffix(".json").read_text())
#: Flags of a server, by how a secret is given. SGLang 0.5.23 accepts these.
ACCEPTED = _CASES["accepted"]
FLAGS = ACCEPTED | _CASES["not accepted"]
#: The same in files for --config, which SGLang refuses.
FILES = _CASES["files"]
#: Variable -> its value.
VARIABLES = _CASES["variables"]


def places(*, out: str, err: str, folder: Path) -> Iterator[str]:
    """Yield the places of a mark, in all printed text and in all files in ``folder``."""
    texts = {"stdout": out, "stderr": err}
    for path in folder.rglob("*"):
        if path.is_file():
            texts[path.name] = path.read_text(errors="replace")
    for name, text in texts.items():
        if MARK in text or OTHER_MARK in text:
            yield name
