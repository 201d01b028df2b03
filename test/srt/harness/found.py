"""What ``verify`` found, without a server."""

from __future__ import annotations

from collections import Counter
from typing import Any

from sglang_gemma4_yoco import counters
from sglang_gemma4_yoco.commands.verify import prompts, verify
from sglang_gemma4_yoco.commands.verify.compare import Answer, Position
from sglang_gemma4_yoco.commands.verify.prompts import Prompt
from sglang_gemma4_yoco.commands.verify.verify import AGAIN, ALONE, AT_ONCE, TIMED, Found


def position(token: int, logprob: float, **likeliest: float) -> Position:
    return Position(token, logprob, {int(k[1:]): v for k, v in likeliest.items()})


def outcome(shift: float, *, exact: bool = True, failed: int = 0) -> tuple[dict[str, Any], Any]:
    """The document of servers whose answers differ by ``shift``, and the comparisons."""
    kinds = [Prompt(prompts.QUESTIONS, {}), Prompt(prompts.PREFIX, {})]
    timed = []
    for n in (200, 100):
        timed.append(Prompt(prompts.TIMED, {"input_ids": [1] * n}))

    def found(by: float, factor: float) -> Found:
        def answers(*sent: Prompt) -> list[tuple[Prompt, Answer]]:
            made = position(1, -1.0 - by, t1=-1.0 - by, t2=-2.0)
            return [(one, Answer((made,))) for one in sent]

        rounds = {}
        for name in (ALONE, AT_ONCE, AGAIN):
            rounds[name] = answers(*kinds)
        rounds[TIMED] = answers(*timed)
        seconds = {}
        for tokens in (200, 100):
            seconds[tokens] = [tokens * factor] * 2
        return Found(rounds, {ALONE: Counter({counters.TAIL_EAGER: 7})}, seconds)

    document: dict[str, Any] = dict.fromkeys(
        ("device", "dtype", "sglang", "package", "server_args", "repeats")
    )
    document |= {"model": "a <model>", "rule": "exact" if exact else "noise floor"}
    document["left_out"] = {prompts.CHUNKS: "a <reason>"}
    fast = found(shift, 0.001)
    fast.forwards[ALONE][counters.FAILED] = failed
    return document, verify.conclude(document, found(0.0, 0.002), fast)
