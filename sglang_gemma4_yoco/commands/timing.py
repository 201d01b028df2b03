"""Times: summed up, and measured to the first token of prompts that no server has seen before."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sglang_gemma4_yoco.commands.agreement import Answer
from sglang_gemma4_yoco.commands.prompts import Maker
from sglang_gemma4_yoco.commands.servers import Server

_ONCE_MORE = 1  # prompts of each length that warm up: a first time is always slower


@dataclass(frozen=True)
class Times:
    """Some times in seconds, summed up: of commands and scripts."""

    median: float
    p20: float
    p80: float
    fastest: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Times:
        """Sum up at least one time."""
        points = seconds if len(seconds) > 1 else [*seconds, *seconds]
        p20, _, _, p80 = statistics.quantiles(points, n=5, method="inclusive")
        return cls(statistics.median(seconds), p20, p80, min(seconds))

    def __str__(self) -> str:
        return self.told()

    def told(self, per_second: float = 1.0, digits: int = 3) -> str:
        """The median, and the 20th to 80th percentile, in seconds or in so many per second."""
        median, p20, p80 = (
            f"{per_second * seconds:.{digits}f}" for seconds in (self.median, self.p20, self.p80)
        )
        return f"{median} ({p20}-{p80})"


@dataclass(frozen=True)
class Timed:
    """One timed prompt on one server."""

    length: int
    seconds: float
    answer: Answer


def requests_of(lengths: Sequence[int], repeats: int) -> int:
    """How many requests ``measure`` puts to each server."""
    return len(lengths) * (repeats + _ONCE_MORE)


def measure(
    servers: Sequence[Server],
    maker: Maker,
    lengths: Sequence[int],
    repeats: int,
    tell: Callable[[Server, int, float], None],
) -> list[list[Timed]]:
    """Time running servers in turns; for each of them its times, in the same order.

    The same arguments make the same prompts, so that servers which run one after the other can be
    compared too.

    Args:
        lengths: of the prompts, in tokens.
        repeats: timed prompts of each length.
        tell: told of each request: server, length, seconds.
    """
    found: list[list[Timed]] = [[] for _ in servers]
    order = list(range(len(servers)))
    number = 0
    for length in lengths:
        for repeat in range(-_ONCE_MORE, repeats):
            ids = maker.random(length, number)
            number += 1
            # Who goes first alternates, or the same server would always meet the warmer caches.
            for i in order if repeat % 2 == 0 else reversed(order):
                seconds, reply = servers[i].first_token(ids)
                if repeat >= 0:
                    found[i].append(Timed(length, seconds, Answer.of(reply)))
                tell(servers[i], length, seconds)
    return found


def by_length(timed: Sequence[Timed]) -> dict[int, Times]:
    """What the prompts of each length took."""
    lengths = dict.fromkeys(one.length for one in timed)
    return {
        length: Times.of([one.seconds for one in timed if one.length == length])
        for length in lengths
    }
