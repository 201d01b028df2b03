"""Samples with ``--random-seed``, which the package does not change.

Each server is new, and asked by one client: all requests draw from one generator in the order of
their batches. With a second client, which SGLang's own ``/health`` is by default, samples depend on
who was first, with the package or without it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.ask import outputs, prompts_of
from harness.server import running

pytestmark = pytest.mark.release

PROMPTS = prompts_of(70, 9, 130)
WAYS = {
    "checked": {},
    "not checked": {"SGLANG_GEMMA4_YOCO_SELF_CHECK": "0"},
    "stock": {"SGLANG_GEMMA4_YOCO": "0"},
}


def test_a_seed_gives_the_same_samples(tiny_checkpoint: Path, tmp_path: Path) -> None:
    samples: dict[str, list[Any]] = {}
    for way, env in WAYS.items():
        flags: Any = {"arguments": ["--random-seed", "7"], "env": env, "switch": None}
        with running(tiny_checkpoint, tmp_path / way, **flags) as server:
            found = samples[way] = []
            for ids in PROMPTS:
                found += outputs(server, ids, temperature=1.0)
            found += outputs(server, PROMPTS, temperature=1.0)
            rows = server.prefills()[0].rows
        assert (rows[-1] < rows[0]) == (way != "stock")
    assert samples["checked"] == samples["not checked"] == samples["stock"]
    assert len({tuple(sample) for sample in samples["stock"]}) == len(samples["stock"])
