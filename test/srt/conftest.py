"""Markers, order and scheduling of the tests, and their shared fixtures."""

from __future__ import annotations

import functools
import gc
import inspect
import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from xdist.scheduler import LoadScopeScheduling

# SGLang chooses its platform when it is first imported, in this process as in a server's.
if os.environ.get("YOCO_TEST_GPU") != "1":
    os.environ.setdefault("SGLANG_PLATFORM", "gemma4_cpu")
# Tensors this small gain nothing from threads that wait for each other on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Tests need no model hub: without a network, a lookup would be retried for 45 seconds.
os.environ["HF_HUB_OFFLINE"] = "1"

# Answers must be equal wherever a row can be skipped, whether that pays or not. This overrides the
# developer's environment; unit/test_gate and server/test_defaults test the default.
os.environ["SGLANG_GEMMA4_YOCO_MIN_SKIPPED_ROWS"] = "1"
if os.environ.get("TRITON_INTERPRET") == "1":
    # In the interpreter the self-check takes as long as a test; test_any_backend_triton runs it
    # explicitly. An untested release requires it.
    untested = os.environ.get("SGLANG_GEMMA4_YOCO_UNTESTED", "0")
    os.environ["SGLANG_GEMMA4_YOCO_SELF_CHECK"] = untested

from harness.fixtures import Change, Checkpoints, Said
from harness.server import (
    CAPTURED_ARGUMENTS,
    CAPTURED_GRAPHS,
    DEFAULT_THRESHOLD,
    EXIT_ARGUMENTS,
    EXIT_GRAPHS,
    Server,
    pair,
    python_path,
    running,
)
from sglang_gemma4_reference.checkpoint import E2B_TINY, write_checkpoint
from sglang_gemma4_reference.engine import reset_log
from sglang_gemma4_yoco import log, settings
from sglang_gemma4_yoco.startup import pr27183

if TYPE_CHECKING:
    from sglang_gemma4_reference.engine import Engine

settings.current = settings.read(os.environ)

pytest_plugins = ["harness.own_process"]
# For the servers and all other processes that the tests start.
os.environ["PYTHONPATH"] = python_path(Path(__file__).parent / "harness" / "quick_start")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark a test with its folder's name, so that ``-m "unit or forward"`` chooses what runs."""
    item.add_marker(_folder(item))


#: Files in server/ that run last. Their shared servers are used by no other file, and would occupy
#: 2.7 GB each while the other files start theirs.
LAST = (
    "test_parallel.py",
    "test_served_metrics.py",
    "test_defaults.py",
    "test_captured_tail_server.py",
    "test_workload.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run ``LAST`` after the other files of their folder."""
    folders = list(dict.fromkeys(map(_folder, items)))
    items.sort(key=lambda item: (folders.index(_folder(item)), item.path.name in LAST))


def pytest_collection_finish() -> None:
    """Freeze all objects so far, and make ``gc.freeze`` and ``gc.unfreeze`` do nothing.

    SGLang collects garbage whenever it captures graphs, which takes a second if the objects of all
    its modules are included. It also unfreezes objects.
    """
    gc.collect()
    gc.freeze()
    for name in ("freeze", "unfreeze"):
        setattr(gc, name, lambda: None)


# Files outside server/ that use its shared servers, or start some themselves.
USES_SERVERS = ("test_eval_quality.py", "test_bench_gpu.py")
# Files in server/ that use no shared servers: they start processes and servers of their own.
USES_NONE = (
    "test_broken_package.py",
    "test_doctor.py",
    "test_load_faults.py",
)


class FilesAndServers(LoadScopeScheduling):
    """Scheduler whose unit of work is a file, or all files that share servers.

    The tests of a file share expensive setup. Two processes would each start the session's servers,
    and ten servers do not fit into 24 GiB.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        shares = "/server/" in file and not file.endswith(USES_NONE)
        if shares or file.endswith(USES_SERVERS):
            return "servers"
        return file


@pytest.hookimpl(optionalhook=True)  # the hook exists only with pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FilesAndServers:
    """Return the scheduler that distributes the tests over the processes."""
    return FilesAndServers(config, log)


def _folder(item: pytest.Item) -> str:
    return item.path.relative_to(Path(__file__).parent).parts[0]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Return a function that writes a checkpoint, once for each shape."""
    return functools.cache(
        lambda shape: write_checkpoint(tmp_path_factory.mktemp("checkpoint"), shape)
    )


@pytest.fixture(scope="session")
def tiny_checkpoint(checkpoints: Checkpoints) -> Path:
    """Return the path of a random Gemma 4: 8 layers, the last 4 KV-shared, a window of 32."""
    return checkpoints(E2B_TINY)


@pytest.fixture(scope="session")
def manifests(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a copy of deploy/kubernetes, with the plugin's wheel in it."""
    from harness.manifests import with_wheel

    return with_wheel(tmp_path_factory.mktemp("manifests"))


PROCESSORS = "--enable-custom-logit-processor"


@pytest.fixture(scope="session")
def servers(
    tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Server]]:
    """Yield two servers of one checkpoint: the fast path on (by default), and switched off.

    SGLang's own checks end a server on an error: in its pools (after every batch and when idle, the
    default), in the ownership of pages, or if logits are NaN.
    """
    checks = {
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
        "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
        "SGLANG_ENABLE_NAN_LOGITS_CHECK": "1",
    }
    directory = tmp_path_factory.mktemp("servers")
    with pair(tiny_checkpoint, directory, PROCESSORS, env=checks) as both:
        yield both


def fast_server(name: str, **how: Any) -> Any:
    """Return the fixture of a server that differs from the fast one of ``servers`` as given."""

    @pytest.fixture(scope="session", name=name)
    def server(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
        with running(tiny_checkpoint, tmp_path_factory.mktemp(name), switch=None, **how) as started:
            yield started

    return server


#: With the package and none of its variables, as users have it.
default_server = fast_server("default_server", env=DEFAULT_THRESHOLD)
#: Its decode steps and prefill tails are replayed.
captured_server = fast_server("captured_server", arguments=CAPTURED_ARGUMENTS, env=CAPTURED_GRAPHS)
#: Its captured prefills are left at their exits.
exits_server = fast_server("exits_server", arguments=(*EXIT_ARGUMENTS, PROCESSORS), env=EXIT_GRAPHS)
#: Two tensor-parallel ranks, with metrics; it audits each cut prefill.
ranks_server = fast_server(
    "ranks_server",
    arguments=("--enable-metrics", "--tp-size", "2"),
    env={settings.name_of("audit"): "1", settings.name_of("audit_strict"): "1"},
)


@pytest.fixture(scope="session")
def on_server(servers: tuple[Server, Server]) -> Server:
    """Return the server with the fast path on."""
    return servers[0]


@pytest.fixture(scope="session")
def off_server(servers: tuple[Server, Server]) -> Server:
    """Return the server with the fast path off."""
    return servers[1]


@pytest.fixture(scope="module")
def engine(tiny_checkpoint: Path) -> Engine:
    """Return SGLang's ModelRunner in this process, whose pool holds 4096 tokens."""
    from harness.forwards import ENGINE  # imports SGLang, which some tests do without
    from sglang_gemma4_reference.engine import Engine

    return Engine(tiny_checkpoint, **ENGINE)


@pytest.fixture
def setting() -> Iterator[Change]:
    """Yield a function that changes settings, by their fields, for the rest of the test."""
    with ExitStack() as stack:
        yield lambda **fields: stack.enter_context(settings.changed(**fields))


@pytest.fixture
def outside_of_a_server() -> Iterator[None]:
    """Remove the process's published server arguments, which an engine may have left."""
    from sglang_gemma4_reference import releases

    with releases.unpublished():
        yield


@pytest.fixture
def not_loaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Unload the plugin for the test; its patches are restored afterwards."""
    from sglang.srt.models.gemma4_causal import Gemma4TextModel

    from sglang_gemma4_yoco import compat, plugin
    from sglang_gemma4_yoco.models import registry
    from sglang_gemma4_yoco.startup import patch

    helpers = {helper.__name__ for helper in pr27183.HELPERS}
    plugin.load.cache_clear()
    monkeypatch.setattr(plugin, "why_not_installed", None)
    monkeypatch.setattr(settings, "current", settings.current)
    monkeypatch.setattr(patch, "installed", False)
    for owner, name in patch.WRAPPED:
        monkeypatch.setattr(owner, name, getattr(owner, name))
    models = list(registry.list_text_models())
    for text_model in models:
        monkeypatch.setattr(text_model, "forward", inspect.unwrap(text_model.forward))
    compat.names.find_missing.cache_clear()
    for name in helpers:
        monkeypatch.delattr(Gemma4TextModel, name, raising=False)
    yield
    for name in helpers & vars(Gemma4TextModel).keys():
        delattr(Gemma4TextModel, name)  # earlier ones are restored
    plugin.load.cache_clear()  # an engine of a later test may be the first that loads it
    compat.names.find_missing.cache_clear()


@pytest.fixture
def forgotten_reports() -> Iterator[None]:
    """Reset counters and logged lines."""

    reset_log()
    yield
    reset_log()


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Said:
    """Return a function that returns the package's log lines from here on, at a level or above."""
    caplog.set_level(logging.INFO, log.logger.name)

    def lines(level: int = logging.INFO) -> list[str]:
        ours = [record for record in caplog.records if record.name == log.logger.name]
        return [record.getMessage() for record in ours if record.levelno >= level]

    return lines


@pytest.fixture
def fresh_decisions(engine: Engine, forgotten_reports: None) -> Iterator[None]:
    """Turn the fast path on again after a test, whatever turned it off."""
    from harness.forwards import state_of

    yield
    state = state_of(engine)
    state.failures_in_a_row, state.off_because = 0, None


@pytest.fixture
def batches_with(monkeypatch: pytest.MonkeyPatch) -> Change:
    """Return a function that sets fields of SGLang's forward batches for the rest of the test."""
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    make = ForwardBatch.init_new

    def change(**fields: Any) -> None:
        @functools.wraps(make)
        def init_new(*args: Any, **kwargs: Any) -> Any:
            batch = make(*args, **kwargs)
            for name, value in fields.items():
                assert hasattr(batch, name)
                setattr(batch, name, value)
            return batch

        monkeypatch.setattr(ForwardBatch, "init_new", init_new)

    return change


@pytest.fixture
def restarted(engine: Engine, tiny_checkpoint: Path) -> Iterator[Change]:
    """Yield a function that builds the attention backends again, with further server arguments."""
    from harness.forwards import ENGINE
    from harness.stand_ins import server_args
    from sglang_gemma4_reference import releases

    def restart(**arguments: Any) -> None:
        args = server_args(model_path=str(tiny_checkpoint), **(ENGINE | arguments))
        with releases.serving(args):
            engine.runner.init_attention_backends()

    yield restart
    engine.runner.init_attention_backends()
