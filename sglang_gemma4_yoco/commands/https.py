"""An HTTP client for servers, and explanations of failed requests."""

from __future__ import annotations

import os
import ssl
from http.client import HTTPException
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    import requests

API_KEY = "SGLANG_API_KEY"


def make_session(url: str, key: str | None = None) -> requests.Session:
    """Return an HTTP client with the API key; it uses no proxy for a server on this machine."""
    import requests  # both come with SGLang
    import urllib3

    urllib3.disable_warnings()  # with --insecure it would warn at each request
    client = requests.Session()
    client.trust_env = urlsplit(url).hostname not in ("localhost", "127.0.0.1", "::1", "0.0.0.0")
    client.headers["Connection"] = "close"  # an idle connection may close while it is reused
    if key := (key or os.environ.get(API_KEY, "")).strip():
        client.headers["Authorization"] = f"Bearer {key}"
    return client


def hide_user(url: str) -> str:
    """Return an address without user name, password and query, which may be secrets.

    >>> hide_user("http://user:password@localhost:30000/?key=value")
    'http://localhost:30000/'
    """
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2].partition('?')[0]}"


def explain_failure(failure: BaseException) -> str:
    """Return why a request failed, and the remedy, in one line.

    It quotes nothing that the peer has sent, and no part of the address.
    """
    cause = failure
    while deeper := cause.__cause__ or cause.__context__:
        cause = deeper
    if isinstance(cause, ssl.SSLCertVerificationError):
        return (
            f"its certificate is not trusted ({cause.verify_message}): use --cacert FILE (its "
            "issuer's), a host name that it covers, or --insecure"
        )
    why = getattr(cause, "reason", None) or getattr(cause, "strerror", None) or cause
    if isinstance(failure, ValueError):
        why = "it is not a valid address"
    elif isinstance(cause, HTTPException | ValueError):
        why = "it does not speak HTTP"
    if isinstance(cause, ConnectionRefusedError):
        return f"no answer ({why}): is the server ready, and is this its host and port?"
    return f"no answer ({why}): expected http://HOST:PORT, or https:// if it has a certificate"
