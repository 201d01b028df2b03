"""NGRAM's drafts, which are looked up in the text: they read no row of a prompt but the last."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.ask import GREEDY, assert_alike, compare, drafted, drafted_twice, tokens
from harness.layer_rows import cut
from harness.server import CHUNK, Pair, Server, pair, python_path

pytestmark = pytest.mark.release

# What SGLang's worker has compiled for GPUs alone. ``mask`` [B, n, n] has a token's ancestors in
# the tree of its drafts, and itself.
KERNELS = """
def reconstruct_indices_from_tree_mask(
    mask, seq_lens, positions, index, next_token, next_sibling, requests, drafts
):
    import torch

    above = mask.view(requests, drafts, drafts).bool().tril(-1)
    positions.copy_((seq_lens[:, None] + above.sum(-1)).view(-1))
    index.copy_(torch.arange(requests * drafts).view(requests, drafts))
    next_token.fill_(-1)
    next_sibling.fill_(-1)
    for request, tree in enumerate(above.tolist()):
        parents = [max((i for i, above in enumerate(row) if above), default=-1) for row in tree]
        for token in reversed(range(1, drafts)):
            later = [i for i in range(token + 1, drafts) if parents[i] == parents[token]]
            next_sibling[request, token] = min(later, default=-1)
            next_token[request, parents[token]] = token
"""


@pytest.fixture(scope="module")
def drafting(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    directory = tmp_path_factory.mktemp("drafts")
    kernels = directory / "kernels" / "sgl_kernel"
    kernels.mkdir(parents=True)
    (kernels / "__init__.py").touch()
    (kernels / "speculative.py").write_text(KERNELS)
    arguments = (
        *("--speculative-algorithm", "NGRAM"),
        *("--speculative-num-draft-tokens", "4"),
        *("--speculative-ngram-max-bfs-breadth", "1"),
    )
    env = {"PYTHONPATH": python_path(kernels.parent)}
    with pair(tiny_checkpoint, directory, *arguments, env=env, captured=True) as servers:
        yield servers


def test_drafts(drafting: Pair, off_server: Server) -> None:
    """The prompt is cut, the same tokens are accepted, and the answers are those without drafts."""
    prompts = [tokens(50, seed=1), tokens(7, seed=2), [*tokens(20, seed=3)] * 5]
    both = assert_alike(
        drafting,
        lambda server: [drafted(server, [prompt])[0] for prompt in prompts],
        rows=[cut(len(prompt), 1) for prompt in prompts],
    )
    assert any(sum(histogram[1:]) for _, histogram, _ in both.on), "no draft was right"
    sampling = GREEDY | {"max_new_tokens": 24}
    undrafted = [off_server.generate(input_ids=p, sampling_params=sampling) for p in prompts]
    assert [answer for answer, *_ in both.on] == [reply["output_ids"] for reply in undrafted]


def test_chunks(drafting: Pair) -> None:
    """A draft may start from the token of any chunk: its last row is computed."""
    prompt = tokens(2 * CHUNK + 20, seed=4)
    rows = [cut(CHUNK, 1), cut(CHUNK, 1), cut(20, 1)]
    assert_alike(drafting, lambda server: drafted(server, [prompt]), rows=rows)


def test_a_second_turn(drafting: Pair) -> None:
    """It starts from the first one's K and V, those of accepted drafts included."""
    both = compare(drafting, drafted_twice)
    assert both.on == both.off
    assert max(max(prefill.prefix_lens) for prefill in both.prefills) >= 60


def test_eight_prompts_at_once(drafting: Pair) -> None:
    prompts = [tokens(11 + 13 * n, seed=10 + n) for n in range(8)]
    both = compare(drafting, lambda server: drafted(server, prompts))
    assert both.on == both.off
    assert any(0 < prefill.rows[-1] < sum(prefill.extend_lens) for prefill in both.prefills)
