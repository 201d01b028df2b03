"""SGLang's recording of prefills, repaired for these models where the operator has asked for it.

SGLang 0.5.19 to 0.5.23 cannot record prefills of E2B and E4B: two layers that share K and V count
as an error, and a multimodal model is recorded with ids and embeddings at once (``docs/upstream``
has both reports). With ``--cuda-graph-backend-prefill=breakable`` such a server would not start.

So in the span in which SGLang records, and only there, the two are stepped over, each where the
installed SGLang needs it: what it cannot index stays as it came, and text is recorded from the ids
alone. Such a recording would answer a prompt with images as if it were text: those run eagerly
(``ServedModel.recorded_from_ids``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from sglang_gemma4_yoco import log, seams, settings
from sglang_gemma4_yoco.cutting import served
from sglang_gemma4_yoco.tail.shadow import Shadows

OFF = f"{settings.name_of('prefill_graphs')}=0"
NO_BREAKS = "it is recorded without breaks"


def needed(runner: Any, model: Any) -> str | None:
    """What keeps this ``ModelRunner`` from recording prefills and is to be repaired, or None.

    A server of which no batch may be cut is left as it is: SGLang may be set up in a way that
    nobody has tried with a repair.
    """
    known = served.find(model)
    if known is None or known.constant_reason is not None:
        return None
    return needed_for(multimodal=runner.model_config.is_multimodal)


def needed_for(*, multimodal: bool) -> str | None:
    """The same, of the server whose arguments are published."""
    if not settings.current.prefill_graphs or not seams.prefill_graphs_are_asked_for():
        return None
    return seams.prefill_graph_error(multimodal=multimodal)


def doors_refused() -> str | None:
    """Why no prefill may leave SGLang's recording, whatever is recorded; None if some may."""
    if not settings.current.prefill_graphs:
        return OFF
    return None if seams.prefill_graph_has_breaks() else NO_BREAKS


@contextmanager
def repaired(runner: Any, model: Any) -> Iterator[bool]:
    """SGLang can record prefills of ``model`` in the span.

    Yields:
        Whether anything had to be repaired.
    """
    why = needed(runner, model)
    if why is None:
        yield False
        return
    log.once(
        "Gemma 4 fast prefill: SGLang's recording of prefill CUDA graphs is repaired for this "
        f"model ({why}), because --cuda-graph-backend-prefill asks for them; {OFF} leaves it as "
        "it is"
    )
    with ExitStack() as span:
        span.enter_context(seams.indexing_shared_layers())
        shadows = span.enter_context(Shadows())
        shadows.add(model, "forward", seams.without_embeddings_beside_ids)
        yield True
