"""Faults while SGLang loads the plugin: one clear line each, and SGLang continues.

Every case is a new process that does what each process of a server does first, and then builds the
model's classes; a fault is put there by a plugin that SGLang finds before ours. Without SGLang:
``scripts/test_distribution``.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from harness import forked
from harness.other_plugins import plugin
from harness.server import python_path
from sglang_gemma4_yoco import log

_SECONDS = 300  # for a process that imports SGLang, on a busy machine too

LOAD = """
import logging
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s", force=True)
from sglang.srt.plugins import load_plugins
load_plugins()
import sys
print("client imported", "prometheus_client" in sys.modules)
from sglang.srt.models.gemma4_causal import Gemma4TextModel
print("patched", hasattr(Gemma4TextModel, "_yoco_eligibility"))
"""


# A checkout's own metadata would come before the fault's.
_NOWHERE = Path("/")


def forked_output_of(code: str, directory: Path, **environment: str) -> str:
    """Return the output of a process that has imported SGLang, but not its plugins."""
    output = directory / "output"
    env = {**os.environ, **environment}
    assert forked.Program(["-c", code], cwd=_NOWHERE, env=env, log=output).wait(_SECONDS) == 0
    return output.read_text()


def output_beside(name: str, code: str, directory: Path) -> str:
    """Return the output of a process that loads all plugins, this one before ours."""
    path = python_path(plugin(directory / "path", name, code))
    return forked_output_of(LOAD, directory, PYTHONPATH=path)


def ours(output: str) -> list[str]:
    """Return the lines that the package logged."""
    return [line for line in output.splitlines() if f" {log.logger.name} " in line]


def refusal(output: str) -> str:
    """Return the one line that says why nothing was patched."""
    assert "patched False" in output
    (line,) = ours(output)
    assert line.startswith("ERROR")
    assert "NOT installed, the server runs unpatched" in line
    return line


@pytest.mark.parametrize(("installed", "loads"), [("0.5.16", False), ("0.9.1", True)])
def test_other_versions(tmp_path: Path, installed: str, loads: bool) -> None:
    """An old one is refused by number; a newer one is patched, and decides when a model starts."""
    code = f"""
        import importlib.metadata as metadata
        real = metadata.version
        metadata.version = lambda name: {installed!r} if name == "sglang" else real(name)
    """
    output = output_beside("a_version", code, tmp_path)
    if loads:
        assert "patched True" in output
        (line,) = ours(output)
        assert line.startswith("INFO")
    else:
        assert f"SGLang {installed} is not in the supported range >=0.5.22" in refusal(output)


def test_a_module_that_moved(tmp_path: Path) -> None:
    """A future SGLang may lack one of the modules that the patch imports."""
    code = """
        import sys
        import sglang.srt.model_executor as package
        name = "sglang.srt.model_executor.forward_context"
        was_there = sys.modules.get(name)
        vars(package).pop("forward_context", None)
        sys.modules[name] = None
        import sglang_gemma4_yoco.plugin as ours
        ours.load()
        sys.modules.pop(name)
        if was_there is not None:
            sys.modules[name] = package.forward_context = was_there
        ours.load = lambda: None
    """
    line = refusal(output_beside("a_move", code, tmp_path))
    assert "forward_context" in line
    assert "Install a supported SGLang, or a newer sglang-gemma4-yoco" in line


SWITCHED_OFF = """
import logging, sys
logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s %(message)s", force=True)
import sglang.srt.managers.scheduler, sglang.srt.models.gemma4_causal
def of_sglang():
    return {
        (module, name): {key: id(part) for key, part in vars(value).items()}
        for module in list(sys.modules) if module.startswith("sglang.")
        for name, value in list(vars(sys.modules[module]).items()) if isinstance(value, type)
    }
before = of_sglang()
from sglang.srt.plugins import load_plugins
load_plugins()
after = of_sglang()
print("changed", [name for name, value in before.items() if after[name] != value])
for name in ("ModelRunner", "Scheduler", "SchedulerMetricsCollector", "Gemma4TextModel"):
    assert [key for key in before if key[1] == name], name
print("imported", sorted(name for name in sys.modules if name.startswith("sglang_gemma4_yoco")))
"""


def test_switched_off(tmp_path: Path) -> None:
    """Nothing of SGLang is changed or imported; one line is logged even where INFO is not shown."""
    off = {"SGLANG_GEMMA4_YOCO": "0", "SGLANG_PLUGINS": "gemma4_yoco"}
    output = forked_output_of(SWITCHED_OFF, tmp_path, **off)
    assert "changed []" in output
    package = "sglang_gemma4_yoco"
    modules = [package, *(f"{package}.{name}" for name in ("log", "patched", "plugin", "settings"))]
    assert f"imported {modules}" in output
    (line,) = ours(output)
    assert line.startswith("WARNING")
    assert line.endswith("is off: SGLANG_GEMMA4_YOCO=0")


def test_loading_writes_nothing_and_leaves_the_metrics_client_alone(tmp_path: Path) -> None:
    """Loading works on a read-only disk, and does not import the metrics client.

    Once it is imported, SGLang can no longer tell it where processes share their metrics.
    """
    watch = """
import os, sys
assert "prometheus_client" not in sys.modules
written = []
def hook(event, args):
    if event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        written.append(args[0])
    if event in ("os.mkdir", "os.rename", "os.remove", "subprocess.Popen", "os.fork"):
        written.append(event)
import sglang.srt.models.gemma4_causal
sys.addaudithook(hook)
"""
    watched = watch + LOAD + 'print("written", [p for p in written if p != "/dev/null"])'
    output = forked_output_of("import sys; sys.dont_write_bytecode = True" + watched, tmp_path)
    assert "patched True" in output
    assert "written []" in output
    assert "client imported False" in output
