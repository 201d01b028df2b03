"""The wheel and the source distribution: build, content, and installation without SGLang."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from collections import defaultdict
from pathlib import Path

import pytest

from harness.manifests import copy_sources
from harness.validators import run
from scripts.environment import REPO

VERSION = re.search(r'^version = "(.+)"$', (REPO / "pyproject.toml").read_text(), re.MULTILINE)
NAME = "sglang_gemma4_yoco"

LOADED = """
import logging, sys
from importlib.metadata import entry_points, version
logging.basicConfig(level=logging.INFO, stream=sys.stdout)
import sglang_gemma4_yoco
assert version("sglang-gemma4-yoco") == sglang_gemma4_yoco.__version__ == sys.argv[1]
(point,) = entry_points(group="sglang.srt.plugins")
point.load()()
assert not {"torch", "sglang"} & set(sys.modules)
"""


def commit(folder: Path) -> str:
    """Commit all files of a new repository; return the commit."""
    git = ("git", "-C", folder, "-c", "user.name=a", "-c", "user.email=a@b")
    run(*git, "init", "-q")
    run(*git, "add", ".")
    run(*git, "commit", "-q", "-m", "all")
    return run(*git, "rev-parse", "HEAD").strip()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the wheel, and the source distribution from which it is built."""
    folder = tmp_path_factory.mktemp("dist")
    copy = copy_sources(folder)
    commit(copy)
    run("uv", "build", "-q", "--out-dir", folder, copy)
    [wheel], [source] = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, source


def test_one_version(built: tuple[Path, Path]) -> None:
    assert VERSION is not None
    for path in built:
        assert path.name.startswith(f"{NAME}-{VERSION[1]}")
    changes = (REPO / "CHANGELOG.md").read_text()
    assert re.search(r"^## (\S+)", changes, re.MULTILINE)[1] == VERSION[1]  # type: ignore[index]  # there is one


def read_commit(folder: Path) -> str:
    """Return the commit that the wheel in this folder names."""
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        return opened.read(f"{NAME}/COMMIT").decode().strip()


def test_the_wheel_names_its_commit(
    built: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is git's if there is a repository, even through a source distribution, or a variable's."""
    named = read_commit(built[0].parent)
    assert re.fullmatch("[0-9a-f]{40}", named)
    copy = tmp_path / "checkout"
    with tarfile.open(built[1]) as source:
        source.extractall(copy, filter="data")
    [folder] = copy.iterdir()
    # As in a Dockerfile; a repository around the folder is not its own.
    commit(copy)
    build = ("uv", "build", "-q", "--wheel", "--out-dir", tmp_path, folder)
    for given, expected in (("abc", "abc"), ("", named)):
        monkeypatch.setenv("SGLANG_GEMMA4_YOCO_COMMIT", given)
        run(*build)
        assert read_commit(tmp_path) == expected
    (folder / NAME / "COMMIT").unlink()
    run(*build)
    assert read_commit(tmp_path) == "unknown"


def test_the_wheel_holds_the_package_and_nothing_else(built: tuple[Path, Path]) -> None:
    expected = {"COMMIT"}
    for path in (REPO / NAME).rglob("*.*"):
        if path.suffix != ".pyc":
            expected.add(str(path.relative_to(REPO / NAME)))
    inside = defaultdict(set)
    with zipfile.ZipFile(built[0]) as wheel:
        for name in wheel.namelist():
            folder, _, file = name.partition("/")
            inside[folder].add(file)
    assert inside.pop(NAME) == expected
    [about] = inside
    assert about.startswith(f"{NAME}-")
    assert {"entry_points.txt", "METADATA", "licenses/LICENSE"} <= inside[about]


@pytest.mark.parametrize("which", [0, 1], ids=["wheel", "source"])
def test_installed_where_nothing_else_is(
    built: tuple[Path, Path], which: int, tmp_path: Path
) -> None:
    """SGLang finds the entry point; without SGLang loading it says so, and imports nothing.

    Both can be installed without a network, the source distribution if setuptools is installed.
    """
    assert VERSION is not None
    run("uv", "venv", "-q", "--python", sys.executable, tmp_path / "env")
    python = tmp_path / "env" / "bin" / "python"
    install = ("uv", "pip", "install", "-q", "--python", python)
    run(*install, "setuptools>=77")
    run(*install, "--offline", "--no-deps", "--no-build-isolation", built[which])
    said = run(python, "-I", "-c", LOADED, VERSION[1])
    assert "is NOT installed, the server runs unpatched: " in said
    for command in ("doctor", "verify --model-path x", "status http://localhost:1"):
        words = [str(python), "-m", NAME, *command.split()]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert done.stderr.count("\n") < 2
        last = (done.stdout + done.stderr).splitlines()[-1]
        assert last.endswith("; run this where the server runs")
