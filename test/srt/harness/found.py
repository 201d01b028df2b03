"""Results of ``verify``, made without a server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_gemma4_yoco import counters
from sglang_gemma4_yoco.commands.verify import prompts, verify
from sglang_gemma4_yoco.commands.verify.comparison import Answer, Position
from sglang_gemma4_yoco.commands.verify.prompts import Prompt
from sglang_gemma4_yoco.commands.verify.verify import AGAIN, ALONE, AT_ONCE, CACHED, VerifyResult


def position(token: int, logprob: float, **likeliest: float) -> Position:
    """Return a position; the names in ``likeliest`` are ``t`` and a token's id."""
    return Position(token, logprob, {int(k[1:]): v for k, v in likeliest.items()})


def outcome(
    shift: float,
    *,
    exact: bool = True,
    failed: int = 0,
    again: float = 0.0,
    lengths: Sequence[int] = (200, 100),
    cached: int = 0,
    hits: int = 320,
    outcome: str = counters.TAIL_EAGER,
) -> dict[str, Any]:
    """Return the document of servers that differ by ``shift``, and stock from itself by ``again``.

    Args:
        cached: the number of cached tokens of the fast server's timed prompts.
        hits: the same of its prompt with a prefix.
        outcome: of all its prefills.
    """
    sent = [Prompt(prompts.QUESTIONS, {}), Prompt(prompts.PREFIX, {})]
    others = len(sent)
    for length in lengths:
        # A warm-up, and two whose times count.
        sent += [Prompt(prompts.TIMED, {"input_ids": [1] * length})] * 3
    found = VerifyResult()
    for name in (*AT_ONCE, prompts.QUESTIONS, prompts.PREFIX, prompts.TIMED):
        found.prefills[name][outcome] = 1
    found.prefills[prompts.TIMED][counters.FAILED] = failed

    def answer(fast: bool, way: str, by: float, factor: float) -> None:
        made = position(1, -1.0 - by, t1=-1.0 - by, t2=-2.0)
        for number, prompt in enumerate(sent):
            tokens, cached_tokens = len(prompt.body.get("input_ids", ())), 0
            seconds = factor * tokens
            if (number - others) % 3 == 0:
                seconds = 1000.0
            if fast and tokens:
                cached_tokens = cached
            elif fast and prompt.kind == prompts.PREFIX:
                cached_tokens = hits
            found.answers[fast, way].append(Answer((made,), (), cached_tokens, seconds))

    answer(False, ALONE, 0.0, 0.002)
    answer(False, AGAIN, again, 0.002)
    answer(False, CACHED, 0.0, 0.002)
    answer(True, ALONE, shift, 0.001)
    for way in AT_ONCE:
        answer(False, way, 0.0, 0.002)
        answer(True, way, shift, 0.001)
        for fast in (False, True):
            del found.answers[fast, way][others:]
    document: dict[str, Any] = dict.fromkeys(
        ("sglang", "package", "commit", "server_args", "repeats", "date"), "some"
    )
    document |= {"model": "a <model>", "device": "cpu", "dtype": "bfloat16"}
    if exact:
        document["dtype"] = "float32"
    document["left_out"] = {prompts.CHUNKS: "a <reason>"}
    verify.conclude(document, sent, found)
    return document
