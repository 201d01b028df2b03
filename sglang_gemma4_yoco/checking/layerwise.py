"""Layerwise comparison of the tail with stock: each step runs on stock's inputs.

Answers cannot be compared: in bf16 one rounding can make sharp attention pick another key. So
stock's steps are recorded. Then the cut runs on stock's rows, and the result of each step of layers
S-1 to L-1 is compared with stock's and replaced by it: K and V, per-layer inputs, queries,
attention, the layer's output, and finally the rows after the norm. Attention also runs with zero
queries. The result is the mean of all values that a row attends to: one key more or less changes
it, however sharp the weights.

A captured tail is compared as a whole with an eager run of its layers on the same rows.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sglang_gemma4_yoco import compat
from sglang_gemma4_yoco.captured.graphs import Replay
from sglang_gemma4_yoco.checking import rounding, tail_graphs
from sglang_gemma4_yoco.checking.rounding import Difference, Tolerance
from sglang_gemma4_yoco.compat.batch import ForwardBatch
from sglang_gemma4_yoco.compat.pools import CachedTokens, KeysAndValues
from sglang_gemma4_yoco.compat.text_model import Method, ModelOutput, TextLayer
from sglang_gemma4_yoco.core import cut
from sglang_gemma4_yoco.core.eager_tail import EagerTail
from sglang_gemma4_yoco.core.per_layer import PerLayerInputs
from sglang_gemma4_yoco.core.plan import Plan
from sglang_gemma4_yoco.core.state import ModelState
from sglang_gemma4_yoco.patched import patched

_INPUTS = "per-layer inputs before those"
_INPUT = "per-layer input"
_QUERIES = "queries"
_ATTENTION = "attention"
_MEAN = "mean of the values"
_OUTPUT = "output"
_FINAL = "normed output"

# Values are normed to size 1, so the error of a sum is a few eps of fp32 even if they cancel.
_OF_VALUES = 4.0
# Root mean square of r roundings on each side: 0.27 * sqrt(r). A GPU may sum a product in up to 16
# parts, and round the sum after each: 8 more of the whole sum's size. So r is 5 + 8 for per-layer
# inputs (projected, scaled, normed, added, scaled), and 3 + 8 for queries and keys (projected,
# normed, rotated).
_PROJECTED = Tolerance()
_WEIGHTED = Tolerance(over=-1, floor=_OF_VALUES)
# The tolerances of the other steps.
_TOLERANCES = {
    _ATTENTION: _WEIGHTED,
    _MEAN: _WEIGHTED,
    _OUTPUT: Tolerance(1.5),  # three additions to the residual, and the layer's scale
    _FINAL: Tolerance(2.0),  # the last layer's error, and the norm's
}


@dataclass
class Stock:
    """Inputs and results of stock's layers, for a batch of T rows, of which B are kept.

    Attributes:
        index: [B], the kept rows.
        kept: [B, ...] by step and layer, [B, heads, head_dim] of attention; the output of the layer
            before the cut goes into the tail.
        layer_inputs: [T, ...] by layer, of layer S-1 and, if requested, of earlier ones.
        positions: [T].
        embeds, embedded: [T, hidden] and [T, L, width], the sources of per-layer inputs.
        keys: K and V of layer S-1 in the pool, each [T, kv_heads, head_dim].
    """

    index: Tensor
    kept: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    layer_inputs: dict[int, Tensor] = field(default_factory=dict)
    positions: Any = None
    embeds: Tensor | None = None
    embedded: Tensor | None = None
    keys: KeysAndValues = ()

    def of_rows(self, chosen: array[int]) -> Stock:
        """Return a copy for some of the kept rows, by their indices among them, [n]."""
        places = torch.as_tensor(chosen, device=self.index.device)
        kept = {step: rows[places] for step, rows in self.kept.items()}
        return replace(self, index=self.index[places], kept=kept)


@contextmanager
def call_before_layers(
    state: ModelState, numbers: range, hook: Callable[..., None]
) -> Iterator[None]:
    """Call ``hook`` before each of these layers, as PyTorch does, with the layer's number first.

    Models call their layers with keywords only.
    """
    with ExitStack() as stack:
        for number in numbers:
            layer = state.model.layers[number]
            numbered = partial(hook, number)
            stack.enter_context(layer.register_forward_pre_hook(numbered, with_kwargs=True))
        yield


@contextmanager
def _call_after_steps(
    state: ModelState, on_step: Callable[[str, int, Tensor], None]
) -> Iterator[None]:
    """Call ``on_step`` with each step of the tail, its layer and its result, in the ``with`` block.

    It may overwrite the result, [rows, ...].
    """

    def attend(
        number: int, attention: Any, stock: Method, q: Tensor, *args: object, **kwargs: object
    ) -> Tensor:
        heads = len(q), attention.tp_q_head_num, -1
        on_step(_QUERIES, number, q.view(heads))
        output: Tensor = stock(q, *args, **kwargs)
        on_step(_ATTENTION, number, output.view(heads))
        kwargs["save_kv_cache"] = False  # K and V are written already
        mean = stock(torch.zeros_like(q), *args, **kwargs)
        on_step(_MEAN, number, mean.view(heads))
        return output

    def run_layer(number: int, _: object, stock: Method, **call: Any) -> Tensor:
        if number == state.cut_layer:
            on_step(_OUTPUT, number - 1, state.adapter.view_rows(call["hidden_states"]))
        if call.get("per_layer_input") is not None:
            on_step(_INPUT, number, call["per_layer_input"])
        output: Tensor = stock(**call)
        on_step(_OUTPUT, number, state.adapter.view_rows(output))
        return output

    with ExitStack() as stack:
        for number, layer in enumerate(state.tail_layers, start=state.cut_layer):
            attention = layer.self_attn.attn
            for part, forward in ((layer, run_layer), (attention, attend)):
                watched = partial(forward, number, part, part.forward)
                stack.enter_context(patched(part, forward=watched))
        yield


@contextmanager
def watch_stock(state: ModelState, stock: Stock, first: int) -> Iterator[None]:
    """Fill ``stock``, except for ``keys``, with the results of the layers in the ``with`` block.

    Layer inputs are kept for layers ``first`` to S-1.
    """
    model = state.model
    project: Any = getattr(model, "project_per_layer_inputs", None)
    norm = model.norm.forward

    def keep(step: str, layer: int, rows: Tensor) -> None:
        stock.kept[step, layer] = rows.index_select(0, stock.index)

    def projecting(embeds: Tensor, embedded: Tensor | None = None) -> object:
        # Copied now: on a GPU layer 0 overwrites the embeddings.
        stock.embeds = embeds.clone()
        stock.embedded = embedded
        projected = project(embeds, embedded)
        if projected is not None:
            keep(_INPUTS, state.cut_layer, projected[:, : state.cut_layer])
        return projected

    def keep_all(number: int, _: object, __: object, call: dict[str, Any]) -> None:
        stock.layer_inputs[number] = state.adapter.view_rows(call["hidden_states"]).clone()
        stock.positions = call["positions"].clone()

    def norm_and_keep(*rows: object, **others: object) -> ModelOutput:
        output: ModelOutput = norm(*rows, **others)
        keep(_FINAL, len(model.layers) - 1, compat.layers.get_rows(output))
        return output

    with (
        patched(model, project_per_layer_inputs=projecting),
        call_before_layers(state, range(first, state.cut_layer + 1), keep_all),
        _call_after_steps(state, keep),
        patched(model.norm, forward=norm_and_keep),
    ):
        yield


def run_on_stocks_rows(
    state: ModelState, plan: Plan, stock: Stock
) -> tuple[Tensor, list[Difference]]:
    """Run the cut on stock's rows at the cut, and compare each step.

    Afterwards stock's K and V of layer S-1 are in the pool.

    Returns:
        The model's output, [T, hidden], and the findings of all steps.
    """
    layers = list(state.model.layers)  # Gemma 3n's tail replaces them while it runs
    # Looked up before the tail runs: meanwhile ``out_cache_loc`` has the kept rows' slots alone.
    cached = get_donor_cache(state, plan)
    steps = _StepComparer(state, stock, cached, layers, set(stock.kept))
    rows_at_cut = stock.layer_inputs[state.cut_layer].clone()
    output = rows_at_cut.new_zeros(len(rows_at_cut), state.model.config.hidden_size)
    inputs = cut.make_inputs(state, plan)
    try:
        cached.write((0, 0))  # so that stale K and V cannot mask a missing write
        with _call_after_steps(state, steps.compare_and_replace):
            steps.compare_inputs(inputs)
            cut.finish_prefill(state, plan, output, rows_at_cut, stock.positions, inputs)
        rows = output.index_select(0, stock.index)
        if isinstance(plan.runner, Replay):
            steps.compare_captured(plan.runner, plan.kept_batch.batch, rows)
        steps.compare_keys_and_values()
    except BaseException:
        cached.write(stock.keys)  # later forwards read these slots
        raise
    if isinstance(plan.runner, EagerTail):
        steps.compare_and_replace(_FINAL, len(state.model.layers) - 1, rows)
        for step, layer in steps.missing:
            steps.found.append(rounding.make_defect(f"no {step} of layer {layer}"))
    return output, steps.found


@dataclass
class _StepComparer:
    """Compares the result of each step with stock's, and replaces it by stock's.

    Attributes:
        cached: K and V of layer S-1.
        layers: all layers of the model.
        missing: steps and their layers that have not run yet.
    """

    state: ModelState
    stock: Stock
    cached: CachedTokens
    layers: list[TextLayer]
    missing: set[tuple[str, int]]
    found: list[Difference] = field(default_factory=list)

    def compare_inputs(self, inputs: PerLayerInputs) -> None:
        """Project the per-layer inputs, and compare those of the layers before the cut."""
        stock = self.stock
        cut_layer = self.state.cut_layer
        if stock.embeds is None:
            return
        projected = inputs.project(stock.embeds.clone(), stock.embedded)
        if projected is not None:
            before_cut = projected[:, :cut_layer]
            self.compare_and_replace(_INPUTS, cut_layer, before_cut.index_select(0, stock.index))

    def compare_keys_and_values(self) -> None:
        """Compare K and V of layer S-1 in the pool, and replace them by stock's."""
        expected = self.stock.keys
        self.found += compare_keys_and_values(self.state.cut_layer, expected, self.cached.read())
        self.cached.write(expected)

    def compare_captured(self, replay: Replay, batch: ForwardBatch, rows: Tensor) -> None:
        """Compare a captured tail with an eager run of its layers on stock's rows, with padding.

        Args:
            rows: [B, hidden], the captured tail's.
        """
        stock = self.stock
        inputs = {}
        for name in ("embeds", "embedded"):
            all_rows = getattr(stock, name)
            if all_rows is not None:
                inputs[name] = all_rows[stock.index]
        self.found.append(
            tail_graphs.compare_eager(
                replay,
                rows,
                rows=stock.kept[_OUTPUT, self.state.cut_layer - 1],
                positions=stock.positions[stock.index],
                requests=batch.req_pool_indices,
                lengths=batch.seq_lens,
                **inputs,
            )
        )

    def compare_and_replace(self, step: str, layer: int, found: Tensor) -> None:
        """Compare ``found``, the result of a step, and overwrite it with stock's."""
        if (step, layer) == (_OUTPUT, self.state.cut_layer - 1):  # the tail begins
            self.compare_keys_and_values()
        expected = self.stock.kept[step, layer]
        score_error = 0.0
        given = None
        if step == _ATTENTION:
            score_error = self._measure_scores(layer)
        if step == _OUTPUT:
            given = self.stock.kept.get((_OUTPUT, layer - 1))
        self.found.append(
            rounding.compare_rows(
                f"{step} of layer {layer}",
                expected,
                found,
                _TOLERANCES.get(step, _PROJECTED),
                score_error=score_error,
                given=given,
            )
        )
        self.missing.discard((step, layer))
        found.copy_(expected)

    def _measure_scores(self, layer: int) -> float:
        """Return the relative error of attention's output that is due to the sums of its scores.

        Scores are fp32 sums of head_dim products, which Gemma 4 does not scale down: in sharp heads
        scores and their errors are large, and a softmax can double the errors.
        """
        queries = self.stock.kept[_QUERIES, layer]
        attention = self.layers[layer].self_attn.attn
        keys = self.state.adapter.get_key_scale(self.layers[attention.layer_id]).abs().max()
        norms = queries.float().norm(dim=-1).max()
        unit = rounding.get_score_unit(queries)
        return float(2 * unit * attention.scaling * norms * keys)


def get_donor_cache(state: ModelState, plan: Plan) -> CachedTokens:
    """Return K and V of layer S-1 of the batch's new tokens."""
    return compat.pools.get_cached_tokens(
        plan.backends.tail_backend.token_to_kv_pool,
        state.cut_layer,
        plan.kept_batch.batch.out_cache_loc,
    )


def compare_keys_and_values(
    layer: int, expected: KeysAndValues, found: KeysAndValues
) -> list[Difference]:
    """Compare K and V of a layer in the pool, each [rows, kv_heads, head_dim]."""
    differences = []
    for what, right, written in zip(("keys", "values"), expected, found, strict=True):
        differences.append(
            rounding.compare_rows(
                f"{what} of layer {layer} in the pool", right, written, _PROJECTED
            )
        )
    return differences
