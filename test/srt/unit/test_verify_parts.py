"""The parts of ``verify``, without a server: prompts, distances, the rule, tables and the page."""

from __future__ import annotations

import io
import json
import math
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sglang_gemma4_reference.checkpoint import E2B_TINY, build_tokenizer
from sglang_gemma4_yoco import log
from sglang_gemma4_yoco.commands import main, page, prompts, servers, verify
from sglang_gemma4_yoco.commands.compare import (
    Answer,
    Comparison,
    Position,
    Times,
    beyond,
)
from sglang_gemma4_yoco.commands.console import CommandError
from sglang_gemma4_yoco.commands.prompts import Maker, Prompt
from sglang_gemma4_yoco.commands.verify import AGAIN, ALONE, AT_ONCE, TIMED, Found, Plan


@pytest.fixture(scope="module")
def maker() -> Maker:
    tokenizer = build_tokenizer(E2B_TINY.vocab_size)
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m['role'] }}]{% if m['content'] is string %}{{ m['content'] }}"
        "{% else %}{% for p in m['content'] %}{{ p.get('text', '<' + p['type'] + '>') }}"
        "{% endfor %}{% endif %}{% endfor %}"
    )
    return Maker(tokenizer)


# ---------------------------------------------------------------- prompts


def test_bundled_prompts() -> None:
    assert len(set(prompts.bundled())) == len(prompts.bundled()) >= 8


@pytest.mark.parametrize(
    ("content", "read"),
    [
        ("One?\n\n  Two, with {braces}?  \n", ["One?", "Two, with {braces}?"]),
        ('{"prompt": "One\\nand a half?"}\nTwo?', ["One\nand a half?", "Two?"]),
    ],
)
def test_a_file_of_prompts(tmp_path: Path, content: str, read: list[str]) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text(content)
    assert prompts.read_file(file) == read


def test_questions(maker: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    assert maker.has_template
    ids = maker._tokenizer.encode("[user]One?", add_special_tokens=False)
    assert maker.question("One?").body["input_ids"][-len(ids) :] == ids
    # A base model goes on with the text.
    monkeypatch.setattr(maker._tokenizer, "chat_template", None)
    assert not maker.has_template
    assert maker.question("ab").body["input_ids"] == maker._tokenizer.encode("ab")


def test_questions_about_pictures(maker: Maker) -> None:
    url = prompts.picture("red", "green")
    asked = maker.about_picture(url)
    assert asked.kind == prompts.PICTURES
    assert asked.body["image_data"] == [url]
    assert asked.body["text"] == f"[user]<image>{prompts.WHICH_COLOURS}"
    assert url.startswith("data:image/png;base64,")
    assert url != prompts.picture("green", "red")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "has no prompt"),
        ("\n \n", "has no prompt"),
        ('{"prompt": "a"}\n\n{"prompt": ', ":3: no text, or no JSON"),
        ('{"text": "a"}', ':1: no text, or no JSON with a "prompt"'),
        ('a\n{"prompt": 3}', ":2: no text, or no JSON"),
    ],
)
def test_bad_files_are_named_with_their_line(tmp_path: Path, content: str, said: str) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text(content)
    with pytest.raises(CommandError) as error:
        prompts.read_file(file)
    assert str(file) in str(error.value)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    file = tmp_path / "mine"
    with pytest.raises(FileNotFoundError):
        prompts.read_file(file)
    file.write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(CommandError, match=":1: no text"):
        prompts.read_file(file)


def test_prompts_that_share_what_they_should(maker: Maker) -> None:
    one, other = (p.body["input_ids"] for p in maker.shared_prefix("some words of a text"))
    length = prompts.PREFIX_TOKENS
    assert one[:length] == other[:length]
    assert one[length:] != other[length:]
    assert len(one) == len(other) > length
    assert len(maker.long("words", 500).body["input_ids"]) == 500


def test_timed_prompts_share_no_first_token(maker: Maker) -> None:
    """Or a prefix cache would know a part of the next one."""
    made = [maker.timed(length, number) for number, length in enumerate([1, 2, 64] * 20)]
    ids = [prompt.body["input_ids"] for prompt in made]
    assert list(map(len, ids)) == [1, 2, 64] * 20
    assert len({one[0] for one in ids}) == len(made)
    assert made[2] == maker.timed(64, 2)
    assert made[0].request()["sampling_params"]["max_new_tokens"] == 1


def test_input_logprobs_from_the_first_token_and_from_the_middle(maker: Maker) -> None:
    made = prompts.with_logprobs([maker.question(text) for text in prompts.bundled()])
    assert len(made) == prompts.WITH_LOGPROBS
    starts = [p.body["logprob_start_len"] for p in made]
    assert starts[0] == starts[2] == 0
    assert 0 < starts[1] < len(made[1].body["input_ids"])
    assert all(p.request()["return_logprob"] for p in made)


# ---------------------------------------------------------------- servers


@pytest.mark.parametrize("variable", [None, "secret"])
def test_the_key_is_read_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """As of a server of ``verify``; on a command line ``ps`` would show it."""
    monkeypatch.delenv(servers.API_KEY, raising=False)
    if variable is not None:
        monkeypatch.setenv(servers.API_KEY, variable)
    sent = servers.Server(True, [], 1, Path("log"))._http.headers.get("Authorization")
    assert sent == (variable and "Bearer secret")
    for command in ("verify", "status"):
        with pytest.raises(SystemExit):
            main.main([command, "--help"])
        assert servers.API_KEY in capsys.readouterr().out


def test_free_ports() -> None:
    one, other = servers.free_ports(2)
    assert one != other
    assert servers.free_ports(1, one) == [one]


# ---------------------------------------------------------------- distances


def position(token: int, logprob: float, **likeliest: float) -> Position:
    return Position(token, logprob, {int(k[1:]): v for k, v in likeliest.items()})


def answer(*generated: Position, read: tuple[Position, ...] = ()) -> Answer:
    return Answer(generated, read)


def test_answers_are_compared_up_to_where_they_part() -> None:
    one = answer(position(1, -1.0), position(2, -0.5, t2=-0.5, t3=-0.6), position(9, -9.0))
    other = answer(position(1, -1.25), position(3, -0.4, t3=-0.4, t2=-0.75), position(8, -1.0))
    found = Comparison.of([(one, other), (one, one)])
    assert (found.answers, found.equal_answers) == (2, 1)
    assert found.logprobs == [0.25, 0.25, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "other",
    [
        answer(position(1, math.nan)),
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


def test_what_prefills_compute_of_an_answer() -> None:
    read = (position(5, -1.0), position(6, -2.0))
    whole = answer(position(1, -1.0), position(2, -0.5), read=read)
    assert whole.prefilled == answer(position(1, -1.0), read=read)


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
    return Comparison(2, 2 if equal else 1, [logprob] * 4)


def test_float32_on_a_cpu_must_be_equal() -> None:
    noise = [comparison(0.5)]  # which excuses nothing
    assert beyond(comparison(9e-4), noise, exact=True) == []
    assert "up to 0.0011" in beyond(comparison(1.1e-3), noise, exact=True)[0]
    assert "1 of 2 answers" in beyond(comparison(0.0, equal=False), noise, exact=True)[0]
    assert beyond(comparison(math.inf), noise, exact=True)


@pytest.mark.parametrize("own", [0.0, 0.02, 0.2])
def test_elsewhere_the_noise_of_stock_is_the_measure(own: float) -> None:
    # Of one prompt, which was asked twice: it may be as far off as stock's own.
    noise = [comparison(own), comparison(own / 2)]
    limit = 4 * own + 0.05
    assert beyond(comparison(limit * 0.99, equal=False), noise, exact=False) == []
    assert "log-prob" in beyond(comparison(limit * 1.01), noise, exact=False)[0]
    assert beyond(comparison(math.inf), noise, exact=False)
    assert beyond(comparison(math.inf), [comparison(math.inf)], exact=False)


def test_one_prompt_of_several_may_be_as_far_off_as_the_furthest() -> None:
    noise = [Comparison(8, 8, [0.0] * 7 + [0.8])]
    limit = 3 * 0.1 + 0.05

    def fast(asked: int, logprob: float) -> Comparison:
        return Comparison(2 * asked, 0, [logprob] * 2 * asked)

    for asked, more in ((1, 0.8), (4, 0.2)):
        assert beyond(fast(asked, limit + 0.99 * more), noise, exact=False) == []
        assert beyond(fast(asked, limit + 1.01 * more), noise, exact=False) != []


# ---------------------------------------------------------------- the whole, and the page


def outcome(shift: float, *, exact: bool = True, failed: int = 0) -> tuple[dict[str, Any], Any]:
    """The document of servers whose answers are ``shift`` apart, and the comparisons."""

    def found(by: float, factor: float) -> Found:
        one = answer(position(1, -1.0 - by, t1=-1.0 - by, t2=-2.0))
        answers = {ALONE: [one] * 2, AT_ONCE: [one] * 2, AGAIN: [one] * 2, TIMED: [one] * 3}
        seconds = {length: [length * factor] * 2 for length in (100, 200)}
        return Found(answers, {ALONE: Counter({log.TAIL_EAGER: 7})}, seconds)

    asked = [Prompt(prompts.QUESTIONS, {}), Prompt(prompts.PREFIX, {})]
    left_out = {prompts.CHUNKS: "a <reason>"}
    plan = Plan(asked, {100: [], 200: []}, "float32", exact, left_out)
    document: dict[str, Any] = dict.fromkeys(
        ("device", "sglang", "package", "server_args", "repeats")
    )
    document["model"] = "a <model>"
    fast = found(shift, 0.001)
    fast.forwards[ALONE][log.FAILED] = failed
    return document, verify.conclude(document, plan, found(0.0, 0.002), fast)


def test_the_document() -> None:
    document, _ = outcome(1e-5)
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert document["agrees"] is document["active"] is document["answers_equal"] is True
    assert document["max_logprob_diff"] == pytest.approx(1e-5)
    assert (document["ttft_off_s"], document["ttft_on_s"], document["ratio"]) == (0.4, 0.2, 2.0)
    # No prefix hit, though nothing said that the cache is off.
    assert document["left_out"].keys() == {prompts.CHUNKS, prompts.PREFIX}
    assert document["rounds"][ALONE][log.TAIL_EAGER] == 7


def test_what_is_beyond_is_said() -> None:
    found = (prompts.QUESTIONS, prompts.PREFIX)
    document, _ = outcome(0.01)
    assert document["agrees"] is False
    named = [problem.partition(":")[0] for problem in document["problems"]]
    assert named == [*found, prompts.TIMED]
    assert outcome(0.01, exact=False)[0]["agrees"] is True
    rounded, _ = outcome(0.06, exact=False)
    assert rounded["agrees"] is False
    named = [problem.partition(":")[0] for problem in rounded["problems"]]
    assert named == [*found, *(f"{kind}, prefills alone" for kind in (*found, prompts.TIMED))]
    # Stock serves a batch that fails on the fast path: the answers are right, something is not.
    assert "3 prefills failed" in outcome(0.0, failed=3)[0]["problems"][0]
    assert outcome(math.nan)[0]["max_logprob_diff"] is None


class References(HTMLParser):
    """What a page would load, and the tags it is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.tags: Counter[str] = Counter()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        named = ("src", "href", "xlink:href", "data", "action", "srcset")
        self.loaded += [str(value) for name, value in attrs if name in named]


def test_the_page_opens_without_a_network() -> None:
    document, compared = outcome(0.01)
    rendered = page.render(document, *compared)
    seen = References()
    seen.feed(rendered)
    assert seen.tags["svg"] == 2
    assert not {"script", "link", "img", "iframe"} & seen.tags.keys()
    assert [reference for reference in seen.loaded if not reference.startswith("#")] == []
    assert not re.search(r"@import|url\((?!#)|<!DOCTYPE svg", rendered)
    for words in ("a &lt;model&gt;", "a &lt;reason&gt;", "THE ANSWERS DO NOT AGREE", "2.00"):
        assert words in rendered, words
    # Nothing that is not finite is drawn, and nothing has to be.
    for shift in (0.0, math.nan):
        document, compared = outcome(shift)
        assert page.render(document, *compared).count("<svg") == 2


def test_the_tables() -> None:
    console = Console(file=io.StringIO(), width=110, record=True)
    page.show(outcome(0.01)[0], console)
    shown = console.export_text()
    for words in ("2.00", "0.400 (0.400-0.400)", "1.0e-02", "DO NOT AGREE", "a <reason>"):
        assert words in shown, words


def test_times() -> None:
    assert Times.of([2.0]) == Times(2.0, 2.0, 2.0)
    assert Times.of([3.0, 1.0, 2.0, 5.0, 4.0]).median == 3.0
    assert Times(0.001, 0.0005, 0.002).text(1e3, 1) == "1.0 (0.5-2.0)"
