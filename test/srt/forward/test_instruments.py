"""SGLang's NaN and out-of-bounds checks on the fast path find what they find in stock.

Instruments of a server, such as its profiler, are in ``server/test_http_features``; the dumper and
the KV canary, with which a server runs as stock, in ``unit/test_limits``.
"""

from __future__ import annotations

from contextlib import ExitStack
from unittest import mock

import pytest
from sglang.srt.environ import envs
from sglang.srt.mem_cache import memory_pool
from sglang.srt.utils.async_probe import maybe_detect_oob

from harness.batches import BATCHES
from harness.forwards import CHUNKS, assert_fast
from harness.layer_rows import FIRST_SHARED
from harness.observe import run
from sglang_gemma4_reference.engine import Engine

pytestmark = pytest.mark.usefixtures("forgotten_reports")


def test_checks_of_numbers_and_indices(engine: Engine) -> None:
    """``SGLANG_ENABLE_ASYNC_ASSERT`` and its relatives raise where SGLang reads or writes."""
    with ExitStack() as stack:
        for variable, value in (
            (envs.SGLANG_ENABLE_ASYNC_ASSERT, True),
            (envs.SGLANG_ENABLE_NAN_LOGITS_CHECK, True),
            (envs.SGLANG_INVARIANT_CHECK, 2),
        ):
            stack.enter_context(variable.override(value))
        checks = mock.patch.object(memory_pool, "maybe_detect_oob", wraps=maybe_detect_oob)
        for prompts in (*BATCHES.values(), CHUNKS):
            batch = engine.schedule(prompts)
            with checks as checked:
                run(engine, batch, "1")
            # One per layer that writes K and V, the donor included.
            assert checked.call_count == FIRST_SHARED
            assert_fast(engine, prompts)
