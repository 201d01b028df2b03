"""``scripts/dev/package_types.py``: it names what another SGLang has renamed."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from scripts.dev import package_types
from scripts.environment import REPO

SRT = "srt/model_executor"
#: A field of ``ForwardBatch`` and an attribute of ``ModelRunner``, by their files.
RENAMED = {
    f"{SRT}/forward_batch_info.py": "extend_seq_lens_cpu",
    f"{SRT}/model_runner.py": "req_to_token_pool",
}


def _copy_sglang(folder: Path) -> None:
    """Write a copy of the installed SGLang, links but for the files with renamed attributes."""
    copy, original = folder / "sglang", package_types.find_sglang()
    no_bytecode = shutil.ignore_patterns("__pycache__")
    shutil.copytree(original, copy, copy_function=os.symlink, ignore=no_bytecode)
    for file, name in RENAMED.items():
        text, found = re.subn(rf"\b{name}\b", f"renamed_{name}", (original / file).read_text())
        assert found > 0
        (copy / file).unlink()
        (copy / file).write_text(text)


def _list_uses() -> set[str]:
    """Return each place of the package that reads or writes one of these attributes."""
    uses = set[str]()
    for path in (REPO / "sglang_gemma4_yoco").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in RENAMED.values():
                uses.add(f"{path.relative_to(REPO)}:{node.lineno} {node.attr}")
    return uses


def test_every_use_of_a_renamed_attribute_is_named(tmp_path: Path) -> None:
    _copy_sglang(tmp_path)
    cache, earlier = tmp_path / "cache", REPO / ".mypy_cache" / "package"
    if earlier.exists():  # mypy compares hashes, so that it reads only what has changed
        shutil.copytree(earlier, cache)
    script = str(REPO / "scripts" / "dev" / "package_types.py")
    command = [sys.executable, script, f"--mypy-path={tmp_path}", "--", f"--cache-dir={cache}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    names = "|".join(RENAMED.values())
    error = re.compile(rf'^(\S+:\d+): error: .* has no attribute "({names})"', re.MULTILINE)
    named = {f"{place} {name}" for place, name in error.findall(done.stdout)}
    assert {use.split()[1] for use in named} == {*RENAMED.values()}, done.stdout + done.stderr
    assert named == _list_uses()
    assert done.returncode == 1
