"""A server with refused arguments: it runs as stock, and logs why.

``unit/test_limits`` has all such arguments.
"""

from __future__ import annotations

from pathlib import Path

from harness.ask import (
    Answer,
    assert_same_answers,
    chat,
    compare,
    generate,
    one_by_one,
    picture,
    prompts_of,
    tokens,
)
from harness.layer_rows import assert_all_stock, whole
from harness.server import CHUNK, Server, running

FALLBACK = "Gemma 4 fast prefill falls back to stock"


def test_a_refused_server(off_server: Server, tiny_checkpoint: Path, tmp_path: Path) -> None:
    """All kinds of requests compute all rows, and give the same answers."""
    short, long = prompts_of(50, 2 * CHUNK + 9)

    def ask(server: Server) -> list[Answer]:
        return [
            *one_by_one(short, long, short + tokens(30, seed=3))(server),
            *generate(server, prompts_of(150, 20, 7)),
            chat(server, picture("red")),
        ]

    arguments = ["--enable-deterministic-inference"]
    with running(tiny_checkpoint, tmp_path, switch=None, arguments=arguments) as server:
        assert server.resolved("enable_deterministic_inference") is True
        both = compare((server, off_server), ask)
        [line] = server.log_lines(FALLBACK)
        assert line.endswith(f"{FALLBACK} for this server: deterministic inference")
        assert server.log_lines("fast prefill is active") == []
    assert both.rows[0] == whole(50)
    assert_all_stock(both.prefills)
    assert_same_answers(both, close_calls=1)
