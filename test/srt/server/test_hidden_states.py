"""Servers that may be asked for the hidden states of every row.

A file of its own: the pair of another one would still be running beside this one's.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ask import compare, tokens
from layer_rows import whole
from server import Server, pair
from sglang_gemma4_yoco.loading import limits


@pytest.fixture(scope="module")
def telling(
    tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Server]]:
    """Servers that may be asked for hidden states."""
    with pair(
        tiny_checkpoint, tmp_path_factory.mktemp("telling"), "--enable-return-hidden-states"
    ) as servers:
        yield servers


@pytest.mark.release
def test_returned_hidden_states(telling: tuple[Server, Server]) -> None:
    """A server that may be asked for every row computes every row, whoever asks."""

    def ask(server: Server) -> list[Any]:
        sampling = {"temperature": 0, "max_new_tokens": 2, "ignore_eos": True}
        return [
            server.generate(
                input_ids=tokens(40, seed=7),
                sampling_params=sampling,
                return_hidden_states=wanted,
            )
            for wanted in (True, False)
        ]

    both = compare(telling, ask)
    assert both.rows[0] == whole(40)
    for on, off in zip(both.on, both.off, strict=True):
        assert on["output_ids"] == off["output_ids"]
    on, off = (answers[0]["meta_info"]["hidden_states"] for answers in (both.on, both.off))
    assert len(on[0]) == 40
    assert on == off
    server, _ = telling
    aside = "Gemma 4 fast prefill steps aside for this server"
    assert server.log_lines(f"{aside}: {limits.HIDDEN_STATES}")
    assert not server.log_lines(" is on: ")
    assert "hidden_states" not in both.on[1]["meta_info"]
