"""A prefill server and a decode server that answer as one, over TCP on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import requests

from harness.server import Server, started
from sglang_gemma4_reference.row_trace import Prefill
from sglang_gemma4_reference.workload import Client
from sglang_gemma4_yoco.commands.verify.servers import find_free_ports

_rooms = count(1)  # SGLang's bootstrap_room: one id for a request on both servers

_ENVIRONMENT = {
    "SGLANG_HOST_IP": "127.0.0.1",
    # A request whose peer is gone is aborted after this many seconds; SGLang's default is 300.
    "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "60",
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "60",
}


@dataclass(frozen=True)
class Disaggregated:
    """Two servers that share the work on each request, and are ready.

    Attributes:
        prefill: the one that computes the prompts.
        decode: the one that generates the answers.
        ports: each one's bootstrap port, which its peers use while it prefills.
    """

    prefill: Server
    decode: Server
    ports: list[int]

    def send_to_both(
        self, clients: ThreadPoolExecutor, body: dict[str, Any]
    ) -> tuple[Future[requests.Response], Future[requests.Response]]:
        """Send one body to both servers at once, as SGLang's load balancer does."""
        peers = {"bootstrap_host": "127.0.0.1", "bootstrap_port": self.ports[0]}
        body = {**body, **peers, "bootstrap_room": next(_rooms)}

        def post(server: Server) -> requests.Response:
            return Client(server.url).post("/generate", body)

        return clients.submit(post, self.prefill), clients.submit(post, self.decode)

    def generate(self, **body: Any) -> Any:
        """Return the decode server's /generate answer, with the other's input log-probabilities."""
        with ThreadPoolExecutor(2) as clients:
            replies = [reply.result() for reply in self.send_to_both(clients, body)]
        for reply in replies:
            assert reply.ok, f"{reply.url}: {reply.status_code} {reply.text}"
        prefilled, decoded = (reply.json() for reply in replies)
        logprobs = prefilled["meta_info"].get("input_token_logprobs", [])
        decoded["meta_info"]["input_token_logprobs"] = logprobs
        return decoded

    def forget_prefixes(self) -> None:
        """Empty both prefix caches; this fails while a server still holds a request."""
        self.prefill.forget_prefixes()
        self.decode.forget_prefixes()

    def mark(self) -> int:
        """Return the number of prefill forwards so far on the prefill server."""
        return self.prefill.mark()

    def prefills(self, since: int = 0) -> list[Prefill]:
        """Return the prefill server's prefill forwards, without the first ``since``."""
        return self.prefill.prefills(since)

    def switch_roles(self) -> Disaggregated:
        """Return the pair after each server has taken the other's role."""
        for server, role in ((self.decode, "prefill"), (self.prefill, "decode")):
            # The memory must be specified, though a CPU has no graphs of decode steps.
            body = {"new_role": role, "decode_cuda_graph_memory_gb": 0}
            switched = server.post("/pd_role_switch", body).json()
            assert switched["success"], switched
        return Disaggregated(self.decode, self.prefill, self.ports[::-1])


def listed(reply: Any) -> list[Any]:
    """Return the answers of a batch, or the one answer, as a list."""
    if isinstance(reply, list):
        return reply
    return [reply]


@contextmanager
def disaggregated(
    checkpoint: Path, directory: Path, arguments: Sequence[str], graphs: Mapping[str, str | None]
) -> Iterator[Disaggregated]:
    """Run two servers with the fast path on, one of each role, in the ``with`` block.

    Args:
        arguments: further ones, of both servers.
        graphs: the variables by which they capture on a CPU.
    """
    ports = find_free_ports(2)

    def role(name: str, port: int) -> AbstractContextManager[Server]:
        roles = (
            *("--disaggregation-mode", name),
            *("--disaggregation-transfer-backend", "mooncake_tcp"),
            *("--disaggregation-bootstrap-port", str(port)),
            "--enable-pd-role-switch",
        )
        # Spawned, because the reference platform changes how SGLang sends K and V.
        how: Any = {
            "arguments": (*roles, *arguments),
            "env": {**_ENVIRONMENT, **graphs},
            "spawned": True,
        }
        return started(checkpoint, directory / name, switch=None, **how)

    with role("prefill", ports[0]) as prefill, role("decode", ports[1]) as decode:
        prefill.wait_until_ready()
        decode.wait_until_ready()
        yield Disaggregated(prefill, decode, ports)
