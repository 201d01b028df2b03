"""The protocol of text models whose last layers share K and V of earlier ones.

To add a model, write one module with the members of ``TextModelAdapter``, add it to
``models/registry.py``, and give it entries of its own in ``compat/backends.py``: evidence that a
class of attention backends is right for one model admits it for no other. The core's view of the
residual stream always has the rows first: [T, hidden] for Gemma 4, [T, 4, hidden] for the four
streams of Gemma 3n.

**Sharing.** The KV-shared layers are the last ones: S is the first of them, L is the number of
layers. Each reads K and V of one layer before S. Layer S-1, the last one with its own K and V, is
the donor (the KV source layer of the tail). The cut is inside the donor, which is not layer 0.

**Attributes.** ``compat/text_model.py`` has the attributes of a text model and of its layers that
are read outside of its file. ``layers_to_capture``, a list, is read if present.

**Calls.** SGLang calls the model with ``input_ids``, ``positions``, ``forward_batch``,
``input_embeds`` (the caller's embeddings, or None), in this order, and possibly more. The model
returns [T, hidden], or a tuple that begins with it. It calls its layers with keywords:
``hidden_states``, the residual stream; ``positions``; ``forward_batch``; and ``per_layer_input`` if
it has one. A layer returns the residual stream as one tensor. An attention is called with queries,
K and V, the batch, and ``save_kv_cache`` as a keyword.

**The self-check** (``checking/layerwise.py``) runs each step of the tail on stock's input. Its
tolerances assume that

- a row of keys is about as long as ``get_key_scale`` implies, and the queries' length is measured;
- scores are their products, multiplied by the attention's ``scaling``, without a bias or a cap;
- values are of about size 1 in every head;
- a layer adds to its residual at most three times, and ``norm`` does not shift its rows.

Otherwise review the bounds: one that is too small turns a correct path off, and one that is too
large hides a defect. Break the file on purpose, and see the check fail.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from torch import Tensor

from sglang_gemma4_yoco.compat.backends import BackendTable
from sglang_gemma4_yoco.compat.batch import ForwardBatch
from sglang_gemma4_yoco.compat.names import TextModelNames
from sglang_gemma4_yoco.compat.text_model import Method
from sglang_gemma4_yoco.refusal import ServerRefusal

OTHER_END = "the model does something else between its layers and its norm"


class NotCuttableError(Exception):
    """This model's forward cannot be cut; the message has the reason.

    Raised after the layers before the cut have run. The batch and all later ones fall back to
    stock.
    """


_Model = TypeVar("_Model", contravariant=True)
_Layer = TypeVar("_Layer", contravariant=True)


class TextModelAdapter(Protocol[_Model, _Layer]):
    """One class of text models; the modules of ``models/`` implement it.

    Attributes:
        SGLANG: the SGLang symbols that it uses. A missing one turns only this model off.
        MODEL_TYPES: the ``model_type`` of its text configs, for ``doctor``, which loads no model.
        ATTENTION_BACKENDS: its table in ``compat/backends.py``, admitted and refused ones.
        CUTS_MEDIA: prompts with images, video or audio may be cut.
        LEAVES_CAPTURED_PREFILLS: prefills that SGLang replays from CUDA graphs may be cut. Their
            capture (``compat/captured_prefills.py``) supports Gemma 4's residual stream only.
    """

    SGLANG: TextModelNames
    MODEL_TYPES: tuple[str, ...]
    ATTENTION_BACKENDS: BackendTable
    CUTS_MEDIA: bool
    LEAVES_CAPTURED_PREFILLS: bool

    def find_unsupported_reason(self, model: _Model) -> ServerRefusal | None:
        """Return why no forward of this model, which has KV-shared layers, can be cut; or None."""

    def get_row_shape(self, model: _Model) -> tuple[int, ...]:
        """Return the shape of one row of the residual stream: (hidden,) for Gemma 4."""

    def view_rows(self, residual: Tensor) -> Tensor:
        """Return the residual stream of the layers as a view with its rows first."""

    def stop_before_cut(
        self, model: _Model, cut: int, project: Method
    ) -> AbstractContextManager[list[Tensor]]:
        """Stop the model's forward before layer ``cut``, without its norm, in the ``with`` block.

        Yield a list. Instead of the norm, the residual [T, ...] at the input of layer ``cut`` is
        appended to it; the caller requires exactly one entry. All patches are undone at the end,
        also after an exception.

        Args:
            project: replaces the model's ``project_per_layer_inputs``, if it has any.

        Raises:
            NotCuttableError: in the block: the forward cannot be cut.
        """

    def compute_keys_and_values(
        self, layer: _Layer, rows: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return K and V of all rows, as the stock layer would write them.

        Reads nothing from the current batch: it also runs at start, on rows of zeros.

        Args:
            layer: the donor.
            rows: [T, ...], its input.
            positions: [T] int64.

        Returns:
            ``(k, v)``, each [T, kv_heads, head_dim], in the rows' type.
        """

    def run_tail(
        self,
        model: _Model,
        layers: Sequence[_Layer],
        batch: ForwardBatch,
        rows: Tensor,
        positions: Tensor,
        inputs: Tensor | None,
    ) -> Tensor:
        """Run the donor, the layers after it, and the model's code after its last layer.

        It is captured in a CUDA graph: it neither synchronizes nor depends on values, shapes follow
        from B alone, and its patches are undone, also after an exception. Python state is not
        updated in a replay. Some callers patch ``layers`` and their attentions: call these objects,
        not copies, with keyword arguments.

        Args:
            layers: S-1 to L-1. The donor reads its own K and V from the pool, as they do.
            batch: the batch of the kept rows; its attention metadata is current.
            rows: [B, ...], the residual at the input of the donor; may be overwritten.
            positions: [B] int64.
            inputs: [B, L - S + 1, width], the layers' per-layer inputs, or None.

        Returns:
            [B, hidden], normed.
        """

    def get_key_scale(self, layer: _Layer) -> Tensor:
        """Return the scale of the keys of a layer with its own K and V, by channel: [head_dim].

        The weight of their norm, or about their root mean square if there is no norm. The check at
        start makes synthetic keys of this scale, and the tolerance of attention's scores is
        proportional to it. It may be off by a factor of 2. With a hundredth of it, audits of sharp
        fp32 models reject right prefills; with ten thousand times as much, scores that are off by
        10 % pass.
        """


#: The adapter of some text model.
Adapter = TextModelAdapter[Any, Any]
