"""Why a server gave no answer, and what to do about it; most of it is about https."""

from __future__ import annotations

import os
import ssl
from contextlib import suppress
from typing import TYPE_CHECKING
from urllib.parse import urlsplit


def explain_failure(failure: BaseException, url: str) -> str:
    """Why a request of requests' to this URL has failed, and the remedy, in one line."""
    cause = failure
    while deeper := cause.__cause__ or cause.__context__:
        cause = deeper
    if isinstance(cause, ssl.SSLCertVerificationError):
        remedies = "name its issuer's (--cacert FILE), use a name that is in it, or --insecure"
        return f"its certificate is not trusted ({cause.verify_message}): {remedies}"
    why = getattr(cause, "strerror", None) or "it is no such URL, or gives no answer of HTTP"
    if type(failure) is OSError or getattr(cause, "library", None) == "X509":
        return "there is no certificate in PEM in the file of --cacert, or of SSL_CERT_FILE"
    if isinstance(cause, ssl.SSLError):
        why = "it does not speak https, or not as this machine does"
    elif url.startswith("http:") and not isinstance(failure, ValueError):
        with suppress(OSError):  # a handshake, and nothing more
            where = urlsplit(url)
            ssl.get_server_certificate((str(where.hostname), where.port or 80), timeout=5)
            return f"this server speaks https: use https://{where.netloc}"
    return f"no answer ({why}); expected http://HOST:PORT"


pass

if TYPE_CHECKING:
    import requests

API_KEY = "SGLANG_API_KEY"


def make_session(url: str, key: str | None = None) -> requests.Session:
    """An HTTP client for a server, with its API key; to this machine it uses no proxy."""
    import requests  # both come with SGLang
    import urllib3

    urllib3.disable_warnings()  # of a certificate that is not to be checked
    client = requests.Session()
    client.trust_env = urlsplit(url).hostname not in ("localhost", "127.0.0.1", "::1")
    client.headers["Connection"] = "close"  # an idle connection may be closed as it is used again
    if key := key or os.environ.get(API_KEY):
        client.headers["Authorization"] = f"Bearer {key}"
    return client
