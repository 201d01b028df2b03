"""Each layer given what stock's was given: what it computes is stock's, but for rounding.

End to end a right fast path may differ from stock by anything: it sums in another order, and in
bf16 sharp attention makes of one rounding another pick of a key. So stock is watched, layer by
layer, and the fast path is run once more, its layers launched. Before each step the numbers that it
goes on with are replaced by stock's. What the step then makes of them is compared; see
``rounding``.

The steps, for the layers behind the cut and the rows that are kept:

- K and V of layer K-1, for all rows, as they lie in the pool (projected, normed, turned);
- queries (likewise);
- attention of stock's queries over stock's K and V; and of queries of zeros, which see all keys in
  their window alike, so that one key more or less shows however sharp the attention is;
- the layer's output, given stock's output of its attention;
- the layer's per-layer input;

and at the end the rows that the model hands on, normed. So the window, the slots, the positions,
the rows and their order all show where they come in. Layers before the cut are stock's own code;
where they run at all they are given stock's rows too, since their per-layer inputs are not
projected by stock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from sglang_gemma4_yoco import seams
from sglang_gemma4_yoco.checking import rounding
from sglang_gemma4_yoco.checking.rounding import Comparison, Finding
from sglang_gemma4_yoco.tail.graphs import Inputs
from sglang_gemma4_yoco.tail.shadow import Shadows

# Roundings of a step on each side, as root mean square: 0.27 * sqrt(r), and on a GPU another r / 2,
# where a product is summed in parts that are rounded.
_OF_KEYS = 0.75  # r = 3: projected, normed, turned
_OF_QUERIES = 0.75
_OF_ATTENTION = 1.0  # weights and sums, for each part of the keys
_OF_INPUTS = 1.0  # r = 5: projected, scaled, normed, added, scaled
_OF_LAYER = 1.0  # four sums of the residual, beside what is added
_OF_NORM = 2.0  # that of a layer, normed


@dataclass
class Trace:
    """What stock's layers were given, and what they made of it, for one batch.

    Tensors are [T, ...] or [B, ...], with T rows of the batch and B kept ones; by layer.

    Attributes:
        first: the first layer behind the cut, K-1 or K.
        index: [B], the kept rows.
        inputs: [T, hidden] of layers before the cut, [B, hidden] behind it; so are the next two.
        outputs: what the layers return.
        per_layer: [rows, width], their per-layer inputs.
        queries, attended, averaged: [B, heads, head_dim] behind the cut: what attends, what comes
            of it, and what comes of queries of zeros.
        at_the_cut: [T, hidden], the rows there.
        keys, values: [T, kv_heads, head_dim] of layer K-1, if it is behind the cut.
        slots: [T], where these lie in the full pool.
        positions: [B].
        embeds: [B, hidden], input embeddings; None without per-layer inputs.
        embedded: [B, L, width], per-layer embeddings; None without any.
        final: [B, hidden], what the model returns.
    """

    first: int
    index: torch.Tensor
    inputs: dict[int, torch.Tensor] = field(default_factory=dict)
    outputs: dict[int, torch.Tensor] = field(default_factory=dict)
    per_layer: dict[int, torch.Tensor] = field(default_factory=dict)
    queries: dict[int, torch.Tensor] = field(default_factory=dict)
    attended: dict[int, torch.Tensor] = field(default_factory=dict)
    averaged: dict[int, torch.Tensor] = field(default_factory=dict)
    at_the_cut: torch.Tensor | None = None
    keys: torch.Tensor | None = None
    values: torch.Tensor | None = None
    slots: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    embeds: torch.Tensor | None = None
    embedded: torch.Tensor | None = None
    final: torch.Tensor | None = None

    @property
    def is_whole(self) -> bool:
        """Whether stock's layers were seen to run, to the end."""
        return self.final is not None and self.at_the_cut is not None

    def all_rows(self, layer: int) -> bool:
        """Whether of this layer all rows are here."""
        return layer < self.first

    def of_rows(self, chosen: torch.Tensor) -> Trace:
        """The same of some of the kept rows: ``chosen`` [b] of them."""

        def some(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor.index_select(0, chosen)

        def behind(by_layer: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
            return {
                layer: rows if self.all_rows(layer) else rows.index_select(0, chosen)
                for layer, rows in by_layer.items()
            }

        return replace(
            self,
            index=self.index.index_select(0, chosen),
            inputs=behind(self.inputs),
            outputs=behind(self.outputs),
            per_layer=behind(self.per_layer),
            queries=behind(self.queries),
            attended=behind(self.attended),
            averaged=behind(self.averaged),
            positions=some(self.positions),
            embeds=some(self.embeds),
            embedded=some(self.embedded),
            final=some(self.final),
        )

    def fill(self, inputs: Inputs, requests: torch.Tensor, lengths: torch.Tensor) -> None:
        """Set the inputs of a recorded tail, [B, ...].

        Args:
            requests, lengths: [B], as in ``Inputs``.
        """
        inputs.requests.copy_(requests)
        inputs.lengths.copy_(lengths)
        inputs.rows.copy_(self.inputs[self.first])
        assert self.positions is not None
        inputs.positions.copy_(self.positions)
        if inputs.embeds is not None:
            assert self.embeds is not None
            inputs.embeds.copy_(self.embeds)
        if inputs.embedded is not None:
            assert self.embedded is not None
            inputs.embedded.copy_(self.embedded[:, self.first :])


# ---------------------------------------------------------------- what a layer is called with

_LAYER = ("positions", "hidden_states", "per_layer_input", "forward_batch")
_ATTENTION = ("q", "k", "v", "forward_batch")


def _called(names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
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


class _Steps(Protocol):
    """What is told of the steps of a forward."""

    def before_layer(self, layer: int, call: dict[str, Any]) -> None: ...

    def after_layer(self, layer: int, rows: torch.Tensor) -> None: ...

    def before_attention(self, layer: int, attention: Any, call: dict[str, Any]) -> None: ...

    def after_attention(
        self, layer: int, attention: Any, call: dict[str, Any], output: torch.Tensor
    ) -> torch.Tensor | None: ...

    def at_the_end(self, rows: torch.Tensor) -> None: ...


@contextmanager
def _told(model: Any, first: int, start: int, steps: _Steps) -> Iterator[None]:
    """Tell ``steps`` of layers from ``start`` on, of attention from ``first`` on, and the end."""
    with ExitStack() as hooks:

        def hook(register: Callable[..., Any], function: Callable[..., Any]) -> None:
            hooks.callback(register(function, with_kwargs=True).remove)

        def hook_layer(number: int, layer: Any) -> None:
            hook(
                layer.register_forward_pre_hook,
                lambda _, args, kwargs: steps.before_layer(number, _called(_LAYER, args, kwargs)),
            )
            hook(
                layer.register_forward_hook,
                lambda _, __, ___, output: steps.after_layer(number, seams.layer_rows(output)),
            )

        def hook_attention(number: int, attention: Any) -> None:
            hook(
                attention.register_forward_pre_hook,
                lambda _, args, kwargs: steps.before_attention(
                    number, attention, _called(_ATTENTION, args, kwargs)
                ),
            )
            hook(
                attention.register_forward_hook,
                lambda _, args, kwargs, output: steps.after_attention(
                    number, attention, _called(_ATTENTION, args, kwargs), output
                ),
            )

        for number, layer in list(enumerate(model.layers))[start:]:
            hook_layer(number, layer)
            if number >= first:
                hook_attention(number, layer.self_attn.attn)
        hook(
            model.register_forward_hook,
            lambda _, __, ___, output: steps.at_the_end(seams.layer_rows(output)),
        )
        yield


# ---------------------------------------------------------------- stock


@contextmanager
def watched(model: Any, trace: Trace, start: int) -> Iterator[_Steps]:
    """Fill ``trace`` with what stock does in the span, from layer ``start`` on.

    Yields what must be told of the model's output, [T, hidden], where its forward is called, and
    not the model itself.
    """
    original = model.project_per_layer_inputs

    def projecting(_: Any) -> Callable[..., Any]:
        def project(embeds: torch.Tensor, embedded: torch.Tensor | None = None) -> Any:
            # Copied now: on a GPU layer 0 adds into the embeddings.
            trace.embeds = embeds.index_select(0, trace.index)
            if embedded is not None:
                trace.embedded = embedded.index_select(0, trace.index)
            return original(embeds, embedded)

        return project

    watching = _Watching(trace)
    with Shadows() as shadows, _told(model, trace.first, start, watching):
        shadows.add(model, "project_per_layer_inputs", projecting)
        yield watching


class _Watching:
    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    def _kept(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.index_select(0, self._trace.index)

    def before_layer(self, layer: int, call: dict[str, Any]) -> None:
        trace, rows = self._trace, call["hidden_states"]
        trace.inputs[layer] = rows.clone() if trace.all_rows(layer) else self._kept(rows)
        given = call["per_layer_input"]
        if given is not None:
            trace.per_layer[layer] = given.clone() if trace.all_rows(layer) else self._kept(given)
        if layer == trace.first:
            trace.at_the_cut, trace.positions = rows.clone(), self._kept(call["positions"])

    def after_layer(self, layer: int, rows: torch.Tensor) -> None:
        trace = self._trace
        trace.outputs[layer] = rows.clone() if trace.all_rows(layer) else self._kept(rows)

    def before_attention(self, layer: int, attention: Any, call: dict[str, Any]) -> None:
        trace = self._trace
        trace.queries[layer] = self._kept(_heads(attention, call["q"]))
        if layer == trace.first and call["k"] is not None:
            trace.keys, trace.values = call["k"].clone(), call["v"].clone()
            trace.slots = call["forward_batch"].out_cache_loc.clone()

    def after_attention(
        self, layer: int, attention: Any, call: dict[str, Any], output: torch.Tensor
    ) -> None:
        trace = self._trace
        trace.attended[layer] = self._kept(_heads(attention, output))
        trace.averaged[layer] = self._kept(_average(attention, call))

    def at_the_end(self, rows: torch.Tensor) -> None:
        self._trace.final = self._kept(rows)


@contextmanager
def rounded_once_more(layers: Iterable[Any], draw: torch.Generator) -> Iterator[None]:
    """Attention and FFN of these layers round otherwise: by up to eps / 2 of their type more."""

    def rounded(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
        eps = torch.finfo(output.dtype).eps
        share = torch.rand(output.shape, generator=draw, device=output.device) - 0.5
        return (output.float() * (1 + share * eps)).to(output.dtype)

    with ExitStack() as hooks:
        for layer in layers:
            for part in (layer.self_attn, layer.mlp):
                hooks.callback(part.register_forward_hook(rounded).remove)
        yield


# ---------------------------------------------------------------- the fast path


class Forced:
    """The fast path, run with its steps given stock's numbers; a context manager around that.

    Attributes:
        final: [B, hidden], the kept rows that the model has handed on; None before.
    """

    def __init__(self, model: Any, trace: Trace, start: int, last: int) -> None:
        """Compare with what stock did.

        Args:
            start: the first layer that runs.
            last: the last layer that is launched; the last before the cut where the others are
                replayed, or skipped.
        """
        self.final: torch.Tensor | None = None
        self._model = model
        self._trace = trace
        self._start = start
        self._last = last
        self._seen: set[int] = set()
        self._compared: list[Comparison] = []
        self._span = ExitStack()

    def __enter__(self) -> Forced:
        self._span.enter_context(_told(self._model, self._trace.first, self._start, self))
        hook = self._model.norm.register_forward_pre_hook(self._at_the_cut)
        self._span.callback(hook.remove)
        return self

    def __exit__(self, *error: object) -> None:
        self._span.close()

    def findings(self) -> list[Finding]:
        """What the comparisons have given, those among them that could not be made."""
        found = rounding.findings(self._compared)
        for layer in range(self._start, self._last + 1):
            if layer not in self._seen:
                found.append(rounding.defect(f"layer {layer} has not run"))
        return found

    # -- rows ----------------------------------------------------------------------------------

    def _like(self, expected: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Those of ``rows``, all or kept ones, that ``expected`` has."""
        if rows.shape[0] == expected.shape[0]:
            return rows
        return rows.index_select(0, self._trace.index)

    def _force(self, rows: torch.Tensor, expected: torch.Tensor) -> None:
        """Overwrite ``rows`` with stock's; where these are the kept ones of all, those alone."""
        stock = expected.reshape(expected.shape[0], *rows.shape[1:])
        if rows.shape[0] == stock.shape[0]:
            rows.copy_(stock)
        else:
            rows.index_copy_(0, self._trace.index, stock)

    def _compare(
        self,
        what: str,
        expected: torch.Tensor,
        found: torch.Tensor,
        roundings: float,
        **kwargs: Any,
    ) -> None:
        self._compared.append(Comparison.of(what, expected, found, roundings, **kwargs))

    # -- steps ---------------------------------------------------------------------------------

    def _at_the_cut(self, _: Any, args: tuple[torch.Tensor, ...]) -> None:
        """In the place of the model's norm."""
        assert self._trace.at_the_cut is not None
        self._force(args[0], self._trace.at_the_cut)

    def before_layer(self, layer: int, call: dict[str, Any]) -> None:
        trace, given = self._trace, call["per_layer_input"]
        self._force(call["hidden_states"], trace.inputs[layer])
        if layer > self._last:
            return
        if layer in trace.per_layer and given is not None:
            expected = trace.per_layer[layer]
            found = self._like(expected, given)
            self._compare(f"per-layer input of layer {layer}", expected, found, _OF_INPUTS)

    def after_layer(self, layer: int, rows: torch.Tensor) -> None:
        trace = self._trace
        if layer > self._last:
            return
        self._seen.add(layer)
        given, expected = trace.inputs[layer], trace.outputs[layer]
        found, given = self._like(expected, rows), self._like(expected, given)
        # A layer scales what it returns: its input is as large as that, scaled alike.
        scale = expected.float().abs().median() / given.float().abs().median().clamp_min(1e-30)
        size = (rounding.sizes(expected).square() + (scale * rounding.sizes(given)).square()).sqrt()
        self._compare(f"output of layer {layer}", expected, found, _OF_LAYER, size=size)

    def before_attention(self, layer: int, attention: Any, call: dict[str, Any]) -> None:
        trace = self._trace
        if layer > self._last:
            return
        if trace.keys is not None and layer == trace.first:
            self._force_keys_and_values(layer)
        expected = trace.queries[layer]
        found = self._like(expected, _heads(attention, call["q"]))
        self._compare(
            f"queries of layer {layer}", expected.flatten(0, 1), found.flatten(0, 1), _OF_QUERIES
        )
        self._force(call["q"], expected)

    def _force_keys_and_values(self, layer: int) -> None:
        """Those of the pool, where layer K-1 and those that share with it read them."""
        trace = self._trace
        assert trace.keys is not None
        assert trace.values is not None
        assert trace.slots is not None
        buffers, slots = seams.cache_of(seams.current_attn_backend(), layer, trace.slots)
        stock = trace.keys, trace.values
        written = [buffer[slots] for buffer in buffers]
        self._compared += keys_and_values_compared(f"layer {layer} in the pool", stock, written)
        for buffer, values in zip(buffers, stock, strict=True):
            buffer[slots] = values

    def after_attention(
        self, layer: int, attention: Any, call: dict[str, Any], output: torch.Tensor
    ) -> torch.Tensor | None:
        if layer > self._last:
            return None
        trace = self._trace
        for what, expected, rows, besides in (
            ("attention", trace.attended[layer], output, self._of_scores(layer, attention)),
            ("mean of the values", trace.averaged[layer], _average(attention, call), None),
        ):
            found = self._like(expected, _heads(attention, rows)).flatten(0, 1)
            of_heads = expected.flatten(0, 1)
            size = rounding.row_sizes(of_heads)
            self._compare(
                f"{what} of layer {layer}",
                of_heads,
                found,
                _OF_ATTENTION,
                size=size,
                besides=besides,
            )
        forced = output.clone()
        self._force(forced, trace.attended[layer])
        return forced

    def at_the_end(self, rows: torch.Tensor) -> None:
        expected = self._trace.final
        assert expected is not None
        self.final = self._like(expected, rows)
        if self._last == len(self._model.layers) - 1:
            self._compare("rows behind the norm", expected, self.final, _OF_NORM)

    def _of_scores(self, layer: int, attention: Any) -> torch.Tensor:
        """How much of attention's output hangs on how its scores are summed: [].

        Scores are sums of head_dim products, in fp32, and Gemma 4 scales none of them: those of
        sharp heads are large, and so are their errors, of which a softmax makes twice as many.
        """
        queries, width = self._trace.queries[layer].float(), attention.qk_head_dim
        donor = self._model.layers[attention.layer_id].self_attn
        largest = queries.norm(dim=-1).max() * donor.k_norm.weight.abs().max() * math.sqrt(width)
        eps = torch.finfo(torch.float32).eps
        if queries.is_cuda and self._trace.queries[layer].dtype == torch.float32:
            eps = rounding.TF32 / math.sqrt(width)
        off: torch.Tensor = 2 * eps * largest
        return off


def keys_and_values_compared(
    where: str, expected: Iterable[torch.Tensor], found: Iterable[torch.Tensor]
) -> list[Comparison]:
    """K and V of ``where`` compared, each [rows, kv_heads, head_dim]."""

    def of_channels(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return tensor.reshape(-1, like.shape[-1])

    return [
        Comparison.of(f"{what} of {where}", of_channels(e, e), of_channels(f, e), _OF_KEYS)
        for what, e, f in zip(("keys", "values"), expected, found, strict=True)
    ]
