"""What the init container of ``deploy/kubernetes/plugin`` and the Dockerfile install or refuse."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.ask import generate, tokens
from harness.layer_rows import cut
from harness.manifests import pod, render
from harness.server import running
from scripts.environment import REPO

IMPORTED = ("-P", "-c", "import sglang_gemma4_yoco; print(sglang_gemma4_yoco.__file__)")


@pytest.fixture
def image(tmp_path: Path) -> dict[str, str]:
    """Return the environment of an image of SGLang: no virtual environment, and a PYTHONPATH.

    Its ``python3`` imports what the tests' environment contains, but for the plugin.
    """
    program, packages = tmp_path / "bin" / "python3", tmp_path / "packages"
    for folder in (program.parent, packages):
        folder.mkdir()
    program.symlink_to(sys._base_executable)  # type: ignore[attr-defined]  # not in typeshed
    for installed in Path(pytest.__file__).parents[1].iterdir():
        if "yoco" not in installed.name:
            (packages / installed.name).symlink_to(installed)
    path = f"{packages}:{REPO / 'test' / 'reference'}:{os.environ['PYTHONPATH']}"
    return {"PATH": f"{program.parent}:{os.environ['PATH']}", "PYTHONPATH": path}


def start(manifests: Path, volume: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the init container's command, with its paths and the wheel's in these folders."""
    [container] = pod(render(manifests / "fast"))["initContainers"]
    environment.update({one["name"]: str(volume) for one in container["env"]})
    command, [script] = container["command"], container["args"]
    return subprocess.run(
        [*command, script.replace("/wheel/", f"{manifests}/wheel/")],
        env=environment,
        capture_output=True,
        text=True,
    )


def test_it_serves(
    manifests: Path,
    image: dict[str, str],
    tiny_checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server of that Python prefills with a cut, whatever its PYTHONPATH."""
    volume = tmp_path / "volume"
    volume.mkdir()
    installed = start(manifests, volume, **image)
    assert installed.returncode == 0, installed.stdout + installed.stderr
    python = str(tmp_path / "bin" / "python3")
    without = subprocess.run([python, *IMPORTED], env=image, capture_output=True, text=True)
    assert "No module named 'sglang_gemma4_yoco'" in without.stderr
    env: dict[str, Any] = {**image, "PYTHONUSERBASE": str(volume)}
    said = subprocess.check_output([python, *IMPORTED], env=env, text=True)
    assert said.startswith(str(volume))
    monkeypatch.setattr(sys, "executable", python)
    with running(tiny_checkpoint, tmp_path, switch=None, env=env, spawned=True) as server:
        mark = server.mark()
        generate(server, tokens(90, seed=1))
        [prefill] = server.prefills(since=mark)
    assert prefill.rows == cut(90, 1)


@pytest.mark.parametrize(
    "other",
    [{"PYTHONPATH": ""}, {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}],
    ids=["without SGLang", "in a virtual environment"],
)
def test_another_python_ends_the_start(
    manifests: Path, image: dict[str, str], tmp_path: Path, other: dict[str, str]
) -> None:
    ended = start(manifests, tmp_path / "volume", **image | other)
    assert ended.returncode == 1
    [line] = ended.stderr.splitlines()
    assert line.startswith("cannot install the plugin: ")
    assert not (tmp_path / "volume").exists()


def test_no_image_is_built_without_sglang_or_without_the_plugin(
    image: dict[str, str], tmp_path: Path
) -> None:
    last = (REPO / "Dockerfile").read_text().partition("&& ")[2].replace("\\\n", "")
    ours = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    ends = []
    for environment in (ours, image, {**image, "PYTHONPATH": ""}):
        how: Any = {"env": environment, "cwd": tmp_path, "capture_output": True, "text": True}
        done = subprocess.run(["sh", "-c", last], **how)
        ends.append((done.returncode, done.stderr.rpartition(": ")[2].strip()))
    assert ends == [
        (0, ""),
        (1, "'gemma4_yoco'"),
        (1, "No package metadata was found for sglang"),
    ]
