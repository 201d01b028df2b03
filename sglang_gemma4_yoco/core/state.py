"""What is known of one served model. The start of SGLang's runner creates it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Protocol

import torch

from sglang_gemma4_yoco import compat, log
from sglang_gemma4_yoco.core.model import TextModel
from sglang_gemma4_yoco.core.per_layer import Buffers, can_be_split
from sglang_gemma4_yoco.core.tail import TailBackend
from sglang_gemma4_yoco.counters import Counters, served
from sglang_gemma4_yoco.refusal import ServerRefusal

#: Where a model has its ``ModelState``.
STATE_ENTRY = "_yoco_state"

_attached: weakref.WeakSet[ModelState] = weakref.WeakSet()


class TailRunner(Protocol):
    """Runs the tail of one planned batch."""

    @property
    def outcome(self) -> str:
        """The name under which ``counters`` counts its forward."""

    @property
    def buffers(self) -> Buffers | None:
        """The memory from which it projects its per-layer inputs; None if it is given them."""

    def run(
        self,
        rows: torch.Tensor,
        positions: torch.Tensor,
        get_inputs: Callable[[], torch.Tensor | None],
    ) -> torch.Tensor:
        """The kept rows [B, hidden], normed, from all rows [T, ...] at the cut."""


@dataclass(eq=False)
class ModelState:
    """What is known of one model.

    With S the first KV-shared layer of L, layers 0 to S-2 run on all rows, and layers S-1 to L-1,
    except for K and V of layer S-1, on kept rows.

    Attributes:
        model: SGLang's text model.
        kind: the file of ``models/`` that knows it.
        unsupported: why none of its batches is cut, or None. Checks replace it for a moment.
        attention: the tail's own backend; None if ``unsupported``.
        captured: the captured tail (``captured.graphs.TailGraphs``), if there is one.
        is_capturing: whether the current forward is being captured in a CUDA graph.
        replayed_exits: while SGLang replays a captured prefill, its ``PrefillGraphExits``.
        after_cut: called with each forward that was cut, its plan and its output; returns the
            output for the model. None if there is nothing to do.
        failures_in_a_row: of the fast path.
        serves: whether it was set up, so that the server may have requests.
        planned_rows: rows of a batch that is to be cut, until the model's forward takes its plan.
        report: entries for /server_info, by key, from the parts that use this object.
        counters: count its forwards: this process's, and a check's own while that runs.
    """

    model: Any
    kind: TextModel
    unsupported: ServerRefusal | None
    attention: TailBackend | None = None
    captured: Any = None
    replayed_exits: Any = None
    is_capturing: Callable[[], bool] = compat.attention.is_capturing
    after_cut: Callable[[Any, Any, Any], Any] | None = None
    failures_in_a_row: int = 0
    serves: bool = False
    planned_rows: int | None = None
    report: dict[str, Any] = field(default_factory=dict)
    counters: Counters = served
    _patches: ExitStack = field(default_factory=ExitStack)

    @cached_property
    def splits_per_layer_inputs(self) -> bool:
        """Whether those of the tail's layers are projected for kept rows alone."""
        return can_be_split(self.model)

    @cached_property
    def cut_layer(self) -> int:
        """S-1, the donor: the first layer that runs on kept rows."""
        first = first_shared_layer(self.model.config)
        assert first is not None, "models without a KV-shared tail are not supported"
        return first - 1

    @cached_property
    def tail_layers(self) -> list[Any]:
        """Layers S-1 to L-1; the first is the donor."""
        return list(self.model.layers)[self.cut_layer :]

    @cached_property
    def on_gpu(self) -> bool:
        """Whether it runs on a GPU of any kind, where launches take time."""
        device = getattr(getattr(self.attention, "tail", None), "device", "cpu")
        return torch.device(device).type != "cpu"

    def describe(self) -> str:
        """Where it is cut, and on which attention, for the log and /server_info."""
        assert self.attention is not None
        main, tail = type(self.attention.main).__name__, type(self.attention.tail).__name__
        described = (
            f"cut inside layer {self.cut_layer}, after its K and V "
            f"(of {self.model.config.num_hidden_layers} layers), attention by {main}"
        )
        if tail != main:
            described += f", the tail's by {tail}"
        return described

    def attach(self, plan_batch: Callable[[ModelState, Any], None]) -> None:
        """Become the state of the model; ``plan_batch`` gets each batch that SGLang has planned."""
        self.model.__dict__[STATE_ENTRY] = self
        _attached.add(self)
        if self.attention is not None:
            follow = self.attention.call_after_planning(partial(plan_batch, self))
            self._patches.enter_context(follow)

    def close(self) -> None:
        """Leave the runner's backend and the model as they were."""
        self._patches.close()
        self.model.__dict__.pop(STATE_ENTRY, None)
        _attached.discard(self)

    def on_close(self, callback: Callable[[], object]) -> None:
        """Have ``callback`` called when this closes."""
        self._patches.callback(callback)

    @contextmanager
    def calling(self, after_cut: Callable[[Any, Any, Any], Any]) -> Iterator[None]:
        """In the ``with`` block ``after_cut`` is called, and no prefill is audited."""
        audits, self.after_cut = self.after_cut, after_cut
        try:
            yield
        finally:
            self.after_cut = audits

    def turn_off(self, refusal: ServerRefusal) -> None:
        """Cut no further batch, and log why."""
        self.unsupported = refusal
        self.after_cut = None
        if refusal.is_logged:
            log.log_once(
                f"Gemma 4 fast prefill falls back to stock for this server: {refusal}",
                refusal.level,
            )


def first_shared_layer(config: Any) -> int | None:
    """S, the first layer that reads an earlier layer's K and V; None if the model has no tail.

    The multi-token-prediction assistant has none: all its layers are shared, and no layer writes
    K and V for them.
    """
    layers = config.num_hidden_layers
    shared = getattr(config, "num_kv_shared_layers", None) or 0
    if 0 < shared < layers:
        return int(layers - shared)
    return None


def find_state(model: Any) -> ModelState | None:
    """The state of ``model``, if it has one."""
    state: ModelState | None = model.__dict__.get(STATE_ENTRY)
    return state


def get_attached_state() -> ModelState | None:
    """The state of the model that this process serves."""
    return next(iter(_attached), None)
