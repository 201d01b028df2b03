"""The tail on stock's own numbers: what each step computes is stock's, but for rounding.

End to end a right fast path may differ from stock by anything: it sums in another order, and in
bf16 sharp attention makes of one rounding another pick of a key. So stock is watched, layer by
layer, and the cut is made once more of stock's rows. Before each step of the tail the numbers that
it goes on with are replaced by stock's (teacher forcing). What the step makes of them is compared;
see ``rounding``.

The steps, for the kept rows of layers S-1 to L-1:

- K and V of layer S-1, for all rows, as they lie in the pool (projected, normed, turned);
- the layer's per-layer input, and those of the layers before the cut, which are projected apart;
- queries (projected, normed, turned);
- attention of stock's queries over stock's K and V; and of queries of zeros, which see all keys in
  their window alike, so that one key more or less shows however sharp the attention is;
- the layer's output, given stock's output of its attention;

and at the end the rows that go on to the logits, normed. So the window, the slots, the positions,
the rows and their order all show where they come in. A captured tail is compared as a whole, with
its layers run eagerly on the same rows. Layers before the cut are stock's own code.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from sglang_gemma4_yoco import seams
from sglang_gemma4_yoco.captured import proof
from sglang_gemma4_yoco.captured.graphs import Replay
from sglang_gemma4_yoco.checking import rounding
from sglang_gemma4_yoco.checking.rounding import Comparison, Finding
from sglang_gemma4_yoco.core import cut
from sglang_gemma4_yoco.core.cut import EagerTail, Plan
from sglang_gemma4_yoco.core.replaced import replaced
from sglang_gemma4_yoco.core.state import ModelState

# Roundings of a step on each side, as root mean square: 0.27 * sqrt(r), and on a GPU another r / 2,
# where a product is summed in parts that are rounded.
_OF_KEYS = 0.75  # r = 3: projected, normed, turned
_OF_QUERIES = 0.75
_OF_ATTENTION = 1.0  # weights and sums, for each part of the keys
_OF_INPUTS = 1.0  # r = 5: projected, scaled, normed, added, scaled
_OF_LAYER = 1.0  # four sums of the residual, beside what is added
_OF_NORM = 2.0  # that of a layer, normed
_OF_LOGITS = 3.0  # of rows that are off by the last layer's roundings and the norm's

_LAYER = ("positions", "hidden_states", "per_layer_input", "forward_batch")
_ATTENTION = ("q", "k", "v", "forward_batch")
_ByLayer = dict[int, torch.Tensor]


@dataclass
class Stock:
    """What stock's layers were given, and what they made of it, for one batch.

    With T rows of the batch and B kept ones.

    Attributes:
        index: [B], the kept rows.
        front: [T, hidden], the rows at the cut.
        positions: [T].
        embeds, embedded: [T, hidden] and [T, L, width], what per-layer inputs are made of.
        per_layer: [B, L, width], these; None without any.
        inputs, outputs: [B, hidden] of the tail's layers.
        queries, attended, averaged: [B, heads, head_dim] of the same: what attends, what comes of
            it, and what comes of queries of zeros.
        final: [B, hidden], what the model returns.
        keys: K and V of layer S-1 in the pool, each [T, kv_heads, head_dim].
        before: [T, hidden] by layer, the inputs of those before the cut, where they are watched.
    """

    index: torch.Tensor
    front: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    embeds: torch.Tensor | None = None
    embedded: torch.Tensor | None = None
    per_layer: torch.Tensor | None = None
    inputs: _ByLayer = field(default_factory=dict)
    outputs: _ByLayer = field(default_factory=dict)
    queries: _ByLayer = field(default_factory=dict)
    attended: _ByLayer = field(default_factory=dict)
    averaged: _ByLayer = field(default_factory=dict)
    final: torch.Tensor | None = None
    keys: Sequence[torch.Tensor] = ()
    before: _ByLayer = field(default_factory=dict)

    def of_rows(self, chosen: torch.Tensor) -> Stock:
        """The same of some of the kept rows: ``chosen`` [b] of them."""
        some: dict[str, Any] = {}
        for name in ("index", "per_layer", "final"):
            tensor = getattr(self, name)
            some[name] = None if tensor is None else tensor.index_select(0, chosen)
        for name in ("inputs", "outputs", "queries", "attended", "averaged"):
            by_layer = getattr(self, name).items()
            some[name] = {layer: rows.index_select(0, chosen) for layer, rows in by_layer}
        return replace(self, **some)


# -- hooks -----------------------------------------------------------------------------------------


def called(names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """What a function was called with, by the names of its parameters."""
    return dict(zip(names, args, strict=False)) | kwargs


def _heads(attention: Any, rows: torch.Tensor) -> torch.Tensor:
    """[rows, heads, head_dim] of what attends, or of what comes of it."""
    return rows.reshape(rows.shape[0], attention.tp_q_head_num, -1)


def _average(attention: Any, call: dict[str, Any]) -> torch.Tensor:
    """Attention of queries of zeros: the mean of all values that each row sees."""
    q = torch.zeros_like(call["q"])
    output: torch.Tensor = attention.forward(
        q, call["k"], call["v"], forward_batch=call["forward_batch"], save_kv_cache=False
    )
    return _heads(attention, output)


@contextmanager
def _hooked(state: ModelState, steps: _Watching | _Forcing) -> Iterator[None]:
    """``steps`` has its methods called before and after the tail's layers and their attention."""
    with ExitStack() as span:
        for number, layer in enumerate(state.tail_layers, start=state.cut):
            attention = layer.self_attn.attn
            for register, function in (
                (layer.register_forward_pre_hook, steps.before_layer),
                (layer.register_forward_hook, steps.after_layer),
                (attention.register_forward_pre_hook, steps.before_attention),
                (attention.register_forward_hook, steps.after_attention),
            ):
                handle = register(partial(function, number), with_kwargs=True)
                span.callback(handle.remove)
        yield


@contextmanager
def before_the_cut(state: ModelState, stock: Stock, *, force: bool) -> Iterator[None]:
    """In the span ``stock`` takes down the inputs of layers before the cut, or forces them."""

    def hook(number: int, _: Any, args: Any, kwargs: Any) -> None:
        rows = called(_LAYER, args, kwargs)["hidden_states"]
        if force:
            rows.copy_(stock.before[number])
        else:
            stock.before[number] = rows.clone()

    with ExitStack() as span:
        for number, layer in enumerate(state.model.layers[: state.cut]):
            handle = layer.register_forward_pre_hook(partial(hook, number), with_kwargs=True)
            span.callback(handle.remove)
        yield


# -- stock -----------------------------------------------------------------------------------------


@contextmanager
def watched(state: ModelState, stock: Stock) -> Iterator[None]:
    """Fill ``stock`` with what stock does in the span; ``final`` and ``keys`` are left out."""
    project = state.model.project_per_layer_inputs

    def projecting(embeds: torch.Tensor, embedded: torch.Tensor | None = None) -> Any:
        # Copied now: on a GPU layer 0 adds into the embeddings.
        stock.embeds, stock.embedded = embeds.clone(), embedded
        projected = project(embeds, embedded)
        stock.per_layer = None if projected is None else projected.index_select(0, stock.index)
        return projected

    with (
        replaced(state.model, project_per_layer_inputs=projecting),
        _hooked(state, _Watching(stock, state.cut)),
    ):
        yield


class _Watching:
    def __init__(self, stock: Stock, cut: int) -> None:
        self._stock = stock
        self._cut = cut

    def _kept(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.index_select(0, self._stock.index)

    def before_layer(self, layer: int, _: Any, args: Any, kwargs: Any) -> None:
        stock, call = self._stock, called(_LAYER, args, kwargs)
        stock.inputs[layer] = self._kept(call["hidden_states"])
        if layer == self._cut:
            stock.front, stock.positions = call["hidden_states"].clone(), call["positions"].clone()

    def after_layer(self, layer: int, _: Any, __: Any, ___: Any, output: Any) -> None:
        self._stock.outputs[layer] = self._kept(seams.layer_rows(output))

    def before_attention(self, layer: int, attention: Any, args: Any, kwargs: Any) -> None:
        call = called(_ATTENTION, args, kwargs)
        self._stock.queries[layer] = self._kept(_heads(attention, call["q"]))

    def after_attention(
        self, layer: int, attention: Any, args: Any, kwargs: Any, output: torch.Tensor
    ) -> None:
        call = called(_ATTENTION, args, kwargs)
        self._stock.attended[layer] = self._kept(_heads(attention, output))
        self._stock.averaged[layer] = self._kept(_average(attention, call))


# -- the fast path ---------------------------------------------------------------------------------


def prefill(state: ModelState, plan: Plan, stock: Stock) -> tuple[torch.Tensor, list[Finding]]:
    """Cut a batch whose layers before the cut have given what stock's have.

    In the end stock's K and V of layer S-1 are in the pool. While it runs they are not: what is not
    written must not look as if it were.

    Returns:
        What the model would go on with, [T, hidden], and what was found on the way.
    """
    compared, found = list[Comparison](), list[Finding]()
    forcing = _Forcing(state, plan, stock, compared)
    model = partial(_model, state, plan, stock, compared)
    caches, slots = donor_cache(state, plan)
    for cache in caches:
        cache[slots] = 0
    assert stock.positions is not None
    try:
        with _hooked(state, forcing):
            output = seams.layer_rows(cut.prefill(state, plan, stock.positions, model))
        rows = output.index_select(0, stock.index)
        if isinstance(plan.runner, Replay):
            compared.append(_captured(state, plan, stock, rows))
        written = [cache[slots] for cache in caches]
    finally:
        for cache, values in zip(caches, stock.keys, strict=True):
            cache[slots] = values
    compared += compare_keys_and_values(state.cut, stock.keys, written)
    if isinstance(plan.runner, EagerTail):
        assert stock.final is not None
        compared.append(Comparison.of("rows after the norm", stock.final, rows, _OF_NORM))
        missing = stock.outputs.keys() - forcing.seen
        found += [rounding.defect(f"layer {layer} has not run") for layer in sorted(missing)]
    return output, found + rounding.findings(compared)


def _model(state: ModelState, plan: Plan, stock: Stock, compared: list[Comparison]) -> torch.Tensor:
    """In the place of the model's forward up to the cut: per-layer inputs, stock's rows, norm."""
    assert stock.front is not None
    rows = stock.front.clone()
    if stock.embeds is not None:
        inputs = state.model.project_per_layer_inputs(stock.embeds.clone(), stock.embedded)
        for layer in range(0 if stock.per_layer is None else state.cut):
            found = inputs[:, layer, :].index_select(0, stock.index)
            compared.append(_of_inputs(layer, stock, found))
    seams.start_residual(plan.batch, rows)
    output: torch.Tensor = state.model.norm(rows)
    return output


def _captured(state: ModelState, plan: Plan, stock: Stock, rows: torch.Tensor) -> Comparison:
    """What a captured tail gave, beside its layers run eagerly on stock's rows, with padding."""
    assert isinstance(plan.runner, Replay)
    assert stock.positions is not None
    embeds, embedded = stock.embeds, stock.embedded
    eager = plan.runner.eager(
        rows=stock.inputs[state.cut],
        positions=stock.positions.index_select(0, stock.index),
        requests=plan.batch.req_pool_indices,
        lengths=plan.batch.seq_lens,
        embeds=None if embeds is None else embeds[stock.index],
        embedded=None if embedded is None else embedded[stock.index, state.cut :],
    )
    return proof.comparison(eager, rows)


class _Forcing:
    """Compares each step of an eager tail, and replaces what it goes on with."""

    def __init__(
        self, state: ModelState, plan: Plan, stock: Stock, compared: list[Comparison]
    ) -> None:
        self.seen: set[int] = set()
        self._state = state
        self._cache = donor_cache(state, plan)  # now: the tail's batch has other slots
        self._stock = stock
        self._compared = compared

    def before_layer(self, layer: int, _: Any, args: Any, kwargs: Any) -> None:
        call, stock = called(_LAYER, args, kwargs), self._stock
        rows, expected = call["hidden_states"], stock.inputs[layer]
        if layer == self._state.cut:
            self._compared.append(Comparison.of("rows at the cut", expected, rows, _OF_LAYER))
        rows.copy_(expected)
        if stock.per_layer is not None:
            self._compared.append(_of_inputs(layer, stock, call["per_layer_input"]))

    def after_layer(self, layer: int, _: Any, __: Any, ___: Any, output: Any) -> None:
        self.seen.add(layer)
        given, expected = self._stock.inputs[layer], self._stock.outputs[layer]
        # A layer scales what it returns: its input is as large as that, scaled alike.
        scale = expected.float().abs().median() / given.float().abs().median().clamp_min(1e-30)
        size = (rounding.sizes(expected).square() + (scale * rounding.sizes(given)).square()).sqrt()
        rows = seams.layer_rows(output)
        what = f"output of layer {layer}"
        self._compared.append(Comparison.of(what, expected, rows, _OF_LAYER, size=size))

    def before_attention(self, layer: int, attention: Any, args: Any, kwargs: Any) -> None:
        call, expected = called(_ATTENTION, args, kwargs), self._stock.queries[layer]
        if layer == self._state.cut:
            self._force_keys_and_values(layer)
        found = _heads(attention, call["q"])
        what = f"queries of layer {layer}"
        self._compared.append(
            Comparison.of(what, expected.flatten(0, 1), found.flatten(0, 1), _OF_QUERIES)
        )
        call["q"].copy_(expected.reshape(call["q"].shape))

    def _force_keys_and_values(self, layer: int) -> None:
        """Those of the pool, where layer S-1 and those that share with it read them."""
        caches, slots = self._cache
        found = [cache[slots] for cache in caches]
        self._compared += compare_keys_and_values(layer, self._stock.keys, found)
        for cache, values in zip(caches, self._stock.keys, strict=True):
            cache[slots] = values

    def after_attention(
        self, layer: int, attention: Any, args: Any, kwargs: Any, output: torch.Tensor
    ) -> torch.Tensor:
        stock, call = self._stock, called(_ATTENTION, args, kwargs)
        for what, expected, found, besides in (
            ("attention", stock.attended, output, self._of_scores(layer, attention)),
            ("mean of the values", stock.averaged, _average(attention, call), None),
        ):
            of_heads = expected[layer].flatten(0, 1)
            self._compared.append(
                Comparison.of(
                    f"{what} of layer {layer}",
                    of_heads,
                    found.reshape(of_heads.shape),
                    _OF_ATTENTION,
                    size=rounding.row_sizes(of_heads),
                    besides=besides,
                )
            )
        return stock.attended[layer].reshape(output.shape).clone()

    def _of_scores(self, layer: int, attention: Any) -> torch.Tensor:
        """How much of attention's output depends on how its scores are summed: [].

        Scores are sums of head_dim products, in fp32, and Gemma 4 scales none of them: those of
        sharp heads are large, and so are their errors, of which a softmax makes twice as many.
        """
        queries, width = self._stock.queries[layer], attention.qk_head_dim
        donor = self._state.model.layers[attention.layer_id].self_attn
        norms = queries.float().norm(dim=-1).max() * donor.k_norm.weight.abs().max()
        eps = torch.finfo(torch.float32).eps
        if queries.is_cuda and queries.dtype == torch.float32:
            eps = rounding.TF32 / math.sqrt(width)
        off: torch.Tensor = 2 * eps * norms * math.sqrt(width)
        return off


# -- comparisons -----------------------------------------------------------------------------------


def _of_inputs(layer: int, stock: Stock, found: torch.Tensor) -> Comparison:
    assert stock.per_layer is not None
    what = f"per-layer input of layer {layer}"
    return Comparison.of(what, stock.per_layer[:, layer], found, _OF_INPUTS)


def donor_cache(
    state: ModelState, plan: Plan
) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """K and V of layer S-1, and where in them the batch's new tokens are."""
    layer = state.tail_layers[0].self_attn.attn.layer_id
    return seams.cache_of(plan.attention.tail, layer, plan.batch.out_cache_loc)


def compare_keys_and_values(
    layer: int,
    expected: Iterable[torch.Tensor],
    found: Iterable[torch.Tensor],
    where: str = "in the pool",
) -> list[Comparison]:
    """K and V of a layer compared, each [rows, kv_heads, head_dim]."""
    return [
        Comparison.of(
            f"{what} of layer {layer} {where}", e.flatten(0, 1), f.flatten(0, 1), _OF_KEYS
        )
        for what, e, f in zip(("keys", "values"), expected, found, strict=True)
    ]


def compare_logits(
    expected: torch.Tensor, found: torch.Tensor, *, rows: torch.Tensor
) -> Comparison:
    """Logits [requests, vocabulary] of the last rows that stock and the forced tail have given.

    Args:
        rows: what they are made of; its type is what rounds, whatever that of logits is.
    """
    size = expected.float().square().mean(dim=-1, keepdim=True).sqrt()
    return Comparison.of("logits", expected, found, _OF_LOGITS, size=size, rounded=rows)
