"""Random traffic of all kinds at once, on equals off, with and without failures of the fast path.

A short form of ``scripts/bench/random_workload.py``, on the servers that other tests use as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from harness.ask import assert_same_traffic, traffic
from harness.layer_rows import assert_all_fast, assert_all_stock
from harness.server import CAPTURED_ROWS, Server
from sglang_gemma4_reference import tail_failures
from sglang_gemma4_reference.checkpoint import E2B_TINY
from sglang_gemma4_reference.row_trace import Prefill
from sglang_gemma4_reference.workload import (
    ACTIVE,
    SERVED_BY_STOCK,
    SKIPPED,
    Answer,
    Output,
    Request,
    compare,
    outcome,
    outcomes,
    random_requests,
)
from sglang_gemma4_yoco.commands.verify.comparison import Position

REQUESTS = random_requests(70, seed=1, vocabulary=E2B_TINY.vocab_size, longest=700)


def ask(server: Server) -> tuple[list[Answer], list[Prefill]]:
    """Return all answers of one server, and its prefill forwards; assert that nothing leaks."""
    mark = server.mark()
    answers = traffic(server, REQUESTS, 16)
    return answers, server.prefills(since=mark)


@pytest.fixture(scope="module")
def stock(off_server: Server) -> list[Answer]:
    answers, prefills = ask(off_server)
    assert_all_stock(prefills)
    return answers


@pytest.mark.parametrize(
    ("name", "minimum", "captured"),
    [
        ("on_server", 1, ()),
        ("default_server", None, ()),
        ("captured_server", 1, CAPTURED_ROWS),
    ],
    ids=["any row", "default settings", "captured tail"],
)
def test_random_traffic(
    request: pytest.FixtureRequest,
    off_server: Server,
    stock: list[Answer],
    name: str,
    minimum: int | None,
    captured: Sequence[int],
) -> None:
    """With any skipped row enough, with the default threshold, and with a captured tail."""
    server = request.getfixturevalue(name)
    answers, prefills = ask(server)
    assert_all_fast(prefills, minimum, captured)
    if captured:
        assert sum(prefill.replays for prefill in prefills) >= 10
        assert any(prefill.rows[-1] > max(captured) for prefill in prefills)
    forwards = outcomes(prefills)
    assert forwards[ACTIVE] >= 10
    assert forwards[SKIPPED] >= 1
    assert_same_traffic(REQUESTS, stock, answers, off_server)


def test_random_traffic_while_the_tail_fails(
    on_server: Server, off_server: Server, stock: list[Answer]
) -> None:
    """Every fourth cut forward fails inside the tail, and stock serves it."""
    before = len(tail_failures.so_far(on_server.failures))
    on_server.failures.write_text("4")
    try:
        answers, prefills = ask(on_server)
    finally:
        on_server.failures.unlink()
    injected = len(tail_failures.so_far(on_server.failures)) - before
    assert injected >= 2, "no failures: is the installed test/reference up to date?"
    served = [prefill for prefill in prefills if outcome(prefill) == SERVED_BY_STOCK]
    assert len(served) == injected
    assert_all_fast(prefill for prefill in prefills if prefill not in served)
    assert_same_traffic(REQUESTS, stock, answers, off_server)
    lines = on_server.log_lines("serves the batch: InjectedError")
    assert lines
    assert len(lines) <= E2B_TINY.kv_shared_layers  # one for each kind


# ---------------------------------------------------------------- the comparison

_BODY = {"input_ids": [30, 31], "return_logprob": True}
GREEDY = Request(_BODY | {"sampling_params": {"temperature": 0, "max_new_tokens": 3}})
SAMPLED = Request(_BODY | {"sampling_params": {"temperature": 1, "max_new_tokens": 3}})
INTERRUPTED = Request(GREEDY.body, leaves_after=1.0)
LIKELIEST: dict[int | str, float] = {40: -1.0, 60: -2.0}
POSITIONS = (
    Position(40, -1.0, LIKELIEST),
    Position(41, -2.0, {41: -2.0, 99: -2.1}),
    Position(42, -1.5, {}),
)
READ = (Position(31, -3.0, {}), Position(32, -2.0, {}))
OUTPUT = Output((40, 41, 42), POSITIONS, "length")


def changed(**fields: Any) -> Answer:
    """Return the stock server's answer, with an output that differs in these fields."""
    return Answer((replace(OUTPUT, **fields),), READ)


def last_is(logprob: float) -> Answer:
    """Return stock's answer with another log-probability of its last token."""
    return changed(positions=(*POSITIONS[:2], Position(42, logprob, {})))


@pytest.mark.parametrize(
    ("request_", "answer", "said"),
    [
        (GREEDY, changed(), None),
        (INTERRUPTED, Answer(), None),
        (GREEDY, changed(tokens=(40, 41)), "end differently"),
        (GREEDY, last_is(-1.501), "output log-probability 2"),
        (SAMPLED, changed(tokens=(40, 41), positions=POSITIONS[:2]), "2 of 3"),
        (
            SAMPLED,
            changed(positions=(Position(40, -1.0, {40: -1.0, 60: -2.1}), *POSITIONS[1:])),
            "likeliest log-probability 1",
        ),
        (GREEDY, Answer((OUTPUT,), (READ[0], Position(32, -2.01, {}))), "input log-prob"),
        (SAMPLED, Answer((OUTPUT,)), "2 and 0 input"),
        (GREEDY, Answer((OUTPUT,) * 2, READ), "1 and 2 outputs"),
        (GREEDY, Answer(), "no answer"),
    ],
)
def test_comparison(request_: Request, answer: Answer, said: str | None) -> None:
    result = compare([request_], [changed()], [answer], lambda _: (-1.0, -2.0))
    assert len(result.differences) == (said is not None)
    assert said is None or said in result.differences[0]


@pytest.mark.parametrize(("second", "differences"), [(-1.0000001, 0), (-1.1, 1)])
def test_comparison_of_close_calls(second: float, differences: int) -> None:
    """Stock is asked for log-probabilities that were not sent along."""
    stock = Answer((Output((40, 41), finish="length"),))
    other = Answer((Output((40, 99), finish="length"),))
    likeliest = mock.Mock(return_value=(-1.0, second))
    result = compare([GREEDY], [stock], [other], likeliest)
    assert (len(result.differences), result.close_calls) == (differences, 1)
    likeliest.assert_called_once_with([30, 31, 40])
