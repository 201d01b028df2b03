"""The plan of the tail and of the PR's helper on SGLang's Triton backend: reads and files.

SGLang's Triton backend reads from the device how large a window's index buffer must be, whenever it
plans a batch; for the tail's plan it is given one. Its decode step by itself sees one key fewer in
a window than its prefill does.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

from harness.batches import batch_of
from harness.fixtures import Checkpoints
from harness.forwards import INTERPRETED_ENGINE
from harness.layer_rows import TWO_POOLS
from harness.observe import TOLERANCE
from sglang_gemma4_reference import interpreter, releases
from sglang_gemma4_reference.engine import Engine, Prompt, reset_log, switched
from sglang_gemma4_reference.host_reads import counted
from sglang_gemma4_yoco import compat, counters, log

interpreter.make_quick()

PACKAGE = str(Path(log.__file__).parent)
Reads = Counter[tuple[str, str]]
WINDOW = TWO_POOLS.sliding_window


@pytest.fixture(scope="module")
def engine(checkpoints: Checkpoints) -> Engine:
    engine = Engine(checkpoints(TWO_POOLS), **INTERPRETED_ENGINE)
    assert type(engine.runner.attn_backend) is TritonAttnBackend
    return engine


@pytest.mark.parametrize("decodes", [True, False])
def test_a_kept_row_sees_the_whole_window(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, decodes: bool
) -> None:
    """The PR's helper plans the runner's backend again."""
    if not decodes:
        monkeypatch.setattr(compat.release, "LAST_TESTED", Version("0.5.0"))
    model, main = engine.text_model, engine.runner.attn_backend
    scheduled = engine.schedule(batch_of((0, WINDOW + 3), (WINDOW + 1, 2), (0, WINDOW - 1)))
    with switched("0"):
        engine.forward(scheduled)  # K and V are in the cache
    batch = releases.forward_batch(scheduled, engine.runner)
    attention = model.layers[4].self_attn  # shared, and with a window
    assert compat.attention.count_keys_in_window(attention.attn) == WINDOW
    width = attention.num_heads * attention.head_dim
    queries = torch.randn(len(batch.input_ids), width, generator=torch.manual_seed(0))

    def attend(rows: torch.Tensor) -> torch.Tensor:
        attended: torch.Tensor = attention.attn(
            rows, None, None, forward_batch=batch, save_kv_cache=False
        )
        return attended.reshape(rows.shape)

    span = forward_context(ForwardContext(attn_backend=main))
    with span, switched("0"), torch.no_grad():
        main.init_forward_metadata(batch)
        whole = attend(queries)
        rows, *_, index, restore = model._yoco_truncate_to_last_tokens(
            queries, batch.positions, None, batch
        )
        try:
            assert batch.forward_mode.is_decode() is decodes
            assert compat.attention.get_current_backend() is main
            kept = attend(rows)
        finally:
            restore()
        assert len(index) == 3
        torch.testing.assert_close(kept, whole[index], atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(attend(queries), whole, atol=0, rtol=0)


@pytest.mark.parametrize(
    "prompts",
    [
        batch_of((3, 6), (0, 4)),
        [*batch_of((3, 6), logprob_start=7), *batch_of((0, 4))],
        batch_of((3, 6), (0, 4), to_come=(21, 22)),
    ],
    ids=["last rows", "suffixes", "an intermediate chunk"],
)
def test_the_tails_plan_reads_nothing(engine: Engine, prompts: list[Prompt]) -> None:
    """Neither the plan nor anything else of the forward reads more than stock."""
    scheduled = engine.schedule(prompts)
    planned = []
    whole = []
    for switch in ("0", "1"):
        reset_log()
        with (
            switched(switch),
            counted() as reads,
            engine.text_model.register_forward_pre_hook(
                lambda *_, reads=reads: planned.append(in_sglang(reads))
            ),
        ):
            engine.forward(scheduled)
        assert counters.CUT.isdisjoint(counters.served.forwards) == (switch == "0")
        assert [site for _, site in reads if site.startswith(PACKAGE)] == []
        whole.append(in_sglang(reads))
    stock_plan, fast_plan = planned
    assert stock_plan
    assert fast_plan - stock_plan == Counter()
    assert (whole[1] - fast_plan) - (whole[0] - stock_plan) == Counter()
    assert_no_file_is_opened(engine, scheduled)


def in_sglang(reads: Reads) -> Reads:
    """Return the reads by SGLang; the interpreter of the kernels reads all the time."""
    return Counter({read: n for read, n in reads.items() if "/sglang/" in read[1]})


def assert_no_file_is_opened(engine: Engine, scheduled: Any) -> None:
    """Assert that no file is opened, beyond what stock and Triton's interpreter open."""
    seen = {"0": Counter[tuple[str, str]](), "1": Counter[tuple[str, str]]()}
    running = ""

    def count(event: str, args: tuple[Any, ...]) -> None:
        if running and event in ("open", "import", "os.listdir", "os.scandir"):
            seen[running][event, str(args[0])] += 1

    sys.addaudithook(count)  # permanently: Python removes none
    for running in seen:
        with switched(running):
            engine.forward(scheduled)
    running = ""
    assert seen["1"] - seen["0"] == Counter()
