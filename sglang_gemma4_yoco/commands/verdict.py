"""What the answers and times of two servers amount to: the document, and whether they agree."""

from __future__ import annotations

import argparse
import math
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sglang_gemma4_yoco import __version__, log
from sglang_gemma4_yoco.commands import prompts as kinds
from sglang_gemma4_yoco.commands.agreement import Answer, Comparison, beyond
from sglang_gemma4_yoco.commands.examination import Found, Plan
from sglang_gemma4_yoco.commands.timing import by_length

TIMED = "first tokens of timed prompts"


@dataclass
class Outcome:
    """What is known in the end.

    Attributes:
        document: what goes into verify.json.
        fast, noise: by kind of prompt, fast against stock, and stock against itself.
    """

    document: dict[str, Any]
    fast: dict[str, Comparison] = field(default_factory=dict)
    noise: dict[str, Comparison] = field(default_factory=dict)


def compare(
    plan: Plan, stock: Found, fast: Found, *, prefilled: bool = False
) -> tuple[dict[str, Comparison], dict[str, Comparison]]:
    """By kind of prompt: fast against stock, and stock against itself.

    Args:
        prefilled: only of what prefills computed, and no decode step.
    """
    present = dict.fromkeys(prompt.kind for prompt in plan.prompts)

    def of(kind: str, *answers: tuple[list[Answer], list[Answer]]) -> Comparison:
        return Comparison.of(
            (one.prefilled, other.prefilled) if prefilled else (one, other)
            for ones, others in answers
            for prompt, one, other in zip(plan.prompts, ones, others, strict=True)
            if prompt.kind == kind
        )

    others = ((stock.alone, stock.at_once), (stock.alone, stock.again))
    noise = {kind: of(kind, *others) for kind in present}
    both = ((stock.alone, fast.alone), (stock.alone, fast.at_once))
    found = {kind: of(kind, *both) for kind in present}
    found[TIMED] = Comparison.of(
        (one.answer, other.answer) for one, other in zip(stock.timed, fast.timed, strict=True)
    )
    return found, noise


def pooled(comparisons: Sequence[Comparison]) -> Comparison:
    """Several comparisons as one."""
    whole = Comparison()
    for one in comparisons:
        whole.answers += one.answers
        whole.equal_answers += one.equal_answers
        whole.tokens += one.tokens
        whole.equal_tokens += one.equal_tokens
        whole.logprobs += one.logprobs
        whole.divergences += one.divergences
    return whole


def problems(plan: Plan, stock: Found, fast: Found) -> list[str]:
    """Why the two servers do not agree; none if they do.

    Where rounding counts, what prefills computed is judged by itself as well: most of an answer's
    tokens come from decode steps, which are the same in both servers, and hide the first.
    """
    compared, noise = compare(plan, stock, fast)
    judged = [(compared, noise, "")]
    if not plan.exact:
        del compared[TIMED]  # first tokens, all of them
        judged.append((*compare(plan, stock, fast, prefilled=True), ", prefills alone"))
    found = [
        f"{kind}{part}: {sentence}"
        for of_fast, of_stock, part in judged
        for kind, one in of_fast.items()
        for sentence in beyond(one, of_stock.values(), exact=plan.exact)
    ]
    if fast.forwards[log.FAILED]:
        found.append(
            f"{fast.forwards[log.FAILED]} prefills failed on the fast path; see server-on.log"
        )
    return found


def _finite(number: float) -> float | None:
    """As JSON knows it."""
    return number if math.isfinite(number) else None


def _figures(one: Comparison) -> dict[str, Any]:
    return {
        "answers": one.answers,
        "equal_answers": one.equal_answers,
        "tokens": one.tokens,
        "equal_tokens": one.equal_tokens,
        "logprobs": len(one.logprobs),
        "mean_logprob_diff": _finite(one.mean_logprob),
        "max_logprob_diff": _finite(one.max_logprob),
        "mean_kl": _finite(one.mean_kl) if one.divergences else None,
        "max_kl": _finite(one.max_kl) if one.divergences else None,
    }


def empty_document(args: argparse.Namespace, device: str, output: Path) -> dict[str, Any]:
    """What is known before anything is measured."""
    return {
        "model": args.label or args.model_path,
        "device": device,
        "dtype": None,
        "sglang": version("sglang"),
        "package": __version__,
        "server_args": shlex.join(args.server_args),
        "prompt_tokens": max(args.prompt_tokens),
        "active": False,
        "agrees": None,
        "answers_equal": None,
        "max_logprob_diff": None,
        "ttft_off_s": None,
        "ttft_on_s": None,
        "ratio": None,
        "repeats": args.repeats,
        "rule": None,
        "problems": [],
        "left_out": {},
        "agreement": {},
        "times": [],
        "forwards": {},
        "prefix_hit_tokens": None,
        "output": str(output),
    }


def conclude(document: dict[str, Any], plan: Plan, stock: Found, fast: Found) -> Outcome:
    """Judge what was found, and put it into the document."""
    compared, noise = compare(plan, stock, fast)
    wrong = problems(plan, stock, fast)
    everything = pooled(list(compared.values()))
    off, on = by_length(stock.timed), by_length(fast.timed)
    longest = max(off)
    hits = [
        answer.cached_tokens
        for prompt, answer in zip(plan.prompts, fast.alone, strict=True)
        if prompt.kind == kinds.PREFIX
    ]
    if not hits[-1] and kinds.PREFIX not in plan.left_out:
        plan.left_out[kinds.PREFIX] = "no hit of the prefix cache, though it is on"
    document |= {
        "dtype": plan.dtype,
        "active": True,
        "agrees": not wrong,
        "answers_equal": everything.all_equal,
        "max_logprob_diff": _finite(everything.max_logprob),
        "ttft_off_s": round(off[longest].median, 6),
        "ttft_on_s": round(on[longest].median, 6),
        "ratio": round(off[longest].median / on[longest].median, 4),
        "rule": "exact" if plan.exact else "noise floor",
        "problems": wrong,
        "left_out": plan.left_out,
        "agreement": {
            kind: {
                "fast": _figures(one),
                "stock": _figures(noise[kind]) if kind in noise else None,
            }
            for kind, one in compared.items()
        },
        "times": [
            {
                "tokens": length,
                "off": asdict(off[length]),
                "on": asdict(on[length]),
                "ratio": round(off[length].median / on[length].median, 4),
            }
            for length in off
        ],
        "forwards": dict(fast.forwards),
        "prefix_hit_tokens": hits[-1],
    }
    return Outcome(document, compared, noise)
