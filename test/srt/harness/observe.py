"""What a forward really did: rows per layer, the batch before and after, outputs and K/V.

Looked at from outside, by module hooks and copies of the pools; nothing here uses the package.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from sglang.srt.model_executor import forward_context

from harness.batches import kept_rows
from sglang_gemma4_reference import releases
from sglang_gemma4_reference.engine import Engine, Prompt, switched

#: Of logits of size 10, in fp32. The tail sums in another order than stock does, which moves an
#: answer by 1e-5; one key more or less in a window moves it by 1e-2.
TOLERANCE = 5e-5


@dataclass(frozen=True)
class Attended:
    """One layer's call of the attention backend.

    Attributes:
        queries: rows that attended.
        keys: rows whose K and V were passed in to be written; 0 for a layer that writes none.
        mode: the batch's forward mode at the time, by name.
        backend: the backend at the time.
        laid_out: copies of what the batch said of its rows and requests at the time, by field.
    """

    queries: int
    keys: int
    mode: str
    backend: Any
    laid_out: dict[str, torch.Tensor]


#: The fields of a batch that attention, or a layer beside it, may read.
_LAID_OUT = (
    "extend_prefix_lens",
    "extend_seq_lens",
    "extend_start_loc",
    "input_ids",
    "positions",
    "seq_lens",
)


@dataclass(frozen=True)
class Metadata:
    """What an attention backend had planned at one moment.

    Backends keep buffers across plans and put views of them into their metadata, so the same
    object may hold another batch's values: hence the copies.

    Attributes:
        planned: the metadata object, None where a backend keeps none.
        tensors: the tensors in it, by field.
        contents: copies of them.
        settings: the backend's own plain values, its window's size among them.
    """

    planned: Any
    tensors: dict[str, torch.Tensor]
    contents: dict[str, torch.Tensor]
    settings: dict[str, object]

    @classmethod
    def of(cls, backend: Any) -> Metadata:
        """What ``backend`` has planned now."""
        planned = getattr(backend, "forward_metadata", None)
        fields = {}
        if planned is not None:
            fields = vars(planned)
        tensors = {}
        for n, v in fields.items():
            if isinstance(v, torch.Tensor):
                tensors[n] = v
        return cls(
            planned=planned,
            tensors=tensors,
            contents={name: value.clone() for name, value in tensors.items()},
            settings={
                name: value
                for name, value in vars(backend).items()
                if isinstance(value, (bool, int, float, str))
            },
        )

    def differences(self, other: Metadata) -> list[str]:
        """The names of what is not the same in both, in values."""
        names = self.contents.keys() | other.contents.keys()
        return [
            *(n for n in sorted(names) if not _same_bytes(self.contents, other.contents, n)),
            *(n for n, value in self.settings.items() if other.settings[n] != value),
        ]


def _same_bytes(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], name: str) -> bool:
    if name not in one or name not in other:
        return False
    a, b = one[name], other[name]
    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
    )


@dataclass
class Observed:
    """One forward.

    Attributes:
        rows: rows that the FFN of each layer computed, in the order of the layers that ran.
        attention_rows: rows of each layer's attention that were projected back, likewise.
        attended: each layer's call of the attention backend, likewise.
        projected: (rows, layers) of each projection of per-layer inputs.
        positions: [T], what the text model was given.
        hidden: [T, hidden], what the text model returned.
        output: SGLang's logits output.
        kv: K and V of each layer that owns some.
        before: the fields of the batch as the text model found them.
        after: the fields of the batch as the text model left them.
        planned_before: the runner's attention backend as the text model found it.
        planned_after: the runner's attention backend as the text model left it.
    """

    rows: list[int] = field(default_factory=list)
    attention_rows: list[int] = field(default_factory=list)
    attended: list[Attended] = field(default_factory=list)
    projected: list[tuple[int, int]] = field(default_factory=list)
    positions: torch.Tensor | None = None
    hidden: torch.Tensor | None = None
    output: Any = None
    kv: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    before: dict[str, object] = field(default_factory=dict)
    after: dict[str, object] = field(default_factory=dict)
    planned_before: Metadata | None = None
    planned_after: Metadata | None = None


def _fields(batch: Any) -> dict[str, object]:
    found: dict[str, object] = {}
    for f in dataclasses.fields(batch):
        found[f.name] = getattr(batch, f.name)
    return found


@contextmanager
def watching(engine: Engine, seen: Observed) -> Iterator[None]:
    """Record into ``seen`` what the engine's text model does during the span."""
    model = engine.text_model
    hooks = []

    def on_entry(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        batch = batch_in(args, kwargs)
        seen.before = _fields(batch)
        seen.positions = (kwargs["positions"] if "positions" in kwargs else args[1]).clone()
        seen.planned_before = Metadata.of(engine.runner.attn_backend)

    def on_exit(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        batch = batch_in(args, kwargs)
        seen.after = _fields(batch)
        seen.planned_after = Metadata.of(engine.runner.attn_backend)
        # With captured layers the model returns their states beside its own.
        seen.hidden = (output[0] if isinstance(output, tuple) else output).clone()

    hooks.append(model.register_forward_pre_hook(on_entry, with_kwargs=True))
    hooks.append(model.register_forward_hook(on_exit, with_kwargs=True))

    def counting(rows: list[int]) -> Callable[[Any, Any], None]:
        def count(_: Any, args: Any) -> None:
            rows.append(args[0].shape[0])

        return count

    def attending(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = dict(zip(("q", "k", "v", "forward_batch"), args, strict=False)) | kwargs
        batch = call["forward_batch"]
        fields = {}
        for name in _LAID_OUT:
            fields[name] = getattr(batch, name, None)
        seen.attended.append(
            Attended(
                queries=call["q"].shape[0],
                keys=0 if call["k"] is None else call["k"].shape[0],
                mode=batch.forward_mode.name,
                backend=forward_context.get_forward_context().attn_backend,
                laid_out={n: v.clone() for n, v in fields.items() if v is not None},
            )
        )

    def projecting(_: Any, args: tuple[torch.Tensor, ...]) -> None:
        seen.projected.append((args[0].shape[0], args[0].shape[-2]))

    if model.per_layer_projection_norm is not None:
        hooks.append(model.per_layer_projection_norm.register_forward_pre_hook(projecting))
    for layer in model.layers:
        attn = layer.self_attn.attn
        hooks.append(attn.register_forward_pre_hook(attending, with_kwargs=True))
        hooks.append(layer.mlp.register_forward_pre_hook(counting(seen.rows)))
        o_proj = layer.self_attn.o_proj
        hooks.append(o_proj.register_forward_pre_hook(counting(seen.attention_rows)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def batch_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The forward batch that the text model is called with."""
    if "forward_batch" in kwargs:
        return kwargs["forward_batch"]
    return args[2]


def run(engine: Engine, batch: Any, switch: str, *, planned_as: Observed | None = None) -> Observed:
    """One forward of a scheduled batch, its cache slots poisoned before, with the switch set.

    Args:
        planned_as: another forward of the same requests on the same slots. The runner's own plan
            must be the same as it was then, and it is looked at before kernels follow it: they
            trust it with the process's memory.
    """
    seen = Observed()
    engine.poison(batch)

    def as_planned(*_: Any) -> None:
        if planned_as is not None:
            assert seen.planned_before is not None
            assert planned_as.planned_before is not None
            assert seen.planned_before.differences(planned_as.planned_before) == []

    with switched(switch), watching(engine, seen):
        hook = engine.text_model.register_forward_pre_hook(as_planned)
        try:
            seen.output = engine.forward(batch)
        finally:
            hook.remove()
    seen.kv = engine.kv()
    return seen


def step(engine: Engine, batch: Any, answered: Sequence[int], switch: str) -> Observed:
    """One decode step of a batch that has run its prefill, after these tokens."""
    seen = Observed()
    with switched(switch), watching(engine, seen):
        seen.output = engine.decode(batch, answered)
    seen.kv = engine.kv()
    return seen


@dataclass(frozen=True)
class Expected:
    """What one forward of the fast path must do, as ``Observed`` names it.

    Attributes:
        attended: (queries, keys) of each call of the attention backend.
        front: how many of these calls belong to the front, on the runner's own plan.
        tail_mode: the batch's forward mode in the calls after those.
        laid_out: the fields of the batch in those calls: the kept rows are a batch of their own.
        first_position: of the forward's first row, counted from zero.
    """

    rows: list[int]
    attention_rows: list[int]
    attended: list[tuple[int, int]]
    front: int
    tail_mode: str
    laid_out: dict[str, list[int]]
    first_position: int
    projected: list[tuple[int, int]]


def expected(engine: Engine, prompts: Sequence[Prompt]) -> Expected | None:
    """What a forward of ``prompts`` must do, counted from their fields; None: stock."""
    config = engine.text_model.config
    layers, first = config.num_hidden_layers, _first_shared(engine)
    total, kept = sum(len(p.new) for p in prompts), sum(kept_rows(prompts))
    if kept == total:
        return None
    decodes, intermediate = kept == len(prompts), skips_tail(prompts)
    first_cut = first - 1
    tail = 0
    if not intermediate:
        tail = layers - first_cut
    return Expected(
        rows=[total] * first_cut + [kept] * tail,
        attention_rows=[total] * first_cut + [kept] * tail,
        attended=[(total, total)] * first_cut + [(kept, 0)] * tail,
        front=first_cut,
        tail_mode="DECODE" if decodes else "EXTEND",
        laid_out=_tail_of(prompts),
        first_position=len(prompts[0].cached),
        projected=_projections(engine, total, kept, first_cut, intermediate),
    )


def replayed(wanted: Expected) -> Expected:
    """``wanted`` where the tail is replayed: the Python of its layers does not run."""
    front = wanted.front
    return dataclasses.replace(
        wanted,
        rows=wanted.rows[:front],
        attention_rows=wanted.attention_rows[:front],
        attended=wanted.attended[:front],
        projected=wanted.projected[:1],
    )


def _tail_of(prompts: Sequence[Prompt]) -> dict[str, list[int]]:
    kept = kept_rows(prompts)
    ends = [len(p.cached) + len(p.new) for p in prompts]
    starts = [end - m for end, m in zip(ends, kept, strict=True)]
    return {
        "extend_prefix_lens": starts,
        "extend_seq_lens": kept,
        "extend_start_loc": [sum(kept[:i]) for i in range(len(kept))],
        "input_ids": [t for p, m in zip(prompts, kept, strict=True) for t in p.new[-m:]],
        "positions": [i for s, e in zip(starts, ends, strict=True) for i in range(s, e)],
        "seq_lens": ends,
    }


def skips_tail(prompts: Sequence[Prompt]) -> bool:
    """Whether no row of a forward of ``prompts`` is read, and the batch says so."""
    return releases.marks_intermediate() and all(
        p.to_come and len(p.new) > 1 and not 0 <= p.logprob_start < len(p.cached) + len(p.new)
        for p in prompts
    )


def _first_shared(engine: Engine) -> int:
    config = engine.text_model.config
    first: int = config.num_hidden_layers - config.num_kv_shared_layers
    return first


def _projections(
    engine: Engine, total: int, kept: int, first_cut: int, intermediate: bool
) -> list[tuple[int, int]]:
    if engine.text_model.per_layer_projection_norm is None:
        return []
    rest = engine.text_model.config.num_hidden_layers - first_cut
    return [(total, first_cut)] + ([] if intermediate else [(kept, rest)])


def assert_as_expected(seen: Observed, wanted: Expected) -> None:
    """FFN, attention and per-layer inputs had the rows that they must have, and no more."""
    assert seen.rows == wanted.rows
    assert seen.attention_rows == wanted.attention_rows
    assert [(a.queries, a.keys) for a in seen.attended] == wanted.attended
    modes = [a.mode for a in seen.attended]
    assert set(modes[: wanted.front]) == {getattr(seen.before["forward_mode"], "name", None)}
    assert set(modes[wanted.front :]) <= {wanted.tail_mode}
    assert seen.positions is not None
    # SGLang's multimodal Gemma 4 counts positions from one.
    shift = int(seen.positions[0]) - wanted.first_position
    laid_out = {**wanted.laid_out, "positions": [p + shift for p in wanted.laid_out["positions"]]}
    for call in seen.attended[wanted.front :]:
        assert {name: rows.tolist() for name, rows in call.laid_out.items()} == laid_out
    assert seen.projected == wanted.projected


def assert_stock(engine: Engine, prompts: Sequence[Prompt], seen: Observed) -> None:
    """Every layer computed every row, on the runner's own backend."""
    total = sum(len(p.new) for p in prompts)
    layers, first = len(engine.text_model.layers), _first_shared(engine)
    assert seen.rows == seen.attention_rows == [total] * layers
    keys = [total] * first + [0] * (layers - first)
    assert [(a.queries, a.keys) for a in seen.attended] == [(total, k) for k in keys]
    assert {id(a.backend) for a in seen.attended} == {id(engine.runner.attn_backend)}
    assert seen.projected == _projections(engine, total, 0, layers, intermediate=True)


def assert_metadata_unchanged(seen: Observed) -> None:
    """The runner's backend has its plan after the forward: the same object, with the same values.

    That is more than equal answers need: SGLang's speculative workers plan ahead, and a second
    forward of the same plan would read what the first left.
    """
    before, after = seen.planned_before, seen.planned_after
    assert before is not None
    assert after is not None
    assert before.planned is after.planned
    replaced = []
    for n, tensor in before.tensors.items():
        if after.tensors.get(n) is not tensor:
            replaced.append(n)
    assert replaced == []
    assert before.differences(after) == []


def assert_same_objects(seen: Observed) -> None:
    """The batch's fields are, after the forward, the very objects that they were before it."""
    changed = []
    for name, value in seen.before.items():
        if seen.after[name] is not value:
            changed.append(name)
    assert changed == []


def assert_same_cache(stock: Observed, fast: Observed) -> None:
    """Every layer's K and V are byte for byte the same at every slot."""
    for layer, ((k, v), (k2, v2)) in enumerate(zip(stock.kv, fast.kv, strict=True)):
        assert torch.equal(k, k2), f"K of layer {layer} differs"
        assert torch.equal(v, v2), f"V of layer {layer} differs"


def both_ways(
    engine: Engine, batch: Any, tolerance: float = TOLERANCE
) -> tuple[Observed, Observed]:
    """A scheduled batch off and on: answers and cache are the same, and its fields put back."""
    stock, fast = run(engine, batch, "0"), run(engine, batch, "1")
    assert_same_objects(fast)
    assert_same_cache(stock, fast)
    assert_same_answers(stock, fast, tolerance)
    return stock, fast


def assert_same_answers(stock: Observed, fast: Observed, tolerance: float) -> None:
    """Next-token logits and all requested log-probabilities agree within ``tolerance``."""
    for name in (
        "next_token_logits",
        "input_token_logprobs",
        "input_top_logprobs_val",
        "input_token_ids_logprobs_val",
    ):
        want, got = getattr(stock.output, name, None), getattr(fast.output, name, None)
        if want is None:
            assert got is None
            continue
        difference = (_flat(got) - _flat(want)).abs()
        assert difference.numel() == 0 or difference.max() <= tolerance, f"{name}: {difference}"


def _flat(values: Any) -> torch.Tensor:
    if isinstance(values, torch.Tensor):
        return values.float().flatten()
    if isinstance(values, (list, tuple)):
        parts = [_flat(value) for value in values]
        if parts:
            return torch.cat(parts)
        return torch.empty(0)
    return torch.tensor([float("nan") if values is None else float(values)]).nan_to_num(7.0)
