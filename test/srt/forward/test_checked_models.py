"""The check at start on models that are tame and on some that are not: it tells right from wrong.

Here are three models; ``scripts/bench_checks.py`` has hundreds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
from breakages import BREAKAGES
from checking import NEW, REQUESTS, checked, counted

from decode_graphs import recorded_decode_steps
from forwards import ENGINE, norms_that_add_in_place
from sglang_gemma4_reference import releases
from sglang_gemma4_reference.checkpoint import (
    E2B_TINY,
    E2B_TINY_SHARP,
    Gemma4Shape,
    write_checkpoint,
)
from sglang_gemma4_reference.engine import Engine
from sglang_gemma4_yoco import owner

pytestmark = pytest.mark.usefixtures("forgotten_reports")

MODELS: dict[str, Gemma4Shape] = {
    "tame, fp32": E2B_TINY,
    "sharp, bf16": E2B_TINY_SHARP,
    "sharp, bf16, donor with a window": dataclasses.replace(
        E2B_TINY_SHARP, kv_shared_layers=3, sliding_per_full=1
    ),
}


@pytest.fixture(scope="module", params=MODELS)
def recorded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """Tame or not, with the tail recorded."""
    shape = MODELS[request.param]
    path = write_checkpoint(tmp_path_factory.mktemp("checkpoint"), shape)
    engine = Engine(path, **(ENGINE | {"dtype": shape.dtype}), cuda_graph_bs_decode=[1, 2, 4])
    with recorded_decode_steps(engine):
        yield engine


ENOUGH = 4  # times its bound: so far off is everything that is broken


def test_what_is_right_agrees(recorded: Engine) -> None:
    found = owner.of(recorded.text_model).checked
    assert found is not None
    assert found.worst is not None
    assert found.worst.excess < 0.5
    assert owner.of(recorded.text_model).graphs is not None
    assert owner.of(recorded.text_model).constant_reason is None


@pytest.mark.parametrize("way", BREAKAGES)
def test_what_is_broken_is_found(recorded: Engine, way: str) -> None:
    known = owner.of(recorded.text_model)
    with BREAKAGES[way](known) as applies:
        if not applies:
            pytest.skip("this model has no place for it")
        found = checked(recorded)
    assert found.worst is not None
    assert not found.agrees
    assert found.worst.excess > ENOUGH, str(found.worst)
    assert checked(recorded).agrees


def test_a_recorded_tail_is_replayed(recorded: Engine) -> None:
    """Once given stock's rows, and once as it serves; a replay runs no Python."""
    known = owner.of(recorded.text_model)
    assert known.graphs is not None
    assert known.graphs.rows[-1] >= REQUESTS
    with counted(recorded) as forwards:
        assert checked(recorded).agrees
    suffix, total = NEW[0] - 2 + 1 + NEW[2], sum(NEW)
    unread = 0 if releases.tells_unread_chunks() else REQUESTS
    # Beside the first replay its layers are launched on as many rows as the graph has.
    assert [f[-1] for f in forwards] == [total, REQUESTS, suffix, unread, REQUESTS + 1, 0, total]


def test_norms_that_add_in_place(recorded: Engine) -> None:
    """As on CUDA: what stock was given is copied before a layer adds into it."""
    with norms_that_add_in_place(recorded):
        found = checked(recorded)
    assert found.worst is not None
    assert found.worst.excess < 0.5
