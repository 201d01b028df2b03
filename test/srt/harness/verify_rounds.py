"""Rounds of ``verify`` on sharp bf16 models: with the package, and with a defect in one prompt.

Two servers are kept up. In the fast one the package is a copy that takes the row before the kept
one for one prompt, which a file names by its length; without the file it is the package.
"""

from __future__ import annotations

import dataclasses
import json
import random
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from harness.server import Pair, changed_package, pair
from sglang_gemma4_reference.checkpoint import E2B_TINY_SHARP, write_checkpoint
from sglang_gemma4_yoco.commands.verify import prompts, verify
from sglang_gemma4_yoco.commands.verify.prompts import Prompt
from sglang_gemma4_yoco.settings import name_of

_DEFECT = "GEMMA4_VERIFY_DEFECT"  # the variable with the file's path
_RETURN = "    return KeptRows.suffixes(lens, prefix_lens, starts)\n"
_KEEPS_ROWS_BEFORE = f'''\
    from array import array
    from dataclasses import replace
    from json import loads
    from os import environ
    from pathlib import Path

    kept = KeptRows.suffixes(lens, prefix_lens, starts)
    file = Path(environ["{_DEFECT}"])
    if not file.exists():
        return kept
    defect = loads(file.read_text())
    indices = kept.indices.tolist()
    for new, prefix, own, start in zip(lens, prefix_lens, kept.lens, kept.start_loc):
        if (
            new + prefix == defect["tokens"]
            and prefix >= defect["cached"]
            and (own > 1) == defect["reads_prompt"]
            and is_multimodal(forward_batch) == defect["has_media"]
            and new > own
        ):
            for place in range(start, start + own):
                indices[place] -= 1
            file.with_suffix(".shown").touch()
    return replace(kept, indices=array("q", indices))
'''


class Servers(NamedTuple):
    """Servers of one model, and the file that names the defect's prompt."""

    pair: Pair
    file: Path
    tokenizer: Any


class Round(NamedTuple):
    """The outcome of one round.

    Attributes:
        document: what ``verify`` found.
        shown: whether the defect has changed a kept row.
    """

    document: dict[str, Any]
    shown: bool

    def is_reported(self, kind: str | None) -> bool:
        """Return True if there is a problem: with this kind of prompt, or any."""
        return any(problem.startswith(kind or "") for problem in self.document["problems"])


@contextmanager
def serve(directory: Path, seed: int) -> Iterator[Servers]:
    """Serve a random model, stock and fast; with an odd seed its tail is captured."""
    shape = dataclasses.replace(E2B_TINY_SHARP, seed=seed)
    checkpoint = write_checkpoint(directory / "model", shape)
    file = directory / "defect.json"
    changes = {_RETURN: _KEEPS_ROWS_BEFORE}
    env = {
        "PYTHONPATH": changed_package(directory / "copy", "core/eligibility.py", changes),
        "PYTHONSAFEPATH": "1",  # or a checkout in the working directory would hide the copy
        _DEFECT: str(file),
        name_of("audit"): "0",
    }
    how: Any = {"env": env, "captured": seed % 2 == 1, "spawned": True}
    # Only one of the prompts is longer than a chunk.
    flags = ("--dtype", "bfloat16", "--chunked-prefill-size", "256")
    with pair(checkpoint, directory, *flags, **how) as servers:
        yield Servers(servers, file, prompts.load_tokenizer(str(checkpoint)))


def run_round(servers: Servers, draw: random.Random, defect: str | None = None) -> Round:
    """Send new prompts of all kinds to both servers, and compare as ``verify`` does.

    Args:
        defect: the kind of prompt of which a random one has the defect; None for the package.
    """
    fast, stock = servers.pair
    words = " ".join(prompts.read_file(prompts.BUNDLED)).split()
    texts = [" ".join(draw.sample(words, draw.randint(4, 40))) for _ in range(5)]
    args = Namespace(
        prompt_tokens=[64], repeats=1, texts=texts, device="cpu", tokenizer=servers.tokenizer
    )
    document = {"device": "cpu"}
    sent = verify.fit_prompts(document, args, stock)
    for number, prompt in enumerate(sent):
        if prompt.kind == prompts.PICTURES:
            prompt.body["text"] += " more" * number  # or two would have the same length
            colours = [f"#{draw.randrange(1 << 24):06x}" for _ in range(2)]
            prompt.body["image_data"] = [prompts.draw_picture(*colours)]
    shown = servers.file.with_suffix(".shown")
    for file in (servers.file, shown):
        file.unlink(missing_ok=True)
    if defect:
        _write_defect(servers, draw.choice([one for one in sent if one.kind == defect]))
    found = verify.VerifyResult()
    verify.examine_servers([stock, fast], sent, found)
    verify.conclude(document, sent, found)
    return Round(document, shown.exists())


def _write_defect(servers: Servers, prompt: Prompt) -> None:
    """Make the fast server wrong about this prompt, where it is cut: a prefix, if cached."""
    stock = servers.pair[1]
    tokens = stock.generate(**prompt.request())["meta_info"]["prompt_tokens"]
    stock.forget_prefixes()
    # SGLang drops a part of a cached prefix's sliding windows, and so of the hit.
    cached = {prompts.PREFIX: prompts.PREFIX_TOKENS // 2, prompts.CHUNKS: 1}
    defect = {
        "tokens": tokens,
        "cached": cached.get(prompt.kind, 0),
        "reads_prompt": prompt.kind == prompts.LOGPROBS,
        "has_media": prompt.kind == prompts.PICTURES,
    }
    servers.file.write_text(json.dumps(defect))
