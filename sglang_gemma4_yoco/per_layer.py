"""Per-layer inputs (PLE) with the tail layers' part computed for kept rows only.

``project_per_layer_inputs`` makes [T, L, width] for all L layers at once: a GEMM, a norm and four
elementwise passes. Layers from ``first_cut`` on read kept rows only, so the stock function is run
twice over a part of the layers each: all rows of the front, and, when somebody asks, the kept rows
of the rest. Rows are independent of each other and so are layers, hence the result is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional

from sglang_gemma4_yoco import seams


def can_be_split(model: Any) -> bool:
    """Whether this model has per-layer inputs and projects them with plain weights."""
    projection = getattr(model, "per_layer_model_projection", None)
    return projection is not None and seams.is_plain_linear(projection)


class _SomeLayers:
    """The model as ``project_per_layer_inputs`` sees it, with layers [start, stop) only."""

    def __init__(self, model: Any, start: int, stop: int) -> None:
        self._model = model
        self._columns = slice(
            start * model.hidden_size_per_layer_input, stop * model.hidden_size_per_layer_input
        )
        self.config = SimpleNamespace(num_hidden_layers=stop - start)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def per_layer_model_projection(self, embeds: torch.Tensor) -> tuple[torch.Tensor, None]:
        projection = self._model.per_layer_model_projection
        bias = None if projection.bias is None else projection.bias[self._columns]
        return functional.linear(embeds, projection.weight[self._columns], bias), None


class SplitInputs:
    """Stands in for the [T, L, width] tensor: the model takes ``inputs[:, layer, :]`` from it.

    A front layer gets its [T, width]. A layer from ``first_cut`` on gets a ``KeptInput``, which is
    computed when it is asked for, so that a chunk that nobody reads never pays for it.
    """

    def __init__(
        self,
        project: Callable[..., torch.Tensor],
        model: Any,
        embeds: torch.Tensor,
        embedded: torch.Tensor | None,
        first_cut: int,
        index: torch.Tensor,
    ) -> None:
        """Project the front's part, and keep what the rest needs.

        Args:
            project: the stock ``project_per_layer_inputs``, unbound.
            embeds: [T, hidden], the input embeddings.
            embedded: [T, L, width], the per-layer embeddings, or None.
            first_cut: the first layer that reads kept rows only.
            index: [B], the kept rows.
        """
        self._project = project
        self._model = model
        self._first_cut = first_cut
        self._layers: int = model.config.num_hidden_layers
        self._front = self._part(embeds, embedded, 0, first_cut)
        # Copies made now: the embeddings are layer 0's residual, which its fused add-norm
        # overwrites.
        self._embeds = embeds.index_select(0, index)
        self._embedded = None if embedded is None else embedded.index_select(0, index)
        self._rest: torch.Tensor | None = None

    def _part(
        self, embeds: torch.Tensor, embedded: torch.Tensor | None, start: int, stop: int
    ) -> torch.Tensor:
        part = None if embedded is None else embedded[:, start:stop]
        return self._project(_SomeLayers(self._model, start, stop), embeds, part)

    def __getitem__(self, key: tuple[slice, int, slice]) -> torch.Tensor | KeptInput:
        rows, layer, columns = key
        if rows != slice(None) or columns != slice(None):
            raise IndexError(f"per-layer inputs are read one layer at a time, not as {key}")
        return self._front[:, layer] if layer < self._first_cut else KeptInput(self, layer)

    def kept(self, layer: int) -> torch.Tensor:
        """[B, width] of one layer from ``first_cut`` on; the first call projects them all."""
        if self._rest is None:
            self._rest = self._part(self._embeds, self._embedded, self._first_cut, self._layers)
        return self._rest[:, layer - self._first_cut]


class KeptInput:
    """The per-layer input of one layer behind the cut, for kept rows only, not computed yet."""

    def __init__(self, inputs: SplitInputs, layer: int) -> None:
        self._inputs = inputs
        self._layer = layer

    def rows(self) -> torch.Tensor:
        """[B, width]."""
        return self._inputs.kept(self._layer)
