"""``scripts/pack_gpu_env.py``: what can be checked without the other machine.

A whole folder takes a download of 450 MB: one that was made by hand is checked when
``GEMMA4_GPU_ENV`` names it.
"""

from __future__ import annotations

import doctest
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import pack_gpu_env


def files(root: Path, **contents: str) -> Path:
    """Write files; ``a__b`` is a/b.py, and a is made a package."""
    for name, text in contents.items():
        path = root.joinpath(*name.split("__")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.write_text(text)
    (root / "__init__.py").unlink(missing_ok=True)
    return root


def missing(root: Path) -> dict[str, str]:
    return pack_gpu_env.missing_imports(root, ["app.main"])


class TestImports:
    def test_what_is_needed_is_followed(self, tmp_path: Path) -> None:
        files(tmp_path, app__main="from .near import x", app__near="import absent.part, torch, os")
        assert missing(tmp_path) == {"absent": "app.near"}

    def test_a_packages_own_code_is_needed_for_its_modules(self, tmp_path: Path) -> None:
        files(tmp_path, app__main="import app.deep.end", app__deep__end="x = 1")
        (tmp_path / "app" / "deep" / "__init__.py").write_text("import absent")
        assert missing(tmp_path) == {"absent": "app.deep"}

    def test_a_module_that_its_package_lacks(self, tmp_path: Path) -> None:
        files(tmp_path, app__main="from app.gone import x\nfrom app import attribute")
        assert missing(tmp_path) == {"app.gone": "app.main"}

    @pytest.mark.parametrize(
        ("code", "needed"),
        [
            ("try:\n    import absent\nexcept ImportError:\n    absent = None", False),
            ("def f():\n    import absent", False),
            ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import absent", False),
            ("if is_npu():\n    import absent", False),
            ("import contextlib\nwith contextlib.suppress(E):\n    import absent", False),
            ("if is_cuda():\n    import absent", True),
            ("if is_npu():\n    pass\nelse:\n    import absent", True),
            ("class A:\n    import absent", True),
            ("try:\n    pass\nfinally:\n    pass\nimport absent", True),
        ],
    )
    def test_what_a_gpu_needs(self, tmp_path: Path, code: str, needed: bool) -> None:
        assert missing(files(tmp_path, app__main=code)) == (
            {"absent": "app.main"} if needed else {}
        )

    def test_examples_in_docstrings(self) -> None:
        failed, tried = doctest.testmod(pack_gpu_env)
        assert tried > 0
        assert failed == 0


def test_a_wheel_keeps_what_a_hopper_needs(tmp_path: Path) -> None:
    wheel, out = tmp_path / "k-1-py3-none-any.whl", tmp_path / "out"
    out.mkdir()
    kept = {
        *pack_gpu_env.KEPT_KERNELS,
        "sgl_kernel/__init__.py",
        "sglang/srt/server/__init__.py",
        "sglang/srt/models/gemma4_mm.py",
        "k-1.dist-info/METADATA",
    }
    dropped = {
        "sgl_kernel/flash_ops.abi3.so",
        "sgl_kernel/sm100/common_ops.abi3.so",
        "sglang/srt/server/_core.cpython-312-x86_64-linux-gnu.so",
        "sglang/multimodal_gen/pipeline.py",
    }
    files_in = sorted(kept | dropped)
    pack_gpu_env.write_wheel(wheel, ((name, b"content") for name in files_in), "k-1.dist-info")
    with zipfile.ZipFile(pack_gpu_env.copy_needed(wheel, out)) as stripped:
        assert set(stripped.namelist()) == kept | {"k-1.dist-info/RECORD"}
        record = stripped.read("k-1.dist-info/RECORD").decode()
    assert {line.split(",")[0] for line in record.splitlines()} == kept | {"k-1.dist-info/RECORD"}


def test_other_wheels(tmp_path: Path) -> None:
    """Kernels without what a Hopper needs are an error; what is all needed is not written anew."""
    wheel, out = tmp_path / "k-1-py3-none-any.whl", tmp_path / "out"
    out.mkdir()
    pack_gpu_env.write_wheel(wheel, [(pack_gpu_env.KEPT_KERNELS[0], b"")], "k-1.dist-info")
    with pytest.raises(SystemExit, match=pack_gpu_env.KEPT_KERNELS[1]):
        pack_gpu_env.copy_needed(wheel, out)
    pack_gpu_env.write_wheel(wheel, [("k/__init__.py", b"")], "k-1.dist-info")
    assert pack_gpu_env.copy_needed(wheel, out).read_bytes() == wheel.read_bytes()


def test_stand_ins_can_be_installed_and_imported(tmp_path: Path) -> None:
    with zipfile.ZipFile(pack_gpu_env.write_stand_ins(tmp_path)) as wheel:
        wheel.extractall(tmp_path)
    code = (
        "from IPython.display import HTML\n"
        "from flashinfer.sampling import top_k\n"
        "from xgrammar import StructuralTag\n"
        "import flashinfer\n"
        "assert not hasattr(flashinfer, '__version__')\n"
        "class Mine(HTML): pass\n"  # inheriting is no use of it
        "try:\n    top_k()\nexcept ImportError as said:\n    print(said)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "flashinfer.sampling: a stand-in" in done.stdout


@pytest.mark.skipif("GEMMA4_GPU_ENV" not in os.environ, reason="needs a folder made by hand")
def test_the_folder_is_complete() -> None:
    found = pack_gpu_env.check(Path(os.environ["GEMMA4_GPU_ENV"]))
    assert found["missing"] == {}
    assert found["bytes"] <= pack_gpu_env.LIMIT
    names = {name.split("-")[0] for name in found["wheels"]}
    needed = {pack_gpu_env._file_start(package)[0] for package in pack_gpu_env.PACKAGES}
    assert needed | {"sglang_gemma4_yoco", "sglang_gemma4_reference"} <= names
