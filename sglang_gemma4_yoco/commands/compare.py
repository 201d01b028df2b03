"""How far the answers of two servers are apart, and how far they may be; their times."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any, NamedTuple

EXACT_LOGPROB = 1e-3  # sums in another order move a float32 log-probability by 1e-5 at most
NOISE_FACTOR = 3.0
MEAN_LOGPROB = 0.05  # where stock does not differ from itself: bfloat16 has 8 bits

Token = int | str  # its id; or its text, where SGLang's API names no ids


class Position(NamedTuple):
    """One token, its log-probability (NaN where none was given), and those of the likeliest."""

    token: Token
    logprob: float
    likeliest: Mapping[Token, float]


@dataclass(frozen=True)
class Answer:
    """A server's answer."""

    generated: tuple[Position, ...]
    read: tuple[Position, ...] = ()  # of the prompt, where log-probabilities were asked for
    cached_tokens: int = 0  # of the prompt, from the prefix cache

    @property
    def tokens(self) -> tuple[Token, ...]:
        """The generated tokens."""
        return tuple(position.token for position in self.generated)

    @property
    def prefilled(self) -> Answer:
        """The part that a prefill computed: all of ``read``, and the first generated token."""
        return replace(self, generated=self.generated[:1])

    @classmethod
    def of(cls, reply: Mapping[str, Any]) -> Answer:
        """Read SGLang's reply to /generate."""
        about = reply["meta_info"]
        generated, read = (_positions(about, part) for part in ("output", "input"))
        if read and math.isnan(read[0].logprob):  # nothing comes before a prompt's first token
            read = read[1:]
        return cls(generated, read, about["cached_tokens"])


def _positions(about: Mapping[str, Any], part: str) -> tuple[Position, ...]:
    tokens = about.get(f"{part}_token_logprobs") or []
    likeliest = about.get(f"{part}_top_logprobs") or []
    return tuple(
        # JSON has no NaN: it arrives as null.
        Position(token, math.nan if own is None else own, {t: x for x, t, *_ in top or ()})
        for (own, token, *_), top in zip_longest(tokens, likeliest)
    )


@dataclass
class Comparison:
    """Pairs of answers to the same prompts.

    Attributes:
        answers, equal_answers: how many pairs, and how many of them have the same tokens.
        logprobs: distances of log-probabilities, by position: of generated tokens up to the place
            where two answers part, and of prompts where the request asked for them.
    """

    answers: int = 0
    equal_answers: int = 0
    logprobs: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, pairs: Iterable[tuple[Answer, Answer]]) -> Comparison:
        """Compare answers pairwise."""
        result = cls()
        for one, other in pairs:
            result.answers += 1
            result.equal_answers += one.tokens == other.tokens
            if len(one.read) != len(other.read):
                result.logprobs.append(math.inf)
            result.logprobs += map(_apart, one.read, other.read)
            for mine, yours in zip(one.generated, other.generated, strict=False):
                result.logprobs.append(_apart(mine, yours))
                if mine.token != yours.token:
                    break
        return result

    def __add__(self, other: Comparison) -> Comparison:
        answers, equal = self.answers + other.answers, self.equal_answers + other.equal_answers
        return Comparison(answers, equal, self.logprobs + other.logprobs)

    def figures(self) -> dict[str, float | None]:
        """All figures, as JSON knows them: None where there is none, or it is not finite."""
        distances = {"mean_logprob_diff": self.mean_logprob, "max_logprob_diff": self.max_logprob}
        known = {
            key: x if self.answers and math.isfinite(x) else None for key, x in distances.items()
        }
        return {"answers": self.answers, "equal_answers": self.equal_answers, **known}

    @property
    def max_logprob(self) -> float:
        """The largest distance of two log-probabilities."""
        return max(self.logprobs, default=0.0)

    @property
    def mean_logprob(self) -> float:
        """The mean distance of two log-probabilities."""
        return statistics.fmean(self.logprobs) if self.logprobs else 0.0


def _apart(one: Position, other: Position) -> float:
    """How far two servers are apart on the tokens of both, or at least are."""
    distances = []
    for mine, yours in ((one, other), (other, one)):
        known = {**yours.likeliest, yours.token: yours.logprob}
        least = max(mine.logprob - min(known.values()), 0.0)  # of a token that is not known
        named = mine.token in known
        distances.append(abs(mine.logprob - known[mine.token]) if named else least)
    # max() would drop a NaN, which is the worst distance of all.
    return max(distances) if all(map(math.isfinite, distances)) else math.inf


def beyond(fast: Comparison, noise: Collection[Comparison], *, exact: bool) -> list[str]:
    """What is further apart than it may be (``verify --help`` has the rule), as sentences.

    With rounding tokens do not count: one last bit decides between two that are equally likely.
    Where a head attends to few keys, rounding mostly changes nothing, and now and then much.

    Args:
        fast: fast against stock, each prompt sent twice.
        noise: stock against itself, the same prompts in other batches, by kind.
        exact: both compute in float32 on a CPU.
    """
    found = []
    mean, furthest = fast.mean_logprob, fast.max_logprob
    if exact and fast.equal_answers < fast.answers:
        found.append(f"{fast.answers - fast.equal_answers} of {fast.answers} answers differ")
    if exact and furthest > EXACT_LOGPROB:
        apart = f"log-probabilities are up to {furthest:.2g} apart"
        found.append(f"{apart}; float32 promises {EXACT_LOGPROB:g}")
    own = max((one.mean_logprob for one in noise), default=0.0)
    most = max((one.max_logprob for one in noise), default=0.0)
    limit = NOISE_FACTOR * own + most / max(fast.answers // 2, 1) + MEAN_LOGPROB
    # Where stock's own are not finite, nothing is measured by them.
    if not exact and (mean > limit or math.isinf(mean)):
        found.append(
            f"log-probabilities are {mean:.2g} apart on average, and may be {limit:.2g}: stock "
            f"differs from itself by {own:.2g}, and by {most:.2g} at most"
        )
    return found


@dataclass(frozen=True)
class Times:
    """Some times in seconds: their median and two of their percentiles."""

    median: float
    p20: float
    p80: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Times:
        """Sum up at least one time."""
        points = seconds if len(seconds) > 1 else [*seconds, *seconds]
        p20, _, _, p80 = statistics.quantiles(points, n=5, method="inclusive")
        return cls(statistics.median(seconds), p20, p80)

    def text(self, scale: float = 1.0, digits: int = 3) -> str:
        """The median, and the 20th to 80th percentile; in milliseconds with a ``scale`` of 1e3."""
        points = (self.median, self.p20, self.p80)
        return "{} ({}-{})".format(*(f"{scale * point:.{digits}f}" for point in points))
