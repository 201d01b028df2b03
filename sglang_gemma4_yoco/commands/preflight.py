"""The part of ``doctor`` that needs SGLang: the seams, the model, and the server's flags.

Flags are judged by the code that judges them in a server. What a server only determines when it
starts is not guessed at here.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Mapping, Sequence
from importlib import import_module
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

#: What a server only determines when it starts, and logs in its first line.
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
    """Add everything that needs SGLang; ``output`` has what SGLang prints meanwhile."""
    findings.facts["plugins"]["installed"] = patch.is_installed()
    try:
        if not patch.is_installed():
            seams.check()
    except seams.SeamError as refusal:
        findings.refusals.append(str(refusal))
    if seams.is_newer_than_tested():
        findings.add("SGLang", f"newer than {seams.LAST_TESTED}, the last release tested")
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model-path", "--model", nargs="?")
    parser.add_argument("--revision", nargs="?")
    given, _ = parser.parse_known_args(flags)
    named = given.model_path
    served = model or named
    if named not in (None, served):
        raise CommandError(f"two models: --model-path {model}, and {named} after --; leave one")
    if served is None:
        findings.unknowns.append("no model is named: give --model-path")
        return
    config = _model(findings, served, given.revision)
    if config is not None:
        _server(findings, config, flags if named else ["--model-path", served, *flags], output)


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
        findings.unknowns.append(f"the model {name} cannot be read ({why}): {remedy}")
        return None
    text = config.get("text_config", config)
    layers = text.get("num_hidden_layers")
    known = str(text.get("model_type", "")).startswith("gemma4") and layers is not None
    first = first_shared_layer(SimpleNamespace(**text)) if known else None
    quantised = _quantised(config)
    findings.facts |= {"layers": layers, "first_shared": first, "quantisation": quantised}
    findings.add("architecture", ", ".join(config.get("architectures") or ["not named"]))
    findings.add("layers", str(layers))
    findings.add("quantisation", quantised or "none, by its config")
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
        _publish(flags)
    except SystemExit as refused:
        printed = output.getvalue()[begin:].partition(": error: ")[2].splitlines()
        why = next(iter(printed), "SGLang's parser refuses them")
        help_alone = "with --help or --version they start no server"
        raise CommandError(f"the server's flags: {why if refused.code else help_alone}") from None
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
    backend, disabled = f"backend {graph!r}", "--cuda-graph-backend-prefill=disabled"
    if why is not None and not repaired:
        off = "" if settings.current.prefill_graphs else f" ({repair.OFF}: it is not repaired)"
        findings.add("prefill graphs", f"{backend}: SGLang cannot capture this model{off}")
        stops = f"SGLang does not start with prefill CUDA graphs of this model ({why})"
        findings.refusals.append(f"{stops}; {disabled} starts it")
        return
    how = f"SGLang's capture is repaired ({why})" if repaired else "SGLang captures them"
    findings.add("prefill graphs", f"{backend}: {how}")
    closed = repair.exits_refused()
    if closed is not None:
        stock = f"replayed prefills are not shortened ({closed})"
        findings.add("", f"{stock}; {disabled} shortens them")
        return
    findings.add("", "replayed prefills are shortened, where the check at start agrees")
    captures = seams.prefill_captures()
    buckets = getattr(captures, "bs", None) or ()
    longest = max(buckets, default=getattr(captures, "max_bs", None))
    if longest is not None and longest > _WORTH_CAPTURING:
        captured = f"prefills of up to {longest} tokens are captured; long ones gain nothing by it"
        findings.add("", f"{captured}: try --cuda-graph-max-bs-prefill={_WORTH_CAPTURING}")


def _judge(findings: Findings, config: Mapping[str, Any], argument: Any) -> None:
    """What a start decides by the flags, by the same code; all else is settled at start."""
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
        findings.unknowns.append(
            f"attention by {', '.join(others)}: settled when a server has built it. Admitted are "
            "triton, trtllm_mha, fa4, intel_xpu, and hybrids of them"
        )
    findings.add("settled at start", AT_START)


def _publish(flags: Sequence[str]) -> None:
    """Take this process for a scheduler of the server that these flags would start.

    SGLang itself parses, resolves, checks and publishes them; nothing is started.

    Raises:
        SystemExit: its parser refuses them, and has printed why.
        Exception: they cannot be resolved on this machine, or contradict each other.
    """
    args = import_module("sglang.srt.server_args").prepare_server_args(list(flags))
    if hasattr(args, "resolve_once"):  # 0.5.20; before, the parser does it
        args.resolve_once()
    args.check_server_args()
    context = import_module("sglang.srt.runtime_context")
    ranks: dict[str, Any] = {}
    if hasattr(context, "SpawnRanks"):  # 0.5.21
        ranks["ranks"] = context.SpawnRanks(world_rank=0, gpu_id=0)
    context.publish(args, role="scheduler", **ranks)
