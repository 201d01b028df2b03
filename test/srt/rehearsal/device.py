"""A CUDA runtime, driver and cuBLAS of our own, which give torch a device once loaded.

It must be loaded before torch. Its libraries have the names of the real ones, so that torch's,
Triton's and SGLang's own code runs on them; nothing that is installed changes. The device is named
``rehearsal``, so that no figure of it is taken for a GPU's.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

#: Answer to a question, as JSON.
Answer = dict[str, Any]

HERE = Path(__file__).parent
#: The CUDA 13 runtime that torch was installed with.
CUDA = Path(sysconfig.get_path("platlib")) / "nvidia" / "cu13"
_CACHES = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
CACHE = Path(_CACHES) / "gemma4_yoco_rehearsal"
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

#: What the runtime counts, as in runtime.cpp. A listener hears of those from HOST_WAIT on.
Kind = enum.IntEnum(
    "Kind",
    "LAUNCH COPY HOST_WAIT GRAPH_LAUNCH PINNING EVENT_RECORD EVENT_WAIT",
    start=0,
)
#: A listener's type: kind, description of a wait, stream, event or graph.
LISTENER = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint64, ctypes.c_uint64)

#: Of the real ones, by ``CUDA``: their names are taken from them, and the sources include them.
REAL = (
    *("lib/libcudart.so.13", "lib/libcublasLt.so.13", "lib/libcublas.so.13"),
    *("include/cuda.h", "include/cuda_runtime_api.h"),
)


def read_table(name: str) -> Any:
    """Return the content of a JSON file of this folder."""
    return json.loads((HERE / f"{name}.json").read_text())


def say_what_is_missing() -> str | None:
    """Return one line that says what to install, or None."""
    if shutil.which("g++") is None or shutil.which("nm") is None:
        return "the rehearsal needs g++ and nm: install g++ and binutils"
    if not (CUDA / "lib" / RUNTIME).exists():
        return "the rehearsal needs torch for CUDA 13: install its default build for Linux"
    return None


def _list_names(library: str) -> set[str]:
    """Return the functions of the real library."""
    if library == DRIVER:  # it comes with the GPU's driver
        header = (CUDA / "include" / "cuda.h").read_text()
        return set(re.findall(r"CUDAAPI (cu[A-Z]\w+)\(", header))
    command = ["nm", "--defined-only", "-D", str(CUDA / "lib" / library)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return set(re.findall(r" (_*cu\w+)", output))


def _write_stubs(names: set[str]) -> str:
    """Return C++ of functions that count, for names that the library's source lacks.

    They return success if they need no effect; else they end the process with their name.
    """
    head = (
        '#include <cstdio>\n#include <unistd.h>\n#define FUNCTION extern "C" __attribute__((weak))'
    )
    say = 'fprintf(stderr, "rehearsal: %s is not written\\n", name)'
    lines = [head, f"static int stop(const char* name) {{ {say}; _exit(70); }}"]
    without_effect = read_table("without_effect")
    for name in sorted(names):
        answer = "0" if name in without_effect else f'stop("{name}")'
        lines.append(f"FUNCTION int {name}() {{ return {answer}; }}")
    return "\n".join(lines)


def _run_compiler(*arguments: str) -> None:
    subprocess.run(["g++", "-O1", "-std=c++17", "-fPIC", "-w", *arguments], check=True)


def _build_library(library: str, folder: Path) -> None:
    """Build a library that has all names of the real one."""
    out = folder / library
    stubs = out.with_suffix(".cpp")
    stubs.write_text(_write_stubs(_list_names(library)))
    versions = out.with_suffix(".map")
    versions.write_text(f"{library} {{ global: *; }};\n")
    inputs = [str(HERE / SOURCES[library]), str(stubs)]
    if library != RUNTIME:
        inputs.append(str(folder / RUNTIME))
    names = [f"-Wl,-soname,{library}", f"-Wl,--version-script={versions}"]
    _run_compiler("-shared", f"-I{CUDA}/include", *inputs, "-o", str(out), "-ldl", *names)


def find_folder() -> Path:
    """Return the libraries' folder in the cache: another one once a source has changed.

    The real libraries count by size and time, for one of them has hundreds of megabytes.
    """
    digest = hashlib.sha256()
    for source in (*sorted(HERE.glob("*.cpp")), HERE / "without_effect.json", Path(__file__)):
        digest.update(source.read_bytes())
    for name in REAL:
        known = (CUDA / name).stat()
        digest.update(f"{CUDA / name} {known.st_size} {known.st_mtime_ns}".encode())
    return CACHE / digest.hexdigest()[:16]


def build_libraries() -> Path:
    """Return the folder of the libraries, built if it is not there yet: in about ten seconds.

    Raises:
        RuntimeError: something that this needs is not installed.
    """
    missing = say_what_is_missing()
    if missing is not None:
        raise RuntimeError(missing)
    folder = find_folder()
    if folder.exists():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(dir=CACHE))
    for library in SOURCES:
        _build_library(library, fresh)
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
    for name in ("count", "host_offset", "captured_graph"):
        getattr(runtime, f"rehearsal_{name}").restype = ctypes.c_uint64
    for name in ("captured_graph", "is_pinned", "launch"):
        getattr(runtime, f"rehearsal_{name}").argtypes = [ctypes.c_uint64]
    return runtime


def read_counters(runtime: ctypes.CDLL) -> Counter[str]:
    """Return how often each thing has happened in this process, by the names of ``Kind``."""
    return Counter({kind.name.lower(): runtime.rehearsal_count(kind) for kind in Kind})
