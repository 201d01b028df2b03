"""What the core must know of a text model whose last layers share K and V of earlier ones.

A model is one file of ``models/`` with the functions of ``TextModel``. Whatever its residual stream
is made of, the core has the rows of it first: [T, hidden] for Gemma 4, [T, 4, hidden] for the four
streams of Gemma 3n. S is the first KV-shared layer of L. Layer S-1, the last one with K and V
of its own, is the donor, in other words the KV source layer of the tail.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from sglang_gemma4_yoco import compat

OTHER_END = "the model does something else between its layers and its norm"


class NotCuttableError(Exception):
    """This model's forward cannot be cut; the message has the reason.

    It is raised after the layers before the cut have run. Only time is lost: the stock forward then
    serves the batch from its beginning.
    """


class TextModel(Protocol):
    """One class of text models; a module of ``models/`` fulfils it.

    Whoever adds a model writes these functions, names its class in ``models/registry.py``, and adds
    the modules of the models around it to ``loading/classes.py``. The check at start compares each
    step of the tail with stock's, so it finds what was misunderstood.

    Attributes:
        CUTS_MEDIA: prompts with images, video or audio may be cut.
        LEAVES_CAPTURED_PREFILLS: so may prefills that SGLang replays from CUDA graphs.
        MODEL_TYPES: the ``model_type`` of its configs, for ``doctor``, which loads no model.
        ATTENTION: the attention backends that it admits.
    """

    CUTS_MEDIA: bool
    LEAVES_CAPTURED_PREFILLS: bool
    MODEL_TYPES: tuple[str, ...]
    ATTENTION: compat.backends.Attention

    def find_unsupported_reason(self, model: Any, main: Any) -> str | None:
        """Why no forward of this model, which has KV-shared layers, can be cut; or None.

        Args:
            main: the server's attention backend, which ``ATTENTION`` judges.
        """

    def get_row_shape(self, model: Any) -> tuple[int, ...]:
        """The shape of one row of the residual stream between two layers: (hidden,) for Gemma 4."""

    def view_rows(self, residual: torch.Tensor) -> torch.Tensor:
        """The residual stream, as layers take and return it, with its rows first; a view."""

    def stop_before_cut(
        self, model: Any, cut: int, project: Callable[..., Any]
    ) -> AbstractContextManager[list[torch.Tensor]]:
        """In the ``with`` block the model's forward runs layers 0 to ``cut`` - 1, and no norm.

        It yields a list, to which each call of what follows the layers adds its rows [T, ...], the
        residual at the input of layer ``cut``. There must be one such call.

        Args:
            project: replaces the model's ``project_per_layer_inputs``.

        Raises:
            NotCuttableError: in the block: the forward is not one that can be cut.
        """

    def compute_keys_and_values(
        self, layer: Any, rows: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of all rows, as the stock layer would write them.

        Args:
            layer: the donor.
            rows: [T, ...], its input.
            positions: [T] int64.

        Returns:
            ``(k, v)``, each [T, kv_heads, head_dim], in the rows' type.
        """

    def run_tail(
        self,
        model: Any,
        layers: list[Any],
        batch: Any,
        rows: torch.Tensor,
        positions: torch.Tensor,
        inputs: torch.Tensor | None,
    ) -> torch.Tensor:
        """Run the donor, the layers after it, and what the model does after its last layer.

        Args:
            layers: S-1 to L-1. The donor reads its own K and V from the pool, as they do.
            batch: the batch of the kept rows, whose attention is planned and is the current one.
            rows: [B, ...], the residual at the input of the donor; may be overwritten.
            positions: [B] int64.
            inputs: [B, L - S + 1, width], the layers' per-layer inputs; None without any.

        Returns:
            [B, hidden], normed.
        """
