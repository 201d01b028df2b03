"""What came of the check at start, for the log and for /server_info."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang_gemma4_yoco.checking.rounding import Finding


@dataclass(frozen=True)
class Checked:
    """What came of it.

    Attributes:
        worst: the comparison that is farthest beyond its bound, or nearest to it; None where
            nothing was compared.
        apart: the largest relative difference of a request's logits from stock's, end to end.
        noise: that of stock from itself, where every step of its tail is rounded once more.
        seconds: how long it took.
        unchecked: why nothing was compared.
        doors: as ``worst``, of prefills that left SGLang's recordings by their doors; None where
            these are closed.
    """

    worst: Finding | None = None
    apart: float | None = None
    noise: float | None = None
    seconds: float = 0.0
    unchecked: str | None = None
    doors: Finding | None = None

    @property
    def agrees(self) -> bool:
        """Whether nothing was found that speaks against the fast path."""
        return self.worst is None or self.worst.is_rounding

    def describe(self) -> str:
        """For the log."""
        if self.worst is None:
            return f"not checked: {self.unchecked}"
        told = f"checked layer by layer: {'at most ' if self.agrees else ''}{self.worst}"
        if self.apart is None:
            return told
        return (
            f"{told}; logits {self.apart:.1e} apart, as rounding moves stock's by {self.noise:.1e}"
        )

    def state(self) -> dict[str, Any]:
        """For /server_info."""
        nothing = dict.fromkeys(("compared", "largest_difference", "allowed"))
        return {
            **(nothing if self.worst is None else _state_of(self.worst)),
            "logits_apart": self.apart,
            "logits_apart_by_rounding": self.noise,
            "seconds": round(self.seconds, 3),
            "unchecked": self.unchecked,
            "doors": None if self.doors is None else _state_of(self.doors),
        }


def _state_of(finding: Finding) -> dict[str, Any]:
    return {
        "compared": finding.what,
        "largest_difference": finding.error,
        "allowed": finding.allowed,
    }
