"""What ``verify`` found, without a server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from sglang_gemma4_yoco import counters
from sglang_gemma4_yoco.commands.verify import prompts, verify
from sglang_gemma4_yoco.commands.verify.compare import Answer, Position
from sglang_gemma4_yoco.commands.verify.prompts import Prompt
from sglang_gemma4_yoco.commands.verify.verify import (
    ALONE,
    ALONE_AGAIN,
    AT_ONCE,
    CACHED,
    TIMED,
    TIMED_AGAIN,
    Answers,
    Found,
)


def position(token: int, logprob: float, **likeliest: float) -> Position:
    return Position(token, logprob, {int(k[1:]): v for k, v in likeliest.items()})


def outcome(
    shift: float,
    *,
    exact: bool = True,
    failed: int = 0,
    again: float = 0.0,
    lengths: Sequence[int] = (200, 100),
) -> dict[str, Any]:
    """The document of servers that differ by ``shift``, and stock from itself by ``again``."""
    kinds = [Prompt(prompts.QUESTIONS, {}), Prompt(prompts.PREFIX, {})]

    def answers(by: float, factor: float, timed: bool) -> Answers:
        sent = kinds
        if timed:
            sent = [Prompt(prompts.TIMED, {"input_ids": [1] * n}) for n in (*lengths, *lengths)]
        found = []
        for one in sent:
            seconds = factor * len(one.body.get("input_ids", ()))
            made = position(1, -1.0 - by, t1=-1.0 - by, t2=-2.0)
            found.append((one, Answer((made,), seconds=seconds)))
        return found

    stock, fast = Found(), Found(forwards={ALONE: Counter({counters.TAIL_EAGER: 7})})
    for name in (ALONE, AT_ONCE, TIMED):
        stock.answers[name] = answers(0.0, 0.002, name == TIMED)
        fast.answers[name] = answers(shift, 0.001, name == TIMED)
    stock.answers[CACHED] = answers(0.0, 0.002, False)
    stock.answers[ALONE_AGAIN] = answers(again, 0.002, False)
    stock.answers[TIMED_AGAIN] = answers(again, 0.002, True)
    fast.forwards[ALONE][counters.FAILED] = failed
    document: dict[str, Any] = dict.fromkeys(
        ("device", "dtype", "sglang", "package", "server_args", "repeats", "date")
    )
    document |= {"model": "a <model>", "rule": "exact" if exact else "noise floor"}
    document["left_out"] = {prompts.CHUNKS: "a <reason>"}
    verify.conclude(document, stock, fast)
    return document
