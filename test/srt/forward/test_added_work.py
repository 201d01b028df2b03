"""The host's overhead of a forward besides its layers: everything it reads is read once.

On a GPU the host decides how long a short prompt takes, and between the plan and the first layer
nothing is queued: time lost there makes the answer later.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from harness.audited import Operations, audited, functions_entered
from harness.batches import BATCHES, batch_of
from harness.forwards import TWO_PROMPTS, assert_fast, outcomes
from harness.observe import run
from harness.stand_ins import tail_of
from sglang_gemma4_reference import releases
from sglang_gemma4_reference.engine import Engine
from sglang_gemma4_yoco import counters, log, settings
from sglang_gemma4_yoco.core import eligibility
from sglang_gemma4_yoco.loading import runner_setup
from sglang_gemma4_yoco.models import gemma4

pytestmark = pytest.mark.usefixtures("forgotten_reports")

PACKAGE = Path(settings.__file__).parent
NOTHING_TO_SKIP = batch_of((5, 1), (0, 1))


# ---------------------------------------------------------------- files, modules, variables


@pytest.mark.parametrize("name", BATCHES)
def test_a_fast_forward_opens_no_file(engine: Engine, name: str) -> None:
    """No file is opened and nothing imported from planning to logits; Triton: ``test_planning``."""
    scheduled = engine.schedule(BATCHES[name])
    seen = {}
    for switched in ("0", "1", "0", "1"):
        with audited() as seen[switched]:
            rows = run(engine, scheduled, switched).rows
        assert (rows[-1] < rows[0]) == (switched == "1")
    assert seen["1"] - seen["0"] == Counter()


# ---------------------------------------------------------------- the gate


@pytest.mark.parametrize("name", [*BATCHES, "nothing to skip"])
def test_the_gate_runs_once(engine: Engine, name: str) -> None:
    scheduled = engine.schedule(BATCHES.get(name, NOTHING_TO_SKIP))
    with mock.patch.object(
        eligibility, "check_eligibility", wraps=eligibility.check_eligibility
    ) as ran:
        rows = run(engine, scheduled, "1").rows
    assert (rows[-1] < sum(scheduled.extend_lens)) == (name in BATCHES)
    assert ran.call_count == 1


# ---------------------------------------------------------------- copies to the device


@pytest.mark.parametrize("name", BATCHES)
def test_all_that_the_host_knows_travels_at_once(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """All values reach the device in one copy. It recomputes no known value; lengths are cast
    there to the batch's type, all at once."""
    forward_batch = releases.forward_batch(engine.schedule(BATCHES[name]), engine.runner)
    copied: list[tuple[Any, ...]] = []
    stock = torch.Tensor.to

    def noting(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        copied.append((*args, kwargs))
        return stock(tensor, *args, **kwargs)

    with Operations() as ran, monkeypatch.context() as noted:
        noted.setattr(torch.Tensor, "to", noting)
        tail = tail_of(forward_batch)
        assert tail.fields
    assert copied == [(torch.device("cpu"), {"non_blocking": True}), (torch.int32, {})]
    names = [name for name, _ in ran.calls]
    assert {"cumsum", "sub", "arange", "ones_like"}.isdisjoint(names)
    assert names.count("_to_copy") == 1
    # Else Triton compiles another kernel in the middle of a forward.
    for name in ("extend_seq_lens", "extend_prefix_lens", "extend_start_loc"):
        column = tail.fields[name]
        assert isinstance(column, torch.Tensor)
        assert column.data_ptr() % 16 == 0
    # Input ids, and the slots of suffixes: those are on the device only.
    assert names.count("index_select") == (1 if tail.decodes else 2)


# ---------------------------------------------------------------- built at start


def test_the_donors_kernels_are_compiled_at_start(engine: Engine) -> None:
    """They are compiled for few rows and for many: SGLang uses another kernel from 257 rows on."""
    with mock.patch.object(
        gemma4, "compute_keys_and_values", wraps=gemma4.compute_keys_and_values
    ) as projected:
        engine.runner.init_attention_backends()
    few, many = runner_setup._FEW, runner_setup._MANY
    assert 1 < few <= 256 < many
    assert [len(call.args[1]) for call in projected.call_args_list] == [few, many]
    assert_fast(engine)


def test_kernels_that_cannot_be_compiled_are_no_servers_end(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def impossible(*_: Any) -> None:
        raise RuntimeError("no compiler")

    with monkeypatch.context() as broken:
        broken.setattr(gemma4, "compute_keys_and_values", impossible)
        engine.runner.init_attention_backends()
    [record] = [r for r in caplog.records if r.name == log.logger.name]
    assert "no compiler" in record.getMessage()
    assert record.exc_info
    assert_fast(engine)


# ---------------------------------------------------------------- size of the call tree


def test_a_cut_prefill_enters_few_functions_of_the_package(engine: Engine) -> None:
    """It enters at most 65 functions; on Triton one more, which allocates windows."""
    entered = functions_entered(engine, TWO_PROMPTS)
    assert outcomes() == {counters.TAIL_EAGER: 2}
    assert len(entered) <= 64, sorted(entered)
    assert len({file for file, *_ in entered}) <= 15
