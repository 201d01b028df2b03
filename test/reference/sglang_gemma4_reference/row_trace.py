"""Observer of prefills: how many rows each decoder layer of a Gemma 4 computes.

With ``GEMMA4_ROW_TRACE=FILE`` in a server's environment, every prefill forward of a model of
``TEXT_MODELS``, and every one that verifies drafts, appends one line to FILE::

    {"mode": "EXTEND", "extend_lens": [50], "prefix_lens": [0], "rows": [50, 50, 1, 1],
     "process": 4711, "ends_prompt": true, "logprob_starts": null, "captures": "NULL",
     "multimodal": false, "replays": 0}

``rows`` are the leading dimensions of the tensors with which the layers' MLPs were called, in this
forward or in the capture of a graph (``recorder``) that it replayed; 0 for a layer that was not
called. All other entries come from SGLang's batch, read before any layer runs. The trace uses
PyTorch's module hooks, so nothing of SGLang is replaced.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from sglang_gemma4_reference import recorder

VARIABLE = "GEMMA4_ROW_TRACE"
VERIFY = "TARGET_VERIFY"

#: The batch that SGLang serves by a captured prefill; it calls the model with a copy, which has
#: fewer fields.
replayed = ContextVar("replayed", default=None)


@dataclass
class Prefill:
    """One prefill forward, or one that verifies drafts, whose ``extend_lens`` is one sum.

    Attributes:
        mode: name of the batch's forward mode when the model was called.
        extend_lens: new tokens of every request.
        prefix_lens: tokens of every request that were in the cache before.
        rows: rows that the MLP of each layer computed.
        process: id of the process that ran it.
        ends_prompt: whether some request's prompt ends here; running requests that decode in the
            batch are not counted. Always true if SGLang has no such field (up to 0.5.22).
        logprob_starts: of every request the first new token whose log-probability is requested;
            None if no request of the batch requests any.
        captures: name of the mode in which hidden states are captured.
        multimodal: whether some request has media.
        replays: the number of replayed graphs.
    """

    mode: str
    extend_lens: list[int]
    prefix_lens: list[int]
    rows: list[int]
    process: int = 0
    ends_prompt: bool = True
    logprob_starts: list[int] | None = None
    captures: str = "NULL"
    multimodal: bool = False
    replays: int = 0


def batch_given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the batch of a text model's call; a wrapper of its forward may hide the names."""
    return next(value for value in (*args, *kwargs.values()) if hasattr(value, "forward_mode"))


#: SGLang's classes of text models with KV-shared layers.
TEXT_MODELS = (
    "sglang.srt.models.gemma4_causal.Gemma4TextModel",
    "sglang.srt.models.gemma3n_causal.Gemma3nTextModel",
)


def when_built(call: Callable[[Any], object]) -> None:
    """Call ``call`` with every text model of ``TEXT_MODELS`` that this process builds."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def built(_: None, model: Any, *__: object, **___: object) -> None:
        call(model)

    for text_model in TEXT_MODELS:
        HookRegistry.register(f"{text_model}.__init__", built, HookType.AFTER)


def _integers(lens: Iterable[Any] | None) -> list[int]:
    if lens is None:
        return []
    return [int(n) for n in lens]


def observe(model: Any, file: str) -> None:
    """Append a JSON line to ``file`` after each prefill of ``model``, one of ``TEXT_MODELS``.

    Synthetic requests are left out.
    """
    layers = model.layers
    current = None

    def begin(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal current
        batch = replayed.get() or batch_given(args, kwargs)
        current = None
        recorder.replays.clear()
        if batch.rids is None:  # a synthetic request: made to warm up, or to compare
            return
        where: Any = {"rows": [0] * len(layers), "process": os.getpid()}
        if batch.forward_mode.is_target_verify():  # has no lengths on the host
            current = Prefill(VERIFY, [len(batch.input_ids)], [], **where)
        elif batch.forward_mode.is_extend_without_speculative():  # no decode step
            current = Prefill(
                batch.forward_mode.name,
                _integers(batch.extend_seq_lens_cpu),
                _integers(batch.extend_prefix_lens_cpu),
                **where,
                ends_prompt=bool(getattr(batch, "contains_last_prefill_chunk", True)),
                logprob_starts=(
                    _integers(batch.extend_logprob_start_lens_cpu) if batch.return_logprob else None
                ),
                captures=getattr(batch.capture_hidden_mode, "name", "NULL"),
                # SGLang takes the inputs away once they are embedded.
                multimodal=getattr(batch, "mm_input_embeds", None) is not None
                or any(item is not None for item in batch.mm_inputs or ()),
            )

    def count(_: nn.Module, args: tuple[Any, ...], layer: int) -> None:
        rows = args[0].shape[0]
        if not recorder.note(("rows of an MLP", layer), rows) and current is not None:
            current.rows[layer] += rows

    def end(*_: object) -> None:
        nonlocal current
        if current is not None:
            current.replays = len(recorder.replays)
            for graph in recorder.replays:
                for layer in range(len(layers)):
                    current.rows[layer] += graph.notes["rows of an MLP", layer]
            with open(file, "a", encoding="utf-8") as trace:
                trace.write(json.dumps(asdict(current)) + "\n")
        current = None

    model.register_forward_pre_hook(begin, with_kwargs=True)
    for index, layer in enumerate(layers):
        layer.mlp.register_forward_pre_hook(partial(count, layer=index))
    model.register_forward_hook(end)


class Trace:
    """Incremental reader of the file that ``observe`` writes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen: list[Prefill] = []
        self._read = 0  # bytes

    def prefills(self) -> list[Prefill]:
        """Return all prefills so far, oldest first; none if nothing was recorded yet."""
        self._read_on()
        return [seen for seen in self._seen if seen.mode != VERIFY]

    def verifications(self) -> list[Prefill]:
        """Return all forwards so far that verified drafts, oldest first."""
        self._read_on()
        return [seen for seen in self._seen if seen.mode == VERIFY]

    def _read_on(self) -> None:
        if self.path.exists():
            with self.path.open("rb") as file:
                file.seek(self._read)
                new = file.read()
            complete = new[: new.rfind(b"\n") + 1]  # a line may be on its way
            self._read += len(complete)
            self._seen += [Prefill(**json.loads(line)) for line in complete.splitlines()]


def load() -> None:
    """Observe the models of ``TEXT_MODELS`` in this process, if the variable names a file.

    The entry point ``gemma4_row_trace`` of SGLang's general plugins.
    """
    path = os.environ.get(VARIABLE)
    if path:
        when_built(partial(observe, file=path))
