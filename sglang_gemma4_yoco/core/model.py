"""The protocol of text models whose last layers share K and V of earlier ones.

To add a model, write one file with the functions of ``TextModel``, and name it in
``models/registry.py``. Whatever its residual stream is made of, the core has the rows of it first:
[T, hidden] for Gemma 4, [T, 4, hidden] for the four streams of Gemma 3n.

**Sharing.** The KV-shared layers are the last ones: S is the first of them, L is the number of
layers. They read K and V of layers before S, each of one layer. Layer S-1, the last one with K and
V of its own, is the donor, in other words the KV source layer of the tail, and is cut inside. It is
not layer 0.

**Attributes.** All else that is read of a text model outside of its file:

- ``config.num_hidden_layers`` (L), ``config.num_kv_shared_layers`` (L - S), ``config.hidden_size``
  and ``config.vocab_size``;
- ``layers``, all L of them; ``self_attn.attn`` of each is its ``RadixAttention``, whose
  ``layer_id`` is that of the layer whose K and V it reads;
- ``norm``, a module, which is called once with the rows after the last layer;
- ``layers_to_capture``, if there is such a list;
- of a model with per-layer inputs ``project_per_layer_inputs``, ``per_layer_model_projection``,
  ``embed_tokens_per_layer`` and ``hidden_size_per_layer_input``, as Gemma 4 has them. A model
  without ``per_layer_model_projection`` has no per-layer inputs.

**Calls.** SGLang calls the model with ``input_ids``, ``positions`` and ``forward_batch``, which may
be followed by others. Embeddings that its caller has made are ``input_embeds``, at any place. It
returns [T, hidden], or a tuple that begins with it. The model calls its layers with keywords:
``hidden_states``, the residual stream; ``positions``; ``forward_batch``; and ``per_layer_input`` if
it has one. A layer returns the residual stream, as one tensor. An attention is called with queries,
K and V, the batch, and ``save_kv_cache`` as a keyword.

**The check at start** (``checking/layerwise.py``) gives each step of the tail stock's own input.
What it allows for rounding assumes that

- a row of keys is about as long as ``get_key_scale`` says, and the queries' length is measured;
- scores are their products, multiplied by the attention's ``scaling``, without a bias or a cap;
- values are of about size 1 in every head;
- a layer adds at most two or three sums to its residual, and ``norm`` does not shift its rows.

Elsewhere the bounds must be looked at again: too small a bound turns a correct path off, and one
that is too large hides a defect. Break the file on purpose, and see the check find it.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from sglang_gemma4_yoco.compat.backends import Attention
from sglang_gemma4_yoco.compat.names import TextModelNames
from sglang_gemma4_yoco.refusal import ServerRefusal

OTHER_END = "the model does something else between its layers and its norm"


class NotCuttableError(Exception):
    """This model's forward cannot be cut; the message has the reason.

    It is raised after the layers before the cut have run. Only time is lost: the stock forward then
    serves the batch from its beginning.
    """


class TextModelAdapter(Protocol):
    """One class of text models; a module of ``models/`` fulfils it.

    Attributes:
        SGLANG: what the file uses of SGLang. What a release lacks turns this model off alone.
        MODEL_TYPES: the ``model_type`` of its text's configs, for ``doctor``, which loads no model.
        ATTENTION: the attention backends that it admits: those of ``compat/backends.py``.
        CUTS_MEDIA: prompts with images, video or audio may be cut.
        LEAVES_CAPTURED_PREFILLS: so may prefills that SGLang replays from CUDA graphs. Their
            capture (``compat/captured_prefills.py``) is known for Gemma 4's residual stream alone.
    """

    SGLANG: TextModelNames
    MODEL_TYPES: tuple[str, ...]
    ATTENTION: Attention
    CUTS_MEDIA: bool
    LEAVES_CAPTURED_PREFILLS: bool

    def find_unsupported_reason(self, model: Any) -> ServerRefusal | None:
        """Return why no forward of this model, which has KV-shared layers, can be cut; or None."""

    def get_row_shape(self, model: Any) -> tuple[int, ...]:
        """The shape of one row of the residual stream between two layers: (hidden,) for Gemma 4."""

    def view_rows(self, residual: torch.Tensor) -> torch.Tensor:
        """The residual stream, as layers take and return it, with its rows first; a view."""

    def stop_before_cut(
        self, model: Any, cut: int, project: Callable[..., Any]
    ) -> AbstractContextManager[list[torch.Tensor]]:
        """Stop the model's forward before layer ``cut``, without its norm, in the ``with`` block.

        It yields a list, to which each call of what follows the layers adds its rows [T, ...], the
        residual at the input of layer ``cut``. There must be one such call. Whatever is replaced is
        put back at the end, also after an exception.

        Args:
            project: replaces the model's ``project_per_layer_inputs``, if it has any.

        Raises:
            NotCuttableError: in the block: the forward is not one that can be cut.
        """

    def compute_keys_and_values(
        self, layer: Any, rows: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of all rows, as the stock layer would write them.

        It reads nothing of the current batch: it also runs at start, on rows of zeros.

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

        It is captured in a CUDA graph: nothing in it waits for the device or depends on values,
        shapes follow from B alone, and what it replaces for the run is put back, also after an
        exception. What it keeps in Python is not there in a replay. Some callers watch ``layers``
        and their attentions, so it calls those, with keywords, and no copies.

        Args:
            layers: S-1 to L-1. The donor reads its own K and V from the pool, as they do.
            batch: the batch of the kept rows, whose attention is planned and is the current one.
            rows: [B, ...], the residual at the input of the donor; may be overwritten.
            positions: [B] int64.
            inputs: [B, L - S + 1, width], the layers' per-layer inputs; None without any.

        Returns:
            [B, hidden], normed.
        """

    def get_key_scale(self, layer: Any) -> torch.Tensor:
        """How large the keys of a layer with K and V of its own are, by channel: [head_dim].

        The weight of their norm, or about their root mean square where they have none. The check at
        start makes synthetic keys of this size.
        """
