"""``status``: what a running server says of the fast path, scheduler by scheduler.

It asks /server_info. Standard library only, so that it also runs where there is no SGLang.
"""

from __future__ import annotations

import argparse
import ipaddress
import json
from collections.abc import Mapping
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import OpenerDirector, ProxyHandler, Request, build_opener

from sglang_gemma4_yoco.commands.console import CommandError, heading, say

ENTRY = "gemma4_yoco"
_PATHS = ("/server_info", "/get_server_info")  # the latter: releases too old for the plugin
_SECONDS = 30.0  # a scheduler answers between two forwards
NO_PLUGIN = (
    "the server has no plugin, or an older one: is it installed in its environment? "
    "`sglang-gemma4-yoco doctor` there tells"
)


def add_to(commands: Any) -> None:
    """Add the parser of ``status``."""
    parser = commands.add_parser(
        "status",
        help="is it active on a running server",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("url", metavar="URL", help="for example http://localhost:30000")
    parser.add_argument("--api-key", metavar="KEY", help="if the server was started with one")
    parser.add_argument("--json", action="store_true", help="one line of JSON, for a program")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Ask, and report; returns 0 if the path is active on every scheduler, else 1.

    Raises:
        CommandError: there is no SGLang server at this URL.
    """
    info = server_info(args.url.rstrip("/"), args.api_key)
    states = [state.get(ENTRY) for state in info["internal_states"]]
    active, reason = verdict(states)
    if args.json:
        document = {"active": active, "reason": reason, "sglang": info.get("version")}
        say(json.dumps({**document, "url": args.url, "schedulers": states}))
        return 0 if active else 1
    for number, state in enumerate(states):
        heading(f"Scheduler {number} of {len(states)}")
        for line in lines_of(state) if state else [NO_PLUGIN]:
            say(f"  {line}")
    say()
    say("The fast path is active." if active else f"The fast path is NOT active: {reason}")
    return 0 if active else 1


def verdict(states: list[dict[str, Any] | None]) -> tuple[bool, str | None]:
    """Whether the path is active on every scheduler, and the first reason why not."""
    for state in states:
        if not state:
            return False, NO_PLUGIN
        if not state.get("active"):
            return False, str(state.get("reason"))
    return bool(states), None if states else "the server names no scheduler"


def lines_of(state: Mapping[str, Any]) -> list[str]:
    """A scheduler's state, aligned; entries of other versions as they are."""
    rows = dict(state.get("rows") or {})
    width = max(map(len, state), default=0)
    lines = []
    for name, value in state.items():
        if name == "rows" and sum(rows.values()):
            share = rows.get("skipped", 0) / sum(rows.values())
            value = f"{_told(rows)} ({share:.1%} skipped)"
        told = value if isinstance(value, str) else _told(value)
        first, *others = told.splitlines() or [""]
        lines += [f"{name:<{width}}  {first}", *(" " * (width + 2) + line for line in others)]
    return lines


def _told(value: Any) -> str:
    """A value in words: a table's entries beside each other, those of one inside it in brackets."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return "; ".join(f"{name}: {_inside(part)}" for name, part in value.items()) or "none yet"
    if isinstance(value, list):
        return "\n".join(map(_told, value)) or "none"
    return str(value)


def _inside(part: Any) -> str:
    return f"({_told(part)})" if isinstance(part, Mapping) else _told(part)


# -- asking ----------------------------------------------------------------------------------


def server_info(url: str, key: str | None) -> dict[str, Any]:
    """What the server says of itself, its schedulers' ``internal_states`` among it.

    Raises:
        CommandError: nobody answers, or not as an SGLang server does.
    """
    opener = _opener(url)
    text = None
    for path in _PATHS:
        text = _get(opener, url, path, key)
        if text is not None:
            break
    try:
        info = json.loads(text or "null")
        states = info["internal_states"]
        if isinstance(states, list) and all(isinstance(state, dict) for state in states):
            return dict(info)
    except (ValueError, TypeError, KeyError):
        pass
    raise CommandError(
        f"what answers at {url} is no SGLang server: give the URL of the server itself, as "
        "http://HOST:PORT"
    )


def _opener(url: str) -> OpenerDirector:
    """What fetches from this URL; from this machine itself, without a proxy between."""
    try:
        parts = urlsplit(url)
        host = parts.hostname
        known = parts.scheme in ("http", "https") and host is not None and parts.port != 0
    except ValueError:  # a port that is no number
        known, host = False, None
    if not known or host is None:
        raise CommandError(f"{url} is no URL of a server: it looks like http://localhost:30000")
    return build_opener(ProxyHandler({})) if _is_here(host) else build_opener()


def _is_here(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _get(opener: OpenerDirector, url: str, path: str, key: str | None) -> str | None:
    """The document at ``path``, or None where there is none."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        with opener.open(Request(url + path, headers=headers), timeout=_SECONDS) as answer:
            return str(answer.read().decode(errors="replace"))
    except HTTPError as refused:
        refused.close()
        if refused.code in (401, 403):
            raise CommandError(f"{url} wants another key: give it with --api-key") from None
        if refused.code == 404:
            return None
        raise CommandError(
            f"{url}{path} answers {refused.code} {refused.reason}: see the server's log"
        ) from None
    except (URLError, OSError, HTTPException, ValueError) as failure:
        why = getattr(failure, "reason", None) or failure
        raise CommandError(
            f"{url} does not answer ({why}): is the server up, and are host and port right?"
        ) from None
