"""Builds a CUDA runtime, driver and cuBLAS of our own, and loads them: then torch has a device.

It must be loaded before torch. Its libraries have the names of the real ones, so that torch's,
Triton's and SGLang's own code runs on them; nothing that is installed changes. The device is named
``rehearsal``, so that no figure of it is taken for a GPU's.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
CACHE = Path.home() / ".cache" / "gemma4_yoco_rehearsal"
RUNTIME = "libcudart.so.13"
DRIVER = "libcuda.so.1"
#: The release whose kernels ``compiled_kernels`` and ``triton_kernels`` know.
SGLANG = "0.5.23"
#: Each library, in the order in which they are built and loaded, with its source.
SOURCES = {
    RUNTIME: "runtime.cpp",
    DRIVER: "driver.cpp",
    "libcublasLt.so.13": "blas.cpp",
    "libcublas.so.13": "blas.cpp",
}


class Kind(enum.IntEnum):
    """What the runtime counts, as in runtime.cpp. A listener hears of those from HOST_WAIT on."""

    LAUNCH = 0
    COPY = 1
    DEVICE_ALLOCATION = 2
    HOST_WAIT = 3
    GRAPH_LAUNCH = 4
    PINNED_ALLOCATION = 5
    EVENT_RECORD = 6
    EVENT_WAIT = 7


#: A listener's type: kind, what waits for what, stream, event or graph.
LISTENER = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint64, ctypes.c_uint64)


def find_cuda() -> Path | None:
    """The folder of the CUDA 13 runtime that torch was installed with."""
    spec = importlib.util.find_spec("nvidia")
    if spec is None or spec.submodule_search_locations is None:
        return None
    for folder in spec.submodule_search_locations:
        found = Path(folder) / "cu13"
        has_headers = (found / "include" / "cuda_runtime_api.h").exists()
        if has_headers and (found / "lib" / RUNTIME).exists():
            return found
    return None


def say_what_is_missing() -> str | None:
    """One line that says what to install, or None."""
    if shutil.which("g++") is None or shutil.which("nm") is None:
        return "the rehearsal needs g++ and nm: install g++ and binutils"
    if find_cuda() is None:
        return "the rehearsal needs torch for CUDA 13: install its default build for Linux"
    return None


def _list_names(library: Path, *options: str) -> set[str]:
    command = ["nm", "--defined-only", *options, str(library)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {line.split()[-1].split("@")[0] for line in output.splitlines()}


def _list_names_of_the_real_one(cuda: Path, library: str) -> set[str]:
    if library == DRIVER:  # it comes with the GPU's driver
        header = (cuda / "include" / "cuda.h").read_text()
        return set(re.findall(r"CUDAAPI (cu[A-Z]\w+)\(", header))
    names = _list_names(cuda / "lib" / library, "-D")
    return {name for name in names if name.lstrip("_").startswith("cu")}


def write_stubs(names: set[str]) -> str:
    """C++ in which each function ends the process with its name."""
    head = "#include <cstdio>\n#include <unistd.h>\n"
    say = 'fprintf(stderr, "rehearsal: %s is not written\\n", name)'
    stop = f"static void stop(const char* name) {{ {say}; _exit(70); }}\n"
    lines = [f'extern "C" void {name}(void) {{ stop("{name}"); }}' for name in sorted(names)]
    return head + stop + "\n".join(lines) + "\n"


def _run_compiler(*arguments: str) -> None:
    subprocess.run(["g++", "-O1", "-std=c++17", "-fPIC", "-w", *arguments], check=True)


def _build_library(cuda: Path, library: str, folder: Path) -> None:
    """Build one that has all names of the real one; what is not written ends the process."""
    out = folder / library
    compiled = out.with_suffix(".o")
    _run_compiler(f"-I{cuda}/include", "-c", str(HERE / SOURCES[library]), "-o", str(compiled))
    missing = _list_names_of_the_real_one(cuda, library) - _list_names(compiled)
    stubs = out.with_suffix(".cpp")
    stubs.write_text(write_stubs(missing))
    versions = out.with_suffix(".map")
    versions.write_text(f"{library} {{ global: *; }};\n")
    inputs = [str(compiled), str(stubs)]
    if library != RUNTIME:
        inputs.append(str(folder / RUNTIME))
    names = [f"-Wl,-soname,{library}", f"-Wl,--version-script={versions}"]
    _run_compiler("-shared", *inputs, "-o", str(out), "-ldl", *names)


def build_libraries() -> Path:
    """The folder of the libraries, built where a source has changed: in about ten seconds.

    Raises:
        RuntimeError: something that this needs is not installed.
    """
    cuda = find_cuda()
    if cuda is None:
        raise RuntimeError(say_what_is_missing())
    sources = [HERE / name for name in sorted(set(SOURCES.values()))]
    parts = [path.read_bytes() for path in (*sources, Path(__file__))]
    parts.append(str(cuda).encode())
    folder = CACHE / hashlib.sha256(b"".join(parts)).hexdigest()[:16]
    if folder.exists():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(dir=CACHE))
    for library in SOURCES:
        _build_library(cuda, library, fresh)
    try:
        fresh.rename(folder)
    except OSError:  # another process was faster
        shutil.rmtree(fresh)
    return folder


@functools.cache
def load_runtime() -> ctypes.CDLL:
    """Load the libraries, once, for all that this process imports later.

    Raises:
        RuntimeError: torch is loaded already, and has looked for a device.
    """
    if "torch" in sys.modules:
        raise RuntimeError("the rehearsal's runtime must be loaded before torch")
    folder = build_libraries()
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # operations in compiled functions are not seen
    loaded = [ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL) for name in SOURCES]
    runtime = loaded[0]
    for name in ("count", "host_offset", "used_bytes", "captured_graph"):
        getattr(runtime, f"rehearsal_{name}").restype = ctypes.c_uint64
    for name in ("captured_graph", "is_pinned", "launch"):
        getattr(runtime, f"rehearsal_{name}").argtypes = [ctypes.c_uint64]
    return runtime


def read_counters(runtime: ctypes.CDLL) -> dict[str, int]:
    """How often each thing has happened since the process began, by the names of ``Kind``."""
    return {kind.name.lower(): runtime.rehearsal_count(kind) for kind in Kind}
