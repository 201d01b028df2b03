"""Per-layer inputs (PLE) with the tail layers' part computed for kept rows only.

``project_per_layer_inputs`` makes [T, L, width] for all L layers at once: a GEMM, a norm and four
elementwise passes. Layers from ``first_cut`` on read kept rows only, so the stock function is run
twice over a part of the layers each: all rows of the front, and, when somebody asks, the kept rows
of the rest. Rows are independent of each other and so are layers, hence the result is the same.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

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


def project(
    model: Any, embeds: torch.Tensor, embedded: torch.Tensor | None, start: int, stop: int
) -> torch.Tensor:
    """Per-layer inputs of layers [start, stop), by the stock function.

    Args:
        embeds: [rows, hidden], the input embeddings.
        embedded: [rows, stop - start, width], these layers' per-layer embeddings, or None.

    Returns:
        [rows, stop - start, width].
    """
    some_layers = _SomeLayers(model, start, stop)
    projected: torch.Tensor = type(model).project_per_layer_inputs(some_layers, embeds, embedded)
    return projected


class Room(NamedTuple):
    """Where recorded layers expect what their per-layer inputs are made of.

    Attributes:
        embeds: [B, hidden], for the kept rows' input embeddings.
        embedded: [B, recorded layers, width], for their per-layer embeddings; None without any.
    """

    embeds: torch.Tensor
    embedded: torch.Tensor | None


class SplitInputs:
    """Stands in for the [T, L, width] tensor: the model takes ``inputs[:, layer, :]`` from it.

    Its loop runs the front's layers alone. The inputs of those from ``first_cut`` on are computed
    when the tail asks for them, so that a chunk that nobody reads never pays for them.
    """

    def __init__(
        self,
        model: Any,
        embeds: torch.Tensor,
        embedded: torch.Tensor | None,
        first_cut: int,
        index: torch.Tensor,
        room: Room | None = None,
    ) -> None:
        """Project the front's part, and keep what the rest needs.

        Args:
            embeds: [T, hidden], the input embeddings.
            embedded: [T, L, width], the per-layer embeddings, or None.
            first_cut: the first layer that reads kept rows only.
            index: [B], the kept rows.
            room: of the layers that are replayed, which project their inputs themselves.
        """
        self._model = model
        self._first_cut = first_cut
        of_front = None if embedded is None else embedded[:, :first_cut]
        self._front = project(model, embeds, of_front, 0, first_cut)
        # Copies made now: the embeddings are layer 0's residual, which its fused add-norm
        # overwrites.
        self._embeds = torch.index_select(
            embeds, 0, index, out=None if room is None else room.embeds
        )
        self._embedded = None
        if embedded is not None:
            self._embedded = torch.index_select(
                embedded[:, first_cut:], 0, index, out=None if room is None else room.embedded
            )

    def __getitem__(self, key: tuple[slice, int, slice]) -> torch.Tensor | None:
        rows, layer, columns = key
        if rows != slice(None) or columns != slice(None):
            raise IndexError(f"per-layer inputs are read one layer at a time, not as {key}")
        return self._front[:, layer] if layer < self._first_cut else None

    def kept(self) -> torch.Tensor:
        """[B, L - first_cut, width]."""
        stop = self._model.config.num_hidden_layers
        return project(self._model, self._embeds, self._embedded, self._first_cut, stop)
