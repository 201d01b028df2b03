"""Fixtures of the tests that need a checkpoint or a server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

# SGLang chooses its platform when it is first imported, in this process as in a server's.
os.environ.setdefault("SGLANG_PLATFORM", "gemma4_cpu")
# Tensors this small gain nothing from threads that wait for each other on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Equality must hold wherever a row can be skipped, whether that pays or not (test_threshold).
os.environ.setdefault("SGLANG_GEMMA4_YOCO_MIN_SKIPPED_ROWS", "1")

from server import Server, started
from sglang_gemma4_reference.checkpoint import E2B_TINY, write_checkpoint


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Gemma 4 of 8 layers, the last 4 of them KV-shared, with a window of 32."""
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny", E2B_TINY)


@pytest.fixture(scope="session")
def servers(
    tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Server]]:
    """Two servers of one checkpoint: the fast path on (by default), and switched off."""
    directory = tmp_path_factory.mktemp("servers")
    with ExitStack() as stack:
        # Starting is mostly importing, so they start side by side.
        on, off = (
            stack.enter_context(started(tiny_checkpoint, directory / name, switch=switch))
            for name, switch in (("on", None), ("off", "0"))
        )
        on.wait_until_ready()
        off.wait_until_ready()
        yield on, off


@pytest.fixture(scope="session")
def on_server(servers: tuple[Server, Server]) -> Server:
    """The server with the fast path on."""
    return servers[0]


@pytest.fixture(scope="session")
def off_server(servers: tuple[Server, Server]) -> Server:
    """The server with the fast path off."""
    return servers[1]
