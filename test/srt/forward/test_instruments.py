"""SGLang's instruments on the fast path: tools that check, dump, record or count a forward.

Each either finds what it finds in stock, or refuses the server. Those of a server, such as its
profiler, are in ``server/test_http_features``; the KV canary is in ``unit/test_limits``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from unittest import mock

import pytest
import torch
from packaging.version import Version
from sglang.srt.debug_utils import dumper as dumpers
from sglang.srt.environ import envs
from sglang.srt.mem_cache import memory_pool
from sglang.srt.utils.async_probe import maybe_detect_oob

from harness.batches import BATCHES, new_rows
from harness.forwards import CHUNKS, ENGINE, TWO_PROMPTS, assert_fast, outcomes
from harness.layer_rows import FIRST_SHARED
from harness.observe import run
from sglang_gemma4_reference.engine import Engine
from sglang_gemma4_yoco import compat
from sglang_gemma4_yoco.loading import unsupported

pytestmark = [
    pytest.mark.skipif(
        Version(version("sglang")) < compat.release.LAST_TESTED,
        reason="the instruments of SGLang 0.5.23",
    ),
    pytest.mark.usefixtures("forgotten_reports"),
]

# ---------------------------------------------------------------- dumps


@pytest.fixture
def dumping(tmp_path: Path) -> Iterator[Callable[..., None]]:
    """Yield a function that configures SGLang's dumper, as its environment variables do."""
    dumper = dumpers.dumper
    before = dumper._config
    common = {"dir": str(tmp_path), "exp_name": "found", "non_intrusive_mode": "all"}
    yield lambda **values: dumper.configure(**common, enable_output_console=False, **values)
    dumper.reset()
    dumper._config = before
    vars(dumper).pop("_http_manager", None)


def test_the_dumper_finds_all_rows(
    tiny_checkpoint: Path, tmp_path: Path, dumping: Callable[..., None]
) -> None:
    """It does though it is turned on while the server serves; from the start: ``test_limits``."""
    dumper = dumpers.dumper
    dumping(server_port="reuse")
    engine = Engine(tiny_checkpoint, **ENGINE)
    # The scheduler's answer to /dumper/configure.
    dumper._http_manager.handle_request(method="configure", body={"enable": True})
    total = new_rows(TWO_PROMPTS)
    batch = engine.schedule(TWO_PROMPTS)
    dumper.configure(exp_name="prefill")
    assert run(engine, batch, "1").rows == [total] * len(engine.text_model.layers)
    shapes = []
    for file in (tmp_path / "prefill").iterdir():
        if re.search("layers\\.\\d+\\.mlp\\.output", file.name):
            shapes.append(torch.load(file)["value"].shape[0])
    assert shapes == [total] * len(engine.text_model.layers)
    assert outcomes() == {unsupported.DUMPER: 1}


# ---------------------------------------------------------------- checks of values and indices


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
            # The donor's K and V too, before its tail.
            assert checked.call_count == FIRST_SHARED
            assert_fast(engine, prompts)
