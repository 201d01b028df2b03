"""Servers really started with arguments that refuse them: they run as stock, and log why.

Each is one server with the package, beside the suite's stock server. Others of the refused
arguments start no server of a Gemma 4 on a CPU: LoRA takes pinned memory, two-batch overlap
attention by data-parallel ranks or an exchange of experts, ``--enable-layernorm-sp`` and sharding
of the KV cache other models and modes, captures of further hidden states a draft model.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

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
from harness.server import CHUNK, Server, running, started

FALLBACK = "Gemma 4 fast prefill falls back to stock"
_HOOK = '[{"name": "none", "target_modules": ["no.such.module"], "hook_factory": "builtins:dict"}]'


@dataclass(frozen=True)
class Refused:
    """A server argument, and the reason for which no batch of such a server is cut."""

    argument: str
    reason: str
    value: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """As SGLang calls the field."""
        return self.argument.removeprefix("--").replace("-", "_")


REFUSED = [
    Refused("--enable-deterministic-inference", "deterministic inference"),
    Refused("--forward-hooks", "forward hooks, which may read any row", (_HOOK,)),
]


@pytest.mark.parametrize(
    "refused",
    [REFUSED[0], *(pytest.param(refused, marks=pytest.mark.release) for refused in REFUSED[1:])],
    ids=lambda refused: refused.name,
)
def test_refused_argument(
    refused: Refused, off_server: Server, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """Single prompts, chunks, a batch, a cached prefix and an image: all rows, same answers."""
    short, long = prompts_of(50, 2 * CHUNK + 9)

    def ask(server: Server) -> list[Answer]:
        return [
            *one_by_one(short, long, short + tokens(30, seed=3))(server),
            *generate(server, prompts_of(150, 20, 7)),
            chat(server, picture("red")),
        ]

    arguments = (refused.argument, *refused.value)
    with running(tiny_checkpoint, tmp_path, switch=None, arguments=arguments) as server:
        assert server.resolved(refused.name), "SGLang has taken the argument back"
        both = compare((server, off_server), ask)
        [line] = server.log_lines(FALLBACK)
        assert line.endswith(f"{FALLBACK} for this server: {refused.reason}")
        assert server.log_lines("fast prefill is active") == []
    assert both.rows[0] == whole(50)
    assert_all_stock(both.prefills)
    assert both.prefills
    assert_same_answers(both, close_calls=1)


@pytest.mark.release
def test_the_dumper(off_server: Server, tiny_checkpoint: Path, tmp_path: Path) -> None:
    """Turned on over HTTP while the server serves: it dumps all rows, and nothing else changes."""
    env = {"DUMPER_SERVER_PORT": "reuse", "DUMPER_DIR": str(tmp_path / "dumps")}
    how = {"enable": True, "exp_name": "one", "non_intrusive_mode": "all"}
    [short] = prompts_of(50)
    # Spawned: SGLang looks at the variable when it is imported.
    with running(tiny_checkpoint, tmp_path, switch=None, env=env, spawned=True) as server:
        both = compare((server, off_server), one_by_one(short))
        server.post("/dumper/configure", how | {"enable_output_console": False})
        again = one_by_one(short + tokens(30, seed=3))
        both_dumped = compare((server, off_server), again)
        [line] = server.log_lines(FALLBACK)
    assert "DUMPER_SERVER_PORT" in line
    assert both.rows == [whole(50)]
    assert_all_stock(both_dumped.prefills)
    assert_same_answers(both)
    assert_same_answers(both_dumped)
    assert [*(tmp_path / "dumps" / "one").iterdir()]


@pytest.mark.release
def test_embeddings(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """SGLang's own Gemma 4 has no embeddings, and ends the server at the first request for one.

    Until then it loads, plans and runs the forward: all rows of it. The log ends with SGLang's own
    error, and with nothing that could be taken for its cause.
    """
    with started(tiny_checkpoint, tmp_path, switch=None, arguments=["--is-embedding"]) as server:
        server.wait_until(server.mark, "a forward, of SGLang's own warm-up", 540)
        server.wait_until(
            lambda: server.log_lines("has no attribute 'embeddings'"), "SGLang's own error"
        )
        assert_all_stock(server.prefills())
        assert server.log_lines("Gemma 4 fast prefill") == []
