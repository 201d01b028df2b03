"""Parts of ``verify``, without a server: prompts, distances, the rule, and the report."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from argparse import Namespace
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from harness.found import outcome, position
from sglang_gemma4_reference.checkpoint import E2B_TINY, build_tokenizer
from sglang_gemma4_yoco import counters, settings
from sglang_gemma4_yoco.commands import https
from sglang_gemma4_yoco.commands.console import CommandError
from sglang_gemma4_yoco.commands.verify import prompts, report, servers, verify
from sglang_gemma4_yoco.commands.verify.comparison import (
    Answer,
    Comparison,
    Position,
    Times,
    find_inequality,
    find_outlier,
)
from sglang_gemma4_yoco.commands.verify.prompts import Prompt
from sglang_gemma4_yoco.settings import name_of


@pytest.fixture
def tokenizer() -> Any:
    found = build_tokenizer(E2B_TINY.vocab_size)
    found.chat_template = (
        "{% for m in messages %}[{{ m['role'] }}]{% if m['content'] is string %}{{ m['content'] }}"
        "{% else %}{% for p in m['content'] %}{{ p.get('text', '<' + p['type'] + '>') }}"
        "{% endfor %}{% endif %}{% endfor %}"
    )
    return found


# ---------------------------------------------------------------- prompts


def test_a_file_of_prompts(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes("One?\n\n  Two, with {braces}?  \nÜ\n".encode() + b"\xff")
    assert prompts.read_file(file) == ["One?", "Two, with {braces}?", "Ü", "\ufffd"]
    file.write_text("\n \n")
    with pytest.raises(CommandError, match="has no prompt: write one per line"):
        prompts.read_file(file)


def bodies(made: list[Prompt], kind: str) -> list[Any]:
    found = []
    for prompt in made:
        if prompt.kind == kind:
            found.append(prompt.body)
    return found


def test_prompts_of_all_kinds(tokenizer: Any) -> None:
    texts = ["One?", "Two, and more?", "Three?"]
    made = prompts.make_prompts(tokenizer, texts, 9, long=500, pictures=True)
    assert list(dict.fromkeys(prompt.kind for prompt in made)) == list(
        dict.fromkeys((prompts.QUESTIONS, prompts.LOGPROBS, *prompts.KINDS))
    )
    questions = [body["input_ids"] for body in bodies(made, prompts.QUESTIONS)]
    ids = tokenizer.encode("[user]One?", add_special_tokens=False)
    assert questions[0][-len(ids) :] == ids
    logprobs = bodies(made, prompts.LOGPROBS)
    *questions, one = questions
    assert [body["input_ids"][9:] for body in logprobs] == questions
    assert [body["logprob_start_len"] for body in logprobs] == [9, 9, 9]
    assert len({body["input_ids"][0] for body in logprobs}) == 3  # no prefix is cached
    [other] = (body["input_ids"] for body in bodies(made, prompts.PREFIX))
    assert one[: prompts.PREFIX_TOKENS] == other[: prompts.PREFIX_TOKENS]
    assert one[prompts.PREFIX_TOKENS] != other[prompts.PREFIX_TOKENS]
    [long] = bodies(made, prompts.CHUNKS)
    assert len(long["input_ids"]) == 500
    pictures = bodies(made, prompts.PICTURES)
    assert {body["text"] for body in pictures} == {f"[user]<image>{prompts.WHICH_COLOURS}"}
    assert len({url for body in pictures for url in body["image_data"]}) == 2
    assert all(prompt.request()["return_logprob"] for prompt in made)


def test_a_base_model_continues_the_text(tokenizer: Any) -> None:
    tokenizer.chat_template = None
    made = prompts.make_prompts(tokenizer, ["ab"], 9)
    assert bodies(made, prompts.QUESTIONS)[0] == {"input_ids": tokenizer.encode("ab")}


def test_timed_prompts_share_no_first_token(tokenizer: Any) -> None:
    """Otherwise the prefix cache would hold a part of the next one."""
    made = [prompts.make_timed(tokenizer, length, length) for length in range(1, 65)]
    ids = [prompt.body["input_ids"] for prompt in made]
    assert list(map(len, ids)) == list(range(1, 65))
    assert len({one[0] for one in ids}) == len(made)
    assert made[63] == prompts.make_timed(tokenizer, 64, 64)
    assert made[0].request()["sampling_params"]["max_new_tokens"] == 1


# ---------------------------------------------------------------- servers


def test_no_prefill_is_audited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An audited prefill gives stock's answer."""
    monkeypatch.setenv(name_of("audit"), "1")
    server = servers.Server(True, [], 1, tmp_path / "log")
    assert settings.read(server.env).audit == 0


@pytest.mark.parametrize(
    ("chunk", "most", "sent"),
    [
        (256, 4096, 320),
        (2048, 2572, 2560),
        (2048, 2571, None),
        (-1, 4096, None),
    ],
)
def test_a_prompt_that_is_longer_than_a_chunk(
    tokenizer: Any, chunk: int, most: int, sent: int | None
) -> None:
    """It is sent if chunks are cut at all, and the server takes it and its new tokens."""
    made, document = fitted(tokenizer, [128], chunked_prefill_size=chunk, max_req_input_len=most)
    assert [len(body["input_ids"]) for body in bodies(made, prompts.CHUNKS)] == [sent] * bool(sent)
    assert (prompts.CHUNKS in document["left_out"]) is (sent is None)
    assert len(bodies(made, prompts.TIMED)) == 2  # one warms up


def test_timed_prompts_that_the_server_does_not_take(tokenizer: Any) -> None:
    """They are refused before any prompt is sent."""
    with pytest.raises(CommandError, match="with these flags a prompt has at most 2036 tokens"):
        fitted(tokenizer, [128, 2048], max_req_input_len=2048)


def fitted(
    tokenizer: Any, lengths: list[int], **info: Any
) -> tuple[list[prompts.Prompt], dict[str, Any]]:
    """Return the prompts for a server on a CPU with these limits, and the document."""
    server = servers.Server(True, [], 1, Path("none"))
    info = {"chunked_prefill_size": 256, "dtype": "float32"} | info
    documents = {"/server_info": info | {"internal_states": [info]}, "/model_info": {}}
    args = Namespace(
        prompt_tokens=lengths, repeats=1, texts=["One?"], device="cpu", tokenizer=tokenizer
    )
    document: dict[str, Any] = {}
    with mock.patch.object(server, "get", documents.__getitem__):
        return verify.fit_prompts(document, args, server), document


def test_a_key_is_sent_without_the_end_of_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of variables may give a key with one, with which it is no valid header."""
    monkeypatch.setenv(https.API_KEY, "secret\n")
    assert https.make_session("http://example.org").headers["Authorization"] == "Bearer secret"


# ---------------------------------------------------------------- distances


def answer(*generated: Position, read: tuple[Position, ...] = ()) -> Answer:
    return Answer(generated, read)


def test_answers_are_compared_up_to_where_they_part() -> None:
    one = answer(position(1, -1.0), position(2, -0.5, t2=-0.5, t3=-0.6), position(9, -9.0))
    other = answer(position(1, -1.25), position(3, -0.4, t3=-0.4, t2=-0.75), position(8, -1.0))
    found = Comparison.of([(one, other), (one, one)])
    assert (found.answers, found.equal_answers) == (2, 1)
    assert found.prefilled == [0.25, 0.0]
    assert found.logprobs == [0.25, 0.25, 0.0, 0.0, 0.0]
    read = answer(position(1, -1.0), read=(position(5, -1.0), position(6, -2.0)))
    assert Comparison.of([(read, read)]).prefilled == [0.0] * 3  # a prefill computes them all


@pytest.mark.parametrize(
    "other",
    [
        answer(position(1, math.nan)),
        answer(position(1, -1.0), position(2, -0.5)),  # the other one has ended early
        answer(position(2, math.nan, t1=-1.0)),
        answer(position(1, -1.0), read=(position(5, -1.0),)),  # more of the prompt was read
    ],
)
def test_what_is_not_known_is_far_apart(other: Answer) -> None:
    assert Comparison.of([(answer(position(1, -1.0)), other)]).max_logprob == math.inf


@pytest.mark.parametrize(
    ("likeliest", "least"),
    [
        ({"t2": -0.25, "t3": -4.0}, 3.0),  # the first server's token is none of them, so below -4
        ({}, 0.75),  # it is less likely than the second server's own
    ],
)
def test_a_token_that_is_not_among_the_likeliest(likeliest: dict[str, float], least: float) -> None:
    other = answer(position(2, -0.25, **likeliest))
    one = answer(position(1, -1.0))
    assert Comparison.of([(one, other)]).logprobs == [least]
    assert Comparison.of([(other, one)]).logprobs == [least]


def test_a_reply_is_read() -> None:
    about = {
        "output_token_logprobs": [[-0.5, 7, None], [None, 8, None]],
        "output_top_logprobs": [[[-0.5, 7, None], [-1.5, 3, None]], None],
        "input_token_logprobs": [[None, 2, None], [-2.0, 4, None]],
        "input_top_logprobs": [None, [[-1.0, 5, None]]],
        "cached_tokens": 3,
    }
    read = Answer.of({"text": "x", "meta_info": about})
    assert read.tokens == (7, 8)
    assert math.isnan(read.generated[1].logprob)
    assert read.generated[0].likeliest == {7: -0.5, 3: -1.5}
    assert read.read == (Position(4, -2.0, {5: -1.0}),)
    assert read.cached_tokens == 3


# ---------------------------------------------------------------- the rule


def comparison(logprob: float, *, equal: bool = True) -> Comparison:
    return Comparison(2, 2 - (not equal), [logprob] * 4, [logprob] * 2)


def test_float32_on_a_cpu_must_be_equal() -> None:
    assert find_inequality(comparison(9e-4)) is None
    for one in (comparison(1.1e-3), comparison(0.0, equal=False), comparison(math.inf)):
        told = f"{one.equal_answers} of 2 answers have the same tokens, and log-probabilities "
        told += f"differ by up to {one.max_logprob:.2g}"
        assert find_inequality(one) == told


def answers(*logprobs: float) -> list[Answer]:
    """Return answers of two tokens, whose first one has this log-probability."""
    return [answer(position(1, logprob), position(2, -1.0)) for logprob in logprobs]


@pytest.mark.parametrize("own", [0.0, 0.02, 0.2])
def test_elsewhere_stocks_answers_to_the_prompt_are_the_measure(own: float) -> None:
    """Fast's answer may be farther from the nearest one than these are from each other."""
    stock = answers(-1.0 - own, -1.0, -1.0 - own / 2)
    limit = own + 0.125
    assert find_outlier(answers(-1.0 + limit * 0.99), stock) is None
    assert find_outlier(answers(-1.0 - own - limit * 0.99), stock) is None
    assert find_outlier(answers(-1.0 + limit * 1.01), stock)
    assert find_outlier(answers(math.nan), stock)
    assert find_outlier(answers(math.nan), answers(math.nan, -1.0))


@pytest.mark.parametrize(
    ("shifts", "is_problem"),
    [
        ((3.0,), True),
        ((3.0, 0.0, 0.0), False),
        ((0.0, 3.0, 3.0), True),
        ((3.0, math.nan, 0.0), True),
    ],
)
def test_one_answer_of_three_may_be_rounding(shifts: tuple[float, ...], is_problem: bool) -> None:
    """Two of three are more than chance, and so is the only one."""
    fast = answers(*(-1.0 - shift for shift in shifts))
    assert (find_outlier(fast, answers(-1.0, -1.0)) is not None) is is_problem


def test_what_prefills_computed_is_judged_by_itself() -> None:
    """Most tokens come from decode steps, and hide the first ones; a timed prompt has none."""
    rest = [position(2, -1.0)] * 11
    stock = [answer(position(1, -1.0), *rest)] * 2
    first = answer(position(1, -1.2), *rest)
    later = answer(position(1, -1.0), *[position(2, -1.2)] * 11)
    for fast, told in ((first, "those of prefills alone) differ by 0.2"), (later, "all) ")):
        assert str(find_outlier([fast], stock)).startswith(f"log-probabilities ({told}")


def test_prompts_that_stand_out_are_sent_to_stock_again(tmp_path: Path) -> None:
    """Stock may answer like fast in another batch; a defect is no answer of stock's."""
    sent = [Prompt(kind, {}, new) for new, kind in enumerate(prompts.KINDS)]
    ways = {verify.ALONE: 1, verify.AGAIN: 1, verify.CACHED: 1, **verify.AT_ONCE}
    found = verify.VerifyResult()
    for fast, way in product((False, True), ways):
        found.answers[fast, way].extend(answers(*[-1.0] * 5))
    # Rounding, a defect, and a rounding that shows in one batch.
    found.answers[True, verify.ALONE][:] = answers(-1.0, -1.3, -2.0, -1.0, -1.0)
    found.answers[True, "5 at once"][:] = answers(-1.0, -1.0, -1.0, -3.0, -1.0)
    outliers = verify.find_outliers(sent, found.answers)
    assert [kind for kind in prompts.KINDS if outliers[kind]] == [prompts.PREFIX, prompts.CHUNKS]

    def reply(_: servers.Server, prompt: Prompt) -> Answer:
        return answers(-1.2 if prompt.kind == prompts.PREFIX else -1.0)[0]

    server = servers.Server(False, [], 1, tmp_path / "log")
    with (
        mock.patch.object(verify, "send_prompt", reply),
        mock.patch.object(server, "forget_prefixes") as flushed,
    ):
        verify.send_at_once(server, sent, found, verify.MORE)
    assert flushed.call_count == len(verify.MORE)
    outliers = verify.find_outliers(sent, found.answers)
    assert [kind for kind in prompts.KINDS if outliers[kind]] == [prompts.CHUNKS]
    assert "differ by 1 on average, and 0.12 is allowed" in str(outliers[prompts.CHUNKS])


# ---------------------------------------------------------------- the document, and the page


def test_the_document() -> None:
    document = outcome(1e-5)
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert document["agrees"] is document["active"] is document["answers_equal"] is True
    assert document["max_logprob_diff"] == pytest.approx(1e-5)
    assert (document["ttft_off_s"], document["ttft_on_s"], document["ratio"]) == (0.4, 0.2, 2.0)
    assert document["left_out"].keys() == {prompts.CHUNKS}
    assert document["prefills"][prompts.QUESTIONS][counters.TAIL_EAGER] == 1
    prefix = document["agreement"][prompts.PREFIX]
    assert (prefix["prefills"], prefix["cut"], prefix["cached_tokens"]) == (1, 1, 320)
    assert "3 prefills failed" in outcome(0.0, failed=3)["problems"][0]
    assert outcome(math.nan)["max_logprob_diff"] is None


@pytest.mark.parametrize(
    ("how", "kind", "reason"),
    [
        ({"hits": 0}, prompts.PREFIX, "no token came from the prefix cache"),
        ({"outcome": "lora"}, prompts.QUESTIONS, "none of its 1 prefills was cut: {'lora': 1}"),
        ({"outcome": "lora"}, "5 at once", "none of its 1 prefills was cut: {'lora': 1}"),
    ],
)
def test_what_was_not_tried(how: dict[str, Any], kind: str, reason: str) -> None:
    """It is so in the table, the notes and the verdict, whatever the answers are."""
    document = outcome(0.0, **how)
    assert document["agrees"] is True
    assert document["left_out"][kind] == reason
    text = report.format_report(document)
    assert f"- Not tried: {kind}: {reason}" in text
    assert re.search(rf"the answers agree\. Not tried: .*{kind}", text)
    assert "| not tried" in text


def test_a_time_from_the_prefix_cache_is_refused() -> None:
    with pytest.raises(CommandError, match="5 tokens of a timed prompt"):
        outcome(0.0, cached=5)


@pytest.mark.parametrize(
    ("shift", "exact", "again", "agrees"),
    [
        (0.01, True, 0.0, False),
        (0.01, False, 0.0, True),
        (0.13, False, 0.0, False),
        # In float32, where all must be equal, unless stock differs from itself.
        (0.3, True, 0.3, True),
        (3.0, True, 0.3, False),
    ],
)
def test_a_difference_is_named_with_its_kind(
    shift: float, exact: bool, again: float, agrees: bool
) -> None:
    document = outcome(shift, exact=exact, again=again)
    assert (document["agrees"], document["stock_differs"]) == (agrees, again > 0)
    named = []
    for problem in document["problems"]:
        named.append(problem.partition(":")[0])
    assert named == [prompts.QUESTIONS, prompts.PREFIX, prompts.TIMED] * (not agrees)
    blamed = "Stock differs from itself in identical batches, which is not fast prefill's doing."
    text = report.format_report(document)
    assert (blamed in text) is (again > 0)
    assert ("the answers do NOT agree" in text) is not agrees


REPORT = """\
### YOCO fast prefill: a <model>

**Fast prefill was active, and the answers do NOT agree. Not tried: longer than a chunk.** In \
float32 on a CPU tokens must be equal, and log-probabilities within 1e-3.

- SGLang some, sglang-gemma4-yoco some, commit some, some
- cpu, float32, server flags: `some`
- Problem: questions: 4 of 4 answers have the same tokens, and log-probabilities differ by up to \
0.01
- Problem: a shared prefix: 4 of 4 answers have the same tokens, and log-probabilities differ by \
up to 0.01
- Problem: first tokens of timed prompts: 6 of 6 answers have the same tokens, and \
log-probabilities differ by up to 0.01
- Not tried: longer than a chunk: a <reason>
- Two runs of stock in identical batches agree.

"""


def test_the_report_can_be_pasted() -> None:
    """What was run comes before the figures; each table is one of Markdown."""
    text = report.format_report(outcome(0.01))
    head, *tables = re.split(r"^(?=Time to|Stock against)", text, flags=re.MULTILINE)
    assert head == REPORT
    times, compared = ([line for line in table.splitlines() if "|" in line] for table in tables)
    assert [len(times), len(compared)] == [4, 6]
    for lines in (times, compared):
        assert len({len(line) for line in lines}) == 1
        assert len({line.count("|") for line in lines}) == 1
        assert not lines[1].strip("|-")
    cells = [cell.strip() for cell in times[2].split("|")]
    assert cells[1:4] == ["100", "2.00", "0.200 (0.200-0.200)"]
    assert "not finite" in report.format_report(outcome(math.nan))


def test_times() -> None:
    assert Times.of([2.0]) == Times(2.0, 2.0, 2.0)
    assert Times.of([3.0, 1.0, 2.0, 5.0, 4.0]) == Times(3.0, 1.8, 4.2)
    assert str(Times(1.0, 0.0005, 2.0)) == "1.000 (0.001-2.000)"


WITHOUT_PACKAGING = """
import sys
sys.modules["packaging"] = None
from sglang_gemma4_yoco.commands.main import main
raise SystemExit(main(["verify", "--model-path", "none"]))
"""


def test_a_missing_import_is_one_line(tmp_path: Path) -> None:
    """The environment may not be the server's."""
    command = [sys.executable, "-c", WITHOUT_PACKAGING]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert "packaging" in line
