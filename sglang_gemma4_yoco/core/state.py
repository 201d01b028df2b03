"""The state of one served model, created when SGLang's runner starts."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch

from sglang_gemma4_yoco import log
from sglang_gemma4_yoco.compat.batch import ForwardBatch
from sglang_gemma4_yoco.compat.text_model import TextConfig, TextLayer, TextModel
from sglang_gemma4_yoco.core.backend_pair import BackendPair
from sglang_gemma4_yoco.core.interfaces import AfterCut, CapturedFront, CapturedTail
from sglang_gemma4_yoco.core.model import Adapter
from sglang_gemma4_yoco.core.per_layer import can_be_split
from sglang_gemma4_yoco.counters import Counters, served
from sglang_gemma4_yoco.refusal import ServerRefusal

#: The attribute of a model with its ``ModelState``. Checks run forwards with modified copies.
STATE_ENTRY = "_yoco_state"

_attached: weakref.WeakSet[ModelState] = weakref.WeakSet()


@dataclass
class ModelReport:
    """Entries of one model in /server_info; None if unknown.

    Attributes:
        tail_mode: how the tail runs: captured, or eagerly and why.
        check: the result of the self-check.
        exits: whether captured prefills may be cut.
        exits_check: the result of the check of exits.
    """

    tail_mode: str | None = None
    check: dict[str, Any] | None = None
    exits: str | None = None
    exits_check: dict[str, Any] | None = None


@dataclass(eq=False)
class ModelState:
    """The state of one model.

    With S the first KV-shared layer of L, layers 0 to S-2 run on all rows, and layers S-1 to L-1,
    except for K and V of layer S-1, on kept rows.

    Attributes:
        model: SGLang's text model.
        adapter: its module in ``models/``.
        off_because: why none of its batches is cut, or None.
        backends: the attention backends, the tail's among them; None if the server was refused at
            start.
        chunk_readers: third-party code that may read what is sampled from unfinished chunks.
        captured: the captured tail, if there is one.
        front: the captured prefill that runs the layers before the cut of the current batch; None
            if the model's own loop runs them.
        after_cut: called after each forward that was cut, or None.
        failures_in_a_row: consecutive failures of the fast path.
        serves: setup is complete, so the server may have requests.
        planned_rows: rows of a planned batch until the model's forward takes its plan.
        report: entries of /server_info.
        counters: counters of its forwards: this process's, or a check's own.
    """

    model: TextModel
    adapter: Adapter
    off_because: ServerRefusal | None
    backends: BackendPair | None = None
    chunk_readers: object = None
    captured: CapturedTail | None = None
    front: CapturedFront | None = None
    after_cut: AfterCut | None = None
    failures_in_a_row: int = 0
    serves: bool = False
    planned_rows: int | None = None
    report: ModelReport = field(default_factory=ModelReport)
    counters: Counters = served
    _patches: ExitStack = field(default_factory=ExitStack, init=False)

    @cached_property
    def splits_per_layer_inputs(self) -> bool:
        """True if per-layer inputs of the tail are projected for kept rows only."""
        return can_be_split(self.model)

    @cached_property
    def cut_layer(self) -> int:
        """S-1, the donor: the first layer that runs on kept rows."""
        first = first_shared_layer(self.model.config)
        assert first is not None, "models without a KV-shared tail are not supported"
        return first - 1

    @cached_property
    def tail_layers(self) -> list[TextLayer]:
        """Layers S-1 to L-1; the first is the donor."""
        return list(self.model.layers)[self.cut_layer :]

    @cached_property
    def on_gpu(self) -> bool:
        """True on any accelerator, where launches take time."""
        if not self.backends:
            return False
        return torch.device(self.backends.tail_backend.device).type != "cpu"

    def get_backends(self) -> BackendPair:
        """Return the attention backends; without the tail's own no batch is eligible."""
        assert self.backends, "the server was refused at start"
        return self.backends

    def describe(self) -> str:
        """Return the cut layer and the attention backends, for the log and /server_info."""
        backends = self.get_backends()
        main = type(backends.main_backend).__name__
        tail = type(backends.tail_backend).__name__
        described = (
            f"cut inside layer {self.cut_layer}, after its K and V "
            f"(of {self.model.config.num_hidden_layers} layers), attention by {main}"
        )
        if tail != main:
            described += f", the tail's by {tail}"
        return described

    def attach(self, plan_batch: Callable[[TextModel, ForwardBatch], None]) -> None:
        """Attach this state to the model.

        Args:
            plan_batch: called with the model and each batch whose attention metadata exists.
        """
        self.model.__dict__[STATE_ENTRY] = self
        _attached.add(self)
        if self.backends:
            span = self.backends.call_after_init(partial(plan_batch, self.model))
            self._patches.enter_context(span)

    def close(self) -> None:
        """Restore the runner's backend and the model."""
        self._patches.close()
        self.model.__dict__.pop(STATE_ENTRY, None)
        _attached.discard(self)

    def on_close(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` when this state is closed."""
        self._patches.callback(callback)

    def turn_off(self, refusal: ServerRefusal) -> None:
        """Stop cutting batches, and log the reason."""
        self.off_because = refusal
        self.after_cut = None
        if refusal.is_logged:
            log.log_once(
                f"YOCO fast prefill falls back to stock for this server: {refusal}",
                refusal.level,
            )

    def turn_off_after(self, found: object, refusal: ServerRefusal) -> None:
        """Stop cutting batches because of ``found``, and log both."""
        self.turn_off(refusal)
        log.log_error(f"YOCO fast prefill is off for this server: {refusal}; {found}")


def first_shared_layer(config: TextConfig) -> int | None:
    """Return S, the first layer that reads an earlier layer's K and V; None without a tail.

    The multi-token-prediction assistant has none: all its layers are shared, and none writes K
    and V for them.
    """
    layers = config.num_hidden_layers
    shared = getattr(config, "num_kv_shared_layers", None) or 0
    if 0 < shared < layers:
        return int(layers - shared)
    return None


def find_state(model: TextModel) -> ModelState | None:
    """Return the state of ``model``, or None."""
    return model.__dict__.get(STATE_ENTRY)


def get_state(model: TextModel) -> ModelState:
    """Return the state of ``model``, which must have one."""
    state: ModelState = model.__dict__[STATE_ENTRY]
    return state


def get_attached_state() -> ModelState | None:
    """Return the state of the model that this process serves, or None."""
    return next(iter(_attached), None)
