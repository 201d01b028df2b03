"""A pytest plugin: the tests of ``test/srt/gpu`` run on the rehearsal's device, values computed.

    PYTHONPATH=test/srt python scripts/run_tests.py --gpu -- -p rehearsal.gpu_tests

The model is a small one in place of E2B. Tests that need CUPTI, the profiler's library, are left
out by name. What they print is no measurement: the device is called ``rehearsal``.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Any

from rehearsal import device

device.load_runtime()
os.environ["SGLANG_PLUGINS"] = "gemma4_yoco"

import dataclasses  # noqa: E402 - after the runtime and the environment

import pytest  # noqa: E402

NEEDS_CUPTI = "test/srt/gpu/test_on_a_gpu.py::test_a_replay_is_one_launch"
#: Dimensions of the model in place of E2B, whose lengths and window the tests need.
SMALL: dict[str, Any] = {
    "dtype": "bfloat16",
    "layers": 10,
    "kv_shared_layers": 5,
    "sliding_per_full": 1,
    "head_dim": 128,
    "global_head_dim": 256,
    "vocab_size": 4096,
    "sliding_window": 512,
}
_session = ExitStack()


def pytest_configure(config: pytest.Config) -> None:
    """Leave out what cannot run, and enter the mode for the whole session."""
    config.option.deselect = [NEEDS_CUPTI]
    from rehearsal import kernels, operations
    from sglang_gemma4_reference import checkpoint
    from sglang_gemma4_reference.engine import Engine

    _session.enter_context(operations.computed(floats=True))
    checkpoint.PRESETS["E2B"] = dataclasses.replace(checkpoint.E2B_TINY, **SMALL)
    stock = Engine.__init__

    def build(self: Engine, *args: Any, **arguments: Any) -> None:
        kernels.install()
        few: dict[str, Any] = {"cuda_graph_bs_decode": [1, 4], "mem_fraction_static": 0.5}
        stock(self, *args, **(few | arguments))

    Engine.__init__ = build  # type: ignore[method-assign]


def pytest_unconfigure() -> None:
    _session.close()
