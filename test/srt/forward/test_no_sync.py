"""With the fast path on, no prefill makes the host wait for the device where stock does not.

On a GPU a value that travels from the device to the host stalls the host until all queued kernels
have run; every launch after it is then paid in full. No GPU is needed to see such reads: each goes
through one of a few PyTorch operations (``host_reads``), which ``HostReads`` records with the code
that asked.

What a CPU shows: no read by the package's own code at all, and none in a whole forward that the
stock forward does not do as well. SGLang's Triton backend by itself reads from the device how
large a window's index buffer must be, whenever it plans a batch; planning the tail it is given one.
Up to 0.5.21 it also reads, twice, how much of that buffer to translate: before the first layer, and
right after the stock plan's own reads, which have drained the queue already. ``gpu/`` asks CUDA.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import batches
from audited import audited
from batches import batch_of
from layer_rows import FIRST_CUT, INTERPRETED, LAYERS
from media import MediaPrompt, media_batch
from observe import Observed, watching
from own_process import INTERPRETER, is_set_up, run_elsewhere
from sglang_gemma4_reference import host_reads, interpreter
from sglang_gemma4_reference.checkpoint import write_checkpoint
from sglang_gemma4_reference.engine import Engine, switched
from sglang_gemma4_yoco import log, seams
from sglang_gemma4_yoco.core import gate
from sglang_gemma4_yoco.core.state import find

PACKAGE = str(Path(log.__file__).parent)


@dataclass(frozen=True)
class Read:
    """One read of a device value on the host.

    Attributes:
        kind: the operation's name.
        site: ``path:function`` of the innermost code outside of PyTorch.
    """

    kind: str
    site: str


class HostReads:
    """Records, while entered, every operation for which a GPU's host would have to wait."""

    def __init__(self) -> None:
        self.seen: list[Read] = []
        self._stack = ExitStack()

    def __enter__(self) -> HostReads:
        self._stack.enter_context(host_reads.noted(self.note))
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def note(self, kind: str) -> None:
        """Record one read."""
        self.seen.append(Read(kind, host_reads.caller(__file__)))

    def counted(self) -> Counter[tuple[str, str]]:
        """Reads by kind and site."""
        return Counter((read.kind, read.site) for read in self.seen)


# ---------------------------------------------------------------- the detector itself


def _mask(x: torch.Tensor) -> torch.Tensor:
    return x > 1


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda x: x[0].item(),
    "tolist": lambda x: x.tolist(),
    "slice by a scalar": lambda x: x[: x[0]],
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[_mask(x)],
    "masked_select": lambda x: x.masked_select(_mask(x)),
    "unique": lambda x: x.unique(),
    "repeat_interleave": lambda x: x.repeat_interleave(x),
    "cpu": lambda x: x.cpu(),
    "to cpu": lambda x: x.to("cpu"),
    "tensor on the device": lambda x: torch.tensor([1, 2], device=x.device),
}

NO_READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "index_select": lambda x: x.index_select(0, x[:1] - 1),
    "slice by numbers": lambda x: x[1:2],
    "index by a tensor": lambda x: x[x - 1],
    "host tensor": lambda x: torch.tensor([1, 2], dtype=x.dtype),
    "pinned copy": lambda x: torch.tensor([1, 2]).to(x.device, non_blocking=True),
    "cast": lambda x: x.to(torch.int32),
}


@pytest.mark.parametrize("name", READS)
def test_a_host_read_is_seen(name: str) -> None:
    with HostReads() as reads:
        READS[name](torch.tensor([1, 2, 3]))
    assert reads.seen


@pytest.mark.parametrize("name", NO_READS)
def test_what_stays_on_the_device_is_no_read(name: str) -> None:
    x = torch.tensor([1, 2, 3])
    with HostReads() as reads:
        NO_READS[name](x)
    assert reads.seen == []


# ---------------------------------------------------------------- the forward


def read_by(engine: Engine, scheduled: Any, switch: str, *, unread: bool) -> HostReads:
    """What one forward reads: planning, model, logits."""
    reads, seen = HostReads(), Observed()
    with switched(switch), watching(engine, seen), reads:
        engine.forward(scheduled, unread=unread)
    kept = seen.rows[-1] if len(seen.rows) == LAYERS else 0
    total = sum(scheduled.extend_lens)
    cut_rows = [total] * FIRST_CUT + [kept] * (LAYERS - FIRST_CUT if kept else 0)
    assert seen.rows == (cut_rows if switch == "1" else [total] * LAYERS)
    assert switch == "0" or kept < total
    return reads


def assert_no_more_reads(fast: HostReads, stock: HostReads) -> None:
    """The package's code reads nothing, and what it calls nowhere more often than stock."""
    assert [read for read in fast.seen if read.site.startswith(PACKAGE)] == []
    assert fast.counted() - stock.counted() == Counter()


BATCHES = {
    **batches.BATCHES,
    "an intermediate chunk": batch_of((20, 60), (0, 30), to_come=(21, 22)),
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_text_prefill_reads_nothing_that_stock_does_not(engine: Engine, name: str) -> None:
    scheduled = engine.schedule(BATCHES[name])
    unread = name == "an intermediate chunk"
    stock = read_by(engine, scheduled, "0", unread=unread)
    fast = read_by(engine, scheduled, "1", unread=unread)
    # The CPU's own attention reads lengths in each layer: the stock forward is not free of them.
    assert stock.seen
    assert_no_more_reads(fast, stock)


@pytest.mark.parametrize("cached", [0, 5])
def test_an_image_prefill_reads_nothing_that_stock_does_not(engine: Engine, cached: int) -> None:
    prompt = MediaPrompt("what is <|image|> there?", cached=cached)
    stock = read_by(engine, media_batch(engine, prompt), "0", unread=False)
    encoded = [read for read in stock.seen if "gemma4_vision" in read.site]
    assert encoded, "the image was not encoded"
    fast = read_by(engine, media_batch(engine, prompt), "1", unread=False)
    assert_no_more_reads(fast, stock)


@pytest.mark.parametrize("name", BATCHES)
def test_the_tail_is_planned_before_the_first_layer(engine: Engine, name: str) -> None:
    state = find(engine.text_model)
    assert state is not None
    attention = state.attention
    assert attention is not None
    events: list[str] = []
    patch = pytest.MonkeyPatch()

    def noting(event: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            events.append(event)
            return call(*args, **kwargs)

        return noted

    for backend, plans in ((attention.main, "plan main"), (attention.tail, "plan tail")):
        patch.setattr(
            backend, "init_forward_metadata", noting(plans, backend.init_forward_metadata)
        )
    hooks = [
        layer.register_forward_pre_hook(lambda *_, i=i: events.append(f"layer {i}"))
        for i, layer in enumerate(engine.text_model.layers)
    ]
    try:
        scheduled = engine.schedule(BATCHES[name])
        events.clear()
        with switched("1"):
            engine.forward(scheduled, unread=name == "an intermediate chunk")
    finally:
        patch.undo()
        for hook in hooks:
            hook.remove()
    assert log.forwards
    if name == "an intermediate chunk":  # which has no tail
        assert events == ["plan main", *(f"layer {i}" for i in range(FIRST_CUT))]
    else:
        assert events == ["plan main", "plan tail", *(f"layer {i}" for i in range(LAYERS))]


def test_a_read_in_the_package_is_found(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduled = engine.schedule(BATCHES["one prompt"])
    stock = read_by(engine, scheduled, "0", unread=False)
    check = gate.check_eligibility

    def reading(state: Any, forward_batch: Any) -> Any:
        assert int(forward_batch.seq_lens.max()) > 0
        return check(state, forward_batch)

    monkeypatch.setattr(gate, "check_eligibility", reading)
    fast = read_by(engine, scheduled, "1", unread=False)
    with pytest.raises(AssertionError):
        assert_no_more_reads(fast, stock)


# ---------------------------------------------------------------- on Triton


def check_on_triton(checkpoint: Path) -> None:
    """On SGLang's Triton backend the tail's plan reads nothing, or no more than it must."""
    interpreter.make_quick()
    engine = Engine(checkpoint, device="cpu", dtype="float32", max_total_tokens=512)
    last_rows = batch_of((3, 6), (0, 4))
    suffixes = [*batch_of((3, 6), logprob_start=7), *batch_of((0, 4))]
    for prompts in (last_rows, suffixes):
        scheduled = engine.schedule(prompts)
        assert_no_more_reads_on_triton(engine, scheduled)
        assert_no_file_is_opened(engine, scheduled)


def assert_no_file_is_opened(engine: Engine, scheduled: Any) -> None:
    """Beyond what stock and Triton's interpreter open; all has run once before."""
    seen = {}
    for switch in ("0", "1"):
        with switched(switch), audited() as seen[switch]:
            engine.forward(scheduled)
    assert seen["1"] - seen["0"] == Counter()


def assert_no_more_reads_on_triton(engine: Engine, scheduled: Any) -> None:
    planned: list[Counter[tuple[str, str]]] = []
    whole: list[Counter[tuple[str, str]]] = []
    for switch in ("0", "1"):
        reads = HostReads()
        hook = engine.text_model.register_forward_pre_hook(
            lambda *_, reads=reads: planned.append(in_sglang(reads))
        )
        log.reset()
        with switched(switch), reads:
            engine.forward(scheduled)
        hook.remove()
        assert (log.forwards[log.TAIL_EAGER] == 1) == (switch == "1")
        assert [read for read in reads.seen if read.site.startswith(PACKAGE)] == []
        whole.append(in_sglang(reads))
    stock_plan, fast_plan = planned
    more = fast_plan - stock_plan
    assert stock_plan
    if seams.HAS_RESIDUAL_STREAM:  # 0.5.22
        assert more == Counter()
    else:
        ((_, site),) = more
        assert site.endswith("triton_backend.py:update_sliding_window_buffer")
        assert more.total() == 2
    assert (whole[1] - fast_plan) - (whole[0] - stock_plan) == Counter()


def in_sglang(reads: HostReads) -> Counter[tuple[str, str]]:
    """Reads by SGLang; the interpreter of the kernels reads all the time."""
    counted = reads.counted().items()
    return Counter({(kind, site): n for (kind, site), n in counted if "/sglang/" in site})


def test_on_triton_the_tails_plan_reads_nothing(tmp_path: Path) -> None:
    if is_set_up(INTERPRETER):
        check_on_triton(write_checkpoint(tmp_path, INTERPRETED))
        return
    # Triton decides when it is imported whether it interprets, hence a process of its own.
    this = f"{__file__}::{test_on_triton_the_tails_plan_reads_nothing.__name__}"
    program, log = ["pytest", "-p", "no:xdist", "-p", "no:cacheprovider", this], tmp_path / "log"
    status = run_elsewhere(program, log, INTERPRETER, Path.cwd())
    assert status == 0, log.read_text()[-9000:]
    assert "1 passed" in log.read_text()
