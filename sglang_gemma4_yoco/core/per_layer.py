"""Per-layer inputs (PLE), computed for kept rows only in the tail's layers.

SGLang's ``project_per_layer_inputs`` computes [T, L, width] for all L layers at once. Here it is
called twice: for the layers before the cut on all rows, and for the tail's layers on the kept rows.
Rows and layers are independent, so the results are the same.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from sglang_gemma4_yoco import compat
from sglang_gemma4_yoco.compat.text_model import TextModel
from sglang_gemma4_yoco.patched import patched


def can_be_split(model: TextModel) -> bool:
    """Return True if this model projects all of its per-layer inputs with plain weights."""
    projection = getattr(model, "per_layer_model_projection", None)
    if projection is None or not compat.layers.is_plain_linear(projection):
        return False
    # With several ranks each may have a shard of them, as in Gemma 3n.
    columns: int = model.config.num_hidden_layers * model.hidden_size_per_layer_input
    return len(projection.weight) == columns


def project_layers(
    model: TextModel, embeds: Tensor, embedded: Tensor | None, start: int, stop: int
) -> Tensor:
    """Return the per-layer inputs of layers [start, stop), computed by the stock function.

    It sees a model that has these layers only. Unnecessary once it takes a range of layers.

    Args:
        embeds: [rows, hidden], the input embeddings.
        embedded: [rows, stop - start, width], these layers' per-layer embeddings, or None.

    Returns:
        [rows, stop - start, width].
    """
    width = model.hidden_size_per_layer_input
    weight = model.per_layer_model_projection.weight[start * width : stop * width]

    def project_columns(rows: Tensor) -> tuple[Tensor, None]:
        return functional.linear(rows, weight), None

    with patched(
        model,
        config=SimpleNamespace(num_hidden_layers=stop - start),
        per_layer_model_projection=project_columns,
    ):
        projected: Tensor = type(model).project_per_layer_inputs(model, embeds, embedded)
    return projected


class Buffers(NamedTuple):
    """The memory from which a captured tail projects its per-layer inputs.

    Attributes:
        embeds: [B, hidden], for the kept rows' input embeddings.
        embedded: [B, L - cut, width], for their per-layer embeddings, or None.
    """

    embeds: Tensor
    embedded: Tensor | None


@dataclass(eq=False)
class PerLayerInputs:
    """The inputs of one forward. ``project`` replaces the model's ``project_per_layer_inputs``.

    Attributes:
        cut: the first layer that reads kept rows only.
        index: [B], the kept rows.
        buffers: those of a captured tail, which projects its inputs itself; otherwise None.
        split: ``can_be_split(model)``.
    """

    model: TextModel
    cut: int
    index: Tensor
    buffers: Buffers | None
    split: bool
    _projected: Tensor | None = None
    _embeds: Tensor | None = None
    _embedded: Tensor | None = None

    def project(self, embeds: Tensor, embedded: Tensor | None = None) -> Tensor | None:
        """Project the inputs of the layers before the cut, and keep the sources of the tail's.

        Args:
            embeds: [T, hidden], the input embeddings.
            embedded: [T, L, width], the per-layer embeddings, or None.

        Returns:
            [T, cut, width], or [T, L, width] if they cannot be split; None if the model has none.
        """
        if not self.split:
            self._embeds = embeds
            self._projected = type(self.model).project_per_layer_inputs(
                self.model, embeds, embedded
            )
            return self._projected
        into_embeds = into_embedded = before_cut = None
        if self.buffers:
            into_embeds, into_embedded = self.buffers
        # Copied now: the embeddings are layer 0's residual, which its fused add-norm overwrites.
        self._embeds = torch.index_select(embeds, 0, self.index, out=into_embeds)
        if embedded is not None:
            before_cut = embedded[:, : self.cut]
            self._embedded = torch.index_select(
                embedded[:, self.cut :], 0, self.index, out=into_embedded
            )
        return project_layers(self.model, embeds, before_cut, 0, self.cut)

    def are_complete(self) -> bool:
        """Return True if the model has projected them, with the inputs that a captured tail needs.

        Always True for a model without per-layer inputs.
        """
        if self._embeds is None:
            return getattr(self.model, "per_layer_model_projection", None) is None
        return not self.buffers or (self._embedded is None) == (self.buffers.embedded is None)

    def get_kept(self) -> Tensor | None:
        """Return the tail's per-layer inputs, [B, L - cut, width], or None."""
        if self.split and self._embeds is not None:
            return project_layers(
                self.model,
                self._embeds,
                self._embedded,
                self.cut,
                self.model.config.num_hidden_layers,
            )
        if self._projected is None:
            return None
        return self._projected[:, self.cut :].index_select(0, self.index)
