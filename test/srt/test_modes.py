"""Serving modes on real servers: on equals off, and each mode is shown to be what it says it is.

The modes that need nothing but a request run on the session's servers; the others have a pair of
their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ask import TOLERANCE, Compared, assert_same_answers, compare, generate, tokens
from layer_rows import assert_all_fast, cut, whole
from server import CHUNK, Server, started
from sglang_gemma4_reference.checkpoint import E2B_TINY, write_assistant
from sglang_gemma4_yoco import gate

STEPS_ASIDE = "Gemma 4 fast prefill steps aside"
LABELS = [40, 300, 511]


@contextmanager
def pair(checkpoint: Path, directory: Path, *arguments: str) -> Iterator[tuple[Server, Server]]:
    """Two servers with the same arguments, on and off."""
    with ExitStack() as stack:
        on, off = (
            stack.enter_context(
                started(checkpoint, directory / name, switch=switch, arguments=arguments)
            )
            for name, switch in (("on", None), ("off", "0"))
        )
        on.wait_until_ready()
        off.wait_until_ready()
        yield on, off


# -- requests that generate nothing ----------------------------------------------------------


def score(server: Server, query: list[int], items: list[list[int]]) -> list[list[float]]:
    """Log-probabilities of ``LABELS`` behind the query and each item."""
    body = {"query": query, "items": items, "label_token_ids": LABELS, "model": "default"}
    scores: list[list[float]] = server.post("/v1/score", body).json()["scores"]
    return scores


def assert_same_scores(both: Compared[list[float]]) -> None:
    assert len(both.on) == len(both.off) > 0
    for on, off in zip(both.on, both.off, strict=True):
        assert on == pytest.approx(off, abs=TOLERANCE, rel=0)
        assert len(set(on)) == len(LABELS)


def test_score(servers: tuple[Server, Server]) -> None:
    """/v1/score reads the last row of each request, whose prompt may span several chunks."""
    query, items = tokens(30, seed=1), [tokens(n, seed=n) for n in (5, 12, 2 * CHUNK + 9)]
    both = compare(servers, lambda server: score(server, query, items))
    assert_all_fast(both.prefills)
    assert_same_scores(both)
    # Each item has its own scores: they are of its last row.
    assert len({tuple(scores) for scores in both.on}) == len(items)


def test_score_of_cached_prompt(servers: tuple[Server, Server]) -> None:
    """What one score request has put into the cache serves the next."""
    query = tokens(90, seed=2)

    def ask(server: Server) -> list[list[float]]:
        return [score(server, query, [tokens(n, seed=n)])[0] for n in (4, 20)]

    both = compare(servers, ask)
    assert_all_fast(both.prefills)
    assert [prefill.prefix_lens for prefill in both.prefills] == [[0], [90]]
    assert_same_scores(both)


def test_input_logprobs_without_generation(servers: tuple[Server, Server]) -> None:
    """A request for the log-probabilities of its prompt's last tokens alone keeps these rows."""

    def ask(server: Server) -> list[list[float]]:
        reply = server.generate(
            input_ids=tokens(70, seed=3),
            sampling_params={"max_new_tokens": 0},
            return_logprob=True,
            logprob_start_len=60,
        )
        # The first of them has nothing before it in the answer.
        return [[p for p, _, _ in reply["meta_info"]["input_token_logprobs"] if p is not None]]

    both = compare(servers, ask)
    assert both.rows == [cut(70, 10)]
    assert both.on[0] == pytest.approx(both.off[0], abs=TOLERANCE, rel=0)
    assert len(both.on[0]) == 9


# -- drafts of a multi-token-prediction assistant --------------------------------------------


@pytest.fixture(scope="module")
def drafting(
    tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Server]]:
    """Servers with an assistant that drafts three tokens ahead."""
    directory = tmp_path_factory.mktemp("drafting")
    assistant = write_assistant(directory / "assistant", E2B_TINY)
    with pair(
        tiny_checkpoint,
        directory,
        *("--speculative-algorithm", "NEXTN"),
        *("--speculative-draft-model-path", str(assistant)),
        *("--speculative-num-steps", "3"),
        *("--speculative-eagle-topk", "1"),
        *("--speculative-num-draft-tokens", "4"),
    ) as servers:
        yield servers


def draft(server: Server, prompts: list[list[int]], **body: Any) -> list[tuple[Any, ...]]:
    """Greedy answers to several prompts at once: tokens, and how many drafts were right."""
    sampling = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
    replies = server.generate(input_ids=prompts, sampling_params=sampling, **body)
    return [
        (
            reply["output_ids"],
            reply["meta_info"]["spec_correct_drafts_histogram"],
            reply["meta_info"]["spec_num_proposed_drafts"],
        )
        for reply in replies
    ]


def compare_drafts(
    servers: tuple[Server, Server], ask: Callable[[Server], list[Any]]
) -> Compared[Any]:
    """Same tokens and same accepted lengths, from prompts that took the fast path."""
    both = compare(servers, ask)
    assert_all_fast(both.prefills)
    assert both.on == both.off
    return both


def test_drafts(drafting: tuple[Server, Server]) -> None:
    """Same tokens and same accepted lengths; the assistant starts from the prompt's last row."""
    prompts = [tokens(n, seed=n) for n in (50, 7, 300)]
    both = compare_drafts(drafting, lambda server: draft(server, prompts))
    # Some drafts are right and some are wrong: both ways lead on from the prefill's K/V.
    histograms = [histogram for _, histogram, _ in both.on]
    assert any(sum(histogram[1:]) for histogram in histograms)
    assert any(histogram[0] for histogram in histograms)
    [line] = drafting[0].log_lines("Gemma 4 fast prefill is active")
    assert "Gemma4TextModel" in line


def test_drafts_behind_a_cached_prompt(drafting: tuple[Server, Server]) -> None:
    """A second turn starts from the first one's K/V, that of accepted drafts included."""

    def ask(server: Server) -> list[tuple[Any, ...]]:
        first = draft(server, [tokens(60, seed=4)])
        turn = [*tokens(60, seed=4), *first[0][0], *tokens(9, seed=5)]
        return [*first, *draft(server, [turn])]

    both = compare_drafts(drafting, ask)
    assert max(max(prefill.prefix_lens) for prefill in both.prefills) >= 60


def test_drafts_beside_input_logprobs(drafting: tuple[Server, Server]) -> None:
    """A draft starts from the last row where the suffix of a prompt is kept too."""
    both = compare(
        drafting,
        lambda server: [
            (answer.tokens, [round(p, 3) for p in answer.input_logprobs])
            for answer in generate(server, tokens(70, seed=6), logprob_start_len=60)
        ],
    )
    assert both.rows == [cut(70, 10)]
    assert both.on == both.off


# -- hidden states ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def telling(
    tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Server]]:
    """Servers that may be asked for hidden states."""
    with pair(
        tiny_checkpoint, tmp_path_factory.mktemp("telling"), "--enable-return-hidden-states"
    ) as servers:
        yield servers


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
    assert telling[0].log_lines(f"{STEPS_ASIDE}: {gate.HIDDEN_STATES}")
    assert "hidden_states" not in both.on[1]["meta_info"]


# -- adapters --------------------------------------------------------------------------------


def write_adapter(path: Path) -> Path:
    """A random LoRA adapter of all attention projections."""
    path.mkdir(parents=True)
    draw = torch.Generator().manual_seed(0)
    weights: dict[str, torch.Tensor] = {}
    rank = 4
    for layer, kind in enumerate(E2B_TINY.layer_types):
        head_dim = E2B_TINY.global_head_dim if kind == "full_attention" else E2B_TINY.head_dim
        name = f"base_model.model.model.language_model.layers.{layer}.self_attn.o_proj"
        wide = E2B_TINY.heads * head_dim
        weights[f"{name}.lora_A.weight"] = torch.randn(rank, wide, generator=draw) * 0.3
        weights[f"{name}.lora_B.weight"] = (
            torch.randn(E2B_TINY.hidden_size, rank, generator=draw) * 0.3
        )
    save_file(weights, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(
        '{"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", '
        f'"r": {rank}, "lora_alpha": {rank}, "target_modules": ["o_proj"]}}'
    )
    return path


@pytest.fixture(scope="module")
def adapted(
    tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Server]]:
    """Servers with an adapter that requests may name."""
    directory = tmp_path_factory.mktemp("adapted")
    with pair(
        tiny_checkpoint,
        directory,
        "--enable-lora",
        *("--lora-paths", f"adapter={write_adapter(directory / 'adapter')}"),
        *("--lora-backend", "torch_native"),
    ) as servers:
        yield servers


def test_adapter(adapted: tuple[Server, Server]) -> None:
    """A server with adapters computes every row, of requests without one as well."""
    both = compare(
        adapted,
        lambda server: [
            generate(server, tokens(50, seed=8), lora_path=name)[0] for name in ("adapter", None)
        ],
    )
    assert both.rows == [whole(50), whole(50)]
    assert_same_answers(both)
    with_adapter, without = both.on
    assert with_adapter.logprobs != pytest.approx(without.logprobs, abs=TOLERANCE, rel=0)
    assert adapted[0].log_lines(f"{STEPS_ASIDE} for this server: {gate.LORA}")


# -- prefill for a decode server elsewhere ---------------------------------------------------


@pytest.fixture(scope="module")
def prefilling(
    tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Server]]:
    """Servers that prefill only, with SGLang's transfer that hands the K/V to nobody."""
    with pair(
        tiny_checkpoint,
        tmp_path_factory.mktemp("prefilling"),
        *("--disaggregation-mode", "prefill"),
        *("--disaggregation-transfer-backend", "fake"),
    ) as servers:
        yield servers


def test_prefill_for_a_decode_server(prefilling: tuple[Server, Server]) -> None:
    """The first token comes from the last row; of K/V every row's is handed on, chunk by chunk."""
    lengths = (50, 9, 300)

    def ask(server: Server) -> list[Any]:
        sampling = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
        return [
            [
                reply["meta_info"]["output_token_logprobs"]
                for reply in [
                    server.generate(
                        input_ids=tokens(n, seed=n),
                        sampling_params=sampling,
                        return_logprob=True,
                        bootstrap_host="2.2.2.2",
                        bootstrap_room=n,
                    )
                ]
            ]
            for n in lengths
        ]

    both = compare(prefilling, ask)
    assert_all_fast(both.prefills)
    for [on], [off] in zip(both.on, both.off, strict=True):
        [(on_logprob, on_token, _)], [(off_logprob, off_token, _)] = on, off
        assert on_token == off_token
        assert on_logprob == pytest.approx(off_logprob, abs=TOLERANCE, rel=0)
