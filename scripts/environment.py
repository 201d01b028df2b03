"""What the scripts share: a virtual environment, random checkpoints, where results come from.

Standard library only: this runs before anything is installed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))  # what is imported next is standard library, and not installed yet

from sglang_gemma4_yoco.commands.console import CommandError  # noqa: E402
from sglang_gemma4_yoco.commands.console import say as say  # noqa: E402
from sglang_gemma4_yoco.commands.console import tail as tail  # noqa: E402
from sglang_gemma4_yoco.commands.redact import learn_secrets, redact, redact_flags  # noqa: E402

SetupError = CommandError
REFERENCE = REPO / "test" / "reference"
SGLANG_VERSION = "0.5.23"
INSTALL_BYTES = 12e9
_SERVER_ARGS = "--server-args"

# Isolated (-I), so that a package counts as installed only if it is, whatever the directory.
_PROBE = """
import importlib.util, json
from importlib.metadata import PackageNotFoundError, version
found = {}
for name in ("sglang", "sglang-gemma4-yoco", "sglang-gemma4-reference", "rich", "matplotlib"):
    try:
        found[name] = version(name)
    except PackageNotFoundError:
        found[name] = None
spec = importlib.util.find_spec("sglang_gemma4_yoco")
print(json.dumps(found | {"path": spec and spec.origin}))
"""
_PROBE_GPU = """
import torch
print(torch.cuda.get_device_name() if torch.cuda.is_available() else "")
"""


def run_logged(command: Sequence[str | Path], log: Path, env: dict[str, str] | None = None) -> bool:
    """Run ``command`` with its output appended to ``log``; return whether it succeeded.

    Every 30 seconds a line is printed.
    """
    began = reported = time.monotonic()
    with log.open("a") as output:
        output.write(f"$ {shlex.join(map(str, command))}\n")
        output.flush()
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=env)
        try:
            while process.poll() is None:
                time.sleep(0.2)
                if time.monotonic() - reported > 30:
                    reported = time.monotonic()
                    say(f"   still running after {reported - began:.0f} s")
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    return process.returncode == 0


def probe(python: str | Path) -> dict[str, str | None]:
    """The versions of what the demo needs, None if missing, and the package's ``path``."""
    command = [python, "-I", "-c", _PROBE]
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as failure:
        raise SetupError(
            f"{python} does not work ({failure}): delete its environment, or choose another "
            "directory with --venv."
        ) from failure
    found: dict[str, str | None] = json.loads(output)
    return found


def gpu_name(python: str | Path) -> str | None:
    """The name of the GPU that PyTorch can use, or None."""
    command = [python, "-I", "-c", _PROBE_GPU]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SetupError(
            f"PyTorch cannot be imported by {python}:\n{done.stderr}\n"
            "Delete that environment and run the demo again."
        )
    return done.stdout.strip() or None


def create_venv(venv: Path, log: Path) -> None:
    """Create a virtual environment at ``venv`` with what this machine has."""
    if venv.exists() and any(venv.iterdir()):
        raise SetupError(
            f"{venv} exists and is not a virtual environment: choose another with --venv."
        )
    say(f"Creating a virtual environment in {venv}")
    uv = shutil.which("uv")
    if run_logged([sys.executable, "-m", "venv", venv], log):
        return
    shutil.rmtree(venv, ignore_errors=True)
    if uv and run_logged([uv, "venv", "--python", sys.executable, venv], log):
        return
    # Debian's python3 lacks ensurepip unless python3-venv is installed; its pip may be there.
    if run_logged([sys.executable, "-m", "venv", "--without-pip", venv], log):
        return
    raise SetupError(
        "no virtual environment could be created. Install Python's venv module (Debian and "
        "Ubuntu: apt install python3-venv) or uv, or, inside an environment that has everything "
        "already, use --no-venv.",
        log,
    )


def find_uv(venv: Path, log: Path) -> Path:
    """The uv to install with: the environment's own, put there if need be."""
    own = venv / "bin" / "uv"
    python = venv / "bin" / "python"
    if own.exists():
        return own
    say("Installing uv into it")
    if run_logged([python, "-m", "pip", "install", "uv"], log):
        return own
    on_path = shutil.which("uv")
    if on_path:
        return Path(on_path)
    if run_logged([sys.executable, "-m", "pip", "--python", python, "install", "uv"], log):
        return own
    raise SetupError(
        "uv could not be installed. If the log says that pip is missing, install python3-venv or "
        "uv; if the package index was not reached, check network and proxy.",
        log,
    )


def install(uv: Path, python: Path, packages: Sequence[str], log: Path) -> None:
    """Install ``packages`` into the environment of ``python``."""
    command: list[str | Path] = [uv, "pip", "install", "--python", python, *packages]
    began = time.monotonic()
    earlier = log.stat().st_size if log.exists() else 0
    done = run_logged(command, log)
    if not done and "cuda-tile" in log.read_text(errors="replace")[earlier:]:
        # SGLang 0.5.18 to 0.5.22 ask for a release candidate that is not built everywhere.
        say("   its cuda-tile cannot be installed here, trying again with cuda-tile 1.6.0")
        override = log.with_name("override.txt")
        override.write_text("cuda-tile==1.6.0\n")
        done = run_logged([*command, "--override", override], log)
    if not done:
        raise SetupError(
            f"installing {' '.join(packages)} failed. If the package index was not reached, check "
            "network and proxy; if no version fits, try another Python (3.11 or later; "
            "3.10 up to SGLang 0.5.21) or another --sglang-version. What was installed is kept for "
            "the next run.",
            log,
        )
    say(f"   done in {time.monotonic() - began:.0f} s")


def prepare_environment(
    venv: Path,
    log: Path,
    *,
    sglang_version: str = SGLANG_VERSION,
    device: str = "auto",
    group: str | None = None,
) -> tuple[Path, str]:
    """Complete the virtual environment; return its interpreter and the device to serve on.

    Args:
        venv: where it is, or where to make it.
        log: what the installers print is appended to this file.
        sglang_version: the SGLang to install.
        device: ``cpu``, ``cuda``, or ``auto`` for the GPU if PyTorch sees one.
        group: one of this project's dependency groups, such as ``test``.

    Raises:
        SetupError: something could not be installed.
    """
    python = venv / "bin" / "python"
    if not (venv / "pyvenv.cfg").exists():
        create_venv(venv, log)
    found = probe(python)
    wanted = f"sglang=={sglang_version}"
    if found["sglang"] != sglang_version:
        free = shutil.disk_usage(venv).free
        if free < INSTALL_BYTES:
            raise SetupError(
                f"{venv} has {free / 1e9:.1f} GB of free disk and SGLang needs about "
                f"{INSTALL_BYTES / 1e9:.0f}: free some, or choose another disk with --venv."
            )
        uv = find_uv(venv, log)
        say(f"Installing {wanted} (about 10 GB; the log is {log})")
        install(uv, python, [wanted], log)
    if device == "auto":
        device = "cuda" if gpu_name(python) else "cpu"
    # Editable, so that an environment from last week measures the checkout of today.
    complete = _is_from_here(found) and found["rich"] and found["matplotlib"]
    local = [] if complete and not group else ["-e", f"{REPO}[verify]", *of_group(group)]
    # With a group, always: an older installation lacks the plugins that were added since.
    if device == "cpu" and (group or not found["sglang-gemma4-reference"]):
        local += ["-e", str(REFERENCE)]
    if local:
        uv = find_uv(venv, log)
        say(f"Installing this package{' and its CPU platform' if device == 'cpu' else ''}")
        install(uv, python, [wanted, *local], log)
    return python, device


def of_group(name: str | None) -> list[str]:
    """The installer's arguments for a dependency group of this project; none for None."""
    return [f"--group={REPO / 'pyproject.toml'}:{name}"] if name else []


def _is_from_here(found: dict[str, str | None]) -> bool:
    path = found["path"]
    installed = found["sglang-gemma4-yoco"]
    return bool(installed and path and Path(path).resolve().parent.parent == REPO)


# ---------------------------------------------------------------- random checkpoints


def make_checkpoint(
    preset: str, work_dir: Path, log: Path, python: str | Path = sys.executable
) -> Path:
    """Write a random checkpoint, or find the one that an earlier run wrote.

    Args:
        python: the interpreter of an environment with PyTorch.
    """
    maker = REFERENCE / "sglang_gemma4_reference" / "checkpoint.py"
    digest = hashlib.sha256(maker.read_bytes()).hexdigest()[:8]
    path = work_dir / f"{preset}-{digest}"
    if path.exists():
        say(f"Random checkpoint of an earlier run: {path}")
        return path
    say(f"Making a random checkpoint, {preset}: {path}")
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    # By path: on a GPU machine the reference distribution is not installed, as it is a platform.
    env = os.environ | {"PYTHONPATH": str(REFERENCE)}
    command = [python, "-m", "sglang_gemma4_reference.checkpoint", preset]
    try:
        if not run_logged([*command, partial], log, env):
            raise SetupError("the checkpoint could not be made; its log says why.", log)
        partial.rename(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return path


def make_work_dir(path: Path) -> None:
    """Make the directory for logs and checkpoint, and keep it out of version control."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / ".gitignore").write_text("*\n")
    except OSError as failure:
        raise SetupError(f"{path} cannot be written ({failure}): choose --work-dir.") from failure


def make_log_dir(work_dir: Path) -> Path:
    """Make the working directory if need be, and a new folder in it for the logs of this run."""
    make_work_dir(work_dir)
    logs = work_dir / "logs" / time.strftime("%Y%m%d-%H%M%S")
    logs.mkdir(parents=True)
    return logs


# ---------------------------------------------------------------- commands and their results


class _Defaults(argparse.RawDescriptionHelpFormatter):
    """Names each default that is worth naming, and keeps the lines of the description."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if not action.default or action.default in (True, argparse.SUPPRESS):
            return action.help
        if isinstance(action.default, list):
            return f"{action.help or ''} (default: {' '.join(map(str, action.default))})"
        return f"{action.help or ''} (default: %(default)s)"


def command_line(about: str | None) -> argparse.ArgumentParser:
    """A parser whose ``--help`` shows ``about`` as it is, and the defaults.

    It takes no shortened flags: servers' secrets are looked for behind ``--server-args``.
    """
    hide_servers_secrets(sys.argv)
    return argparse.ArgumentParser(description=about, formatter_class=_Defaults, allow_abbrev=False)


def hide_servers_secrets(words: Sequence[str]) -> str:
    """A script's command line for a shell, without secrets; none of them is printed from now on.

    A script's own flags have none. A server's flags are in the one word of ``--server-args``, or
    they are what follows ``--``.
    """
    end = words.index("--") if "--" in words else len(words)
    after = list(words[end:])
    of_server, shown = after[1:], list[str]()
    for word in words[:end]:
        flag, equals, flags = word.partition("=")
        if shown[-1:] == [_SERVER_ARGS]:
            before, flags = "", word
        elif flag == _SERVER_ARGS and equals:
            before = f"{flag}="
        else:
            shown.append(word)
            continue
        of_server += shlex.split(flags)
        shown.append(before + redact_flags(shlex.split(flags)))
    learn_secrets(of_server, os.environ)
    command: str = redact(f"{shlex.join(shown)} {redact_flags(after)}".rstrip())
    return command


def heading(text: str) -> None:
    """Begin a new part of the output."""
    say(f"\n== {text}")


def failed(failure: Exception) -> int:
    """Print why a command cannot go on, after the end of its log; return its exit status, 2."""
    log = getattr(failure, "log", None)
    if log is not None:
        say(tail(log), sys.stderr)
    say(f"error: {failure}", sys.stderr)
    return 2


def write_whole(path: Path, text: str) -> None:
    """Write a file in one step: who reads it meanwhile finds the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text)
    partial.replace(path)


def origin() -> dict[str, str]:
    """Where a result comes from: command, commit, package and machine."""
    return {
        "command": hide_servers_secrets(["python", *sys.argv]),
        "commit": commit(),
        "package": package_of(),
        "machine": platform.machine(),
    }


def commit() -> str:
    """The checkout's last commit, with ``-dirty`` if more than measurements has changed since."""
    try:
        return commit_of([".", ":(exclude)benchmark"])
    except SetupError:
        return "unknown"


def commit_of(paths: Sequence[str]) -> str:
    """The last commit that changed one of these; ``-dirty`` if there are changes since."""

    def git(*command: str) -> str:
        done = subprocess.run(["git", *command], cwd=REPO, capture_output=True, text=True)
        if done.returncode:
            raise SetupError(f"git {command[0]} failed in {REPO}: {done.stderr.strip()}")
        return done.stdout.strip()

    commit = git("log", "-1", "--format=%h", "--abbrev=12", "--", *paths)
    changed = git("status", "--porcelain", "--", *paths)
    return f"{commit}-dirty" if changed else commit


def package_of(folder: Path = REPO / "sglang_gemma4_yoco") -> str:
    """What the package in ``folder`` is, in twelve digits, committed or not."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        content = path.read_bytes()
        found.update(f"{path.relative_to(folder)} {len(content)}\n".encode() + content)
    return found.hexdigest()[:12]
