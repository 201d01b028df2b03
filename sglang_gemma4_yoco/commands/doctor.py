"""``doctor``: would the fast path be active on a server with these flags, and what could it save?

Nothing is started: no port is opened, no directory made, no memory of a GPU taken. SGLang is
imported in this process, loads its plugins and resolves the flags as a server of its would.
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import os
import platform
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from importlib.metadata import PackageNotFoundError, entry_points, requires, version
from typing import Any

from packaging.requirements import Requirement

from sglang_gemma4_yoco import __version__, plugin, settings
from sglang_gemma4_yoco.commands.console import CommandError, say
from sglang_gemma4_yoco.commands.findings import Findings

#: Which plugins SGLang loads, by their names with commas between them; unset for all.
RESTRICTION = "SGLANG_PLUGINS"
#: What --json always has, beside the verdict; null where it was not found out.
FACTS = (
    *("version", "sglang", "torch", "python", "settings", "plugins"),
    *("model", "layers", "first_shared", "quantisation", "ceiling"),
    "attention",
)


def add_to(commands: Any) -> None:
    """Add the parser of ``doctor``."""
    parser = commands.add_parser(
        "doctor",
        help="would it be active, before a server is started",
        description=__doc__,
        usage="%(prog)s [-h] [--model-path MODEL] [--json] [-- SERVER_FLAG ...]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model-path", metavar="MODEL", help="a directory, or a name on Hugging Face"
    )
    parser.add_argument("--json", action="store_true", help="one line of JSON, for a program")
    parser.add_argument(
        "flags", nargs="*", metavar="SERVER_FLAG", help="behind --: what the server would be given"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Examine, report; returns 0 if it would be active, 1 if not, 2 if that cannot be told.

    Raises:
        CommandError: there is no SGLang, or its parser refuses the flags.
    """
    findings = Findings(FACTS)
    try:
        with quiet() as said:
            _versions(findings)
            _settings(findings)
            _discovery(findings)
            _with_sglang(findings, args.model_path, args.flags, said)
    except CommandError as failure:
        if args.json:
            findings.refusals.clear()
            findings.unknowns = [str(failure)]
            say(json.dumps(findings.document()))
        raise
    if args.json:
        say(json.dumps(findings.document()))
    else:
        findings.show()
    return findings.exit_status


@contextmanager
def quiet() -> Iterator[io.StringIO]:
    """Keep what SGLang prints and logs out of the report; it is in the yielded text."""
    root, said = logging.getLogger(), io.StringIO()
    handlers, level = list(root.handlers), root.level
    with warnings.catch_warnings(), redirect_stdout(said), redirect_stderr(said):
        warnings.simplefilter("ignore")
        try:
            yield said
        finally:
            root.handlers[:] = handlers
            root.setLevel(level)


def _versions(findings: Findings) -> None:
    findings.section("Versions")
    needed = next(r for r in map(Requirement, requires(plugin.DISTRIBUTION) or ()) if _is(r))
    installed = {name: _version(name) for name in ("sglang", "torch")}
    if installed["sglang"] is None:
        raise CommandError(
            "no SGLang is installed in this environment; run this where the server runs"
        )
    findings.facts |= {"version": __version__, "python": platform.python_version(), **installed}
    findings.tell(plugin.DISTRIBUTION, __version__)
    findings.tell("SGLang", f"{installed['sglang']} (supported: {needed.specifier})")
    findings.tell("torch", installed["torch"] or "not installed")
    findings.tell("Python", platform.python_version())
    try:
        plugin.check_version()
    except plugin.UnsupportedError as refusal:
        findings.refusals.append(str(refusal))


def _is(requirement: Requirement) -> bool:
    return requirement.name == "sglang"


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _settings(findings: Findings) -> None:
    findings.section("Settings, in the environment")
    variables = settings.VARIABLES.values()
    findings.facts["settings"] = {one.name: os.environ.get(one.name) for one in variables}
    for one in variables:
        value = os.environ.get(one.name)
        findings.tell(one.name, f"unset: {one.unset}" if value is None else value)
        try:
            if value is not None and one.read(value) is False and one.name == settings.SWITCH:
                findings.refusals.append(f"{one.name}={value}")
        except ValueError as invalid:
            findings.refusals.append(str(invalid))
    for name in settings.unknown(os.environ):
        findings.tell(name, "is no setting of this version, and is ignored: misspelt?")


def _discovery(findings: Findings) -> None:
    """Would SGLang's loader find the plugin, and run it?"""
    findings.section("Plugins")
    found = {entry.name: entry for entry in entry_points(group=plugin.GROUP)}
    allowed = os.environ.get(RESTRICTION) or None
    findings.facts["plugins"] = {"found": sorted(found), "restricted_to": allowed}
    findings.tell("found by SGLang", ", ".join(sorted(found)) or "none")
    if plugin.NAME not in found:
        findings.refusals.append(
            f"the plugin is not registered in this environment: pip install {plugin.DISTRIBUTION}"
        )
    if allowed is not None:
        findings.tell(RESTRICTION, allowed)
        if plugin.NAME not in map(str.strip, allowed.split(",")):
            findings.refusals.append(
                f"{RESTRICTION}={allowed} leaves {plugin.NAME} out: add it, or unset it"
            )


def _with_sglang(
    findings: Findings, model: str | None, flags: Sequence[str], said: io.StringIO
) -> None:
    """All that must be asked of SGLang itself, which loads its plugins first, as in a server."""
    try:
        from sglang.srt.plugins import load_plugins
    except Exception as failure:
        raise CommandError(f"SGLang cannot be imported here: {failure!r}") from failure
    load_plugins()
    try:
        from sglang_gemma4_yoco.commands import preflight
    except ImportError as missing:
        findings.refusals.append(
            plugin.left_alone or f"SGLang lacks what the patch needs ({missing})"
        )
        return
    preflight.examine(findings, model, flags, said)
