"""Predict whether fast prefill would be active on a server with these flags.

It starts no server, opens no port and uses no GPU memory. SGLang is imported in this process, loads
its plugins and resolves the flags as it would in a server. The exit status is 0 if fast prefill
would be active, 1 if it would not, and 2 if this machine cannot tell.
"""

import argparse
import io
import os
import platform
from contextlib import redirect_stderr, redirect_stdout
from importlib.metadata import entry_points, version
from importlib.util import find_spec

from sglang_gemma4_yoco import COMMIT, __version__, plugin, settings
from sglang_gemma4_yoco.commands.console import CommandError, Report

#: SGLang's variable with the names of the plugins to load, separated by commas; unset for all.
RESTRICTION = "SGLANG_PLUGINS"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``doctor``."""
    parser.add_argument("--model-path", metavar="MODEL", help="a directory or a Hugging Face name")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("flags", nargs="*", metavar="SERVER_FLAG", help="SGLang's flags, after --")


def run(args: argparse.Namespace) -> int:
    """Examine and report; return the exit status."""
    report = Report()
    unseen = io.StringIO()
    try:
        _versions(report)
        _settings(report)
        _discovery(report)
        flags = args.flags
        if args.model_path is not None:
            flags = ["--model-path", args.model_path, *flags]
        with redirect_stdout(unseen), redirect_stderr(unseen):  # what SGLang prints
            from sglang.srt.plugins import load_plugins

            load_plugins()  # first, as in a server
            report.refuse(plugin.why_not_installed)
            from sglang_gemma4_yoco.commands import preflight

            preflight.examine(report, flags)
    except (CommandError, ImportError) as failure:  # ImportError: of a part of SGLang
        if isinstance(failure, ImportError) and plugin.is_from_this_package(failure):
            raise
        report.unknowns.append(str(failure))
    report.show(args.json)
    return report.exit_status


def _versions(report: Report) -> None:
    report.begin("Versions")
    if not find_spec("sglang"):
        raise CommandError("no SGLang is installed here; run this where the server runs")
    found = {
        "version": __version__,
        "commit": COMMIT,
        "sglang": version("sglang"),
        "torch": version("torch"),
        "python": platform.python_version(),
    }
    for name, release in found.items():
        report.add(name, release, **{name: release})


def _settings(report: Report) -> None:
    report.begin("Settings, in the environment")
    values = {name: os.environ.get(name) for name in settings.VARIABLES}
    report.entries["settings"] = values
    for name, value in values.items():
        if value is None:
            report.add(name, f"unset: {settings.describe_default(settings.VARIABLES[name])}")
            continue
        report.add(name, value)
        try:
            settings.parse(name, value)
        except ValueError as invalid:
            report.refuse(invalid)
    for name in sorted(os.environ.keys() - settings.VARIABLES.keys()):
        if name.startswith(settings.SWITCH):
            report.add(name, "is not a setting of this version, and is ignored: misspelt?")


def _discovery(report: Report) -> None:
    """Report whether SGLang would find and load the plugin."""
    report.begin("Plugins")
    found = sorted(entry.name for entry in entry_points(group=plugin.GROUP))
    allowed = os.environ.get(RESTRICTION) or None
    report.entries["plugins"] = {"found": found}
    report.add("found by SGLang", ", ".join(found) or "none")
    if plugin.NAME not in found:
        report.refuse(
            "the plugin is not registered in this environment: pip install --no-deps . in a "
            "checkout of it"
        )
    if allowed:
        loaded = {name.strip() for name in allowed.split(",")}.intersection(found)
        report.entries["plugins"]["restricted_to"] = sorted(loaded)
        report.add(RESTRICTION, f"SGLang loads only {', '.join(sorted(loaded)) or 'none'} of these")
        if plugin.NAME not in loaded:
            report.refuse(f"{RESTRICTION} leaves {plugin.NAME} out: add it, or unset it")
