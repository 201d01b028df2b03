"""Install the wrappers into SGLang's classes, and take them out again.

Two methods are wrapped, on their classes: ``Gemma4TextModel.forward`` decides and runs the cut,
``ModelRunner.init_attention_backends`` gives the tail its own backend. Two helpers are added to
``Gemma4TextModel``. Nothing is replaced, so models that imported the class by name are patched too.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch

from sglang_gemma4_yoco import __version__, cut, fallback, gate, ranks, report, seams
from sglang_gemma4_yoco.attention import TailAttention

_Model = seams.gemma4_causal.Gemma4TextModel
_Runner = seams.ModelRunner

# (class, attribute) -> (the original, our wrapper), while installed.
_installed: dict[tuple[type, str], tuple[Any, Any]] = {}
_attached: weakref.WeakSet[TailAttention] = weakref.WeakSet()


class AlreadyInstalledError(RuntimeError):
    """This process's SGLang is patched by this package already."""


def _yoco_eligibility(self: Any, forward_batch: Any) -> bool:
    """Whether this forward may skip, in the KV-shared layers, the rows that nobody reads."""
    return gate.ineligible_reason(self, forward_batch) is None


def _yoco_truncate_to_last_tokens(
    self: Any, hidden_states: Any, positions: Any, per_layer_inputs: Any, forward_batch: Any
) -> Any:
    """See ``cut.truncate_to_last_tokens``."""
    if not isinstance(hidden_states, torch.Tensor):
        # The helper was published in two argument orders; in the other one the batch leads.
        forward_batch, hidden_states, positions, per_layer_inputs = (
            hidden_states,
            positions,
            per_layer_inputs,
            forward_batch,
        )
    return cut.truncate_to_last_tokens(
        self, hidden_states, positions, per_layer_inputs, forward_batch
    )


def _with_fast_prefill(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def forward(
        self: Any, input_ids: Any, positions: Any, forward_batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if forward_batch.forward_mode is seams.ForwardMode.DECODE or torch.compiler.is_compiling():
            return stock(self, input_ids, positions, forward_batch, *args, **kwargs)
        run = functools.partial(stock, self, input_ids, positions, forward_batch, *args, **kwargs)
        embeds = kwargs.get("input_embeds", args[0] if args else None)
        return _fast_or_stock(self, forward_batch, embeds, run)

    return forward


def _fast_or_stock(
    model: Any, forward_batch: Any, embeds: torch.Tensor | None, run: Callable[[], Any]
) -> Any:
    """One prefill forward. ``run`` is the stock one, which the cut makes fast.

    See ``fallback`` for what happens when that fails.
    """
    copy = fast = None
    try:
        reason = cut.refusal(model, forward_batch)
        if reason is None:
            copy = fallback.copy_of(embeds)
            fast = cut.Cut(model, forward_batch)
            with fast:
                output = run()
            if fast.done:
                report.active(model, lambda: _description(model), tail_skipped=fast.tail.unread)
                fallback.succeeded()
            return output
    except cut.LateRefusalError as late:
        reason = str(late)  # on all ranks alike, as any refusal
    except Exception as failure:
        if not fallback.is_alone():
            raise
        fallback.failed(failure)
        fallback.put_back(embeds, copy)
        if fast is not None and cut.tail_attention(model) is None:
            # The runner's own metadata was the tail's for a while, and this may be why it failed.
            cut.plan_as_stock(forward_batch)
        return run()
    report.stepped_aside(reason)
    fallback.put_back(embeds, copy)
    return run()


def _description(model: Any) -> str:
    backend = type(seams.current_attn_backend()).__name__
    planned = "planned ahead" if cut.tail_attention(model) is not None else "rebuilt at the cut"
    return (
        f"{type(model).__name__} with hidden size {model.config.hidden_size}, "
        f"{cut.describe(model)}, attention by {backend}, {planned}"
    )


def _with_tail_attention(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def init_attention_backends(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = stock(self, *args, **kwargs)
        if not getattr(self, "is_draft_worker", False):
            for model in _text_models(self.model):
                _give_tail_attention(self, model)
        return result

    return init_attention_backends


def _text_models(module: torch.nn.Module) -> list[Any]:
    """The text models in ``module`` that have a KV-shared tail."""
    return [
        model
        for model in module.modules()
        if isinstance(model, _Model) and gate.first_shared_layer(model.config) is not None
    ]


def _give_tail_attention(runner: Any, model: Any) -> None:
    """Build the tail's backend, unless this process never takes the fast path."""
    previous = cut.tail_attention(model)
    if previous is not None:
        previous.detach()
    facts = model.__dict__
    facts.pop("_yoco_donor_cut", None)
    reason = gate.constant_reason(model) if runner.is_generation else gate.EMBEDDINGS
    attention = _tail_attention(runner, model) if reason is None else None
    reason = ranks.disagreement(_findings(reason, attention)) or reason
    facts["_yoco_server_reason"] = reason
    if reason is not None:
        report.once(f"Gemma 4 fast prefill steps aside for this server: {reason}")
        return
    if attention is not None:
        attention.attach()
        _attached.add(attention)
    graph = seams.prefill_graph()
    if graph is not None:
        # A replay runs no Python, so nothing could be said when it happens.
        report.once(
            f"Gemma 4 fast prefill does not reach prefills that are replayed from a CUDA graph "
            f"(backend {graph!r}); --cuda-graph-backend-prefill=disabled runs them through it",
            logging.WARNING,
        )


def _findings(reason: str | None, attention: TailAttention | None) -> str:
    """What must be the same on all ranks for a batch to be cut on all of them."""
    return f"{__version__}, planned ahead: {attention is not None}, stepping aside: {reason}"


def _tail_attention(runner: Any, model: Any) -> TailAttention | None:
    """The tail's own backend, or None and a line in the log. Never raises."""
    try:
        return TailAttention(model, runner.attn_backend, seams.build_attn_backend(runner))
    except Exception as failure:  # noqa: BLE001 - the rebuilt backend serves as well, only slower
        report.once(
            f"No attention backend of its own for the tail ({failure!r}): "
            f"{type(runner.attn_backend).__name__} is rebuilt at the cut instead",
            logging.WARNING,
        )
        return None


def is_installed() -> bool:
    """Whether this process's SGLang is patched by this package."""
    return bool(_installed)


def install() -> None:
    """Patch SGLang's classes in this process.

    Raises:
        AlreadyInstalledError: nothing is changed.
        seams.SeamError: the installed SGLang is not supported; nothing is changed.
    """
    if _installed:
        raise AlreadyInstalledError(
            "it is installed already in this process; call uninstall() first"
        )
    seams.check()
    fallback.reset()
    wrappers = {
        (_Model, "forward"): _with_fast_prefill(_Model.forward),
        (_Runner, "init_attention_backends"): _with_tail_attention(_Runner.init_attention_backends),
    }
    for (owner, name), wrapper in wrappers.items():
        _installed[owner, name] = (getattr(owner, name), wrapper)
        setattr(owner, name, wrapper)
    _Model._yoco_eligibility = _yoco_eligibility
    _Model._yoco_truncate_to_last_tokens = _yoco_truncate_to_last_tokens


def uninstall() -> None:
    """Put the very originals back, and let go of every backend.

    Raises:
        RuntimeError: another plugin has wrapped one of the methods since; taking ours out would
            take theirs with it, so nothing is changed.
    """
    for (owner, name), (_, wrapper) in _installed.items():
        if getattr(owner, name) is not wrapper:
            raise RuntimeError(
                f"{owner.__name__}.{name} was wrapped by someone else after this package; "
                "take that wrapper out first"
            )
    for (owner, name), (original, _) in _installed.items():
        setattr(owner, name, original)
    if _installed:
        del _Model._yoco_eligibility
        del _Model._yoco_truncate_to_last_tokens
    _installed.clear()
    for attention in list(_attached):
        attention.detach()
    _attached.clear()
