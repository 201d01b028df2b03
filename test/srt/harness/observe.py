"""Observer of a forward: rows per layer, the batch before and after, outputs and K/V.

It uses module hooks and copies of the pools; of the package it uses only ``compat.release``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from sglang.srt.model_executor import forward_context

from harness.batches import kept_rows, new_rows
from sglang_gemma4_reference import releases
from sglang_gemma4_reference.engine import Engine, Prompt, switched
from sglang_gemma4_reference.row_trace import batch_given
from sglang_gemma4_yoco import compat

#: For logits of magnitude 10, in fp32. The tail sums in another order than stock does, which moves
#: an answer by 1e-5; one key more or less in a window moves it by 1e-2.
TOLERANCE = 5e-5


#: The fields of a batch that attention or other parts of a layer may read.
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
    """An attention backend's plan at one moment.

    Backends keep buffers across plans and put views of them into their metadata, so the same
    object may hold another batch's values: hence the copies.

    Attributes:
        planned: the metadata object; None if the backend keeps none.
        tensors: the tensors in it, by field.
        contents: copies of them.
        settings: the backend's scalar attributes, its window's size among them.
    """

    planned: Any
    tensors: dict[str, torch.Tensor]
    contents: dict[str, torch.Tensor]
    settings: dict[str, object]

    @classmethod
    def of(cls, backend: Any) -> Metadata:
        """Return the present plan of ``backend``."""
        planned = getattr(backend, "forward_metadata", None)
        seen = cls(planned, {}, {}, {})
        for name, value in getattr(planned, "__dict__", {}).items():
            if isinstance(value, torch.Tensor):
                seen.tensors[name], seen.contents[name] = value, value.clone()
        for name, value in vars(backend).items():
            if isinstance(value, (bool, int, float, str)):
                seen.settings[name] = value
        return seen

    def differences(self, other: Metadata) -> list[str]:
        """Return the names of the values that differ."""
        found = []
        for name in sorted(self.contents.keys() | other.contents.keys()):
            if not _are_same_bytes(self.contents.get(name), other.contents.get(name)):
                found.append(name)
        return found + [
            name for name in self.settings if self.settings[name] != other.settings[name]
        ]


def _are_same_bytes(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return False
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@dataclass
class Observed:
    """Observations of one forward.

    Attributes:
        rows: rows that the FFN of each layer computed, in the order of the layers that ran.
        attention_rows: rows that the output projection of each layer computed, likewise.
        attended: (queries, keys) of each layer's call of the attention backend, likewise: rows that
            attended, and rows whose K and V were passed in to be written.
        modes: the batch's forward mode in these calls, by name.
        backends: the backend of these calls.
        laid_out: copies of the batch's fields about its rows and requests in these calls.
        projected: (rows, layers) of each projection of per-layer inputs.
        positions: [T], the text model's argument.
        hidden: [T, hidden], the text model's output.
        output: SGLang's logits output.
        kv: K and V of each layer that owns some.
        before: the fields of the batch as the text model found them.
        after: the fields of the batch as the text model left them.
        planned_before: the runner's attention backend as the text model found it.
        planned_after: the runner's attention backend as the text model left it.
    """

    rows: list[int] = field(default_factory=list)
    attention_rows: list[int] = field(default_factory=list)
    attended: list[tuple[int, int]] = field(default_factory=list)
    modes: list[str] = field(default_factory=list)
    backends: list[Any] = field(default_factory=list)
    laid_out: list[dict[str, torch.Tensor]] = field(default_factory=list)
    projected: list[tuple[int, int]] = field(default_factory=list)
    positions: Any = None
    hidden: Any = None
    output: Any = None
    kv: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    before: dict[str, object] = field(default_factory=dict)
    after: dict[str, object] = field(default_factory=dict)
    planned_before: Any = None
    planned_after: Any = None


def fields_of(batch: Any) -> dict[str, object]:
    """Return the fields of a batch."""
    return {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}


@contextmanager
def watching(engine: Engine, seen: Observed) -> Iterator[None]:
    """Record into ``seen`` the engine's text model in the ``with`` block."""
    model = engine.text_model

    def on_entry(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.before = fields_of(batch_given(args, kwargs))
        positions = kwargs["positions"] if "positions" in kwargs else args[1]
        seen.positions = positions.clone()
        seen.planned_before = Metadata.of(engine.runner.attn_backend)

    def on_exit(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        seen.after = fields_of(batch_given(args, kwargs))
        seen.planned_after = Metadata.of(engine.runner.attn_backend)
        if isinstance(output, tuple):  # followed by the states of captured layers
            output = output[0]
        seen.hidden = output.clone()

    def counting(rows: list[int]) -> Callable[[Any, Any], None]:
        return lambda _, args: rows.append(args[0].shape[0])

    def attending(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = dict(zip(("q", "k", "v", "forward_batch"), args, strict=False)) | kwargs
        batch, keys = call["forward_batch"], 0
        if call["k"] is not None:
            keys = call["k"].shape[0]
        seen.attended.append((call["q"].shape[0], keys))
        seen.modes.append(batch.forward_mode.name)
        seen.backends.append(forward_context.get_forward_context().attn_backend)
        laid_out = {}
        for name in _LAID_OUT:
            value = getattr(batch, name, None)
            if value is not None:
                laid_out[name] = value.clone()
        seen.laid_out.append(laid_out)

    def projecting(_: Any, args: tuple[torch.Tensor, ...]) -> None:
        seen.projected.append((args[0].shape[0], args[0].shape[-2]))

    with ExitStack() as hooks:
        hooks.enter_context(model.register_forward_pre_hook(on_entry, with_kwargs=True))
        hooks.enter_context(model.register_forward_hook(on_exit, with_kwargs=True))
        norm = _projection_norm(engine)
        if norm is not None:
            hooks.enter_context(norm.register_forward_pre_hook(projecting))
        for layer in model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            call = attention.attn.register_forward_pre_hook(attending, with_kwargs=True)
            hooks.enter_context(call)
            hooks.enter_context(mlp.register_forward_pre_hook(counting(seen.rows)))
            back = attention.o_proj.register_forward_pre_hook(counting(seen.attention_rows))
            hooks.enter_context(back)
        yield


def run(engine: Engine, batch: Any, switch: str, *, planned_as: Observed | None = None) -> Observed:
    """Run a scheduled batch with the switch set, over poisoned cache slots.

    Args:
        planned_as: another forward of the same requests on the same slots. The runner's own plan
            must be the same as then. It is compared before a kernel uses it: with a wrong plan,
            kernels may access any memory of the process.
    """
    seen = Observed()
    engine.poison(batch)

    def as_planned(*_: Any) -> None:
        if planned_as is not None:
            assert seen.planned_before.differences(planned_as.planned_before) == []

    look = engine.text_model.register_forward_pre_hook
    with switched(switch), watching(engine, seen), look(as_planned):
        seen.output = engine.forward(batch)
    seen.kv = engine.kv()
    return seen


def step(engine: Engine, batch: Any, answered: Sequence[int], switch: str) -> Observed:
    """Run one decode step of a batch that has run its prefill, after these tokens."""
    seen = Observed()
    with switched(switch), watching(engine, seen):
        seen.output = engine.decode(batch, answered)
    seen.kv = engine.kv()
    return seen


@dataclass(frozen=True)
class Expected:
    """Expectations of one forward of the fast path, by the names of ``Observed``.

    Attributes:
        attended: (queries, keys) of each call of the attention backend.
        front: how many of these calls belong to the front, on the runner's own plan.
        tail_mode: the batch's forward mode in the calls after those.
        laid_out: the fields of the batch in those calls, which consists of the kept rows.
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
    """Return expectations for a forward of ``prompts``, from their fields; None: stock."""
    total, kept = new_rows(prompts), sum(kept_rows(prompts))
    if kept == total:
        return None
    front = len(engine.layers_with_kv) - 1
    tail = len(engine.text_model.layers) - front
    if skips_tail(prompts):
        tail = 0
    projected = [(total, front)]
    if tail:
        projected.append((kept, tail))
    if _projection_norm(engine) is None:
        projected.clear()
    mode = "EXTEND"
    if kept == len(prompts) and not compat.release.is_newer_than_tested():
        mode = "DECODE"
    return Expected(
        rows=[total] * front + [kept] * tail,
        attention_rows=[total] * front + [kept] * tail,
        attended=[(total, total)] * front + [(kept, 0)] * tail,
        front=front,
        tail_mode=mode,
        laid_out=_tail_of(prompts),
        first_position=len(prompts[0].cached),
        projected=projected,
    )


def replayed(wanted: Expected) -> Expected:
    """Return ``wanted`` for a replayed tail: the Python code of its layers does not run."""
    front = wanted.front
    return dataclasses.replace(
        wanted,
        rows=wanted.rows[:front],
        attention_rows=wanted.attention_rows[:front],
        attended=wanted.attended[:front],
        projected=wanted.projected[:1],
    )


def _tail_of(prompts: Sequence[Prompt]) -> dict[str, list[int]]:
    fields: dict[str, list[int]] = {name: [] for name in _LAID_OUT}
    for prompt, kept in zip(prompts, kept_rows(prompts), strict=True):
        end = len(prompt.cached) + len(prompt.new)
        fields["extend_prefix_lens"].append(end - kept)
        fields["extend_seq_lens"].append(kept)
        fields["extend_start_loc"].append(len(fields["input_ids"]))
        fields["input_ids"] += prompt.new[-kept:]
        fields["positions"] += range(end - kept, end)
        fields["seq_lens"].append(end)
    return fields


def skips_tail(prompts: Sequence[Prompt]) -> bool:
    """Return True if no row of a forward of ``prompts`` is read, and the batch is marked so."""
    return releases.marks_intermediate() and all(
        p.to_come and len(p.new) > 1 and not 0 <= p.logprob_start < len(p.cached) + len(p.new)
        for p in prompts
    )


def _projection_norm(engine: Engine) -> Any:
    """Return the norm of per-layer inputs, or None."""
    return getattr(engine.text_model, "per_layer_projection_norm", None)


def assert_as_expected(seen: Observed, wanted: Expected) -> None:
    """Assert that FFN, attention and per-layer inputs had exactly the expected rows."""
    assert seen.rows == wanted.rows
    assert seen.attention_rows == wanted.attention_rows
    assert seen.attended == wanted.attended
    mode = getattr(seen.before["forward_mode"], "name", None)
    assert set(seen.modes[: wanted.front]) == {mode}
    assert set(seen.modes[wanted.front :]) <= {wanted.tail_mode}
    # SGLang's multimodal Gemma 4 counts positions from one.
    shift = int(seen.positions[0]) - wanted.first_position
    for call in seen.laid_out[wanted.front :]:
        assert call.keys() == wanted.laid_out.keys()
        for name, rows in call.items():
            counted_from = shift * (name == "positions")
            assert (rows - counted_from).tolist() == wanted.laid_out[name], name
    assert seen.projected == wanted.projected


def assert_stock(engine: Engine, prompts: Sequence[Prompt], seen: Observed) -> None:
    """Assert that every layer computed every row, on the runner's own backend."""
    total, model = new_rows(prompts), engine.text_model
    layers, first = len(model.layers), len(engine.layers_with_kv)
    assert seen.rows == seen.attention_rows == [total] * layers
    assert seen.attended == [(total, total)] * first + [(total, 0)] * (layers - first)
    assert set(map(id, seen.backends)) == {id(engine.runner.attn_backend)}
    assert seen.projected == [(total, layers)] * (_projection_norm(engine) is not None)


def assert_metadata_unchanged(seen: Observed) -> None:
    """Assert that the runner's plan is unchanged: the same object, with the same values.

    This is stricter than equal answers require: SGLang's speculative workers plan ahead, and a
    second forward of the same plan would read what the first left.
    """
    before, after = seen.planned_before, seen.planned_after
    assert before.planned is after.planned
    for name, tensor in before.tensors.items():
        assert after.tensors.get(name) is tensor, name
    assert before.differences(after) == []


def assert_same_objects(seen: Observed) -> None:
    """Assert that the batch's fields are the same objects after the forward as before it."""
    for name, value in seen.before.items():
        assert seen.after[name] is value, name


def assert_same_cache(stock: Observed, fast: Observed) -> None:
    """Assert that every layer's K and V are byte for byte the same at every slot."""
    for layer, ((k, v), (k2, v2)) in enumerate(zip(stock.kv, fast.kv, strict=True)):
        assert torch.equal(k, k2), f"K of layer {layer} differs"
        assert torch.equal(v, v2), f"V of layer {layer} differs"


def both_ways(
    engine: Engine, batch: Any, tolerance: float = TOLERANCE
) -> tuple[Observed, Observed]:
    """Run a scheduled batch off and on; assert equal answers and cache, and restored fields."""
    stock, fast = run(engine, batch, "0"), run(engine, batch, "1")
    assert_same_objects(fast)
    assert_same_cache(stock, fast)
    assert_same_answers(stock, fast, tolerance)
    return stock, fast


def assert_same_answers(stock: Observed, fast: Observed, tolerance: float) -> None:
    """Assert that next-token logits and requested log-probabilities agree within ``tolerance``."""
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
    """Return all numbers of a tree of lists as one tensor; None and NaN become 7."""
    if isinstance(values, torch.Tensor):
        return values.float().flatten()
    if isinstance(values, (list, tuple)):
        return torch.cat([torch.empty(0), *map(_flat, values)])
    if values is None:
        return torch.tensor([7.0])
    return torch.tensor([float(values)]).nan_to_num(7.0)


def without_padding(kv: list[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    """Return K and V at all slots but the one of padding."""
    found = []
    for keys, values in kv:
        found += [keys[1:], values[1:]]
    return found
