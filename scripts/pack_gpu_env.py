#!/usr/bin/env python3
"""How does SGLang get onto a GPU machine that has PyTorch but no network?

Fills a folder of at most 60 MB with wheels: SGLang 0.5.17, what it imports when it serves Gemma 4
with Triton attention and the other machine lacks, SGLang's kernels without what an H100 or H200
does not need, this package, and ``test/reference``. The other machine must have Linux on x86-64,
Python 3.12, torch 2.11.0+cu130, triton 3.6.0, and transformers with what it needs.

    python3 scripts/pack_gpu_env.py gpu_env     # here: downloads 450 MB once, keeps 60

    # there, in one line; then --check, and scripts/bench_gpu.py
    python3 -m pip install --no-index --no-deps --no-compile --target site gpu_env/*.whl &&
        export PYTHONPATH=$PWD/site SGLANG_IS_FLASHINFER_AVAILABLE=0
    python3 scripts/pack_gpu_env.py --check     # imports all that a server and the bench need

SGLang imports some large packages whatever it serves. Stand-ins replace them, and raise an error
that names them when they are used. One is the grammar backend: servers need
``--grammar-backend none``. Another is flashinfer: the norms that run there are sgl-kernel's, and
not those of newer releases.

Output contract: progress on stdout; the last line is one JSON document with size and contents, or
with what cannot be imported. Exit status 1 if the folder is too large, or an import fails. Standard
library only, and ``gpu_env.txt`` with the wheels to fetch.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib
import io
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, __file__.rpartition("/scripts/")[0])  # it may be run by its path

from scripts.command_line import new_parser
from scripts.environment import REPO

LIMIT = 60_000_000  # bytes
PYTHON = "3.12"
#: Of wheels that the other machine can load: the releases of glibc, and older names of some.
MANYLINUX = (
    *("_2_39", "_2_35", "_2_34", "_2_31", "_2_28", "_2_27", "_2_26", "_2_24", "_2_17", "_2_12"),
    *("_2_5", "2014", "2010", "1"),
)

#: The wheels to fetch, each at one version.
REQUIREMENTS = Path(__file__).with_name("gpu_env.txt")
#: Of the kernels' compiled parts: what SGLang loads on compute capability 9.0 for Gemma 4. The
#: largest part, FlashAttention 3, is not used by it.
KEPT_KERNELS = ("sgl_kernel/sm90/common_ops.abi3.so", "sgl_kernel/spatial_ops.abi3.so")
#: Of SGLang: image generation, its own tests, and servers in Rust, which a flag must ask for.
_DROPPED = re.compile(r"sglang/(multimodal_gen|test)/|sglang/srt/\w+/_core\..*\.so$")
#: What a launch and the bench import.
ROOTS = (
    *("sglang.launch_server", "sglang.srt.managers.scheduler", "sglang.srt.models.gemma4_mm"),
    *("sglang.srt.entrypoints.http_server", "sglang.srt.managers.detokenizer_manager"),
    *("sglang.srt.layers.attention.triton_backend", "sglang.srt.multimodal.processors.gemma4"),
    *("sglang.benchmark.serving", "sglang_gemma4_yoco.loading.patch"),
    *("sglang_gemma4_reference.engine", "sglang_gemma4_reference.checkpoint"),
)

#: Which norms run on the other machine.
NORMS = "sgl-kernel's own, of SGLang 0.5.17; flashinfer's, which SGLang 0.5.23 runs, are left out"

_STAND_IN = '''\
"""A stand-in: the real package is not in this environment, and nothing here needs it."""


class _Absent:
    def __init__(self, *args, **kwargs):
        raise ImportError(f"{__name__}: a stand-in; install the real package to use it")

    def __init_subclass__(cls, **kwargs):
        pass


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (_Absent,), {})
'''
# SGLang makes it a field of its request models.
_STRUCTURAL_TAG = """

from pydantic import BaseModel


class StructuralTag(BaseModel):
    pass
"""
STAND_INS = {
    "IPython/__init__.py": _STAND_IN,
    "IPython/display.py": _STAND_IN,
    "flashinfer/__init__.py": _STAND_IN,
    "flashinfer/prefill.py": _STAND_IN,
    "flashinfer/sampling.py": _STAND_IN,
    "soundfile/__init__.py": _STAND_IN,
    "xgrammar/__init__.py": _STAND_IN + _STRUCTURAL_TAG,
    "xgrammar/structural_tag.py": _STAND_IN + _STRUCTURAL_TAG,
}


def write_wheel(path: Path, files: Iterable[tuple[str, bytes]], dist_info: str) -> None:
    """Write a wheel with a new RECORD; one among ``files`` (names and contents) is left out."""
    record = io.StringIO()
    rows = csv.writer(record, lineterminator="\n")  # names may have commas
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as wheel:
        for name, content in files:
            if name == f"{dist_info}/RECORD":
                continue
            wheel.writestr(name, content)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=")
            rows.writerow((name, f"sha256={digest.decode()}", len(content)))
        rows.writerow((f"{dist_info}/RECORD", "", ""))
        wheel.writestr(f"{dist_info}/RECORD", record.getvalue())


def is_needed(name: str) -> bool:
    """Whether a file of a wheel is needed on the other machine."""
    if name.startswith("sgl_kernel/") and ".so" in Path(name).name:
        return name in KEPT_KERNELS
    return not name.endswith("/") and _DROPPED.match(name) is None


def copy_needed(wheel: Path, directory: Path) -> Path:
    """Write a wheel again, without what is not needed."""
    path = directory / wheel.name
    with zipfile.ZipFile(wheel) as full:
        kept = list(filter(is_needed, full.namelist()))
        if any(name.startswith("sgl_kernel/") for name in kept) and not {*KEPT_KERNELS} <= {*kept}:
            raise SystemExit(f"error: {wheel.name} lacks one of {KEPT_KERNELS}")
        [dist_info] = {name.split("/")[0] for name in kept if name.endswith(".dist-info/RECORD")}
        write_wheel(path, ((name, full.read(name)) for name in kept), dist_info)
    return path


def write_stand_ins(directory: Path) -> Path:
    """Write a wheel with the stand-ins."""
    dist_info = "gemma4_gpu_env_stand_ins-0.dist-info"
    metadata = "Metadata-Version: 2.1\nName: gemma4-gpu-env-stand-ins\nVersion: 0\n"
    tags = "Wheel-Version: 1.0\nGenerator: pack_gpu_env\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files = STAND_INS | {f"{dist_info}/METADATA": metadata, f"{dist_info}/WHEEL": tags}
    path = directory / "gemma4_gpu_env_stand_ins-0-py3-none-any.whl"
    write_wheel(path, ((name, text.encode()) for name, text in files.items()), dist_info)
    return path


def pip(*arguments: str | Path) -> None:
    """Run pip; if it fails, end with its output."""
    command = [sys.executable, "-m", "pip", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"error: pip {arguments[0]} failed:\n{done.stdout}{done.stderr}")


def build(out: Path, cache: Path) -> None:
    """Fill ``out`` with wheels."""
    print(f"Downloading to {cache}", flush=True)
    cache.mkdir(parents=True, exist_ok=True)
    platforms = [f"--platform=manylinux{tag}_x86_64" for tag in MANYLINUX]
    options = ("--no-deps", "--only-binary=:all:", "--implementation=cp", *platforms)
    # What an earlier run has fetched is not fetched again.
    where = ("-d", cache, "--find-links", cache, "-r", REQUIREMENTS)
    pip("download", *options, f"--python-version={PYTHON}", *where)
    print("Leaving out what is not needed", flush=True)
    wanted = REQUIREMENTS.read_text().split()
    for wheel in cache.glob("*.whl"):
        name, version, *_ = wheel.name.split("-")
        if f"{name.replace('_', '-')}=={version}".lower() in wanted:
            copy_needed(wheel, out)
    write_stand_ins(out)
    print("Building this package and the reference", flush=True)
    for source in (REPO, REPO / "test" / "reference"):
        pip("wheel", "--no-deps", "--wheel-dir", out, source)


def cannot_be_imported() -> dict[str, str]:
    """Of ``ROOTS``, those that this environment cannot import, and why."""
    found = {}
    for name in ROOTS:
        try:
            importlib.import_module(name)
        except Exception as failure:  # noqa: BLE001 - whatever an import raises is what is asked
            found[name] = repr(failure)
    return found


def main() -> int:
    """Fill the folder, or check an environment that was made of it."""
    parser = new_parser(__doc__)
    parser.add_argument("out", type=Path, nargs="?", help="the folder; made if need be")
    parser.add_argument("--cache", type=Path, default=REPO / "build" / "wheels", help="for wheels")
    parser.add_argument("--check", action="store_true", help="import what is needed, here and now")
    args = parser.parse_args()
    if args.check:
        missing = cannot_be_imported()
        print(f"norms: {NORMS}")
        print(json.dumps({"missing": missing, "norms": NORMS}))
        return int(bool(missing))
    if args.out is None:
        parser.error("name a folder, or --check")
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.out) as folder:
        build(Path(folder), args.cache)
        for old in args.out.glob("*.whl"):  # of an earlier run, once there are others
            old.unlink()
        for wheel in Path(folder).glob("*.whl"):
            wheel.rename(args.out / wheel.name)
    wheels = {path.name: path.stat().st_size for path in sorted(args.out.glob("*.whl"))}
    size = sum(wheels.values())
    print(f"norms: {NORMS}")
    print(json.dumps({"bytes": size, "limit": LIMIT, "norms": NORMS, "wheels": wheels}))
    return int(size > LIMIT)


if __name__ == "__main__":
    raise SystemExit(main())
