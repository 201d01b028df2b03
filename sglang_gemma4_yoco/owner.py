"""All that the package knows of one model, in one object that is found from the model.

It is made when the runner builds its attention backends, made anew when it builds them again, and
taken away with the package. A model that no runner has gets one when it is first asked about.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch

from sglang_gemma4_yoco import __version__, seams, switch
from sglang_gemma4_yoco.attending import graphs
from sglang_gemma4_yoco.attending.attention import OwnBackend, RebuiltBackend
from sglang_gemma4_yoco.attending.graphs import TailGraphs
from sglang_gemma4_yoco.checking import audit, proof, self_check
from sglang_gemma4_yoco.checking.audit import Auditor
from sglang_gemma4_yoco.checking.self_check import Checked
from sglang_gemma4_yoco.cutting import donor, fallback, plan
from sglang_gemma4_yoco.cutting.donor import DonorCut
from sglang_gemma4_yoco.cutting.plan import Plan, Refusal
from sglang_gemma4_yoco.cutting.shadow import Shadows
from sglang_gemma4_yoco.deciding import backends, gate, ranks
from sglang_gemma4_yoco.deciding.rows import KeptRows
from sglang_gemma4_yoco.deciding.threshold import TailCost
from sglang_gemma4_yoco.telling import report

_ENTRY = "_yoco"

_attached: weakref.WeakSet[Owner] = weakref.WeakSet()


class Owner:
    """What is known of one model.

    Attributes:
        model: a ``Gemma4TextModel``.
        attention: the attention backend of the tail's own, where the runner could build one.
        checked: what came of the check at start; None before.
        auditor: runs some prefills again as stock, where the operator wants it.
        graphs: the recorded tail, if it is recorded.
        launched_because: why it is not, if it is not.
        planned: what was decided of the batch that the runner planned last, until it has run. One
            forward at a time.
    """

    def __init__(
        self, model: Any, attention: OwnBackend | None = None, backend: Any | None = None
    ) -> None:
        """Know of ``model`` what is given.

        Args:
            backend: the runner's attention backend, where ``attention`` does not tell it.
        """
        self.model = model
        self.attention = attention
        self.checked: Checked | None = None
        self.auditor: Auditor | None = None
        self.graphs: TailGraphs | None = None
        self.launched_because = graphs.NOT_YET
        self.planned: Plan | Refusal | None = None
        self._backend = backend if attention is None else attention.main
        self._shadows = Shadows()

    @cached_property
    def constant_reason(self) -> str | None:
        """Why no batch of this process may take the fast path, or None."""
        return gate.constant_reason(self.model)

    @cached_property
    def first_shared(self) -> int:
        """Index K of the first layer that reads an earlier layer's K/V."""
        first = gate.first_shared_layer(self.model.config)
        assert first is not None, "the gate admits models with a tail only"
        return first

    @cached_property
    def tail_layers(self) -> list[Any]:
        """Layers K to L-1."""
        return list(self.model.layers)[self.first_shared :]

    @property
    def _over_the_pools(self) -> Any | None:
        """The backend that says for sure where pools and device are: the tail's own, if any."""
        return self._backend if self.attention is None else self.attention.tail

    @cached_property
    def donor_cut(self) -> DonorCut:
        """How layer K-1 of this model is cut; said when it is not the deepest."""
        backend = self._over_the_pools
        if backend is None:
            backend = seams.current_attn_backend()
        cut, reason = donor.donor_cut(self.model, backend)
        if reason is not None:
            report.once(f"Gemma 4 fast prefill: {self._place_of(cut)}, because {reason}")
        return cut

    def describe(self) -> str:
        """Where this model is cut, for the log: ``cut inside layer 14, behind K and V (of 35)``."""
        return self._place_of(self.donor_cut)

    def attends(self) -> str:
        """The same, and what the tail will attend on."""
        backend = type(seams.current_attn_backend() if self._backend is None else self._backend)
        told = RebuiltBackend.told if self.attention is None else self.attention.told
        return f"{self.describe()}, attention by {backend.__name__}, {told}"

    def runs_its_tail(self) -> str:
        """How the tail runs, where one row of each request is kept."""
        if self.graphs is None:
            return f"launched ({self.launched_because})"
        return f"replayed for up to {self.graphs.rows[-1]} rows"

    def _place_of(self, cut: DonorCut) -> str:
        where = cut.value.format(donor=self.first_shared - 1, first=self.first_shared)
        return f"{where} (of {self.model.config.num_hidden_layers})"

    # -- lifetime ----------------------------------------------------------------------------

    def attach(self) -> None:
        """Be found from the model, and plan the tail whenever the runner plans a forward."""
        self.model.__dict__[_ENTRY] = self
        _attached.add(self)
        if self.attention is not None:
            self._shadows.add(self.attention.main, "init_forward_metadata", self._with_tail)

    def close(self) -> None:
        """Leave the runner's backend and the model as they were."""
        self._shadows.close()
        self.model.__dict__.pop(_ENTRY, None)
        _attached.discard(self)
        self.release()
        self.launch(graphs.NOT_YET)

    def release(self) -> None:
        """Forget the planned batch and its metadata, which hold device memory."""
        self.planned = None
        if self.attention is not None:
            self.attention.release()

    def why_not_on(self, backend: Any | None) -> str | None:
        """Why the tail cannot run in a forward on this attention backend, or None.

        Args:
            backend: the current one; None outside of a forward, where nothing is computed.
        """
        if backend is None or backend is self._backend:  # which was looked at when it was built
            return None
        return backends.why_not_alone(backend)

    def tail_cost(self, kept: KeptRows, read: int) -> TailCost:
        """What the tail of a batch would cost besides its rows.

        Args:
            kept: the rows that it would run on.
            read: how many of them somebody reads.
        """
        if read == 0 or (self.graphs is not None and self.graphs.size_for(kept) is not None):
            return TailCost.NOTHING
        return TailCost.LAUNCHES if self._on_gpu else TailCost.ARITHMETIC

    @cached_property
    def _on_gpu(self) -> bool:
        device = getattr(self._over_the_pools, "device", "cpu")
        return torch.device(device).type == "cuda"

    # -- the recorded tail -------------------------------------------------------------------

    def record(self, runner: Any) -> None:
        """Record the tail, anew if it was recorded. With several ranks all of them do, or none.

        Raises:
            Exception: recording failed, and other ranks wait for this one.
        """
        self.launch(graphs.NOT_YET)
        recorded: TailGraphs | None = None
        reason = self._attempt(lambda: graphs.why_not(runner, self.model, self.attention))
        reason = ranks.disagreement(f"recorded: {reason}") or reason
        if reason is None:
            recorded, reason = self._recorded(runner)
            # A graph that one rank drops, none may replay: the ranks would add up unlike rows.
            rows = None if recorded is None else recorded.rows
            reason = ranks.disagreement(f"replayed: {rows}") or reason
        if recorded is None or reason is not None:
            if recorded is not None:
                recorded.close()
            self.launch(reason or graphs.NONE_GOOD)
            return
        self.graphs = recorded
        report.once(f"Gemma 4 fast prefill: the tail is recorded {recorded.describe()}")

    def _recorded(self, runner: Any) -> tuple[TailGraphs | None, str | None]:
        """The recorded and proven tail, or why there is none."""
        tail: TailGraphs | None = None

        def record() -> None:
            nonlocal tail
            assert self.attention is not None
            tail = TailGraphs(runner, self.model, self.first_shared, self.donor_cut, self.attention)
            tail.record()
            proof.prove(tail, runner)

        reason = self._attempt(record)
        if tail is not None and (reason is not None or not tail.rows):
            tail.close()
            return None, reason or graphs.NONE_GOOD
        return tail, reason

    def _attempt(self, step: Callable[[], str | None]) -> str | None:
        """What ``step`` says; why it failed, if it did and no other rank waits for this one."""
        try:
            return step()
        except Exception as failure:
            if not fallback.is_alone():
                raise
            report.failure("Gemma 4 fast prefill: recording the tail failed", failure)
            return f"recording failed: {type(failure).__name__}"

    def launch(self, reason: str) -> None:
        """Launch the tail from now on, for this reason; the recorded one is let go."""
        recorded, self.graphs, self.launched_because = self.graphs, None, reason
        if recorded is not None:
            recorded.close()
        if reason != graphs.NOT_YET:
            report.once(f"Gemma 4 fast prefill: the tail is launched layer by layer: {reason}")

    # -- checked before it serves ------------------------------------------------------------

    def check(self, runner: Any) -> Checked:
        """Compare with stock, or know why not. With several ranks all of them agree, or none.

        Raises:
            Exception: it failed, and other ranks wait for this one.
        """
        unchecked = self_check.why_not(runner)
        try:
            checked = self_check.check(runner, self) if unchecked is None else None
        except Exception as failure:
            if not fallback.is_alone():
                raise
            report.failure("Gemma 4 fast prefill: its self-check could not be run", failure)
            checked, unchecked = None, f"it could not be run: {type(failure).__name__}"
        self.checked = checked or Checked(unchecked=unchecked)
        others = ranks.disagreement(f"agrees with stock: {self.checked.agrees}")
        if others is not None or not self.checked.agrees:
            self.refuse(self_check.FAILED)
            found = "another rank's differs" if self.checked.agrees else self.checked.describe()
            report.error(
                f"Gemma 4 fast prefill is off for this server: {self_check.FAILED}; {found}"
            )
        return self.checked

    def refuse(self, reason: str) -> None:
        """Cut no batch from now on."""
        self.constant_reason = reason
        self.auditor = None
        recorded, self.graphs = self.graphs, None
        if recorded is not None:
            recorded.close()

    @contextmanager
    def refusing(self, reason: str) -> Iterator[None]:
        """Cut no batch in the span."""
        before, self.constant_reason = self.constant_reason, reason
        try:
            yield
        finally:
            self.constant_reason = before

    @contextmanager
    def launching(self) -> Iterator[None]:
        """Launch the tail of every batch in the span."""
        before, self.graphs = self.graphs, None
        try:
            yield
        finally:
            self.graphs = before

    # -- one batch ---------------------------------------------------------------------------

    def _with_tail(self, plan_main: Callable[[Any], None]) -> Callable[[Any], None]:
        def init_forward_metadata(forward_batch: Any) -> None:
            plan_main(forward_batch)
            if forward_batch.forward_mode is not seams.ForwardMode.DECODE:
                self._plan_ahead(forward_batch)

        return init_forward_metadata

    def _plan_ahead(self, forward_batch: Any) -> None:
        self.planned = None
        try:
            planned = plan.ahead(self, forward_batch)
        except Exception as failure:
            if not fallback.is_alone():
                raise  # the other ranks go on with a tail
            report.failure("Gemma 4 fast prefill: planning the tail's attention failed", failure)
        else:
            self.planned = planned

    def plan_of(self, forward_batch: Any) -> Plan | None:
        """The plan that was made ahead for this very batch object, if it was not refused."""
        if isinstance(self.planned, Plan) and self.planned.batch is forward_batch:
            return self.planned
        return None

    def decision(self, forward_batch: Any) -> Plan | Refusal:
        """What becomes of this batch, asked when the model is about to run it."""
        return plan.at_the_forward(self, forward_batch)


def find(model: Any) -> Owner | None:
    """What is known of ``model``, if anything is."""
    owner: Owner | None = model.__dict__.get(_ENTRY)
    return owner


def attached() -> Owner | None:
    """What is known of the model that this process serves; the drafts' has no tail."""
    return next(iter(_attached), None)


def of(model: Any) -> Owner:
    """What is known of ``model``."""
    owner = find(model)
    if owner is None:
        owner = Owner(model)
        owner.attach()
    return owner


def start(runner: Any, model: Any) -> None:
    """The runner has built its attention backends: find out anew what there is to know."""
    previous = find(model)
    if previous is not None:
        previous.close()
    reason = _constant_reason(runner, model)
    attention = _own_backend(runner) if reason is None else None
    if reason is None and attention is None:
        reason = backends.why_not_alone(runner.attn_backend)
    reason = ranks.disagreement(_findings(reason, attention)) or reason
    owner = Owner(model, attention if reason is None else None, runner.attn_backend)
    owner.constant_reason = reason
    owner.attach()
    if reason is not None:
        if gate.is_news(reason):
            report.steps_aside(reason)
        return
    _compile_kernels(owner)
    graph = seams.prefill_graph()
    if graph is not None:
        # A replay runs no Python, so nothing could be said when it happens.
        report.once(
            f"Gemma 4 fast prefill does not reach prefills that are replayed from a CUDA graph "
            f"(backend {graph!r}); --cuda-graph-backend-prefill=disabled runs them through it",
            logging.WARNING,
        )


def record(runner: Any, model: Any) -> None:
    """The runner has recorded its own graphs: record the tail, where batches may be cut.

    The first time, nobody is served yet: then the model is compared with stock.
    """
    known = find(model)
    if known is None or known.constant_reason is not None:
        return
    known.record(runner)
    if known.checked is not None:
        return
    checked = known.check(runner)
    if known.constant_reason is None:
        known.auditor = audit.auditor(runner, known)
        told = f"{known.attends()}, {checked.describe()}"
        report.once(f"Gemma 4 fast prefill {__version__} is on: {told}")


def close_all() -> None:
    """Leave every model and every runner's backend as they were."""
    for owner in list(_attached):
        owner.close()


def _constant_reason(runner: Any, model: Any) -> str | None:
    if not runner.is_generation:
        return gate.EMBEDDINGS
    main = runner.attn_backend
    return (
        gate.constant_reason(model)
        or backends.why_not_main(main)
        or backends.why_not_pool(runner.token_to_kv_pool, runner.dtype, main)
    )


def _findings(reason: str | None, attention: OwnBackend | None) -> str:
    """What must be the same on all ranks for a batch to be cut on all of them."""
    found = f"planned ahead: {attention is not None}, stepping aside: {reason}"
    return f"{__version__}, {found}, {switch.settings()}"


def _compile_kernels(owner: Owner) -> None:
    """Compile what no stock layer compiles. Never raises: the first forward would do it as well."""
    try:
        if owner.donor_cut is DonorCut.KEYS_AND_VALUES:
            donor.compile_kernels(owner.model.layers[owner.first_shared - 1].self_attn)
        if owner.attention is not None:
            owner.attention.compile_kernels([layer.self_attn for layer in owner.tail_layers])
    except Exception as failure:  # noqa: BLE001 - whatever it is, stock serves the batches then
        report.failure("Gemma 4 fast prefill: compiling kernels at start failed", failure)


def _own_backend(runner: Any) -> OwnBackend | None:
    """The tail's own backend, or None and a line in the log. Never raises."""
    try:
        tail = seams.build_attn_backend(runner)
        if backends.TAIL in backends.can(type(tail)):
            return OwnBackend(runner.attn_backend, tail)
        failure = f"what is registered as triton is a {type(tail).__name__}"
    except Exception as raised:  # noqa: BLE001 - the rebuilt backend serves as well, only slower
        failure = repr(raised)
    report.once(
        f"Gemma 4 fast prefill: no attention backend of the tail's own ({failure})",
        logging.WARNING,
    )
    return None
