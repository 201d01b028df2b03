"""The wheel and the source distribution: build, content, and installation without SGLang."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from collections import defaultdict
from pathlib import Path

import pytest

from scripts.environment import REPO, find_uv

VERSION = re.search(r'^version = "(.+)"$', (REPO / "pyproject.toml").read_text(), re.MULTILINE)
NAME = "sglang_gemma4_yoco"

LOADED = """
import logging, sys
from importlib.metadata import entry_points, version
logging.basicConfig(level=logging.INFO)
import sglang_gemma4_yoco
assert version("sglang-gemma4-yoco") == sglang_gemma4_yoco.__version__ == sys.argv[1]
(point,) = entry_points(group="sglang.srt.plugins")
point.load()()
assert not {"torch", "sglang"} & set(sys.modules)
"""


@pytest.fixture(scope="module")
def uv() -> Path:
    return find_uv(Path(sys.prefix))


def run(*command: str | Path) -> str:
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def built(uv: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the wheel, and the source distribution from which it is built."""
    folder, copy = tmp_path_factory.mktemp("dist"), tmp_path_factory.mktemp("checkout")
    # From a copy: building writes into the checkout.
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPO / name, copy)
    shutil.copytree(REPO / NAME, copy / NAME, ignore=shutil.ignore_patterns("__pycache__"))
    run(uv, "build", "--out-dir", folder, copy)
    [wheel], [source] = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, source


def test_one_version(built: tuple[Path, Path]) -> None:
    assert VERSION is not None
    for path in built:
        assert path.name.startswith(f"{NAME}-{VERSION[1]}")
    changes = (REPO / "CHANGELOG.md").read_text()
    assert re.search(r"^## (\S+)", changes, re.MULTILINE)[1] == VERSION[1]  # type: ignore[index]  # there is one


def test_the_wheel_holds_the_package_and_nothing_else(built: tuple[Path, Path]) -> None:
    expected = set[str]()
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
    uv: Path, built: tuple[Path, Path], which: int, tmp_path: Path
) -> None:
    """SGLang finds the entry point; without SGLang loading it says so, and imports nothing.

    Both can be installed without a network, the source distribution if setuptools is installed.
    """
    assert VERSION is not None
    run(uv, "venv", "--python", sys.executable, tmp_path / "env")
    python = tmp_path / "env" / "bin" / "python"
    install = (uv, "pip", "install", "--python", python)
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
