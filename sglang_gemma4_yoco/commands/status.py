"""Report whether fast prefill is active on all schedulers of one or more servers.

With --json it prints one line per server. The exit status is 0 if fast prefill is active; 1 if it
is not, or the server does not report it; 2 if the arguments are wrong; 3 if the server gives no
usable answer; 4 if it is active, but prefills failed, audits differed, or no prefill was cut. With
several servers the worst one determines it, in the order 3, 1, 4, 0.
"""

import argparse
import os
import sys
from collections import Counter
from collections.abc import Sequence

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
    None: (1, "The server does not say whether the fast path is active: {}"),
}
_NO_ANSWER = 3
_FAULTY = 4
# The best one first.
_SEVERITY = (0, _FAULTY, 1, _NO_ANSWER)
# Prefills in which each request has one new token, such as those of /health on an idle server.
_NOTHING_TO_SKIP = "every_row_of_the_batch_is_read"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``status``."""
    add = parser.add_argument
    add(
        "urls",
        metavar="URL",
        nargs="+",
        type=add_scheme,
        help="address of a server, for example http://localhost:30000",
    )
    add(
        "--api-key",
        metavar="KEY",
        help=f"the server's API key (default: the variable {API_KEY}, which `ps` does not show)",
    )
    add(
        "--cacert",
        metavar="FILE",
        default=os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("SSL_CERT_FILE"),
        help="trusted certificates in PEM format (default: REQUESTS_CA_BUNDLE, SSL_CERT_FILE)",
    )
    add("--insecure", action="store_true", help="trust any certificate")
    add("--json", action="store_true", help="print one line of JSON per server")


def add_scheme(url: str) -> str:
    """Return ``url`` with ``http://`` if it has no scheme."""
    if "://" in url:
        return url
    return f"http://{url}"


def run(args: argparse.Namespace) -> int:
    """Query each server and report; return the exit status of the worst one."""
    found = []
    for url in args.urls:
        if len(args.urls) > 1 and not args.json:
            say(f"== {hide_user(url)}")
        found.append(report(url, args))
    return max(found, key=_SEVERITY.index)


def report(url: str, args: argparse.Namespace) -> int:
    """Query one server and report; return its exit status."""
    document: Document = {
        "active": None,
        "reason": None,
        "exit_status": _NO_ANSWER,
        "sglang": None,
        "url": hide_user(url),
        "schedulers": [],
    }
    try:
        line = _examine(document, url, args)
    except CommandError as failure:
        line = ""
        document["reason"] = str(failure)
    if args.json:
        say(document)
    elif line:
        say(document["schedulers"], indent=1)  # null for a scheduler without an entry
        say(line)
    else:
        say(f"error: {document['reason']}", sys.stderr)
    return int(document["exit_status"])


def _examine(document: Document, url: str, args: argparse.Namespace) -> str:
    """Query one server, put what it says into the document, and return it as a sentence."""
    sglang, states = schedulers(url, args)
    active, reason = verdict(states)
    status, line = _VERDICTS[active]
    described = reason
    if active:
        status, described = _judge_counts(list(filter(None, states)))
    document |= {
        "active": active,
        "reason": reason,
        "exit_status": status,
        "sglang": sglang,
        "schedulers": states,
    }
    return line.format(described)


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


def _judge_counts(states: Sequence[Document]) -> tuple[int, str]:
    """Return an active server's exit status, and what its prefills were, as a sentence's end.

    Prefills in which there is nothing to skip do not count.
    """
    counts: dict[str, Counter[str]] = {name: Counter() for name in ("forwards", "rows", "audits")}
    for state in states:
        for name, count in counts.items():
            count.update(state.get(name))
    forwards = counts["forwards"]
    status = 0
    faults = ""
    if failed := forwards[counters.FAILED]:
        status = _FAULTY
        faults = f", {failed} failed"
    if differing := counts["audits"][counters.DIFFERS]:
        status = _FAULTY
        faults += f", {differing} audits differed"
    del forwards[_NOTHING_TO_SKIP]
    total = forwards.total()
    if not total:
        return status, f": no prefill yet{faults}."
    cut = sum(forwards[outcome] for outcome in counters.CUT)
    if not cut:
        [(most, _)] = forwards.most_common(1)
        return _FAULTY, (
            f", but none of {total} prefills was cut{faults}: most are {most} (docs/slower.md)."
        )
    rows = counts["rows"]
    skipped = rows["skipped"] / rows.total()
    return status, f": {cut / total:.1%} of prefills cut, {skipped:.1%} of rows skipped{faults}."


def schedulers(address: str, args: argparse.Namespace) -> tuple[str | None, list[Document | None]]:
    """Return a server's SGLang version, and each scheduler's entry; raise CommandError on failure.

    The entry is None for a scheduler without one.
    """
    url = hide_user(address)
    try:
        reply = make_session(address, args.api_key).get(
            f"{address.rstrip('/')}/server_info",
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
