"""Builds the CUDA runtime of ``runtime.cpp`` and loads it before torch: then torch has a device."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("runtime.cpp")
DRIVER_SOURCE = Path(__file__).with_name("driver.cpp")
CACHE = Path.home() / ".cache" / "gemma4_yoco_rehearsal"
LIBRARY = "libcudart.so.13"
DRIVER = "libcuda.so.1"
#: In the order of ``Counter`` in runtime.cpp.
COUNTERS = ("launches", "copies", "host_waits", "graph_launches", "pinned_allocations")


def find_cuda() -> Path | None:
    """The folder of the CUDA 13 runtime that torch was installed with."""
    spec = importlib.util.find_spec("nvidia")
    if spec is None or spec.submodule_search_locations is None:
        return None
    for folder in spec.submodule_search_locations:
        found = Path(folder) / "cu13"
        if (found / "lib" / LIBRARY).exists() and (
            found / "include" / "cuda_runtime_api.h"
        ).exists():
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


def _run_compiler(*arguments: str) -> None:
    subprocess.run(["g++", "-O1", "-fPIC", "-w", *arguments], check=True)


def write_stubs(names: set[str]) -> str:
    """C++ in which each function ends the process with its name."""
    head = "#include <cstdio>\n#include <unistd.h>\n"
    say = 'fprintf(stderr, "rehearsal: %s is not written\\n", name)'
    stop = f"static void stop(const char* name) {{ {say}; _exit(70); }}\n"
    lines = [f'extern "C" void {name}(void) {{ stop("{name}"); }}' for name in sorted(names)]
    return head + stop + "\n".join(lines) + "\n"


def _link_library(source: Path, names: set[str], out: Path) -> None:
    """A library that has all ``names``: those that ``source`` does not define end the process."""
    cuda = find_cuda()
    name = LIBRARY if source == SOURCE else DRIVER
    compiled = out.with_suffix(".o")
    _run_compiler("-std=c++17", f"-I{cuda}/include", "-c", str(source), "-o", str(compiled))
    rest = out.with_suffix(".cpp")
    rest.write_text(write_stubs(names - _list_names(compiled)))
    versions = out.with_suffix(".map")
    versions.write_text(f"{name} {{ global: *; }};\n")
    _run_compiler(
        "-shared",
        str(compiled),
        str(rest),
        "-o",
        str(out),
        f"-Wl,-soname,{name}",
        f"-Wl,--version-script={versions}",
    )


def build_runtime() -> Path:
    """The library, built where its sources have changed.

    Functions that are not written end the process with their name.
    """
    cuda = find_cuda()
    if cuda is None:
        raise RuntimeError(say_what_is_missing())
    real = cuda / "lib" / LIBRARY
    text = (
        SOURCE.read_bytes()
        + DRIVER_SOURCE.read_bytes()
        + Path(__file__).read_bytes()
        + str(real).encode()
    )
    folder = CACHE / hashlib.sha256(text).hexdigest()[:16]
    built = folder / LIBRARY
    if built.exists():
        return built
    CACHE.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(dir=CACHE))
    exported = {name for name in _list_names(real, "-D") if name.startswith(("cuda", "__cuda"))}
    header = (cuda / "include" / "cuda.h").read_text()
    declared = set(re.findall(r"CUDAAPI (cu[A-Z]\w+)\(", header))
    _link_library(DRIVER_SOURCE, declared, fresh / DRIVER)
    _link_library(SOURCE, exported, fresh / LIBRARY)
    try:
        fresh.rename(folder)
    except OSError:  # another process was faster
        shutil.rmtree(fresh)
    return built


def load_runtime() -> ctypes.CDLL:
    """Loads it under the real library's name, so that torch's libraries use it.

    Nothing that is installed changes.
    """
    if "torch" in sys.modules:
        raise RuntimeError("the rehearsal's runtime must be loaded before torch")
    built = build_runtime()
    runtime = ctypes.CDLL(str(built), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(built.with_name(DRIVER)), mode=ctypes.RTLD_GLOBAL)
    runtime.rehearsal_count.restype = ctypes.c_uint64
    return runtime


def read_counters(runtime: ctypes.CDLL) -> dict[str, int]:
    """How often each thing has happened since the process began."""
    return {name: runtime.rehearsal_count(i) for i, name in enumerate(COUNTERS)}
