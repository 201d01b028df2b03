"""SGLang's instruments beside the fast path: what checks, dumps, records or counts a forward.

Each either finds what it finds in stock, or refuses the server. Those of a server, such as its
profiler, are in ``server/test_http_features``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from packaging.version import Version
from sglang.srt.debug_utils import dumper as dumpers
from sglang.srt.environ import envs
from sglang.srt.kv_canary.runner import canary_manager, future_tensor
from sglang.srt.kv_canary.single_forward_manager import manager
from sglang.srt.mem_cache import memory_pool
from sglang.srt.utils.async_probe import maybe_detect_oob

from harness.batches import BATCHES, batch_of, new_rows
from harness.checking import audited
from harness.forwards import CHUNKS, ENGINE, TWO_PROMPTS, assert_fast, state_of
from harness.layer_rows import FIRST_SHARED
from harness.observe import run
from sglang_gemma4_reference.engine import Engine
from sglang_gemma4_yoco import compat, counters
from sglang_gemma4_yoco.checking import requests
from sglang_gemma4_yoco.loading import limits, start

pytestmark = [
    pytest.mark.skipif(
        Version(version("sglang")) < compat.release.LAST_TESTED,
        reason="the instruments of SGLang 0.5.23",
    ),
    pytest.mark.usefixtures("forgotten_reports"),
]

# ---------------------------------------------------------------- the KV canary


class OnHost:
    """What is copied to the host on a stream of its own, where there is no such stream."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def wait(self) -> Any:
        return self._data

    @classmethod
    def copied(cls, device: Any, **_: Any) -> OnHost:
        if isinstance(device, dict):
            return cls({name: cls.cloned(value) for name, value in device.items()})
        return cls(cls.cloned(device))

    @staticmethod
    def cloned(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.clone()
        return value


class Phases:
    """SGLang's ``SimplePhaseChecker``, whose kernel needs a GPU: it raises where that asserts."""

    def __init__(self, *, initial_phase: int, **_: Any) -> None:
        self._phase = self._first = int(initial_phase)

    def enable_assert(self) -> None:
        self._phase = self._first

    def update(self, *, expect_phase: int, next_phase: int, **_: Any) -> None:
        assert self._phase == expect_phase
        self._phase = int(next_phase)


@pytest.fixture(scope="module")
def canary_on_a_cpu() -> Iterator[None]:
    """The canary's own code, with plain PyTorch where it needs a GPU's streams and memory.

    Of Gemma 4 it needs unchanged positions: without that variable it finds violations in stock.
    """
    with ExitStack() as stack:
        stack.enter_context(envs.SGLANG_GEMMA_OUT_OF_PLACE_POSITION_MUTATION.override(True))
        copies = staticmethod(OnHost.copied)
        for owner, name, stand_in in (
            (canary_manager, "create_device_stream", lambda _: None),
            (future_tensor.FutureTensors, "device_to_host", copies),
            (manager, "SimplePhaseChecker", Phases),
        ):
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        yield


def violations(engine: Engine) -> int:
    """How many violations the canary has found so far."""
    return int(engine.runner.canary_manager._device_state.violation_log.violation_write_index)


def verified(engine: Engine) -> int:
    """How many slots the canary has looked at so far."""
    return int(engine.runner.canary_manager._device_state.slot_run_counters.sum())


@pytest.fixture(scope="module", params=["raise", pytest.param("log", marks=pytest.mark.release)])
def watched(request: pytest.FixtureRequest, tiny_checkpoint: Path, canary_on_a_cpu: None) -> Engine:
    """An engine whose slots a canary watches, and the K and V in them."""
    return Engine(tiny_checkpoint, **ENGINE, kv_canary=request.param, kv_canary_real_data="all")


def test_the_check_at_start_beside_a_canary(watched: Engine) -> None:
    """The check is made, and the canary takes no synthetic prefix for a violation."""
    facts = start.get_state(watched.text_model).report["check"]
    assert facts["unchecked"] is None
    assert facts["compared"] is not None
    assert (violations(watched), verified(watched)) == (0, 0)
    watched.runner.canary_manager.mark_init_finished()  # as the scheduler does next


@pytest.mark.parametrize("prompts", [*BATCHES.values(), CHUNKS])
def test_cut_prefills_beside_a_canary(watched: Engine, prompts: list[Any]) -> None:
    before = verified(watched)
    assert_fast(watched, prompts)
    assert violations(watched) == 0
    assert verified(watched) > before


def test_audits_beside_a_canary(watched: Engine) -> None:
    """They write the donor's K and V twice more, within the forward that the canary watches."""
    with audited(watched):
        run(watched, watched.schedule(batch_of((30, 40))), "1")
    assert (counters.audits.agree, counters.audits.differ) == (1, 0)
    assert violations(watched) == 0


def test_a_canary_is_as_it_was_after_synthetic_requests(watched: Engine) -> None:
    """Also where these fail."""
    runner, canary = watched.runner, watched.runner.canary_manager
    with (
        pytest.raises(ZeroDivisionError),
        requests.make_synthetic_requests(runner, state_of(watched)),
    ):
        assert runner.canary_manager is None
        raise ZeroDivisionError
    assert runner.canary_manager is canary


def test_a_canary_finds_what_it_looks_for(
    watched: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """K of a prefix that somebody has overwritten, read by prefills that are cut."""
    batch = watched.schedule(batch_of((30, 40)))
    # Of each pool it looks at the first layer's K; in the full one that is the donor.
    watched.runner.token_to_kv_pool.full_kv_pool.k_buffer[0] += 1
    found = ""
    for _ in range(3):  # it reports a step later
        try:
            run(watched, batch, "1")
        except RuntimeError as raised:
            found += str(raised)
    assert counters.forwards[counters.TAIL_EAGER] == 3
    assert "real_kv" in found + caplog.text
    assert violations(watched) > 0


# ---------------------------------------------------------------- dumps


@pytest.fixture
def dumping(tmp_path: Path) -> Iterator[Callable[..., None]]:
    """Have SGLang's dumper configured so, as by its environment variables."""
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
    """Though it is turned on while the server serves; on from the start: ``unit/test_limits``."""
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
    assert counters.forwards == {limits.DUMPER: 1}


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
