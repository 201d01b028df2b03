"""Differences between two servers' answers, their bounds, and times."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, zip_longest
from typing import NamedTuple

from sglang_gemma4_yoco.commands.console import Document

EXACT_LOGPROB = 1e-3  # sums in another order move a float32 log-probability by 1e-5 at most


class Position(NamedTuple):
    """A token of an answer or a prompt.

    Attributes:
        token: its id, or its text if SGLang's API returns no ids.
        logprob: NaN if none was returned.
        likeliest: the log-probabilities of the likeliest tokens.
    """

    token: int | str
    logprob: float
    likeliest: Mapping[int | str, float]


@dataclass(frozen=True)
class Answer:
    """A server's answer; ``seconds`` is the time from request to reply."""

    generated: tuple[Position, ...]
    read: tuple[Position, ...] = ()  # of the prompt, if requested
    cached_tokens: int = 0  # of the prompt, from the prefix cache
    seconds: float = 0.0
    text: str = ""

    @property
    def tokens(self) -> tuple[int | str, ...]:
        """The generated tokens."""
        return tuple(position.token for position in self.generated)

    @classmethod
    def of(cls, reply: Document, seconds: float = 0.0) -> Answer:
        """Read SGLang's reply to /generate."""
        about = reply["meta_info"]
        read = _read_positions(about, "input")
        if read and math.isnan(read[0].logprob):  # nothing comes before a prompt's first token
            read = read[1:]
        return cls(
            _read_positions(about, "output"),
            read,
            about["cached_tokens"],
            seconds,
            reply.get("text", ""),
        )


def _read_positions(about: Document, part: str) -> tuple[Position, ...]:
    tokens = about.get(f"{part}_token_logprobs") or []
    likeliest = about.get(f"{part}_top_logprobs") or []
    positions = []
    for (logprob, token, *_), top in zip_longest(tokens, likeliest):
        if logprob is None:  # JSON has no NaN: it arrives as null
            logprob = math.nan
        likely = {its_token: its_logprob for its_logprob, its_token, *_ in top or ()}
        positions.append(Position(token, logprob, likely))
    return tuple(positions)


@dataclass
class Comparison:
    """Pairs of answers to the same prompts.

    Attributes:
        answers, equal_answers: the number of pairs, and of pairs with equal tokens.
        logprobs: differences of log-probabilities: of tokens up to the first one in which two
            answers differ, and of prompts if requested.
        prefilled: those of ``logprobs`` that prefills computed: of first tokens and prompts.
    """

    answers: int = 0
    equal_answers: int = 0
    logprobs: list[float] = field(default_factory=list)
    prefilled: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, pairs: Iterable[tuple[Answer, Answer]]) -> Comparison:
        """Compare answers pairwise."""
        result = cls()
        for left, right in pairs:
            result.answers += 1
            result.equal_answers += left.tokens == right.tokens
            read = _list_differences(left.read, right.read)
            generated = _list_differences(left.generated, right.generated)
            result.logprobs += read + generated
            result.prefilled += read + generated[:1]
        return result

    @property
    def max_logprob(self) -> float:
        """The largest difference of two log-probabilities."""
        return max(self.logprobs)

    @property
    def is_equal(self) -> bool:
        """True if all tokens are equal, and all log-probabilities up to float32 rounding."""
        return self.equal_answers == self.answers and self.max_logprob <= EXACT_LOGPROB

    def figures(self) -> dict[str, float | None]:
        """Return all figures, for JSON."""
        return {
            "answers": self.answers,
            "equal_answers": self.equal_answers,
            "mean_logprob_diff": make_finite(statistics.fmean(self.logprobs)),
            "max_logprob_diff": make_finite(self.max_logprob),
        }


def make_finite(value: float) -> float | None:
    """Return a number for JSON: None if it is not finite."""
    if math.isfinite(value):
        return value
    return None


def _list_differences(left: Iterable[Position], right: Iterable[Position]) -> list[float]:
    """Return the differences up to the first two tokens that differ; inf where only one goes on."""
    differences: list[float] = []
    for mine, yours in zip_longest(left, right):
        if not (mine and yours):
            return [*differences, math.inf]
        differences.append(_measure_difference(mine, yours))
        if mine.token != yours.token:
            break
    return differences


def _measure_difference(left: Position, right: Position) -> float:
    """Return the larger difference of log-probabilities of the two tokens.

    It is a lower bound if a server does not report the other's token.
    """
    differences = []
    for mine, yours in ((left, right), (right, left)):
        known = {**yours.likeliest, yours.token: yours.logprob}
        if mine.token in known:
            difference = abs(mine.logprob - known[mine.token])
        else:
            difference = max(mine.logprob - min(known.values()), 0.0)
        if not math.isfinite(difference):
            return math.inf
        differences.append(difference)
    return max(differences)


def find_inequality(fast: Comparison) -> str | None:
    """Return how answers differ that must be equal, as a sentence, or None if they are."""
    if fast.is_equal:
        return None
    return (
        f"{fast.equal_answers} of {fast.answers} answers have the same tokens, and "
        f"log-probabilities differ by up to {fast.max_logprob:.2g}"
    )


def find_outlier(fast: Sequence[Answer], stock: Sequence[Answer]) -> str | None:
    """Return how far the answers to one prompt are from stock's, as a sentence if it is too far.

    The distance of two answers is the mean difference of their log-probabilities. An answer's
    distance from stock is that from the nearest of stock's answers. It may be the largest distance
    of two of these, plus 0.125. Of a prompt that is sensitive to rounding, stock's answers
    in other batches were 0.2 to 3 apart, and those to other prompts of the same model equal. Tokens
    are not compared: the last bit decides between two that are equally likely.

    Args:
        fast: answers in like circumstances, of which the median distance counts: a defect shows in
            most of them, rounding in one. None is too far if there are none.
        stock: at least two answers in several circumstances.
    """
    # Most tokens come from decode steps, the same in both servers: they would hide the first ones.
    for what, part in (("those of prefills alone", "prefilled"), ("all", "logprobs")):

        def measure(pair: tuple[Answer, Answer], part: str = part) -> float:
            return statistics.fmean(getattr(Comparison.of([pair]), part))

        own = max(map(measure, combinations(stock, 2)))
        nearest = [min(measure((answer, other)) for other in stock) for answer in fast]
        found = statistics.median_low(nearest or [0.0])
        # Stock's answers may be equal by chance. Gemma caps logits at 30, and neighbouring bfloat16
        # numbers between 16 and 32 are 0.125 apart.
        limit = own + 0.125
        # If stock's own distances are not finite, there is no limit.
        if found > limit or math.isinf(found):
            return (
                f"log-probabilities ({what}) differ by {found:.2g} on average, and {limit:.2g} is "
                f"allowed: stock's answers to the same prompt differ by up to {own:.2g}"
            )
    return None


@dataclass(frozen=True)
class Times:
    """Median, 20th and 80th percentile of some times, in seconds."""

    median: float
    p20: float
    p80: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Times:
        """Summarise at least one time."""
        import numpy as np  # comes with SGLang

        return cls(*np.percentile(seconds, (50, 20, 80)).tolist())

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.p20:.3f}-{self.p80:.3f})"
