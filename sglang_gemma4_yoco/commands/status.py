"""Report whether fast prefill is active on all schedulers of a server.

Exit status: 0: active; 1: not active; 2: unknown (no response, or no plugin entry).
"""

import argparse
import os
from collections import Counter
from collections.abc import Iterable, Sequence

from sglang_gemma4_yoco import counters
from sglang_gemma4_yoco.commands.console import CommandError, Document, say
from sglang_gemma4_yoco.commands.https import API_KEY, explain_failure, hide_user, make_session
from sglang_gemma4_yoco.settings import SWITCH

#: The package's key in the internal state of each scheduler.
ENTRY = "gemma4_yoco"
NO_ENTRY = (
    f"the server has no entry {ENTRY}. Likely reasons: it is switched off ({SWITCH}=0); the "
    "package is not installed in the server's environment (run `sglang-gemma4-yoco doctor` there); "
    "the plugin failed to load, or this SGLang lacks a method that it wraps (see the lines `YOCO "
    "fast prefill` in the server's log)"
)
# Verdict -> exit status and last line.
_VERDICTS = {
    True: (0, "The fast path is active{}"),
    False: (1, "The fast path is NOT active: {}"),
    None: (2, "The server does not say whether the fast path is active: {}"),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``status``."""
    add = parser.add_argument
    add("url", metavar="URL", type=add_scheme, help="for example http://localhost:30000")
    add(
        "--api-key",
        metavar="KEY",
        help=f"the server's API key (default: the variable {API_KEY}, which `ps` does not show)",
    )
    add(
        "--cacert",
        metavar="FILE",
        default=os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("SSL_CERT_FILE"),
        help="certificates to trust, in PEM (default: REQUESTS_CA_BUNDLE, SSL_CERT_FILE)",
    )
    add("--insecure", action="store_true", help="trust any certificate")
    add("--json", action="store_true", help="one line of JSON, for a program")


def add_scheme(url: str) -> str:
    """Return ``url`` with ``http://`` if it has no scheme."""
    if "://" in url:
        return url
    return f"http://{url}"


def run(args: argparse.Namespace) -> int:
    """Query the server and report; return the exit status."""
    sglang, states = schedulers(args)
    active, reason = verdict(states)
    status, line = _VERDICTS[active]
    if args.json:
        say(
            {
                "active": active,
                "reason": reason,
                "sglang": sglang,
                "url": hide_user(args.url),
                "schedulers": states,
            }
        )
    else:
        say(states, indent=1)  # null for a scheduler without an entry
        say(line.format(reason or _describe_counts(filter(None, states))))
    return status


def verdict(states: Sequence[Document | None]) -> tuple[bool | None, str | None]:
    """Return True if the path is active on every scheduler; else False or None, and the reason.

    False if a scheduler reports that it is not active; None if some of them report nothing.
    """
    for state in filter(None, states):
        if not state.get("active"):
            return False, str(state.get("reason"))
    if not states or not all(states):
        return None, NO_ENTRY
    return True, None


def _describe_counts(states: Iterable[Document]) -> str:
    """Return how much all schedulers of an active server have cut, as the end of a sentence."""
    prefills = Counter[str]()
    rows = Counter[str]()
    for state in states:
        rows.update(state.get("rows"))
        prefills.update(state.get("forwards"))
    total = prefills.total()
    if not total:
        return ": no prefill yet."
    cut = sum(prefills[outcome] for outcome in counters.CUT)
    if not cut:
        [(most, _)] = prefills.most_common(1)
        return f", but none of {total} prefills was cut: most are {most} (docs/slower.md)."
    skipped = rows["skipped"] / rows.total()
    return f": {cut / total:.1%} of prefills cut, {skipped:.1%} of rows skipped."


def schedulers(args: argparse.Namespace) -> tuple[str, list[Document | None]]:
    """Return a server's SGLang version, and each scheduler's entry; raise CommandError on failure.

    The entry is None for a scheduler without one.
    """
    url = hide_user(args.url)
    try:
        reply = make_session(args.url, args.api_key).get(
            f"{args.url.rstrip('/')}/server_info",
            timeout=30,
            # As an argument: environment variables override a session's own setting.
            verify=not args.insecure and (args.cacert or True),
        )
    except (OSError, ValueError) as failure:  # ValueError: it is no URL
        raise CommandError(f"{url}: {explain_failure(failure)}") from None
    if reply.status_code in (401, 403):
        raise CommandError(
            f"{url} rejects this API key, or needs one: set {API_KEY}, or use --api-key"
        )
    try:
        info = reply.json()
        return info.get("version"), [state.get(ENTRY) for state in info["internal_states"]]
    except (ValueError, TypeError, KeyError, AttributeError):
        raise CommandError(
            f"{url.rstrip('/')}/server_info answers {reply.status_code}, not as an SGLang server "
            "does: give the server's own URL, as http://HOST:PORT"
        ) from None
