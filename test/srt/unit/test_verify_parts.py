"""What ``verify`` is made of, without a server: prompts, distances, the rule, the page."""

from __future__ import annotations

import json
import math
import re
from argparse import Namespace
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from sglang_gemma4_reference.checkpoint import E2B_TINY, build_tokenizer
from sglang_gemma4_yoco import log
from sglang_gemma4_yoco.commands import examination, page, prompts, table, verdict
from sglang_gemma4_yoco.commands.agreement import (
    MEAN_KL,
    MEAN_LOGPROB,
    Answer,
    Comparison,
    Position,
    beyond,
    divergence,
)
from sglang_gemma4_yoco.commands.console import CommandError
from sglang_gemma4_yoco.commands.examination import Found, Plan
from sglang_gemma4_yoco.commands.prompts import Maker, Prompt
from sglang_gemma4_yoco.commands.timing import Timed, Times, by_length

PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


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
    conversations = prompts.bundled()
    assert len(conversations) >= 8
    texts = [str(conversation[0]["content"]) for conversation in conversations]
    assert len(set(texts)) == len(texts)


def test_a_file_of_lines(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("One?\n\n  Two, with {braces}?  \n")
    assert [c[0]["content"] for c in prompts.read_file(file)] == ["One?", "Two, with {braces}?"]


def test_a_file_of_json_lines(tmp_path: Path, maker: Maker) -> None:
    file = tmp_path / "prompts.jsonl"
    conversation = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [PICTURE, {"type": "text", "text": "What is it?"}]},
    ]
    lines = [{"prompt": "One?"}, {"messages": conversation}]
    file.write_text("\n".join(map(json.dumps, lines)))
    text, picture = map(maker.question, prompts.read_file(file))
    assert text.kind == prompts.QUESTIONS
    assert maker.question([{"role": "user", "content": "One?"}]).body == text.body
    assert picture.kind == prompts.PICTURES
    assert picture.body["image_data"] == ["data:image/png;base64,AAAA"]
    assert picture.body["text"] == "[system]Be brief.[user]<image>What is it?"


def test_a_template_that_refuses(maker: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{{ raise_exception('no system role') }}"
    monkeypatch.setattr(maker._tokenizer, "chat_template", template)
    with pytest.raises(CommandError, match=r"refuses 'Be brief\.': no system role"):
        maker.question([{"role": "system", "content": "Be brief."}])
    # A model that was not taught to chat goes on with the text.
    monkeypatch.setattr(maker._tokenizer, "chat_template", None)
    ids = maker.question([{"role": "user", "content": "ab"}]).body["input_ids"]
    assert ids == maker._tokenizer.encode("ab")


@pytest.mark.parametrize(
    ("settings", "config", "dtype"),
    [
        ({"dtype": "torch.bfloat16"}, {"dtype": "float32"}, "bfloat16"),
        ({"dtype": "auto"}, {"dtype": "float32"}, "float32"),
        ({}, {"text_config": {"torch_dtype": "bfloat16"}}, "bfloat16"),
        ({}, {}, "unknown"),
        ({}, None, "unknown"),
    ],
)
def test_dtype(tmp_path: Path, settings: Any, config: Any, dtype: str) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    assert examination.find_dtype(settings, str(tmp_path)) == dtype


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "has no prompt"),
        ("\n \n", "has no prompt"),
        ('{"prompt": "a"}\n\n{"prompt": ', ":3: no JSON"),
        ('{"prompt": "a"}\nwords', ":2: no JSON"),
        ('{"prompt": "a"}\n["a"]', ':2: needs an object with either "prompt" or "messages"'),
        ('{"prompt": "a", "messages": []}', ":1: needs an object with either"),
        ('{"text": "a"}', ":1: needs an object with either"),
        ('{"prompt": 3}', ':1: "prompt" must be text'),
        ('{"messages": []}', ':1: "messages" must be a list of at least one'),
        ('{"messages": ["a"]}', ':1: a message needs a "role"'),
        ('{"messages": [{"role": "me", "content": "a"}]}', ':1: a message needs a "role"'),
        ('{"messages": [{"role": "user"}]}', ':1: a message needs "content"'),
        ('{"messages": [{"role": "user", "content": [{"type": "sound"}]}]}', ":1: a part of"),
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


@pytest.mark.parametrize("make", [lambda f: f.mkdir(), lambda f: f.write_bytes(b"\xff\xfe\xfa")])
def test_files_that_cannot_be_read(tmp_path: Path, make: Any) -> None:
    file = tmp_path / "mine"
    with pytest.raises(CommandError, match="cannot be read"):
        prompts.read_file(file)
    make(file)
    with pytest.raises(CommandError, match="cannot be read"):
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
    made = [maker.random(length, number) for number, length in enumerate([1, 2, 64] * 20)]
    assert [len(ids) for ids in made] == [1, 2, 64] * 20
    assert len({ids[0] for ids in made}) == len(made)
    assert made[2] == maker.random(64, 2)


def test_input_logprobs_from_the_first_token_and_from_the_middle(maker: Maker) -> None:
    picture = Prompt(prompts.PICTURES, "a picture", {"text": "", "image_data": ["a"]})
    questions = [maker.question(c) for c in prompts.bundled()]
    made = prompts.with_logprobs([picture, *questions])
    assert len(made) == prompts.WITH_LOGPROBS
    starts = [p.body["logprob_start_len"] for p in made]
    assert starts[0] == starts[2] == 0
    assert 0 < starts[1] < len(made[1].body["input_ids"])
    assert all(p.request()["return_logprob"] for p in made)


# ---------------------------------------------------------------- distances


def position(token: int, logprob: float, **likeliest: float) -> Position:
    return Position(token, logprob, {int(k[1:]): v for k, v in likeliest.items()})


def answer(*generated: Position, read: tuple[Position, ...] = ()) -> Answer:
    return Answer("", generated, read)


def test_divergence_of_whole_distributions() -> None:
    p, q = {1: 0.5, 2: 0.3, 3: 0.2}, {1: 0.2, 2: 0.3, 3: 0.5}
    true = sum(p[t] * math.log(p[t] / q[t]) for t in p)
    logs = [{t: math.log(x) for t, x in d.items()} for d in (p, q)]
    assert divergence(*logs) == pytest.approx(true, abs=1e-9)
    assert divergence(logs[0], logs[0]) == 0.0


def test_divergence_of_the_likeliest_is_a_lower_bound() -> None:
    p, q = [0.5, 0.3, 0.1, 0.1], [0.4, 0.2, 0.3, 0.1]
    true = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    known = divergence({0: math.log(0.5), 1: math.log(0.3)}, {0: math.log(0.4), 2: math.log(0.3)})
    assert 0 < known < true
    # Nothing in common: all is one token, and nothing is known.
    assert divergence({0: math.log(0.9)}, {1: math.log(0.9)}) == 0.0


def test_answers_are_compared_up_to_where_they_part() -> None:
    one = answer(position(1, -1.0), position(2, -0.5, t2=-0.5, t3=-0.6), position(9, -9.0))
    other = answer(position(1, -1.25), position(3, -0.4, t3=-0.4, t2=-0.75), position(8, -1.0))
    found = Comparison.of([(one, other), (one, one)])
    assert (found.answers, found.equal_answers) == (2, 1)
    assert (found.tokens, found.equal_tokens) == (6, 4)
    assert found.logprobs == [0.25, 0.25, 0.0, 0.0, 0.0]
    assert not found.all_equal
    assert len(found.divergences) == 2


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


def comparison(logprob: float, kl: float = 0.0, *, equal: bool = True) -> Comparison:
    return Comparison(2, 2 if equal else 1, 4, 4, [logprob] * 4, [kl] * 4)


def test_float32_on_a_cpu_must_be_equal() -> None:
    noise = [comparison(0.5)]  # which excuses nothing
    assert beyond(comparison(9e-4), noise, exact=True) == []
    assert "up to 0.0011" in beyond(comparison(1.1e-3), noise, exact=True)[0]
    assert "1 of 2 answers" in beyond(comparison(0.0, equal=False), noise, exact=True)[0]
    assert beyond(comparison(math.inf), noise, exact=True)


@pytest.mark.parametrize("own", [0.0, 0.02, 0.2])
def test_elsewhere_the_noise_of_stock_is_the_measure(own: float) -> None:
    # Of one prompt, which was asked twice: it may be as far off as stock's own.
    noise = [comparison(own, own / 10), comparison(own / 2)]
    limit, kl = 4 * own + MEAN_LOGPROB, 4 * own / 10 + MEAN_KL
    within = comparison(limit * 0.99, kl * 0.99, equal=False)
    assert beyond(within, noise, exact=False) == []
    assert "log-prob" in beyond(comparison(limit * 1.01, 0.0), noise, exact=False)[0]
    assert "distributions" in beyond(comparison(0.0, kl * 1.01), noise, exact=False)[0]
    assert beyond(comparison(math.inf), noise, exact=False)
    assert beyond(comparison(math.inf), [comparison(math.inf)], exact=False)


def test_one_prompt_of_several_may_be_as_far_off_as_the_furthest() -> None:
    noise = [Comparison(8, 8, 8, 8, [0.0] * 7 + [0.8], [0.0] * 8)]
    limit = 3 * 0.1 + MEAN_LOGPROB

    def fast(asked: int, logprob: float) -> Comparison:
        return Comparison(2 * asked, 0, 0, 0, [logprob] * 2 * asked, [0.0] * 2 * asked)

    for asked, more in ((1, 0.8), (4, 0.2)):
        assert beyond(fast(asked, limit + 0.99 * more), noise, exact=False) == []
        assert beyond(fast(asked, limit + 1.01 * more), noise, exact=False) != []


# ---------------------------------------------------------------- the whole, and the page


def outcome(shift: float, *, exact: bool = True, failed: int = 0) -> verdict.Outcome:
    """Of servers whose answers are ``shift`` apart in log-probability."""

    def found(by: float, factor: float) -> Found:
        answers = [answer(position(i, -1.0 - by, t1=-1.0 - by, t2=-2.0)) for i in range(2)]
        timed = [Timed(n, n * factor, answers[0]) for n in (100, 100, 200)]
        return Found(answers, answers, answers, timed, Counter({log.TAIL_EAGER: 7}))

    asked = [Prompt(prompts.QUESTIONS, "<b>?", {}), Prompt(prompts.PREFIX, "b", {})]
    plan = Plan(Maker(range(100)), asked, exact, "float32", {prompts.CHUNKS: "a <reason>"})
    args = Namespace(
        label=None, model_path="a <model>", server_args=["--tp", "1"], prompt_tokens=[200],
        repeats=2,
    )  # fmt: skip
    fast = found(shift, 0.001)
    fast.forwards[log.FAILED] = failed
    document = verdict.empty_document(args, "cpu", Path("there"))
    return verdict.conclude(document, plan, found(0.0, 0.002), fast)


def test_the_document() -> None:
    document = outcome(1e-5).document
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert document["agrees"] is document["active"] is document["answers_equal"] is True
    assert document["max_logprob_diff"] == pytest.approx(1e-5)
    assert (document["ttft_off_s"], document["ttft_on_s"], document["ratio"]) == (0.4, 0.2, 2.0)
    assert [point["tokens"] for point in document["times"]] == [100, 200]
    # No prefix hit, though nothing said that the cache is off.
    assert document["left_out"].keys() == {prompts.CHUNKS, prompts.PREFIX}


def test_what_is_beyond_is_said() -> None:
    assert outcome(0.01).document["agrees"] is False
    problems = outcome(0.01).document["problems"]
    assert [problem.partition(":")[0] for problem in problems] == [
        prompts.QUESTIONS,
        prompts.PREFIX,
        verdict.TIMED,
    ]
    assert outcome(0.01, exact=False).document["agrees"] is True
    rounded = outcome(0.06, exact=False).document
    assert rounded["agrees"] is False
    assert [problem.partition(":")[0] for problem in rounded["problems"]] == [
        prompts.QUESTIONS,
        prompts.PREFIX,
        f"{prompts.QUESTIONS}, prefills alone",
        f"{prompts.PREFIX}, prefills alone",
        f"{verdict.TIMED}, prefills alone",
    ]
    # Stock serves a batch that fails on the fast path: the answers are right, something is not.
    assert "3 prefills failed" in outcome(0.0, failed=3).document["problems"][0]
    assert outcome(math.nan).document["max_logprob_diff"] is None


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
    rendered = page.render(outcome(0.01))
    seen = References()
    seen.feed(rendered)
    assert seen.tags["svg"] == 2
    assert seen.tags["table"] == 4
    assert not {"script", "link", "img", "iframe"} & seen.tags.keys()
    assert [reference for reference in seen.loaded if not reference.startswith("#")] == []
    assert not re.search(r"@import|url\((?!#)|<!DOCTYPE svg", rendered)
    assert "a &lt;model&gt;" in rendered
    assert "a &lt;reason&gt;" in rendered
    assert "THE ANSWERS DO NOT AGREE" in rendered
    assert "2.00" in rendered


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    table.show(outcome(0.01).document)
    told = capsys.readouterr().out
    for words in ("2.00", "0.400 (0.400-0.400)", "1.0e-02", "DO NOT AGREE", "a <reason>"):
        assert words in told, words


def test_times() -> None:
    assert Times.of([2.0]) == Times(2.0, 2.0, 2.0, 2.0)
    assert Times.of([3.0, 1.0, 2.0, 5.0, 4.0]).median == 3.0
    nothing = answer()
    timed = [Timed(1, 2.0, nothing), Timed(5, 9.0, nothing), Timed(1, 4.0, nothing)]
    assert {n: times.median for n, times in by_length(timed).items()} == {1: 3.0, 5: 9.0}
