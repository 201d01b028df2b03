"""Secrets as people give them to a server, and whether one is in what a command has left.

Each is a mark that is nowhere else; tests look for the mark in whatever was printed or written.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

MARK = "hunter2-Zq"
#: That of variables: it must not be found for a flag's that is not looked for.
OTHER_MARK = "swordfish-Zq"
#: By how they are given: flags of a server. SGLang 0.5.23 accepts those of ``ACCEPTED``.
FLAGS: dict[str, list[str]] = {
    "known": ["--api-key", MARK],
    "for admins": ["--admin-api-key", MARK],
    "shortened": ["--api-k", MARK],
    "with an equals sign": [f"--api-key={MARK}"],
    "shortened, with an equals sign": [f"--admin-a={MARK}"],
    "quoted, with spaces": ["--api-key", f"a  {MARK}  b"],
    "with quotes in it": ["--api-key", f"""it's "{MARK}" here"""],
    "of several lines": ["--api-key", f"first line\n{MARK}\nlast line"],
    "a dash before it": [f"--api-key=-{MARK}"],
    "two dashes and a space in it": ["--api-key", f"--{MARK} b"],
    "an address": ["--tool-server", f"https://user:{MARK}@host:1/x"],
    "an address with a secret in its path": ["--tool-server", f"https://host/{MARK}"],
    "a shown flag's address": ["--tokenizer-path", f"https://user:{MARK}@host:1/x"],
    "a token in an address": ["--tokenizer-path", f"https://{MARK}@host/x"],
    "a password with an @ and a slash": ["--tokenizer-path", f"https://u:p@/{MARK}@host/x"],
    "signed": ["--tokenizer-path", f"https://host/x?signature={MARK}"],
    "in JSON": ["--model-loader-extra-config", json.dumps({"secret_key": MARK})],
}
ACCEPTED = list(FLAGS)
FLAGS |= {
    "of a key file": ["--ssl-keyfile-password", MARK],
    "an address that SGLang quotes": ["--served-model-name", f"https://user:{MARK}@host:1/x"],
    "misspelt": ["--apikey", MARK],
    "misspelt, with an equals sign": [f"--apikey={MARK}"],
    "misspelt, with spaces": ["--apikey", f"a {MARK} b"],
    "misspelt, not quoted": ["--apikey", "a", MARK, "b"],
    "misspelt, with a dash": ["--apikey", f"-{MARK}"],
    "with a dash": ["--api-key", f"-{MARK}"],
    "one dash": ["-api-key", MARK],
    "a long dash": ["--device", "cpu", "\u2014api-key", MARK],
    "of another release": ["--watermark-key", MARK],
    "of a newer release": ["--switch-of-tomorrow", "--key-of-tomorrow", MARK],
    "not JSON": ["--preferred-sampling-params", f'{{"key": "{MARK}"'],
    "no such choice": ["--tool-call-parser", f"https://user:{MARK}@host"],
    "a model's address": ["--model-path", f"https://user:{MARK}@host/model"],
}
#: Whose reports are made for people as well: all that list the flags, and an error.
SHOWN_IN_TEXT = [*ACCEPTED, "misspelt"]
#: The same in files of --config; SGLang refuses what is here.
FILES = {
    "misspelt in a file": f"device: cpu\nlet_me_in: {MARK}  # ours\n",
    "in a file": f"preferred-sampling-params: 'a \"{MARK}\" b'\n",
}
#: By variable, its value.
VARIABLES = {
    "SGLANG_API_KEY": OTHER_MARK,
    "HF_TOKEN": f"hf_{OTHER_MARK}",
    "AWS_SECRET_ACCESS_KEY": OTHER_MARK,
    "OPENAI_APIKEY": OTHER_MARK,
    "PGPASSWORD": OTHER_MARK,
    "DB_PASSWORD": f"a {OTHER_MARK} b",
    "https_proxy": f"http://user:{OTHER_MARK}@127.0.0.1:9",
}


def places(*, out: str, err: str, folder: Path) -> Iterator[str]:
    """Where a mark is, of all that was printed and of all files in ``folder``."""
    texts = {"stdout": out, "stderr": err}
    for path in folder.rglob("*"):
        if path.is_file():
            texts[path.name] = path.read_text(errors="replace")
    for name, text in texts.items():
        if MARK in text or OTHER_MARK in text:
            yield name
