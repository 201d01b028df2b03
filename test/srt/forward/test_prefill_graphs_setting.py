"""Prefill graphs that ``SGLANG_GEMMA4_YOCO_PREFILL_GRAPHS=1`` turns on: resolved, kept or dropped.

SGLang itself resolves the arguments; the reference platform answers that captured prefills are the
default, as on CUDA. ``server/test_exits_server`` starts a server so.
"""

from __future__ import annotations

import gc
import itertools
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from sglang.srt.arg_groups import resolution_hooks
from sglang.srt.arg_groups.model_override_base import model_config_of
from sglang.srt.arg_groups.overrides import declare_resolution, resolution_result
from sglang.srt.configs import model_config
from sglang.srt.environ import envs
from sglang.srt.model_executor import cuda_graph_config
from sglang.srt.model_executor.runner.eager_runner import EagerRunner
from sglang.srt.model_executor.runner_backend.breakable_cuda_graph_backend import (
    BreakableCudaGraphBackend,
)
from sglang.srt.model_executor.runner_utils.pool import get_global_graph_memory_pool
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import prepare_server_args

from harness.batches import batch_of
from harness.decode_graphs import record_tail
from harness.fixtures import Said
from harness.forwards import ENGINE, InjectedError, state_of
from harness.prefill_exits import BUCKETS, ROWS, close, run
from sglang_gemma4_reference import gemma3n
from sglang_gemma4_reference import prefill_graphs as graphs_on_a_cpu
from sglang_gemma4_reference.checkpoint import PRESETS, assistant_config_dict, write_checkpoint
from sglang_gemma4_reference.engine import Engine
from sglang_gemma4_reference.prefill_graphs import RecordedPrefill
from sglang_gemma4_yoco import compat, counters, metrics, settings
from sglang_gemma4_yoco.admission import order, runner_parts
from sglang_gemma4_yoco.checking import self_check
from sglang_gemma4_yoco.checking.rounding import make_defect
from sglang_gemma4_yoco.checking.self_check import CHECK_FAILED, CheckResult
from sglang_gemma4_yoco.core import ranks
from sglang_gemma4_yoco.counters import TAIL_EAGER
from sglang_gemma4_yoco.models import registry
from sglang_gemma4_yoco.prefill_exits import exit_setup
from sglang_gemma4_yoco.refusal import ServerRefusal
from sglang_gemma4_yoco.startup import arguments_resolved, prefills_captured
from sglang_gemma4_yoco.startup.prefills_captured import NOT_CAPTURED

pytestmark = pytest.mark.usefixtures("forgotten_reports", "outside_of_a_server", "hooks")
STEP = "handle_cuda_graph_config"
BREAKABLE, DISABLED = "breakable", "disabled"
ARE_ON, NO_EFFECT = "turns SGLang's CUDA graphs on for prefills", "has no effect"


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Yield SGLang's hooks of the step, with ours alone, where it captures prefills by default.

    The package is as if it had been loaded with the setting.
    """
    load_plugins()  # first, so that it wraps SGLang's own methods
    monkeypatch.setenv(settings.name_of("prefill_graphs"), "1")
    registered: dict[str, list[Any]] = {}
    monkeypatch.setattr(resolution_hooks, "_HOOKS", registered)
    monkeypatch.setattr(cuda_graph_config, "default_prefill_backend", lambda: BREAKABLE)
    with settings.changed(prefill_graphs=True):
        capture = prefills_captured.keep_if_cut(compat.ModelRunner.init_cuda_graphs)
        monkeypatch.setattr(compat.ModelRunner, "init_cuda_graphs", capture)
        arguments_resolved.register_hook()
        yield registered[STEP]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with models of the real dimensions, without weights, by name."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("E2B", "E4B"):
        write_checkpoint(folder / name, PRESETS[name], weights=False)
    for name, changed in (("26B", {"num_kv_shared_layers": 0}), ("all shared", {})):
        config = json.loads((folder / "E2B" / "config.json").read_text())
        config["text_config"] |= changed or {"num_kv_shared_layers": 35}
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    text_only = config | {"language_model_only": True}
    text_only["text_config"] = config["text_config"] | {"num_kv_shared_layers": 20}
    (folder / "text only").mkdir()
    (folder / "text only" / "config.json").write_text(json.dumps(text_only))
    (folder / "assistant").mkdir()
    assistant = json.dumps(assistant_config_dict(PRESETS["E2B"]))
    (folder / "assistant" / "config.json").write_text(assistant)
    gemma3n.write_config(folder / "Gemma 3n", gemma3n.E2B_TINY, multimodal=True)
    return folder


def resolve(model: Path, *flags: str) -> Any:
    """Return what SGLang makes of these flags: its ``ServerArgs``."""
    with mock.patch.object(logging, "basicConfig"):  # it removes pytest's handler
        args = prepare_server_args(["--model-path", str(model), "--device", "cpu", *flags])
    args.resolve_once()
    return args


def prefill_of(args: Any) -> tuple[str, int, int]:
    """Return the backend of captured prefills, the tokens of the largest, and their number."""
    prefill = resolution_result(args, "cuda_graph_config").prefill
    return prefill.backend, max(prefill.bs), len(prefill.bs)


# ---------------------------------------------------------------- the launcher's side


@pytest.mark.parametrize(
    ("model", "flags", "largest", "number"),
    [
        ("E2B", "", 2048, 42),
        ("E4B", "", 1024, 38),
        ("text only", "", 2048, 42),
        ("E2B", "--chunked-prefill-size=512", 512, 30),
        ("E2B", "--chunked-prefill-size=-1", 2048, 42),
        ("E2B", "--cuda-graph-max-bs-prefill=128", 128, 14),
        ("E2B", "--cuda-graph-bs-prefill=4096", 4096, 1),
        ("E2B", '--cuda-graph-config={"prefill":{"max_bs":64}}', 64, 10),
        ("E2B", '--cuda-graph-config={"prefill":{"bs":[64]}}', 64, 1),
        ("E2B", "--enable-mixed-chunk", 2048, 42),
        ("E2B", "--tp-size=2", 2048, 42),
        ("E2B", "--enable-hierarchical-cache", 2048, 42),
        ("E2B", "--disaggregation-mode=prefill", 2048, 42),
        ("E2B", "--speculative-algorithm=NGRAM", 2048, 42),
        ("E2B", "--speculative-algorithm=NEXTN --speculative-draft-model-path=", 2048, 42),
    ],
)
def test_prefill_graphs_that_it_turns_on(
    models: Path, said: Said, model: str, flags: str, largest: int, number: int
) -> None:
    """SGLang's list of architectures and its config of the model are as before."""
    given = flags.split()
    if "draft" in flags:
        given[-1] += str(models / "assistant")
        given += ["--speculative-num-steps=2", "--speculative-eagle-topk=1"]
        given += ["--speculative-num-draft-tokens=3"]
    args = resolve(models / model, *given)
    assert prefill_of(args) == (BREAKABLE, largest, number)
    [line] = said(logging.WARNING)
    assert ARE_ON in line
    assert not model_config_of(args).is_multimodal_breakable_cuda_graph_supported
    assert not model_config.is_multimodal_breakable_cuda_graph_supported(
        ["Gemma4ForConditionalGeneration"]
    )


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--cuda-graph-backend-prefill=disabled", arguments_resolved.NOT_CHOSEN),
        ("--cuda-graph-backend-prefill=breakable", arguments_resolved.NOT_CHOSEN),
        ('--cuda-graph-config={"prefill":{"backend":"disabled"}}', arguments_resolved.NOT_CHOSEN),
        ("--disable-cuda-graph", arguments_resolved.NOT_CHOSEN),
        ("--disable-prefill-cuda-graph", arguments_resolved.NOT_CHOSEN),
        ("--disaggregation-mode=decode", arguments_resolved.NOT_CHOSEN),
        ("--enable-lora --max-lora-rank=8 --lora-target-modules=all", "LoRA"),
        ("--pp-size=2", "pipeline parallelism"),
        ("--enable-deterministic-inference", "deterministic inference"),
        ("--speculative-algorithm=EAGLE3", "speculative decoding"),
        ("--speculative-algorithm=STANDALONE", arguments_resolved.STANDALONE),
    ],
)
def test_flags_with_which_it_has_no_effect(
    hooks: list[Any], models: Path, said: Said, flags: str, reason: str
) -> None:
    """SGLang resolves them, or refuses them, as without the package."""
    given = flags.split()
    if "speculative" in flags:
        given.append(f"--speculative-draft-model-path={models / 'E4B'}")
    assert resolved(models, *given) == stock_resolves(hooks, models, *given)
    [line] = said(logging.WARNING)
    assert NO_EFFECT in line
    assert reason in line


def resolved(models: Path, *flags: str) -> Any:
    """Return the resolved arguments of a server of E2B, or SGLang's error."""
    try:
        return resolve(models / "E2B", "--random-seed=1", *flags).resolved_dict()
    except ValueError as refused:
        return str(refused)


def stock_resolves(hooks: list[Any], models: Path, *flags: str) -> Any:
    """Return the same without the package's hook."""
    ours = list(hooks)
    hooks.clear()
    found = resolved(models, *flags)
    hooks += ours
    return found


@pytest.mark.parametrize("model", ["26B", "all shared", "Gemma 3n"])
def test_models_that_it_does_not_concern(models: Path, said: Said, model: str) -> None:
    assert prefill_of(resolve(models / model))[0] == DISABLED
    assert said() == []


def test_a_platform_without_captured_prefills(
    models: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On AMD and XPU they are off by default."""
    monkeypatch.setattr(cuda_graph_config, "default_prefill_backend", lambda: DISABLED)
    assert prefill_of(resolve(models / "E2B"))[0] == DISABLED
    assert arguments_resolved.NOT_CUDA in said(logging.WARNING)[0]


def test_what_else_is_known_before_the_start(models: Path, said: Said) -> None:
    spans = {
        compat.server.POSITIONS_VARIABLE: (
            envs.SGLANG_GEMMA_OUT_OF_PLACE_POSITION_MUTATION.override(True)
        ),
        arguments_resolved.NOT_THERE: (
            mock.patch.object(compat.release, "has_exits", return_value=False)
        ),
        "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING": envs.SGLANG_ENABLE_POST_CAPTURE_KV_SIZING.override(
            True
        ),
        # With --enable-memory-saver their capture then raises, which ends the start of several
        # ranks.
        "SGLang's memory saver": envs.SGLANG_MEMORY_SAVER_CUDA_GRAPH.override(True),
    }
    for span in spans.values():
        with span:
            assert prefill_of(resolve(models / "E2B"))[0] == DISABLED
    for reason, line in zip(spans, said(logging.WARNING), strict=True):
        assert reason in line


@pytest.mark.parametrize(
    "changed", [{settings.SWITCH: "0"}, {settings.name_of("prefill_graphs"): "0"}]
)
def test_a_later_server_of_the_program(
    models: Path,
    said: Said,
    monkeypatch: pytest.MonkeyPatch,
    changed: dict[str, str],
) -> None:
    """Its processes would run as stock, which cannot capture these prefills."""
    assert prefill_of(resolve(models / "E2B"))[0] == BREAKABLE
    for name, value in changed.items():
        monkeypatch.setenv(name, value)
    assert prefill_of(resolve(models / "E2B"))[0] == DISABLED
    assert len(said(logging.WARNING)) == 1


@pytest.mark.parametrize("setting", [None, False])
def test_without_the_setting_nothing_is_registered(setting: bool | None) -> None:
    before = {name: list(hooks) for name, hooks in resolution_hooks._HOOKS.items()}
    with settings.changed(prefill_graphs=setting):
        arguments_resolved.register_hook()
    assert before == resolution_hooks._HOOKS


@pytest.mark.parametrize("is_last", [True, False])
@pytest.mark.parametrize("backend", [BREAKABLE, DISABLED, "full"])
def test_another_plugins_hook(
    hooks: list[Any], models: Path, said: Said, is_last: bool, backend: str
) -> None:
    """Of the same step: one that only wraps it, and ones that name a backend."""

    def other(args: Any, previous: Any) -> None:
        previous(args)
        if backend != BREAKABLE:
            config = resolution_result(args, "cuda_graph_config")
            config = cuda_graph_config.with_phase(config, "prefill", backend=backend)
            declare_resolution(args, "another plugin", cuda_graph_config=config)

    hooks.insert(len(hooks) * is_last, other)
    assert prefill_of(resolve(models / "E2B"))[0] == backend
    [line] = said(logging.WARNING)
    assert (ARE_ON in line) == (backend == BREAKABLE or is_last)


def test_a_failure_costs_a_line(models: Path, said: Said) -> None:
    """Before SGLang's step, and after it: it runs once."""
    for name, expected in (("model_config_of", DISABLED), ("bound_prefills", BREAKABLE)):
        with mock.patch.object(compat.resolution, name, side_effect=InjectedError):
            args = resolve(models / "E2B")
        assert prefill_of(args)[0] == expected
    assert len(said(logging.ERROR)) == 1  # of one place
    assert compat.resolution.turns_prefills_on(args)


def test_a_failure_of_sglangs(hooks: list[Any], models: Path) -> None:
    """It is raised, and the config of the model is restored."""
    configs = []

    def fail(args: Any, _: Any) -> None:
        configs.append(model_config_of(args))
        assert configs[0].is_multimodal_breakable_cuda_graph_supported
        raise InjectedError

    hooks.insert(0, fail)
    with pytest.raises(InjectedError):
        resolve(models / "E2B")
    assert not configs[0].is_multimodal_breakable_cuda_graph_supported


# ---------------------------------------------------------------- the scheduler's side


SIZES: dict[str, Any] = {"cuda_graph_bs_decode": [ROWS], "cuda_graph_bs_prefill": BUCKETS}
PROMPT = batch_of((0, 64))


def start(checkpoint: Path) -> Engine:
    """Start an engine as a server is started; its decode steps stay eager."""
    with graphs_on_a_cpu.recordable():
        return Engine(checkpoint, **ENGINE, **SIZES)


def serve(engine: Engine) -> counters.Outcome:
    """Serve a prompt like the stock model; return the outcome."""
    batch = engine.schedule(PROMPT)
    stock, fast = run(engine, batch, eagerly=True), run(engine, batch, fast=True)
    close(fast.logits, stock.logits)
    [outcome] = fast.outcomes
    return outcome


def captured_prefills() -> int:
    """Return the number of captured prefills in this process."""
    gc.collect()
    return sum(isinstance(one, RecordedPrefill) for one in gc.get_objects())


def start_eagerly(checkpoint: Path) -> Engine:
    """Start an engine; assert that it keeps no captured prefill."""
    before = captured_prefills()
    engine = start(checkpoint)
    assert isinstance(engine.runner.prefill_cuda_graph_runner, EagerRunner)
    assert captured_prefills() == before
    return engine


def test_an_engine_with_the_setting(tiny_checkpoint: Path, said: Said) -> None:
    engine = start(tiny_checkpoint)
    assert compat.resolution.turns_prefills_on()
    record_tail(engine, ROWS)
    assert serve(engine) == counters.EXIT_CAPTURED
    assert str(state_of(engine).report.exits).startswith("open after ")
    # A draft model, whose runner captures after this one, is not cut, and drops nothing.
    prefills_captured.keep_if_cut(lambda _: None)(SimpleNamespace(is_draft_worker=True))
    assert compat.server.get_cuda_graph_backend("prefill") == BREAKABLE
    assert said(logging.ERROR) == []


REFUSAL = ServerRefusal("refused by a test")
FAILED_CHECK = CheckResult(make_defect("a test"))
UNCHECKED = CheckResult(unchecked="by a test")


@pytest.mark.parametrize(
    ("owner", "name", "changed", "reason", "outcome"),
    [
        (runner_parts, "find_backend_reason", lambda *_: REFUSAL, REFUSAL.text, REFUSAL),
        (order, "build_pair", lambda *_: None, runner_parts.NO_TAIL.text, runner_parts.NO_TAIL),
        (ranks, "find_difference", lambda _: ranks.NOT_ALIKE, ranks.NOT_ALIKE, None),
        (registry, "list_served_models", lambda _: [], metrics.NO_MODEL, None),
        (self_check, "check_model", lambda *_: FAILED_CHECK, CHECK_FAILED.text, CHECK_FAILED),
        (self_check, "check_model", lambda *_: UNCHECKED, UNCHECKED.refusal.text, None),
        (exit_setup, "check_exits", lambda *_: FAILED_CHECK, "exits are closed", TAIL_EAGER),
    ],
    ids=[
        *("attention backend", "no backend for the tail", "ranks differ", "no model"),
        *("self-check", "no self-check", "exits"),
    ],
)
def test_what_is_found_at_start(
    tiny_checkpoint: Path,
    said: Said,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    changed: Any,
    reason: str,
    outcome: counters.Outcome | None,
) -> None:
    """Nothing is captured, or what was is freed; SGLang's eager runner serves."""
    monkeypatch.setattr(owner, name, changed)
    engine = start_eagerly(tiny_checkpoint)
    assert any("SGLang keeps no captured prefill" in line and reason in line for line in said())
    if outcome is not None:
        assert serve(engine) == outcome


@pytest.mark.parametrize("at", [1, 3])
def test_a_capture_that_fails(
    tiny_checkpoint: Path, said: Said, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """The server starts without captured prefills, which are freed first, and cuts prefills."""
    stock, captures = BreakableCudaGraphBackend.capture_one, itertools.count(1)
    capture, drop = compat.server.PrefillCudaGraphRunner.capture, compat.captured_prefills.drop
    before, alive = captured_prefills(), list[int]()

    def capture_one(*args: Any, **kwargs: Any) -> None:
        if next(captures) == at:
            raise torch.cuda.OutOfMemoryError("injected")
        stock(*args, **kwargs)

    def capture_all(runner: Any) -> None:
        try:
            capture(runner)
        except RuntimeError as error:  # as SGLang does for decode steps
            raise Exception("failed") from error

    def count_and_drop(runner: Any) -> None:
        alive.append(captured_prefills())
        drop(runner)

    monkeypatch.setattr(BreakableCudaGraphBackend, "capture_one", capture_one)
    monkeypatch.setattr(compat.server.PrefillCudaGraphRunner, "capture", capture_all)
    monkeypatch.setattr(compat.captured_prefills, "drop", count_and_drop)
    engine = start_eagerly(tiny_checkpoint)
    assert alive == [before]
    assert get_global_graph_memory_pool() is None  # no other capture may use it
    assert any(NOT_CAPTURED in line for line in said(logging.WARNING))
    assert serve(engine) == TAIL_EAGER


def test_a_capture_that_fails_on_one_rank(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others wait for it: its error ends the start."""
    monkeypatch.setattr(
        BreakableCudaGraphBackend, "capture_one", mock.Mock(side_effect=InjectedError)
    )
    monkeypatch.setattr(compat.server, "is_single_rank", lambda: False)
    with pytest.raises(InjectedError):
        start(tiny_checkpoint)
