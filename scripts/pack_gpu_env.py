#!/usr/bin/env python3
"""How does SGLang get onto a GPU machine that has PyTorch but no network?

Fills a folder of at most 60 MB with wheels: SGLang 0.5.17, what it imports when it serves Gemma 4
with Triton attention and the other machine lacks, SGLang's kernels without what an H100 or H200
does not need, this package, and ``test/reference``. The other machine must have Linux on x86-64,
Python 3.12, torch 2.11.0+cu130, triton 3.6.0 and what comes with them (``HAS``). Its transformers
may be another 5.x: the one that SGLang 0.5.17 asks for is in the folder, as newer ones break it.

    python3 scripts/pack_gpu_env.py gpu_env     # here: downloads 450 MB once, keeps 60

    # there, in one line; then scripts/bench_gpu.py runs
    python3 -m pip install --no-index --no-deps --no-compile --target site gpu_env/*.whl &&
        export PYTHONPATH=$PWD/site SGLANG_IS_FLASHINFER_AVAILABLE=0
    python3 scripts/bench_gpu.py --preset e2b --server-args='--grammar-backend none'

SGLang imports some large packages whatever it serves. Stand-ins replace them, and raise an error
that names them when they are used (``STAND_INS``; one of them is the grammar backend). flashinfer
is another, as it is 957 MB with its compiler: so norms run there by sgl-kernel's own kernels, of
SGLang 0.5.17, and not by flashinfer's, which a server of 0.5.23 runs.

At the end all imports that the launch needs are followed through the folder, so that a module
which neither machine has is found here. Modules whose names are put together at run time are not
seen, and conditions that only the other machine can decide are not decided.

Output contract: progress on stdout, the last line is one JSON document with size and contents.
Exit status 1 when an import is missing or the folder is too large. Standard library only, and
``gpu_env.txt`` with the wheels to fetch.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from environment import REPO, command_line

LIMIT = 60_000_000  # bytes
PYTHON = "3.12"
GLIBC = (39, 35, 34, 31, 28, 27, 26, 24, 17, 12, 5)

#: The wheels to fetch, each at one version.
REQUIREMENTS = Path(__file__).with_name("gpu_env.txt")
PACKAGES = [line for line in REQUIREMENTS.read_text().split() if "==" in line]
#: Of the kernels' compiled parts: what SGLang loads on compute capability 9.0 for Gemma 4. The
#: largest part, FlashAttention 3, is not used by it.
KEPT_KERNELS = ("sgl_kernel/sm90/common_ops.abi3.so", "sgl_kernel/spatial_ops.abi3.so")
#: Of SGLang: image generation, its own tests, and servers in Rust, which a flag must ask for.
_DROPPED = re.compile(r"sglang/(multimodal_gen|test)/|sglang/srt/\w+/_core\..*\.so$")

# Modules that the other machine has.
_HAS = """
    accelerate aiofiles aiohttp annotated_doc anyio attr attrs certifi charset_normalizer
    click cloudpickle cuda cv2 cython dateutil einops filelock fsspec google grpc h11 h5py
    httpcore httpx huggingface_hub idna jinja2 joblib llvmlite markdown_it matplotlib
    multidict networkx ninja numba numpy nvidia packaging pandas peft PIL pip
    prometheus_client propcache psutil pyarrow pybind11 pygments pynvml pytest regex requests
    rich safetensors scipy sentencepiece setuptools six sklearn sympy tiktoken timm tokenizers
    torch torchaudio torchvision tqdm transformers triton typer typing_extensions urllib3
    uvloop wrapt xxhash yaml yarl zipp
"""
HAS = frozenset(_HAS.split())

#: Where a launch begins; what SGLang imports by name at run time stands here too.
ROOTS = (
    "sglang.launch_server",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.managers.tokenizer_manager",
    "sglang.srt.model_executor.model_runner",
    "sglang.srt.models.gemma4_mm",
    "sglang.srt.layers.attention.triton_backend",
    "sglang.srt.multimodal.processors.gemma4",
    "sglang.benchmark.serving",
    "sglang.benchmark.one_batch",
    "sglang_gemma4_yoco.plugin",
    "sglang_gemma4_yoco.loading.patch",
    "sglang_gemma4_reference.engine",
    "sglang_gemma4_reference.checkpoint",
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


# ---------------------------------------------------------------- wheels


def write_wheel(path: Path, files: Iterable[tuple[str, bytes]], dist_info: str) -> None:
    """Write a wheel with a new RECORD.

    Args:
        files: names and contents; a RECORD among them is left out.
        dist_info: the name of its metadata folder.
    """
    record = []
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as wheel:
        for name, content in files:
            if name == f"{dist_info}/RECORD":
                continue
            wheel.writestr(name, content)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=")
            record.append(f"{name},sha256={digest.decode()},{len(content)}\n")
        record.append(f"{dist_info}/RECORD,,\n")
        wheel.writestr(f"{dist_info}/RECORD", "".join(record))


def is_needed(name: str) -> bool:
    """Whether a file of a wheel is needed on the other machine."""
    if name.startswith("sgl_kernel/") and ".so" in Path(name).name:
        return name in KEPT_KERNELS
    return _DROPPED.match(name) is None


def copy_needed(wheel: Path, directory: Path) -> Path:
    """Copy a wheel; write it again without what is not needed, if there is such."""
    path = directory / wheel.name
    with zipfile.ZipFile(wheel) as full:
        names = [name for name in full.namelist() if not name.endswith("/")]
        kept = [name for name in names if is_needed(name)]
        absent = set(KEPT_KERNELS) - set(kept)
        if absent and any(name.startswith("sgl_kernel/") for name in names):
            raise SystemExit(f"error: {wheel.name} has no {', '.join(sorted(absent))}")
        if kept == names:
            path.write_bytes(wheel.read_bytes())
        else:
            dist_info = next(name for name in names if name.endswith("/RECORD")).split("/")[0]
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
    done = subprocess.run(
        [sys.executable, "-m", "pip", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"error: pip {arguments[0]} failed:\n{done.stdout}{done.stderr}")


def build(out: Path, cache: Path) -> None:
    """Fill ``out`` with wheels."""
    print(f"Downloading to {cache}", flush=True)
    cache.mkdir(parents=True, exist_ok=True)
    tags = [*(f"2_{minor}" for minor in GLIBC), "2014", "2010", "1"]
    platforms = (f"--platform=manylinux{'_' * ('_' in tag)}{tag}_x86_64" for tag in tags)
    options = ("--no-deps", "--only-binary=:all:", "--implementation=cp", *platforms)
    # What an earlier run has fetched is not fetched again.
    where = ("-d", cache, "--find-links", cache, "-r", REQUIREMENTS)
    pip("download", *options, f"--python-version={PYTHON}", *where)
    print("Leaving out what is not needed", flush=True)
    wanted = {_file_start(package) for package in PACKAGES}
    for wheel in cache.glob("*.whl"):
        if tuple(wheel.name.split("-")[:2]) in wanted:
            copy_needed(wheel, out)
    write_stand_ins(out)
    print("Building this package and the reference", flush=True)
    for source in (REPO, REPO / "test" / "reference"):
        pip("wheel", "--no-deps", "--wheel-dir", out, source)


def _file_start(package: str) -> tuple[str, str]:
    """Name and version as a wheel's file name has them: ("rpds_py", "2026.9.1")."""
    name, _, version = package.partition("==")
    return re.sub(r"[-_.]+", "_", name).lower(), version


# ---------------------------------------------------------------- imports

# Other devices, other Pythons, and what is asked for before it is imported: not needed.
_ELSEWHERE = re.compile(
    r"TYPE_CHECKING|hip|npu|xpu|cpu|musa|mlx|mps|hpu|rocm|aiter|win32|darwin|version_info|"
    r"available|modelscope|deep_?gemm|sm100|blackwell|sagemaker|__name__",
    re.IGNORECASE,
)


# Of alternatives that are told apart at run time, those not taken.
_ALTERNATIVES = frozenset({"__main__", "zstandard.backend_rust"})


def needed_imports(source: str, module: str, *, is_package: bool) -> Iterator[str]:
    """Modules that must be there for ``module`` to be imported.

    Left out are imports inside functions, where an ImportError is caught, and under an ``if`` about
    another device.
    """
    package = module if is_package else module.rpartition(".")[0]
    pending: list[ast.stmt] = list(reversed(ast.parse(source).body))
    while pending:
        statement = pending.pop()
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            base = statement.module or ""
            if statement.level:
                parts = package.split(".")
                home = ".".join(parts[: len(parts) - statement.level + 1])
                base = f"{home}.{base}" if base else home
            yield base
        elif isinstance(statement, ast.If):
            elsewhere = _ELSEWHERE.search(ast.unparse(statement.test)) is not None
            pending += [] if elsewhere else reversed(statement.body)
            pending += reversed(statement.orelse)
        elif isinstance(statement, ast.Try):
            pending += [] if statement.handlers else reversed(statement.body)
            pending += reversed(statement.orelse)
        elif isinstance(statement, ast.With):
            suppressed = any("suppress" in ast.unparse(item) for item in statement.items)
            pending += [] if suppressed else reversed(statement.body)
        elif isinstance(statement, ast.ClassDef):
            pending += reversed(statement.body)


class Folder:
    """Modules of an unpacked set of wheels."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._tops = {path.name.split(".")[0] for path in root.iterdir()}

    def owns(self, module: str) -> bool:
        """Whether its top-level package is in the folder."""
        return module.split(".")[0] in self._tops

    def find(self, module: str) -> tuple[Path, bool] | None:
        """Its file or namespace folder, and whether it is a package; None if it is not there."""
        path = self._root.joinpath(*module.split("."))
        if (path / "__init__.py").exists():
            return path / "__init__.py", True
        if path.with_suffix(".py").exists():
            return path.with_suffix(".py"), False
        compiled = next(path.parent.glob(f"{path.name}.*so"), None)
        if compiled is not None:
            return compiled, False
        return (path, True) if path.is_dir() else None


def missing_imports(root: Path, roots: Iterable[str] = ROOTS) -> dict[str, str]:
    """Modules that the launch needs and neither the folder nor the other machine has.

    Returns:
        The module, and one that imports it.
    """
    folder = Folder(root)
    missing: dict[str, str] = {}
    pending = [(name, "the launch") for name in roots]
    seen = set(_ALTERNATIVES)
    while pending:
        module, importer = pending.pop()
        if module in seen:
            continue
        seen.add(module)
        parent = module.rpartition(".")[0]
        if parent:
            pending.append((parent, importer))
        top = module.split(".")[0]
        if not folder.owns(module):
            if top not in HAS and top not in sys.stdlib_module_names and top != "__future__":
                missing.setdefault(top, importer)
            continue
        found = folder.find(module)
        if found is None:
            # "import a.b" may name what a's own code puts there; such a case is looked at by hand.
            missing.setdefault(module, importer)
            continue
        file, is_package = found
        if file.suffix == ".py":
            imports = needed_imports(file.read_text("utf-8"), module, is_package=is_package)
            pending += [(name, module) for name in imports]
    return missing


def check(out: Path) -> dict[str, Any]:
    """Size, contents, and missing imports of a filled folder."""
    wheels = sorted(out.glob("*.whl"))
    with tempfile.TemporaryDirectory() as directory:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(directory)
        missing = missing_imports(Path(directory))
    size = sum(wheel.stat().st_size for wheel in wheels)
    return {
        "bytes": size,
        "limit": LIMIT,
        "wheels": {wheel.name: wheel.stat().st_size for wheel in wheels},
        "missing": missing,
        "norms": NORMS,
        "complete": not missing and size <= LIMIT,
    }


def main() -> int:
    """Fill the folder and check it."""
    parser = command_line(__doc__)
    parser.add_argument("out", type=Path, help="the folder; made if need be")
    parser.add_argument("--cache", type=Path, default=REPO / "build" / "wheels", help="for wheels")
    parser.add_argument("--check", action="store_true", help="only check a folder made before")
    args = parser.parse_args()
    if not args.check:
        args.out.mkdir(parents=True, exist_ok=True)
        for old in args.out.glob("*.whl"):
            old.unlink()
        build(args.out, args.cache)
    found = check(args.out)
    for module, importer in sorted(found["missing"].items()):
        print(f"missing: {module}, imported by {importer}")
    print(f"norms: {found['norms']}")
    print(f"{found['bytes']:,} of {LIMIT:,} bytes in {args.out}")
    print(json.dumps(found))
    return 0 if found["complete"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
