"""Gemma 3n inside its multimodal model, over HTTP: two servers get the same requests of text."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from harness import layer_rows
from harness.ask import (
    Answer,
    assert_alike,
    assert_same_answers,
    chat,
    compare,
    generate,
    one_by_one,
    prompts_of,
    tokens,
)
from harness.server import CHUNK, Pair, Server, pair
from sglang_gemma4_reference import gemma3n
from sglang_gemma4_yoco.commands.main import main

SHAPE = gemma3n.E2B_TINY
CUT = SHAPE.layers - SHAPE.kv_shared_layers - 1


cut = partial(layer_rows.cut, shape=SHAPE)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    directory = tmp_path_factory.mktemp("gemma3n")
    checkpoint = gemma3n.write_checkpoint(directory / "checkpoint", SHAPE, multimodal=True)
    # SGLang's warmup sends an image to a multimodal server; this model's tower is a stub.
    with pair(checkpoint, directory, "--skip-server-warmup") as both:
        yield both


def test_chunks(servers: Pair) -> None:
    """Other prompts: ``forward/test_gemma3n``."""
    ask = one_by_one(tokens(CHUNK + 30, seed=7))
    assert_alike(servers, ask, rows=[cut(CHUNK, 0), cut(30, 1)])


def test_a_batch_and_a_chat(servers: Pair) -> None:
    def ask(server: Server) -> list[Answer]:
        answers = generate(server, prompts_of(100, 20, 7, 33))
        return [*answers, chat(server, "Who reads these rows?" * 3)]

    both = compare(servers, ask)
    for prefill in both.prefills:
        assert prefill.rows == cut(sum(prefill.extend_lens), len(prefill.extend_lens))
    assert_same_answers(both)


def test_status(servers: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    generate(servers[0], tokens(50, seed=8))
    assert main(["status", servers[0].url]) == 0
    shown = capsys.readouterr().out
    assert f"cut inside layer {CUT}, after its K and V (of {SHAPE.layers} layers)" in shown
    assert "\nThe fast path is active: " in shown
