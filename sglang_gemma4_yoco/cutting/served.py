"""What is known of a served model and of its current batch. Everything that runs batches asks it.

It is found from the model. ``starting`` makes it when the runner builds its attention backends, and
makes it anew when the runner builds them again. Nothing is found out or decided here.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, partial
from typing import Any, Protocol

import torch

from sglang_gemma4_yoco import log, seams
from sglang_gemma4_yoco.cutting import doors
from sglang_gemma4_yoco.tail import donor, graphs
from sglang_gemma4_yoco.tail.attention import OwnBackend
from sglang_gemma4_yoco.tail.donor import DonorCut
from sglang_gemma4_yoco.tail.graphs import TailGraphs
from sglang_gemma4_yoco.tail.shadow import Shadows

_ENTRY = "_yoco"

_attached: weakref.WeakSet[ServedModel] = weakref.WeakSet()


class Checked(Protocol):
    """What came of the check at start."""

    @property
    def worst(self) -> Any: ...

    @property
    def apart(self) -> float | None: ...

    @property
    def doors(self) -> Any: ...

    @property
    def agrees(self) -> bool: ...

    def describe(self) -> str: ...

    def state(self) -> dict[str, Any]: ...


class Auditor(Protocol):
    """Who runs some prefills again as stock."""

    def is_due(self) -> bool: ...

    def audit(self, plan: Any, output: Any, forwards: Any) -> Any: ...

    def audit_replayed(self, plan: Any, output: Any, replayed: Any) -> Any: ...


class ServedModel:
    """What is known of one model.

    Attributes:
        model: a ``Gemma4TextModel``.
        constant_reason: why no batch of it may take the fast path, or None.
        attention: the attention backend of the tail's own, where the runner could build one.
        checked: what came of the check at start; None before.
        auditor: runs some prefills again as stock, where the operator wants it.
        graphs: the recorded tail, if it is recorded.
        launched_because: why it is not, if it is not.
        planned: what was decided of the batch that the runner planned last, until it has run: a
            ``Plan`` or a ``Refusal``. One forward at a time.
        prefills: SGLang's runner of recorded prefills; None where it has recorded none.
        doors: of these.
        replaying: the batch that SGLang serves by a recorded prefill right now, or None.
    """

    def __init__(
        self,
        model: Any,
        constant_reason: str | None,
        attention: OwnBackend | None = None,
    ) -> None:
        self.model = model
        self.constant_reason = constant_reason
        self.attention = attention
        self.checked: Checked | None = None
        self.auditor: Auditor | None = None
        self.graphs: TailGraphs | None = None
        self.launched_because = graphs.NOT_YET
        self.planned: Any = None
        self.prefills: Any = None
        self.doors = doors.Doors()
        self.replaying: Any = None
        self.backend = None if attention is None else attention.main
        self._shadows = Shadows()
        self._replays = Shadows()
        self._of_text: Any = None

    @cached_property
    def first_shared(self) -> int:
        """Index K of the first layer that reads an earlier layer's K/V."""
        first = donor.first_shared_layer(self.model.config)
        assert first is not None, "the gate admits models with a tail only"
        return first

    @property
    def first_cut(self) -> int:
        """The first layer that runs on kept rows alone: K-1, or K where K-1 cannot be cut."""
        return self.first_shared - (self.donor_cut is DonorCut.KEYS_AND_VALUES)

    @cached_property
    def tail_layers(self) -> list[Any]:
        """Layers K to L-1."""
        return list(self.model.layers)[self.first_shared :]

    @property
    def _over_the_pools(self) -> Any | None:
        """The backend that says for sure where pools and device are; None without one."""
        return None if self.attention is None else self.attention.tail

    @cached_property
    def donor_cut(self) -> DonorCut:
        """How layer K-1 of this model is cut; said when it is not the deepest."""
        backend = self._over_the_pools
        if backend is None:
            backend = seams.current_attn_backend()
        cut, reason = donor.donor_cut(self.model, backend)
        if reason is not None:
            log.once(f"Gemma 4 fast prefill: {self._place_of(cut)}, because {reason}")
        return cut

    def describe(self) -> str:
        """Where this model is cut, for the log: ``cut inside layer 14, behind K and V (of 35)``."""
        return self._place_of(self.donor_cut)

    def attends(self) -> str:
        """The same, and what the tail will attend on."""
        backend = type(seams.current_attn_backend() if self.backend is None else self.backend)
        told = "" if self.attention is None else f", {self.attention.description}"
        return f"{self.describe()}, attention by {backend.__name__}{told}"

    def runs_its_tail(self) -> str:
        """How the tail runs, where one row of each request is kept."""
        if self.graphs is None:
            return f"launched ({self.launched_because})"
        return f"replayed for up to {self.graphs.rows[-1]} rows"

    def leaves_recordings(self) -> str:
        """Whether prefills that SGLang replays leave its recordings, and where."""
        return self.doors.state()

    def _place_of(self, cut: DonorCut) -> str:
        where = cut.value.format(donor=self.first_shared - 1, first=self.first_shared)
        return f"{where} (of {self.model.config.num_hidden_layers})"

    @cached_property
    def on_gpu(self) -> bool:
        """Whether it runs on a GPU, where launches take time."""
        device = getattr(self._over_the_pools, "device", "cpu")
        return torch.device(device).type == "cuda"

    # -- lifetime ----------------------------------------------------------------------------

    def attach(self, plan_ahead: Callable[[ServedModel, Any], None]) -> None:
        """Be found from the model.

        Args:
            plan_ahead: called with this and each batch whose attention the runner has planned and
                that is no decode step, if the tail has a backend of its own.
        """
        self.model.__dict__[_ENTRY] = self
        _attached.add(self)
        if self.attention is None:
            return

        def with_tail(plan_main: Callable[[Any], None]) -> Callable[[Any], None]:
            def init_forward_metadata(forward_batch: Any) -> None:
                plan_main(forward_batch)
                if forward_batch.forward_mode is not seams.ForwardMode.DECODE:
                    plan_ahead(self, forward_batch)

            return init_forward_metadata

        self._shadows.add(self.attention.main, "init_forward_metadata", with_tail)

    def close(self) -> None:
        """Leave the runner's backend and the model as they were."""
        self._shadows.close()
        self.model.__dict__.pop(_ENTRY, None)
        _attached.discard(self)
        self.release()
        self.forget_replays()
        if self._of_text is not None:
            self._of_text.prefill_cuda_graph_runner = None  # SGLang runs prefills eagerly then
        self.drop_graphs(graphs.NOT_YET)

    def release(self) -> None:
        """Forget the planned batch and its metadata, which hold device memory."""
        self.planned = None
        if self.attention is not None:
            self.attention.release()

    def noting_doors(self) -> AbstractContextManager[None]:
        """Where this forward is being recorded in segments, note where it can be left."""
        graph = seams.segmented_recording()
        if graph is None or self.constant_reason is not None:
            return nullcontext()
        return self.doors.noting(graph, self.model.layers[self.first_cut])

    def follow_replays(self, served: Callable[..., Any]) -> None:
        """Know which batch SGLang's recorded prefills serve, and serve it.

        Args:
            served: called with this, a bucket, SGLang's static batch and what runs the recording to
                its end; returns the rows that the model goes on with.
        """

        def following(execute: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(forward_batch: Any, **kwargs: Any) -> Any:
                self.replaying = forward_batch
                try:
                    return execute(forward_batch, **kwargs)
                finally:
                    self.replaying = None
                    self.release()

            return wrapped

        def leaving(replay: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(bucket: Any, static_batch: Any, **kwargs: Any) -> Any:
                to_its_end = partial(replay, bucket, static_batch, **kwargs)
                return served(self, bucket, static_batch, to_its_end)

            return wrapped

        self._replays.add(self.prefills, "execute", following)
        self._replays.add(self.prefills.backend, "replay", leaving)

    def forget_replays(self) -> None:
        """Know of no recorded prefills any more."""
        self._replays.close()
        self.doors.close(doors.NOT_YET)
        self.prefills = None

    def recorded_from_ids(self, runner: Any) -> None:
        """What this ``ModelRunner`` has recorded is text: it replays no prompt with media.

        When this closes nobody keeps those apart any more, and the recordings go.
        """
        self._of_text = runner

        def text_alone(can_run_graph: Callable[..., bool]) -> Callable[..., bool]:
            return lambda batch: not batch.contains_mm_inputs() and can_run_graph(batch)

        self._replays.add(runner.prefill_cuda_graph_runner, "can_run_graph", text_alone)

    def eagerly(self) -> AbstractContextManager[None]:
        """SGLang replays no prefill in the span."""
        return self._replays_are(False)

    def by_recordings(self) -> AbstractContextManager[None]:
        """SGLang replays each prefill in the span, however much padding its recording needs."""
        return self._replays_are(True)

    @contextmanager
    def _replays_are(self, chosen: bool) -> Iterator[None]:
        with Shadows() as shadows:
            if self.prefills is not None:
                shadows.add(self.prefills, "can_run_graph", lambda _: lambda _: chosen)
            yield

    # -- what turns the path, or its graphs, off ----------------------------------------------

    def drop_graphs(self, reason: str) -> None:
        """Let the recorded tail go: it is launched from now on, for this reason."""
        recorded, self.graphs, self.launched_because = self.graphs, None, reason
        if recorded is not None:
            recorded.close()
        if reason != graphs.NOT_YET:
            log.once(f"Gemma 4 fast prefill: the tail is launched layer by layer: {reason}")

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


def find(model: Any) -> ServedModel | None:
    """What is known of ``model``, if anything is."""
    known: ServedModel | None = model.__dict__.get(_ENTRY)
    return known


def attached() -> ServedModel | None:
    """What is known of the model that this process serves; the drafts' has no tail."""
    return next(iter(_attached), None)


def close_all() -> None:
    """Leave every model and every runner's backend as they were."""
    for known in list(_attached):
        known.close()
