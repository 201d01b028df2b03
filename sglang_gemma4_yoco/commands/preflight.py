"""The part of ``doctor`` that needs SGLang: the seams, the model, and the server's flags.

Flags are judged by the code that judges them in a server. What a server finds out on objects that
it builds when it starts is not guessed at here.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from transformers import PretrainedConfig

from sglang_gemma4_yoco import seams, settings
from sglang_gemma4_yoco.commands.console import CommandError
from sglang_gemma4_yoco.commands.doctor import Findings
from sglang_gemma4_yoco.core.gate import EMBEDDINGS
from sglang_gemma4_yoco.core.state import first_shared_layer
from sglang_gemma4_yoco.loading import limits, metrics, patch, start

try:
    from sglang_gemma4_yoco.prefill_graphs import repair, sglang
except ImportError:  # as in ``loading.start``
    repair = None  # type: ignore[assignment]

#: What a server finds out when it starts, and says in its first line.
AT_START = "whether K and V can be read, whether the tail is captured, whether stock agrees"
#: Tokens. Longer prefills keep a GPU busy by themselves, and a replay pads them.
_WORTH_CAPTURING = 1024
# Arguments with which linear layers may be of another kind than the checkpoint's.
_QUANTISING = (
    *("quantization", "modelopt_quant", "quantize_and_serve", "rl_quant_profile"),
    "torchao_config",
)


def examine(
    findings: Findings, model: str | None, flags: Sequence[str], output: io.StringIO
) -> None:
    """Add everything that SGLang is needed for; ``output`` has what SGLang prints meanwhile."""
    findings.facts["plugins"]["installed"] = patch.is_installed()
    try:
        if not patch.is_installed():
            seams.check()
    except seams.SeamError as refusal:
        findings.refusals.append(str(refusal))
    if seams.is_newer_than_tested():
        findings.add("SGLang", f"newer than {seams.LAST_TESTED}, the last release tested")
    named = _value_of(("--model-path", "--model"), flags)
    if model is not None and named not in (None, model):
        raise CommandError(f"two models: --model-path {model}, and {named} after --; leave one")
    served = model or named
    if served is None:
        findings.unknowns.append("no model is named: give --model-path")
        return
    config = _model(findings, served, _value_of(["--revision"], flags))
    if config is not None:
        given = list(flags) if named else ["--model-path", served, *flags]
        _server(findings, config, given, output)


def _value_of(names: Sequence[str], flags: Sequence[str]) -> str | None:
    """The value of the last of these flags, if one is given."""
    value = None
    for flag, following in zip(flags, [*flags[1:], None], strict=False):
        name, equals, given = flag.partition("=")
        if name in names:
            value = given if equals else following
    return value


def _model(findings: Findings, name: str, revision: str | None) -> dict[str, Any] | None:
    """The model's config; None where the path would not be active, or it cannot be loaded."""
    findings.lines.append("Model")
    findings.facts["model"] = name
    findings.add("path", name)
    try:
        config: dict[str, Any] = PretrainedConfig.get_config_dict(name, revision=revision)[0]
        if not config:
            raise FileNotFoundError("it has no config.json")
    except Exception as failure:  # noqa: BLE001 - of a file, a network, a hub, or JSON
        why = next(iter(str(failure).splitlines()), "") or repr(failure)
        remedy = "give a directory with a config.json, or a name that this machine can download"
        findings.unknowns.append(f"the model {name} cannot be had ({why}): {remedy}")
        return None
    text = config.get("text_config", config)
    layers = text.get("num_hidden_layers")
    known = str(text.get("model_type", "")).startswith("gemma4") and layers is not None
    first = first_shared_layer(SimpleNamespace(**text)) if known else None
    findings.facts |= {"layers": layers, "first_shared": first, "quantisation": _quantised(config)}
    findings.add("architecture", ", ".join(config.get("architectures") or ["not named"]))
    findings.add("layers", str(layers))
    findings.add("quantisation", findings.facts["quantisation"] or "none, by its config")
    if first is None:
        findings.refusals.append(metrics.NO_MODEL)
        return None
    findings.add("first shared layer", f"{first}: layers {first} to {layers - 1} have no K/V")
    return config


def _quantised(config: Mapping[str, Any]) -> str | None:
    for part in (config, config.get("text_config") or {}):
        for name in ("quantization_config", "compression_config"):
            if part.get(name):
                return str(part[name].get("quant_method", name))
    return None


def _server(
    findings: Findings, config: Mapping[str, Any], flags: Sequence[str], output: io.StringIO
) -> None:
    findings.lines.append("A server with these flags")
    findings.add("flags", " ".join(flags))
    begin = output.tell()
    try:
        seams.publish_arguments(flags)
    except SystemExit as refused:
        printed = output.getvalue()[begin:].partition(": error: ")[2].splitlines()
        help_alone = "they ask for help or a version alone, and start no server"
        why = next(iter(printed), "SGLang's parser refuses them") if refused.code else help_alone
        raise CommandError(f"the server's flags: {why}") from None
    except Exception as failure:  # noqa: BLE001 - SGLang's own, of whatever kind
        why = " ".join(f"{type(failure).__name__}: {failure}".split())
        findings.unknowns.append(f"SGLang does not resolve these flags on this machine ({why})")
        return
    argument = seams.server_arguments()
    assert argument is not None, "they have been published"
    _prefill_graphs(findings, config, argument)
    _judge(findings, config, argument)


def _prefill_graphs(findings: Findings, config: Mapping[str, Any], argument: Any) -> None:
    """Would SGLang start with the prefill graphs of these flags, and are replays shortened?"""
    graph = seams.prefill_graph()
    if graph is None:
        return
    if repair is None:
        findings.add("prefill graphs", f"backend {graph!r}: exits are {start.NO_EXITS}")
        return
    sees = argument("enable_multimodal") is not False
    multimodal = sees and not config.get("language_model_only", False)
    why = sglang.capture_error(multimodal=multimodal)
    cut = patch.is_installed() and limits.server_reason() is None
    repaired = cut and repair.needed(multimodal=multimodal) is not None
    disabled = "--cuda-graph-backend-prefill=disabled"
    if why is not None and not repaired:
        off = "" if settings.current.prefill_graphs else f" ({repair.OFF}: it is not repaired)"
        findings.add("prefill graphs", f"backend {graph!r}: SGLang cannot capture this model{off}")
        stops = f"SGLang does not start with prefill CUDA graphs of this model ({why})"
        findings.refusals.append(f"{stops}; {disabled} starts it")
        return
    how = f"SGLang's capture is repaired ({why})" if repaired else "SGLang captures them"
    findings.add("prefill graphs", f"backend {graph!r}: {how}")
    closed, longest = repair.exits_refused(), seams.longest_captured_prefill()
    if closed is not None:
        findings.add(
            "", f"replayed prefills are not shortened ({closed}); {disabled} shortens them"
        )
        return
    findings.add("", "replayed prefills are shortened, where the check at start agrees")
    if longest is not None and longest > _WORTH_CAPTURING:
        advice = f"try --cuda-graph-max-bs-prefill={_WORTH_CAPTURING}"
        captured = f"captured are up to {longest} tokens; a replay of a long prefill gains nothing"
        findings.add("", f"{captured}: {advice}")


def _judge(findings: Findings, config: Mapping[str, Any], argument: Any) -> None:
    """What a start asks of the flags, by the same code; all else is settled at start."""
    if argument("model_impl") == "transformers":
        findings.refusals.append(metrics.NO_MODEL)
    if argument("is_embedding"):
        findings.refusals.append(EMBEDDINGS)
    findings.refusals += filter(None, (limits.server_reason(),))
    quantised = next(filter(None, map(argument, _QUANTISING)), None) or _quantised(config)
    if quantised is not None:
        findings.unknowns.append(
            f"quantisation {quantised}: the kinds of layers are settled when weights are loaded. "
            "Those whose rows do not depend on each other are admitted: among them fp8, AWQ, GPTQ "
            "and compressed-tensors, but not GGUF, bitsandbytes of 8 bits and torchao"
        )
    common = argument("attention_backend")
    names = {argument(f"{part}_attention_backend") or common for part in ("prefill", "decode")}
    findings.facts["attention"] = sorted(map(str, names))
    findings.add("attention backend", ", ".join(findings.facts["attention"]))
    others = [name for name in findings.facts["attention"] if name != seams.TAIL_BACKEND]
    if others:
        admitted = "Admitted are triton, trtllm_mha, fa4, intel_xpu, and hybrids of them"
        settled = f"attention by {', '.join(others)}: settled when a server has built it"
        findings.unknowns.append(f"{settled}. {admitted}")
    findings.add("settled at start", AT_START)
