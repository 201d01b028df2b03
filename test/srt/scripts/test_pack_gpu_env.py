"""``scripts/pack_gpu_env.py``: what can be checked without a download of 450 MB."""

from __future__ import annotations

import csv
import subprocess
import sys
import zipfile
from pathlib import Path

from scripts import pack_gpu_env


def test_a_wheel_keeps_what_a_hopper_needs(tmp_path: Path) -> None:
    wheel, out = tmp_path / "k-1-py3-none-any.whl", tmp_path / "out"
    out.mkdir()
    kept = {
        *pack_gpu_env.KEPT_KERNELS,
        "sgl_kernel/__init__.py",
        "sglang/srt/server/__init__.py",
        "sglang/srt/models/gemma4_mm.py",
        "sglang/configs/E=1,N=2.json",
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
        names = set(stripped.namelist())
        record = stripped.read("k-1.dist-info/RECORD").decode().splitlines()
    assert names == kept | {"k-1.dist-info/RECORD"}
    assert {row[0] for row in csv.reader(record)} == names


def test_stand_ins_can_be_installed_and_imported(tmp_path: Path) -> None:
    with zipfile.ZipFile(pack_gpu_env.write_stand_ins(tmp_path)) as wheel:
        wheel.extractall(tmp_path)
    code = (
        "from IPython.display import HTML\n"
        "from flashinfer.sampling import top_k\n"
        "from xgrammar import StructuralTag\n"
        "class Mine(HTML): pass\n"  # inheriting is no use of it
        "try:\n    top_k()\nexcept ImportError as said:\n    print(said)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "flashinfer.sampling: a stand-in" in done.stdout
