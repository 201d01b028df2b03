"""``sglang-gemma4-yoco``: each subcommand is a module with its help, its options and ``run``."""

import argparse
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from sglang_gemma4_yoco import __version__, plugin
from sglang_gemma4_yoco.commands import doctor, status
from sglang_gemma4_yoco.commands.console import CommandError, say
from sglang_gemma4_yoco.commands.redact import learn_secrets, redact
from sglang_gemma4_yoco.commands.verify import verify


class Parser(argparse.ArgumentParser):
    """A parser whose errors quote no secrets."""

    def error(self, message: str) -> NoReturn:
        """Print the message and exit."""
        shown = redact(message)
        if shown.startswith("unrecognized arguments"):
            shown += " (`doctor` and `verify` take a server's flags after `--`)"
        super().error(shown)


def exit_on_signals() -> None:
    """Raise ``SystemExit`` on signals, so that the command stops everything it has started.

    Ignored signals stay ignored, for example under ``nohup``.
    """
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda signum, _: sys.exit(128 + signum))


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status, 2 if it could not do its work."""
    words = argv
    if words is None:
        words = sys.argv[1:]
    # For the parser's own errors. The first word is shown, like a model's name: it may be a
    # misspelt command.
    learn_secrets(["--model", *words])
    parser = Parser(
        prog="sglang-gemma4-yoco", description="Check YOCO fast prefill of Gemma 4 in SGLang"
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(title="commands", required=True)
    for name, command in {"doctor": doctor, "verify": verify, "status": status}.items():
        text = command.__doc__ or ""
        subparser = commands.add_parser(name, help=text.partition("\n")[0], description=text)
        subparser.formatter_class = argparse.RawDescriptionHelpFormatter
        command.add_options(subparser)
        subparser.set_defaults(run=command.run, flags=[], api_key=None)
    args = parser.parse_args(words)
    learn_secrets([*args.flags, f"--api-key={args.api_key or ''}"])
    exit_on_signals()
    try:
        return int(args.run(args))
    except KeyboardInterrupt:
        say("interrupted; everything that was started has been stopped", sys.stderr)
        return 130
    except Exception as failure:  # noqa: BLE001 - Python would print it with whatever it quotes
        say(_describe(failure), sys.stderr)
        return 2


def _describe(failure: Exception) -> str:
    """Return one line about an exception that is no defect of this package; else its traceback."""
    if isinstance(failure, CommandError | OSError):  # OSError: of a file or a folder
        return f"error: {failure}"
    if isinstance(failure, ImportError) and not plugin.is_from_this_package(failure):
        return f"error: {failure}; run this where the server runs"
    return traceback.format_exc()
