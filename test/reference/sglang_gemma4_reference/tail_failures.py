"""Failures on demand inside the KV-shared tail of a Gemma 4, and slow prefills.

With ``GEMMA4_TAIL_FAILURES=FILE`` in a server's environment and a number N in FILE, every Nth
prefill forward that computes only some of its rows in the tail raises ``InjectedError`` before the
MLP of one of the tail's layers, a different one each time. FILE is read at every prefill, so the
failures can be turned on and off while the server runs; without FILE, or with 0 in it, there are
none. Each failure is first recorded as one line of JSON in ``FILE.jsonl``.

With a number of seconds in ``FILE.pause`` every prefill forward first waits that long, or until
that file is gone, so that a test can act in the middle of a prompt on any machine.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from sglang_gemma4_reference.row_trace import batch_given, when_built

VARIABLE = "GEMMA4_TAIL_FAILURES"


class InjectedError(Exception):
    """Raised on purpose, to test how the forward is served then."""


def so_far(file: Path) -> list[dict[str, int]]:
    """Return the failures so far: the number of the ``forward``, and the ``layer`` that raised."""
    record = file.with_name(f"{file.name}.jsonl")
    if record.exists():
        return [json.loads(line) for line in record.read_text().splitlines()]
    return []


def _pause_file(file: Path) -> Path:
    return file.with_name(f"{file.name}.pause")


@contextmanager
def slow_prefills(file: Path, seconds: float) -> Iterator[None]:
    """Delay every prefill forward by ``seconds`` in the ``with`` block, or until the block ends."""
    pause = _pause_file(file)
    pause.write_text(str(seconds))
    try:
        yield
    finally:
        pause.unlink()


def slow_down(model: Any, file: Path) -> None:
    """Make prefill forwards of ``model``, a text model, wait as FILE.pause specifies."""
    pause = _pause_file(file)

    def wait(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not batch_given(args, kwargs).forward_mode.is_extend_without_speculative():
            return
        try:
            ends = time.monotonic() + float(pause.read_text() or 0)
        except FileNotFoundError:
            return
        while pause.exists() and time.monotonic() < ends:
            time.sleep(0.01)

    model.register_forward_pre_hook(wait, with_kwargs=True)


def inject(model: Any, file: Path) -> None:
    """Make prefill forwards of ``model``, a text model with a tail, fail as FILE specifies."""
    layers = len(model.layers)
    first = layers - model.config.num_kv_shared_layers
    total = forwards = fails_at = 0

    def begin(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal total
        batch, total = batch_given(args, kwargs), 0
        if not batch.forward_mode.is_decode_or_idle():
            total = len(batch.input_ids)

    def enter_tail(rows: int) -> None:
        nonlocal forwards, fails_at
        fails_at = 0
        if rows < total:
            forwards += 1
            interval = 0
            if file.exists():
                interval = int(file.read_text() or 0)
            if interval and forwards % interval == 0:
                fails_at = first + forwards // interval % (layers - first)

    def before(_: nn.Module, args: tuple[Any, ...], layer: int) -> None:
        nonlocal fails_at
        if layer == first:
            enter_tail(args[0].shape[0])
        if layer == fails_at:
            fails_at = 0
            with open(f"{file}.jsonl", "a", encoding="utf-8") as record:
                record.write(json.dumps({"forward": forwards, "layer": layer}) + "\n")
            raise InjectedError(f"forward {forwards}, layer {layer}")

    model.register_forward_pre_hook(begin, with_kwargs=True)
    for layer in range(first, layers):
        model.layers[layer].mlp.register_forward_pre_hook(partial(before, layer=layer))


def load() -> None:
    """Prepare each model of ``TEXT_MODELS`` that this process builds, if the variable names a file.

    The entry point ``gemma4_tail_failures`` of SGLang's general plugins.
    """
    file = os.environ.get(VARIABLE)
    if file:
        when_built(partial(_prepare, file=Path(file)))


def _prepare(model: Any, file: Path) -> None:
    slow_down(model, file)
    if model.config.num_kv_shared_layers:
        inject(model, file)
