"""Counters of prefill forwards by outcome, of their rows, and of audits."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from sglang_gemma4_yoco import log
from sglang_gemma4_yoco.refusal import Refusal, ServerRefusal

#: The outcome of a forward: one of the following, or the reason why it ran as stock.
Outcome = str | Refusal

TAIL_EAGER = "active_eager"
TAIL_CAPTURED = "active_captured"
TAIL_SKIPPED = "active_intermediate_chunk"
# The same, after an exit from one of SGLang's prefill graphs.
EXIT_CAPTURED = "exit_captured"
EXIT_SKIPPED = "exit_intermediate_chunk"
FAILED = "failed"
UNSEEN = "unseen"  # eligible, but run by other code
TAIL_RAN = frozenset({TAIL_EAGER, TAIL_CAPTURED, EXIT_CAPTURED})
CUT = TAIL_RAN | {TAIL_SKIPPED, EXIT_SKIPPED}
#: Outcome in the model's own loop -> the outcome at an exit.
AT_EXIT = {TAIL_CAPTURED: EXIT_CAPTURED, TAIL_SKIPPED: EXIT_SKIPPED}

#: The state of a server with ``_MANY_UNSEEN`` unseen prefills and none cut.
NOT_CUT = "set up, but no prefill was cut"
_MANY_UNSEEN = 20

PARTS = COMPUTED, SKIPPED = "computed", "skipped"
RESULTS = AGREES, DIFFERS = "agrees", "differs"


@dataclass(eq=False)
class Counters:
    """Counts of forwards. No lock: a process runs one forward at a time.

    Attributes:
        logs: log the first forward that is cut, and the first of each reason.
        forwards: by outcome.
        rows: by whether the last layer computed them.
        audits: by result.
        worst_audit: their largest error, in multiples of the tolerance.
        observers: called with the counter's name, the label, and the increment.
    """

    logs: bool = True
    forwards: Counter[Outcome] = field(default_factory=Counter)
    rows: Counter[str] = field(default_factory=Counter)
    audits: Counter[str] = field(default_factory=Counter)
    worst_audit: float = 0.0
    observers: list[Callable[[str, Outcome, int], None]] = field(default_factory=list)

    def _count_forward(self, outcome: Outcome, computed: int, skipped: int = 0) -> None:
        self._count("forwards", outcome, 1)
        self._count("rows", COMPUTED, computed)
        self._count("rows", SKIPPED, skipped)

    def _count(self, name: str, label: Outcome, number: int) -> None:
        """Add to a counter, the attribute ``name``, and notify its observers."""
        getattr(self, name)[label] += number
        try:
            for call in self.observers:
                call(name, label, number)
        except Exception as broken:  # noqa: BLE001 - metrics must not fail a forward
            self.observers.clear()
            log.log_failure("YOCO fast prefill: its metrics are no longer collected", broken)

    def count_cut(
        self, describe: Callable[[], str], outcome: str, *, computed: int, skipped: int
    ) -> None:
        """Count a forward on the fast path; log ``describe()`` for the first one.

        Args:
            computed: rows of the batch that the tail computed.
            skipped: the other rows of the batch.
        """
        is_first = CUT.isdisjoint(self.forwards)
        self._count_forward(outcome, computed, skipped)
        if is_first and self.logs:
            log.log_once(f"YOCO fast prefill is active: {describe()}")

    def count_ineligible(self, refusal: Refusal, rows: int) -> None:
        """Count a forward that ran as stock; log its reason once."""
        self._count_forward(refusal, rows)
        # A server's reason was logged at start.
        if self.logs and refusal.is_logged and not isinstance(refusal, ServerRefusal):
            log.log_once(f"YOCO fast prefill falls back to stock: {refusal}")

    def count_unseen(self, rows: int) -> None:
        """Count an eligible prefill that other code ran; warn once there are many."""
        self._count_forward(UNSEEN, rows)
        if self.is_unused():
            log.log_warning(
                f"YOCO fast prefill is set up, but no prefill was cut: {_MANY_UNSEEN} eligible "
                "ones were run by SGLang's CUDA graphs or another plugin"
            )

    def is_unused(self) -> bool:
        """Return True if many prefills were unseen, and none was cut."""
        return self.forwards[UNSEEN] >= _MANY_UNSEEN and CUT.isdisjoint(self.forwards)

    def count_failure(self, error: Exception, rows: int) -> None:
        """Count a forward that failed on the fast path and falls back to stock; log the error."""
        self._count_forward(FAILED, rows)
        log_failed_forward(error)

    def count_audit(self, excess: float, *, agrees: bool) -> None:
        """Count an audited forward."""
        self.worst_audit = max(self.worst_audit, excess)
        self._count("audits", AGREES, int(agrees))
        self._count("audits", DIFFERS, int(not agrees))


#: The process's counters, in /server_info and /metrics. They are not part of a model's state, which
#: is created again when its runner restarts; metrics must only grow.
served = Counters()


def log_failed_forward(error: Exception) -> None:
    """Log the error of a forward that falls back to stock."""
    log.log_failure("YOCO fast prefill failed, the stock forward serves the batch", error)
