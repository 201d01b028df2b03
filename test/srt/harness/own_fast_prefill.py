"""An SGLang with its own fast prefill, off by default, modelled on its open PR #27183.

Written independently, it does what that change does: a server argument, two attributes and two
methods of the text model, and a cut in the model's loop before the first KV-shared layer.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock
from weakref import WeakSet

import pytest
from sglang.srt.models import gemma4_causal
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs

from harness.forwards import ENGINE
from sglang_gemma4_reference import engine
from sglang_gemma4_reference.engine import Engine
from sglang_gemma4_yoco import compat
from sglang_gemma4_yoco.core import state as states
from sglang_gemma4_yoco.core.forward import wrap_model_forward
from sglang_gemma4_yoco.startup import pr27183

MODEL = gemma4_causal.Gemma4TextModel


class Arguments(ServerArgs):
    """Server arguments with the flag."""

    kv_sharing_fast_prefill: bool = False


# Added to the model; below are the parts added to its forward, before a layer and after the norm.
METHODS = """
def first_kv_shared_layer_idx(self):
    return self.config.num_hidden_layers - self.config.num_kv_shared_layers

def fast_prefill_supported(self):
    arguments = get_server_args()
    is_on = getattr(arguments, "kv_sharing_fast_prefill", False)
    drafts = arguments.speculative_algorithm is not None
    return is_on and not drafts and self.config.num_kv_shared_layers > 0

def _enable_fast_prefill(self, forward_batch):
    if not self.fast_prefill_supported or forward_batch.return_logprob:
        return False
    extends = forward_batch.forward_mode.is_extend_without_speculative()
    return extends and max(forward_batch.extend_seq_lens_cpu) > 1

def _yoco_truncate_to_last_tokens(self, forward_batch, hidden_states, positions, per_layer_inputs):
    last = forward_batch.extend_seq_lens.cumsum(0) - 1
    requests = len(last)
    changed = {
        "extend_seq_lens": torch.ones_like(forward_batch.extend_seq_lens),
        "extend_seq_lens_cpu": [1] * requests,
        "extend_start_loc": torch.arange(requests).to(forward_batch.extend_start_loc),
        "extend_num_tokens": requests,
        "out_cache_loc": forward_batch.out_cache_loc[last],
    }
    before = {name: getattr(forward_batch, name) for name in changed}
    vars(forward_batch).update(changed)
    backend = forward_context.get_forward_context().attn_backend
    backend.init_forward_metadata(forward_batch)

    def restore():
        vars(forward_batch).update(before)
        backend.init_forward_metadata(forward_batch)

    rows = residual_batch.set_written(hidden_states[last], forward_batch)
    if per_layer_inputs is not None:
        per_layer_inputs = per_layer_inputs[last]
    return rows, positions[last], per_layer_inputs, last, restore
"""
_LOOP = "for layer_idx in range(self.start_layer, self.end_layer):\n"
_CUT = """
            if layer_idx == self.first_kv_shared_layer_idx and self._enable_fast_prefill(
                forward_batch
            ):
                whole = hidden_states.shape
                hidden_states, positions, per_layer_inputs, last, restore = (
                    self._yoco_truncate_to_last_tokens(
                        forward_batch, hidden_states, positions, per_layer_inputs
                    )
                )
"""
_NORM = "hidden_states, forward_batch, self.norm\n        )\n"
_SCATTER = """
        if last is not None:
            restore()
            hidden_states = hidden_states.new_zeros(whole).index_copy_(0, last, hidden_states)
"""


def _make() -> dict[str, Any]:
    """Return the methods, and a forward with the cut, defined in the model's own module."""
    forward = inspect.unwrap(MODEL.forward)
    source = textwrap.dedent(inspect.getsource(forward)).replace("\n", "\n    ")
    for place, added in ((_LOOP, _CUT), (_NORM, _SCATTER)):
        assert source.count(place) == 1, f"not once in {MODEL.__name__}.forward: {place!r}"
        source = source.replace(place, place + added.lstrip("\n"))
    source = source.replace(_LOOP, f"last = None\n        {_LOOP}")
    made: dict[str, Any] = {}
    scope = {**vars(gemma4_causal), "forward_context": compat.attention.forward_context}
    exec(METHODS + f"\nif True:\n    {source}", scope, made)
    for name in ("first_kv_shared_layer_idx", "fast_prefill_supported"):
        made[name] = property(made[name])
    return made


@contextmanager
def added() -> Iterator[None]:
    """Add it to SGLang in the ``with`` block, before this package is loaded.

    The package's helpers are removed, and no model is attached: an earlier test's may still be in
    memory.
    """
    made = _make()
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(states, "_attached", WeakSet())
        changed.setattr(compat.server, "ServerArgs", Arguments)
        for helper in pr27183.HELPERS:
            changed.delattr(MODEL, helper.__name__, raising=False)
        for name, one in made.items():
            changed.setattr(MODEL, name, one, raising=False)
        yield


@contextmanager
def started(checkpoint: Path, *, flag: bool) -> Iterator[Engine]:
    """Yield an engine of such an SGLang, its flag on or off, patched by this package."""
    load_plugins()  # so that wrapped methods are restored with the rest
    with added(), mock.patch.object(engine, "ServerArgs", Arguments):
        MODEL.forward = wrap_model_forward(MODEL.forward)
        yield Engine(checkpoint, **ENGINE, kv_sharing_fast_prefill=flag)
