"""What the text model is given for a prompt of text: made of its ids, and by SGLang's eager model.

SGLang's multimodal model takes the per-layer embeddings of ids that stand for media (of a literal
``<image>`` in a text, say) from its padding. A graph that is captured from ids must do the same.
"""

from typing import Any

import torch

from sglang_gemma4_yoco import counters
from sglang_gemma4_yoco.checking.requests import NotComparableError, Request, make_prefill_batch
from sglang_gemma4_yoco.replaced import replaced

#: Where the configuration of a multimodal model has these ids.
_PLACEHOLDERS = ("image_token_id", "video_token_id", "audio_token_id")

#: Of T ids the embeddings [T, hidden], and the per-layer ones [T, layers, width], if there are any.
Inputs = tuple[torch.Tensor, torch.Tensor | None]


class _Given(Exception):  # noqa: N818 - it ends a forward that has done what it was run for
    """The inputs of the text model, whose layers do not run."""


def embed_text(model: Any, config: Any, ids: torch.Tensor) -> Inputs:
    """The embeddings of text, as SGLang's eager model makes them; can be captured.

    Args:
        model: a ``Gemma4TextModel``.
        config: of the multimodal model around it.
        ids: [T].
    """
    embeds = model.embed_tokens(ids)
    for name in _PLACEHOLDERS:
        placeholder = getattr(config, name, None)
        if placeholder is not None:
            ids = ids.masked_fill(ids == placeholder, config.text_config.pad_token_id)
    return embeds, model.get_per_layer_inputs(ids)


@torch.no_grad()
def inputs_agree(runner: Any, model: Any) -> bool:
    """Return True if ``embed_text`` makes of ids what SGLang's eager model does, bit for bit.

    The prompt has every id that the configuration names, not only those that are known to be
    special. It needs no slots: no layer runs.

    Raises:
        NotComparableError: SGLang gives its text model something else than what is known here.
    """
    ids = _list_named_ids(runner)
    made: Any = embed_text(model, runner.model.config, ids)
    for own, given in zip(made, get_given_inputs(runner, model, ids), strict=True):
        if given is not None and not torch.equal(own, given):
            return False
    return True


def get_given_inputs(runner: Any, model: Any, ids: torch.Tensor) -> Any:
    """What SGLang's eager model gives its text model for these ids: ``Inputs``."""
    no_slots = torch.zeros_like(ids)
    text = Request(0, 0, ids, no_slots, no_slots)
    batch = make_prefill_batch(runner, [text], starts=None, finishes=True)

    def project(embeds: torch.Tensor, embedded: torch.Tensor | None = None) -> None:
        raise _Given(embeds, embedded)

    try:
        with counters.count_apart(), replaced(model, project_per_layer_inputs=project):
            # A batch that was not planned runs as stock.
            runner.model.forward(ids, batch.positions, batch)
    except _Given as inputs:
        return inputs.args
    raise NotComparableError("the text model has not projected its inputs")


def _list_named_ids(runner: Any) -> torch.Tensor:
    """Every id that the model's configuration names; others take the place of unknown ones."""
    config = runner.model.config
    names = vars(getattr(config, "text_config", config)) | vars(config)
    named = {value for name, value in names.items() if "_token_" in name and type(value) is int}
    vocabulary: int = runner.model_config.vocab_size
    return torch.tensor(sorted(named), device=runner.device) % vocabulary
