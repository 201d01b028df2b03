"""SGLang's text models, their layers and methods: what the package reads of them."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from sglang.srt.layers.radix_attention import RadixAttention as RadixAttention
from torch import Tensor, nn

#: A method of SGLang, which may have other parameters in another release.
Method = Callable[..., Any]
#: The output of a text model: [T, hidden], or a tuple that begins with it.
ModelOutput = Tensor | tuple[Tensor, *tuple[object, ...]]


class TextConfig(Protocol):
    """The config of a text model: L layers, of which the last L - S are KV-shared."""

    num_hidden_layers: int
    num_kv_shared_layers: int
    hidden_size: int
    vocab_size: int


class TextAttention(Protocol):
    """The attention of a layer; ``attn.layer_id`` is the layer whose K and V it reads."""

    attn: RadixAttention


class TextLayer(Protocol):
    """A decoder layer, a PyTorch module."""

    self_attn: TextAttention
    forward: Method
    modules: Method
    register_forward_pre_hook: Method


class TextModel(Protocol):
    """A text model, a PyTorch module.

    Attributes:
        layers: all L of them.
        norm: called once, with the rows after the last layer.
    """

    config: TextConfig
    layers: Sequence[TextLayer]
    norm: nn.Module
    forward: Callable[..., ModelOutput]

    # With per-layer inputs, as in Gemma 4. A model without ``per_layer_model_projection`` has none.
    per_layer_model_projection: nn.Linear
    project_per_layer_inputs: Method
    embed_tokens_per_layer: object
    hidden_size_per_layer_input: int

    # Read if prefills of the model may leave SGLang's graphs.
    embed_tokens: Method
    get_per_layer_inputs: Method
