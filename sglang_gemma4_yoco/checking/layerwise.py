"""Each step of the tail gets stock's own numbers as its input, and its result is compared.

Answers cannot be compared: in bf16 one rounding can make sharp attention pick another key. So stock
is watched, layer by layer. Then the cut runs on stock's rows, and after each step of layers S-1
to L-1 the result is compared with stock's and replaced by it: K and V, per-layer inputs, queries,
attention, the layer's output, and at the end the rows after the norm. Attention also runs with
queries of zeros. The result is the mean of all values that a row attends to: one key more or less
changes it, however sharp the weights.

A captured tail is compared as a whole with its own layers, run eagerly on the same rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from sglang_gemma4_yoco import compat
from sglang_gemma4_yoco.captured.graphs import Replay
from sglang_gemma4_yoco.checking import rounding, tail_graphs
from sglang_gemma4_yoco.checking.rounding import Comparison, Difference
from sglang_gemma4_yoco.core import cut
from sglang_gemma4_yoco.core.per_layer import PerLayerInputs
from sglang_gemma4_yoco.core.plan import Plan
from sglang_gemma4_yoco.core.state import ModelState
from sglang_gemma4_yoco.core.tail import EagerTail
from sglang_gemma4_yoco.replaced import replaced

_INPUT = "per-layer input"
_QUERIES = "queries"
_ATTENTION = "attention"
_MEAN = "mean of the values"
_OUTPUT = "output"
_FINAL = "rows after the norm"

# Root mean square of r roundings on each side: 0.27 * sqrt(r), and on a GPU another r / 2, where a
# product is summed in parts that are rounded.
_ROUNDINGS = {
    _INPUT: 1.0,  # r = 5: projected, scaled, normed, added, scaled
    _QUERIES: 0.75,  # r = 3: projected, normed, turned
    _ATTENTION: 1.0,  # weights and sums, for each part of the keys
    _MEAN: 1.0,
    _OUTPUT: 1.0,  # four sums of the residual, beside what is added
    _FINAL: 2.0,  # that of a layer, normed
}
_OF_KEYS = 0.75  # as queries
_OF_LOGITS = 3.0  # of rows that are off by the last layer's roundings and the norm's

_LAYER = ("positions", "hidden_states", "per_layer_input", "forward_batch")

#: Called with a step, its layer and its rows, which may be overwritten.
_Visit = Callable[[str, int, torch.Tensor], None]


@dataclass
class Stock:
    """Inputs and results of stock's layers, for a batch of T rows, of which B are kept.

    Attributes:
        index: [B], the kept rows.
        kept: [B, ...] by step and layer; the output of the layer before the cut goes into the tail.
        layer_inputs: [T, ...] by layer, of layer S-1 and, where they are wanted, of those before
            it.
        positions: [T].
        embeds, embedded: [T, hidden] and [T, L, width], what per-layer inputs are computed from.
        keys: K and V of layer S-1 in the pool, each [T, kv_heads, head_dim].
    """

    index: torch.Tensor
    kept: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)
    layer_inputs: dict[int, torch.Tensor] = field(default_factory=dict)
    positions: torch.Tensor | None = None
    embeds: torch.Tensor | None = None
    embedded: torch.Tensor | None = None
    keys: Sequence[torch.Tensor] = ()

    def of_rows(self, chosen: Any) -> Stock:
        """The same for some of the kept rows, given by their places among them, [n]."""
        places = torch.as_tensor(chosen, device=self.index.device)
        kept = {step: rows[places] for step, rows in self.kept.items()}
        return replace(self, index=self.index[places], kept=kept)


def name_arguments(
    names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """The arguments of a call, by the names of the function's parameters."""
    return dict(zip(names, args, strict=False)) | kwargs


@contextmanager
def call_before_layers(
    layers: Mapping[int, Any], visit: Callable[[int, dict[str, Any]], None]
) -> Iterator[None]:
    """Have ``visit`` called before each layer, with its number and its arguments."""

    def hook(number: int, _: Any, args: Any, kwargs: Any) -> None:
        visit(number, name_arguments(_LAYER, args, kwargs))

    with ExitStack() as stack:
        for number, layer in layers.items():
            handle = layer.register_forward_pre_hook(partial(hook, number), with_kwargs=True)
            stack.callback(handle.remove)
        yield


@contextmanager
def _visit_steps(state: ModelState, visit: _Visit) -> Iterator[None]:
    """In the ``with`` block ``visit`` is called with the result of each step of the tail."""

    def before_layer(number: int, call: dict[str, Any]) -> None:
        if number == state.cut_layer:
            visit(_OUTPUT, number - 1, state.kind.view_rows(call["hidden_states"]))
        if call["per_layer_input"] is not None:
            visit(_INPUT, number, call["per_layer_input"])

    def attend(number: int, stock: Any, q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        visit(_QUERIES, number, q)
        output: torch.Tensor = stock(q, *args, **kwargs)
        visit(_ATTENTION, number, output)
        # K and V are written already.
        visit(_MEAN, number, stock(torch.zeros_like(q), *args, **kwargs | {"save_kv_cache": False}))
        return output

    def after_layer(number: int, _: Any, __: Any, output: Any) -> None:
        visit(_OUTPUT, number, state.kind.view_rows(compat.layers.get_rows(output)))

    layers = dict(enumerate(state.tail_layers, start=state.cut_layer))
    with call_before_layers(layers, before_layer), ExitStack() as stack:
        for number, layer in layers.items():
            stack.callback(layer.register_forward_hook(partial(after_layer, number)).remove)
            attention = layer.self_attn.attn
            forward = partial(attend, number, attention.forward)
            stack.enter_context(replaced(attention, forward=forward))
        yield


@contextmanager
def watch_stock(state: ModelState, stock: Stock, *, before_cut: bool = False) -> Iterator[None]:
    """Fill ``stock``, except for ``keys``, with what stock's layers compute in the ``with`` block.

    With ``before_cut`` the inputs of the layers before the cut are kept too.
    """
    model, project = state.model, state.model.project_per_layer_inputs

    def keep(step: str, layer: int, rows: torch.Tensor) -> None:
        stock.kept[step, layer] = rows.index_select(0, stock.index)

    def projecting(embeds: torch.Tensor, embedded: torch.Tensor | None = None) -> Any:
        # Copied now: on a GPU layer 0 adds into the embeddings.
        stock.embeds, stock.embedded = embeds.clone(), embedded
        projected = project(embeds, embedded)
        if projected is not None:
            for layer in range(state.cut_layer):
                keep(_INPUT, layer, projected[:, layer, :])
        return projected

    def keep_all(number: int, call: dict[str, Any]) -> None:
        stock.layer_inputs[number] = state.kind.view_rows(call["hidden_states"]).clone()
        stock.positions = call["positions"].clone()

    def keep_final(_: Any, __: Any, output: Any) -> None:
        keep(_FINAL, 0, compat.layers.get_rows(output))

    watched_layers = dict(enumerate(model.layers[: state.cut_layer + 1]))
    if not before_cut:
        watched_layers = {state.cut_layer: model.layers[state.cut_layer]}
    with (
        replaced(model, project_per_layer_inputs=projecting),
        call_before_layers(watched_layers, keep_all),
        _visit_steps(state, keep),
        ExitStack() as stack,
    ):
        stack.callback(model.norm.register_forward_hook(keep_final).remove)
        yield


def run_on_stocks_rows(
    state: ModelState, plan: Plan, stock: Stock
) -> tuple[torch.Tensor, list[Difference]]:
    """Cut a batch whose layers before the cut have computed the same as stock's.

    At the end stock's K and V of layer S-1 are in the pool.

    Returns:
        What the model would continue with, [T, hidden], and the findings of all steps.
    """
    assert stock.positions is not None
    steps, missing = _StepComparer(state, plan, stock), list[Difference]()
    rows_at_cut = stock.layer_inputs[state.cut_layer].clone()
    output = rows_at_cut.new_zeros(len(rows_at_cut), state.model.config.hidden_size)
    inputs = cut.make_inputs(state, plan)
    with zero_slots(steps.caches, steps.slots, stock.keys):
        with _visit_steps(state, steps.visit):
            steps.compare_inputs(inputs)
            cut.finish_prefill(state, plan, output, rows_at_cut, stock.positions, inputs)
        rows = output.index_select(0, stock.index)
        if isinstance(plan.runner, Replay):
            steps.compared.append(_compare_captured(state, plan, stock, rows))
        steps.compare_keys_and_values()
    if isinstance(plan.runner, EagerTail):
        steps.visit(_FINAL, 0, rows)
        for layer in sorted({layer for _, layer in steps.missing}):
            missing.append(rounding.make_defect(f"layer {layer} has not run"))
    return output, missing + rounding.read_differences(steps.compared)


class _StepComparer:
    """Compares what each step gives with stock's, and replaces it by stock's."""

    def __init__(self, state: ModelState, plan: Plan, stock: Stock) -> None:
        self.compared: list[Comparison] = []
        self.missing = set(stock.kept)  # steps and their layers that have not run yet
        self._state = state
        self._stock = stock
        self._layers = list(state.model.layers)  # now: Gemma 3n's tail has others in their place
        # Now: the tail's batch has other slots.
        self.caches, self.slots = get_donor_cache(state, plan)

    def compare_inputs(self, inputs: PerLayerInputs) -> None:
        """Have the per-layer inputs projected; compare those of the layers before the cut."""
        stock = self._stock
        if stock.embeds is None:
            return
        projected = inputs.project(stock.embeds.clone(), stock.embedded)
        if projected is not None:
            for layer in range(self._state.cut_layer):
                self.visit(_INPUT, layer, projected[:, layer, :].index_select(0, stock.index))

    def compare_keys_and_values(self) -> None:
        """Compare K and V of layer S-1 in the pool, and replace them by stock's."""
        found = read_slots(self.caches, self.slots)
        self.compared += compare_keys_and_values(self._state.cut_layer, self._stock.keys, found)
        for cache, values in zip(self.caches, self._stock.keys, strict=True):
            cache[self.slots] = values

    def visit(self, step: str, layer: int, found: torch.Tensor) -> None:
        """Compare ``found``, the result of a step, and overwrite it with stock's."""
        if (step, layer) == (_OUTPUT, self._state.cut_layer - 1):  # the tail begins
            self.compare_keys_and_values()
        expected = self._stock.kept[step, layer].reshape(found.shape)
        self.compared.append(self._comparison(step, layer, expected, found))
        self.missing.discard((step, layer))
        found.copy_(expected)

    def _comparison(
        self, step: str, layer: int, expected: torch.Tensor, found: torch.Tensor
    ) -> Comparison:
        what, size, besides = f"{step} of layer {layer}", None, None
        if step in (_QUERIES, _ATTENTION, _MEAN):
            attention = self._layers[layer].self_attn.attn
            heads = len(found) * attention.tp_q_head_num
            expected, found = expected.reshape(heads, -1), found.reshape(heads, -1)
            if step != _QUERIES:
                size = rounding.measure_sizes(expected, dim=-1)
            if step == _ATTENTION:
                besides = self._of_scores(layer, attention)
        elif step == _FINAL:
            what = step
        elif step == _OUTPUT and layer < self._state.cut_layer:
            what = "rows at the cut"
        elif step == _OUTPUT:
            expected, found = expected.flatten(0, -2), found.flatten(0, -2)
            # Sums of the residual have the input's size too, scaled as the layer scales its output.
            given = self._stock.kept[_OUTPUT, layer - 1].flatten(0, -2)
            scale = expected.float().abs().median() / given.float().abs().median().clamp_min(1e-30)
            size = torch.hypot(
                rounding.measure_sizes(expected), scale * rounding.measure_sizes(given)
            )
        return Comparison.of(what, expected, found, _ROUNDINGS[step], size=size, besides=besides)

    def _of_scores(self, layer: int, attention: Any) -> torch.Tensor:
        """The relative error of attention's output that the sums of its scores cause: [].

        Scores are sums of head_dim products, in fp32, and Gemma 4 does not scale them: in sharp
        heads scores and their errors are large, and a softmax can double the errors.
        """
        queries, width = self._stock.kept[_QUERIES, layer], attention.qk_head_dim
        donor = self._layers[attention.layer_id].self_attn
        norms = queries.float().reshape(-1, width).norm(dim=-1).max()
        eps = torch.finfo(torch.float32).eps
        if queries.is_cuda and queries.dtype == torch.float32:
            eps = rounding.TF32 / math.sqrt(width)
        off: torch.Tensor = 2 * eps * norms * donor.k_norm.weight.abs().max() * math.sqrt(width)
        return off


def _compare_captured(
    state: ModelState, plan: Plan, stock: Stock, rows: torch.Tensor
) -> Comparison:
    """A captured tail's result against its layers, run eagerly on stock's rows, with padding."""
    assert isinstance(plan.runner, Replay)
    assert stock.positions is not None
    embeds, embedded = stock.embeds, stock.embedded
    if embeds is not None:
        embeds = embeds[stock.index]
    if embedded is not None:
        embedded = embedded[stock.index, state.cut_layer :]
    eager = plan.runner.eager(
        rows=stock.kept[_OUTPUT, state.cut_layer - 1],
        positions=stock.positions[stock.index],
        requests=plan.batch.req_pool_indices,
        lengths=plan.batch.seq_lens,
        embeds=embeds,
        embedded=embedded,
    )
    return Comparison.of(tail_graphs.TAIL, eager, rows, tail_graphs.ROUNDINGS)


def get_donor_cache(
    state: ModelState, plan: Plan
) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """K and V of layer S-1, and where in them the batch's new tokens are."""
    layer = state.tail_layers[0].self_attn.attn.layer_id
    return compat.pools.get_cache(plan.attention.tail, layer, plan.batch.out_cache_loc)


def read_slots(caches: Iterable[torch.Tensor], slots: torch.Tensor) -> list[torch.Tensor]:
    """Copies of what is at these slots of K and V, each [slots, kv_heads, head_dim]."""
    return [cache[slots] for cache in caches]


@contextmanager
def zero_slots(
    caches: Iterable[torch.Tensor], slots: torch.Tensor, otherwise: Sequence[torch.Tensor]
) -> Iterator[None]:
    """Zeros at the slots of these caches: what is not written must not look as if it were.

    What is written in the ``with`` block stays. If it fails, the slots get their values of
    ``otherwise``: later forwards read them.
    """
    try:
        for cache in caches:
            cache[slots] = 0
        yield
    except BaseException:
        for cache, values in zip(caches, otherwise, strict=True):
            cache[slots] = values
        raise


def compare_keys_and_values(
    layer: int,
    expected: Iterable[torch.Tensor],
    found: Iterable[torch.Tensor],
    where: str = "in the pool",
) -> list[Comparison]:
    """K and V of a layer compared, each [rows, kv_heads, head_dim]."""
    compared = []
    for what, one, other in zip(("keys", "values"), expected, found, strict=True):
        what = f"{what} of layer {layer} {where}"
        compared.append(Comparison.of(what, one, other, _OF_KEYS))
    return compared


def compare_logits(
    expected: torch.Tensor, found: torch.Tensor, *, rows: torch.Tensor
) -> Comparison:
    """Logits [requests, vocabulary] of stock's and the forced tail's last rows compared.

    They are computed from ``rows``, whose type determines the rounding, not that of the logits.
    """
    size = expected.float().square().mean(dim=-1, keepdim=True).sqrt()
    return Comparison.of("logits", expected, found, _OF_LOGITS, size=size, rounded=rows)
