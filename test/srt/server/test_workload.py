"""Random traffic of all kinds at once, on equals off; also while the fast path fails now and then.

A short form of ``scripts/bench/random_workload.py``, on the servers that other tests use as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

import pytest
from sglang.srt.platforms.interface import SRTPlatform

from layer_rows import assert_all_fast, fast_rows
from server import RECORDED_ROWS, Server
from sglang_gemma4_reference import tail_failures
from sglang_gemma4_reference.checkpoint import E2B_TINY
from sglang_gemma4_reference.workload import (
    ACTIVE,
    NOTHING_TO_SKIP,
    SERVED_BY_STOCK,
    SKIPPED,
    STOCK,
    Answer,
    Client,
    Output,
    Request,
    ask_all,
    compare,
    held_tokens,
    outcome,
    outcomes,
    random_requests,
)

REQUESTS = random_requests(70, seed=1, vocabulary=E2B_TINY.vocab_size, longest=700)


def ask(
    server: Server, minimum: int | None = 1, recorded: Sequence[int] = ()
) -> tuple[list[Answer], Counter[str]]:
    """All answers of one server, and what became of its prefill forwards; nothing may leak.

    Of each forward that took the fast path the rows are those, and only those, that are read.

    Args:
        minimum: the server's threshold; None where nobody set one.
        recorded: the row counts for which its tail is recorded.
    """
    server.forget_prefixes()
    mark = server.mark()
    client = Client(server.url)
    answers = ask_all(client, REQUESTS, concurrency=16)
    assert held_tokens(client) == 0
    assert "leak detected" not in server.log().lower()
    prefills = server.prefills(since=mark)
    for prefill in prefills:
        if outcome(prefill) in (ACTIVE, SKIPPED):
            assert prefill.rows == fast_rows(prefill, minimum, recorded), prefill
    return answers, outcomes(prefills)


@pytest.fixture(scope="module")
def stock(off_server: Server) -> list[Answer]:
    answers, forwards = ask(off_server)
    assert forwards.keys() <= {STOCK, NOTHING_TO_SKIP}
    return answers


def assert_same(off_server: Server, stock: list[Answer], answers: list[Answer]) -> None:
    result = compare(REQUESTS, stock, answers, Client(off_server.url).likeliest)
    assert result.differences == []
    assert result.close_calls <= 1
    # Nothing of this may have been compared with nothing.
    assert result.answered >= len(REQUESTS) - sum(request.interrupted for request in REQUESTS)
    assert result.compared_tokens > 200
    assert result.compared_logprobs > 500


def test_random_traffic(on_server: Server, off_server: Server, stock: list[Answer]) -> None:
    mark = on_server.mark()
    answers, forwards = ask(on_server)
    assert_all_fast(on_server.prefills(since=mark))
    assert forwards[ACTIVE] >= 10
    assert forwards[SKIPPED] >= 1
    assert_same(off_server, stock, answers)


def test_random_traffic_with_default_settings(
    default_server: Server, off_server: Server, stock: list[Answer]
) -> None:
    """As users have it, who set nothing: what pays is skipped, and nothing else."""
    mark = default_server.mark()
    answers, forwards = ask(default_server, minimum=None)
    assert_all_fast(default_server.prefills(since=mark), minimum=None)
    assert forwards[ACTIVE] >= 10
    assert forwards[SKIPPED] >= 1
    assert_same(off_server, stock, answers)


@pytest.mark.skipif(
    not hasattr(SRTPlatform, "get_full_graph_backend_cls"),
    reason="this SGLang asks no platform for its graphs",
)
def test_random_traffic_with_the_recorded_tail(
    recorded_server: Server, off_server: Server, stock: list[Answer]
) -> None:
    """SGLang replays decode steps, and the package the tails of batches with few rows."""
    mark = recorded_server.mark()
    answers, forwards = ask(recorded_server, recorded=RECORDED_ROWS)
    prefills = recorded_server.prefills(since=mark)
    assert_all_fast(prefills, recorded=RECORDED_ROWS)
    assert sum(prefill.replays for prefill in prefills) >= 10
    assert any(prefill.rows[-1] > max(RECORDED_ROWS) for prefill in prefills)
    assert forwards[ACTIVE] >= 10
    assert forwards[SKIPPED] >= 1
    assert_same(off_server, stock, answers)


@contextmanager
def failing(server: Server, every: int) -> Iterator[None]:
    """Make every so manieth shortened forward of the server fail inside the tail."""
    server.failures.write_text(str(every))
    try:
        yield
    finally:
        server.failures.unlink()


def test_random_traffic_while_the_tail_fails(
    on_server: Server, off_server: Server, stock: list[Answer]
) -> None:
    before = len(tail_failures.told(on_server.failures))
    with failing(on_server, every=4):
        answers, forwards = ask(on_server)
    injected = len(tail_failures.told(on_server.failures)) - before
    assert injected >= 2, "no failures: is the installed test/reference up to date?"
    assert forwards[SERVED_BY_STOCK] == injected
    assert forwards[ACTIVE] > injected
    assert_same(off_server, stock, answers)
    lines = on_server.log_lines("serves the batch: InjectedError")
    assert lines
    assert len(lines) <= E2B_TINY.kv_shared_layers  # one for each kind
    answers, forwards = ask(on_server)
    assert forwards[SERVED_BY_STOCK] == 0
    assert forwards[ACTIVE] > 0
    assert_same(off_server, stock, answers)


class TestComparison:
    """The comparison sees what it is there to see."""

    BODY: ClassVar = {"input_ids": [30, 31], "return_logprob": True}
    GREEDY = Request(BODY | {"sampling_params": {"temperature": 0, "max_new_tokens": 3}})
    SAMPLED = Request(BODY | {"sampling_params": {"temperature": 1, "max_new_tokens": 3}})
    STOCK = Answer(
        (Output((40, 41, 42), (-1.0, -2.0, -1.5), ((-1.0, -2.0),) * 3, "length"),), (-3.0, -2.0)
    )

    def differences(self, request: Request, answer: Answer, gap: float = 1.0) -> list[str]:
        result = compare([request], [self.STOCK], [answer], lambda _: (-1.0, -1.0 - gap))
        return result.differences

    def output(self, **changes: object) -> Answer:
        return Answer(
            (Output(**{**vars(self.STOCK.outputs[0]), **changes}),),
            self.STOCK.input_logprobs,
        )

    @pytest.mark.parametrize("request_", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
    def test_equal_answers(self, request_: Request) -> None:
        assert self.differences(request_, self.STOCK) == []

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"tokens": (40, 99, 42)}, "token 1"),
            ({"tokens": (40, 41)}, "end differently"),
            ({"finish": "stop"}, "end differently"),
            ({"logprobs": (-1.0, -2.0, -1.501)}, "output log-probability 2"),
            ({"logprobs": (-1.0, -2.0, float("nan"))}, "output log-probability 2"),
            ({"logprobs": ()}, "3 and 0 output"),
        ],
    )
    def test_of_greedy_answers(self, changes: dict[str, object], said: str) -> None:
        [difference] = self.differences(self.GREEDY, self.output(**changes))
        assert said in difference

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"tokens": (40, 41)}, "2 of 3"),
            ({"likeliest": ((-1.0, -2.1),) * 3}, "likeliest log-probability 1"),
            ({"logprobs": (-1.0, -2.0, float("nan"))}, "nan"),
            ({"logprobs": ()}, "0 log-probabilities of 3"),
            ({"likeliest": ()}, "3 and 0 pairs"),
        ],
    )
    def test_of_sampled_answers(self, changes: dict[str, object], said: str) -> None:
        [difference] = self.differences(self.SAMPLED, self.output(**changes))
        assert said in difference
        assert self.differences(self.SAMPLED, self.output(tokens=(50, 51, 52))) == []

    @pytest.mark.parametrize("request_", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
    def test_of_what_either_has(self, request_: Request) -> None:
        for input_logprobs, said in (
            ((-3.0, -2.01), "input log-probability 1"),
            ((), "2 and 0 input"),
        ):
            [difference] = self.differences(request_, Answer(self.STOCK.outputs, input_logprobs))
            assert said in difference
        two = Answer(self.STOCK.outputs * 2, self.STOCK.input_logprobs)
        result = compare([request_], [two], [self.STOCK], lambda _: (-1.0, -2.0))
        assert "2 and 1 outputs" in result.differences[0]

    @pytest.mark.parametrize(
        ("interrupted", "answer", "said"),
        [
            (False, Answer(error="refused"), ["refused"]),
            (False, Answer(), ["no answer"]),
            (True, Answer(), []),
            (True, Answer(error="refused"), ["refused"]),
            (
                True,
                Answer((Output((40, 99), (-1.0, -2.0), (), "abort"),), (-3.0, -2.0)),
                ["token 1"],
            ),
        ],
    )
    def test_of_errors(self, interrupted: bool, answer: Answer, said: list[str]) -> None:
        request = Request(self.GREEDY.body, leaves_after=1.0 if interrupted else None)
        found = self.differences(request, answer)
        assert len(found) == len(said)
        assert all(words in difference for words, difference in zip(said, found, strict=True))

    def test_of_close_calls(self) -> None:
        stock = Answer((Output((40, 41), finish="length"),))
        other = Answer((Output((40, 99), finish="length"),))
        asked = []

        def likeliest(prompt: object) -> tuple[float, float]:
            asked.append(prompt)
            return -1.0, -1.0000001

        result = compare([self.GREEDY], [stock], [other], likeliest)
        assert (result.differences, result.close_calls) == ([], 1)
        assert asked == [[30, 31, 40]]
