"""Models and servers other than the shared engine, each with an engine of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.models import gemma3n_causal, gemma4_causal
from sglang.srt.models.gemma4_causal import Gemma4TextModel
from sglang.srt.server_args import ServerArgs

from harness.batches import new_rows
from harness.fixtures import Change, Checkpoints
from harness.forwards import ENGINE, TWO_PROMPTS, assert_fast, assert_stock, state_of
from harness.observe import run
from sglang_gemma4_reference.checkpoint import E2B_TINY, config_dict, write_checkpoint
from sglang_gemma4_reference.engine import Engine
from sglang_gemma4_yoco import compat, counters, log
from sglang_gemma4_yoco.admission import arguments, order
from sglang_gemma4_yoco.commands import preflight
from sglang_gemma4_yoco.commands.console import Report
from sglang_gemma4_yoco.core import state
from sglang_gemma4_yoco.refusal import ServerRefusal

pytestmark = pytest.mark.usefixtures("forgotten_reports")
EXPERTS = "rows of UnquantizedFusedMoEMethod may depend on each other"


def assert_never_touched(engine: Engine) -> None:
    """Assert that the model is unknown: SGLang's own forward runs, and nothing is counted."""
    assert state.find_state(engine.text_model) is None
    assert "init_forward_metadata" not in engine.runner.attn_backend.__dict__
    seen = run(engine, engine.schedule(TWO_PROMPTS), "1")
    total = new_rows(TWO_PROMPTS)
    assert seen.rows == [total] * len(engine.text_model.layers)
    assert counters.served.forwards == {}


def test_a_model_without_shared_layers_is_never_touched(checkpoints: Checkpoints) -> None:
    shape = replace(E2B_TINY, kv_shared_layers=0, layers=5)
    engine = Engine(checkpoints(shape), **ENGINE)
    assert order.find_model_reason(engine.text_model) == order.NO_SHARED_LAYERS
    assert_never_touched(engine)


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        # As the multi-token-prediction assistants are: no layer of theirs writes K and V.
        pytest.param(
            attrgetter("text_model.config"),
            "num_kv_shared_layers",
            E2B_TINY.layers,
            id="shared layers alone",
        ),
        # It may be a Gemma 4 with shared layers too, in the process of the one that is served.
        pytest.param(attrgetter("runner"), "is_draft_worker", True, id="a draft model"),
    ],
)
def test_another_model_is_never_touched(
    engine: Engine,
    restarted: Change,
    monkeypatch: pytest.MonkeyPatch,
    owner: Callable[[Engine], Any],
    name: str,
    value: Any,
) -> None:
    state_of(engine).close()
    with monkeypatch.context() as another:
        another.setattr(owner(engine), name, value)
        restarted()
        assert_never_touched(engine)
    restarted()
    assert_fast(engine)


@pytest.mark.parametrize(
    ("module", "name"), [(gemma4_causal, "Gemma4Attention"), (gemma3n_causal, "Gemma3nAttention")]
)
def test_a_model_of_which_sglang_lacks_a_name(
    engine: Engine,
    restarted: Change,
    monkeypatch: pytest.MonkeyPatch,
    tiny_checkpoint: Path,
    module: Any,
    name: str,
) -> None:
    """It runs as stock and says why, as doctor does; names of other models do not matter."""
    find_missing, report = compat.names.find_missing, Report()
    find_missing.cache_clear()
    with monkeypatch.context() as lacking:
        lacking.delattr(module, name)
        restarted()
        preflight._model(report, ServerArgs(model_path=str(tiny_checkpoint)))
        if module is gemma3n_causal:
            assert report.refusals == []
            assert_fast(engine)
        else:
            [reason] = report.refusals
            assert reason == str(state_of(engine).off_because)
            assert f" lacks {name}(...): prefills of Gemma4TextModel run as stock. " in reason
            assert_stock(engine, reason)
    find_missing.cache_clear()
    restarted()


class Derived(Gemma4TextModel):
    """An operator's own text model."""


def test_a_derived_text_model_that_is_trusted(
    engine: Engine,
    restarted: Change,
    setting: Change,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is cut like the model that it is derived from."""
    setting(trust=(__name__,))
    with monkeypatch.context() as derived:
        derived.setattr(engine.text_model, "__class__", Derived)
        restarted()
        assert_fast(engine)
    restarted()


def test_experts_in_the_tail_are_refused(tmp_path: Path) -> None:
    """No published Gemma 4 has both shared layers and a mixture of experts."""
    write_checkpoint(tmp_path, E2B_TINY, weights=False)
    config = config_dict(E2B_TINY)
    config["text_config"] |= {
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    engine = Engine(tmp_path, **ENGINE, load_format="dummy")
    assert engine.text_model.layers[-1].moe is not None
    assert state_of(engine).off_because == ServerRefusal(EXPERTS)
    assert_stock(engine, EXPERTS)


def test_an_embedding_server_is_refused(
    tiny_checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", log.logger.name):
        engine = Engine(tiny_checkpoint, **ENGINE, is_embedding=True)
    assert not engine.runner.is_generation
    said = [line for line in caplog.messages if "fast prefill" in line]
    assert [line for line in said if "is installed" not in line] == []
    assert state_of(engine).backends is None
    assert_stock(engine, arguments.EMBEDDINGS)
