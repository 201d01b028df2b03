"""What ``doctor`` asks of SGLang: its seams, other plugins, the model, and a server's flags.

Imported once SGLang has loaded its plugins. Flags are judged by the gate itself. What a server
finds out on objects that it builds when it starts is not guessed at here: ``AT_START``.
"""

from __future__ import annotations

import inspect
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import PretrainedConfig

from sglang_gemma4_yoco import plugin, seams, settings
from sglang_gemma4_yoco.commands.ceiling import LENGTHS, Arithmetic
from sglang_gemma4_yoco.commands.console import CommandError
from sglang_gemma4_yoco.commands.findings import Findings
from sglang_gemma4_yoco.core import donor, gate
from sglang_gemma4_yoco.loading import limits, metrics, patch

try:
    from sglang_gemma4_yoco.prefill_graphs import repair, sglang
except ImportError:  # left out, or this SGLang captures prefills otherwise
    repair = None  # type: ignore[assignment]

_MODEL_FLAGS = ("--model-path", "--model")
_MAKES_A_DIRECTORY = "--crash-dump-folder"
_OVERRIDES = "--json-model-override-args"
#: What a server finds out when it starts, and says in its first line.
AT_START = (
    "whether K and V can be read",
    "where the model is cut",
    "whether the tail is recorded",
    "whether it gives what stock gives",
)
#: Tokens. Longer prefills keep a GPU busy by themselves, and a replay pads them (a model).
_WORTH_RECORDING = 1024
# Arguments with which linear layers may be of another kind than the checkpoint's.
_QUANTISING = (
    *("quantization", "modelopt_quant", "quantize_and_serve", "rl_quant_profile"),
    "torchao_config",
)


def examine(findings: Findings, model: str | None, flags: Sequence[str], said: io.StringIO) -> None:
    """Add everything that SGLang is needed for.

    Args:
        model: the operator's; None where the flags name it.
        flags: the server's.
        said: what SGLang prints meanwhile.

    Raises:
        CommandError: SGLang's parser refuses the flags.
    """
    _installation(findings)
    named = _value_of(_MODEL_FLAGS, flags)
    if model is not None and named not in (None, model):
        raise CommandError(f"two models: --model-path {model}, and {named} behind --; leave one")
    served = model or named
    config = None if served is None else _model(findings, served, flags)
    if served is None:
        findings.unknowns.append("no model is named: give --model-path")
    elif config is not None:
        arguments = list(flags) if named else ["--model-path", served, *flags]
        _server(findings, config, arguments, said)


def _value_of(names: Sequence[str], flags: Sequence[str]) -> str | None:
    """The value of the last of these flags, if one is given."""
    value = None
    for position, flag in enumerate(flags):
        name, equals, given = flag.partition("=")
        if name in names:
            value = given if equals else next(iter(flags[position + 1 :]), None)
    return value


# -- the installation ------------------------------------------------------------------------


def _installation(findings: Findings) -> None:
    left_alone = plugin.left_alone
    if patch.is_installed():
        findings.tell("seams in SGLang", "all found, and the patch fits")
    else:
        _seams(findings)
    if left_alone is not None and left_alone not in findings.refusals:
        findings.refusals.append(left_alone)
    if seams.is_newer_than_tested():
        findings.tell("SGLang", f"newer than {seams.LAST_TESTED}, the last release tested")
    others = {
        f"{owner.__name__}.{name}": sorted(set(strangers_around(getattr(owner, name))))
        for owner, name in patch.WRAPPED
    }
    findings.facts["plugins"] |= {
        "installed": patch.is_installed(),
        "on_our_methods": {method: found for method, found in others.items() if found},
    }
    for method, found in findings.facts["plugins"]["on_our_methods"].items():
        findings.tell(method, f"is wrapped by {', '.join(found)} as well; both run")


def _seams(findings: Findings) -> None:
    try:
        seams.check()
    except seams.SeamError as refusal:
        findings.tell("seams in SGLang", str(refusal))
        if str(refusal) not in findings.refusals:
            findings.refusals.append(str(refusal))
    else:
        findings.tell("seams in SGLang", "all found")


def strangers_around(method: Any) -> Iterator[str]:
    """The modules of those, neither SGLang nor this package, who have wrapped or replaced it."""
    while method is not None:
        if inspect.isfunction(method):
            # A hook of SGLang's registry is called by a function of SGLang's own.
            hook = inspect.getclosurevars(method).nonlocals.get("hook")
            for function in (method, hook):
                module = getattr(function, "__globals__", {}).get("__name__", "sglang.")
                if not module.startswith(("sglang.", "sglang_gemma4_yoco.")):
                    yield module
        method = getattr(method, "__wrapped__", None)


# -- the model -------------------------------------------------------------------------------


def _model(findings: Findings, name: str, flags: Sequence[str]) -> dict[str, Any] | None:
    """The model's config, told; None where it cannot be had."""
    findings.section("Model")
    findings.facts["model"] = name
    findings.tell("path", name)
    try:
        config = _config(name, _value_of(["--revision"], flags))
        _override(config, _value_of([_OVERRIDES], flags))
    except Exception as failure:  # noqa: BLE001 - of a file, a network, a hub, or JSON
        why = next(iter(str(failure).splitlines()), "") or repr(failure)
        findings.unknowns.append(
            f"the model {name} cannot be had ({why}): give a directory with a config.json, or a "
            "name on Hugging Face that this machine can download"
        )
        return None
    text = config.get("text_config", config)
    layers = text.get("num_hidden_layers")
    known = str(text.get("model_type", "")).startswith("gemma4") and layers is not None
    first = donor.first_shared_layer(SimpleNamespace(**text)) if known else None
    findings.tell("architecture", ", ".join(config.get("architectures") or ["not named"]))
    findings.tell("layers", str(layers))
    findings.facts |= {"layers": layers, "first_shared": first, "quantisation": _quantised(config)}
    findings.tell("quantisation", findings.facts["quantisation"] or "none, by its config")
    if first is None:
        findings.refusals.append(metrics.NO_MODEL)
        return None
    findings.tell("first shared layer, K", f"{first}: layers {first} to {layers - 1} have no K/V")
    _ceiling(findings, text, first)
    return config


def _config(name: str, revision: str | None) -> dict[str, Any]:
    """A checkpoint's config.json.

    Raises:
        Exception: as Hugging Face's loader does.
    """
    if name.startswith(("/", ".", "~")) and not Path(name).is_dir():
        raise FileNotFoundError("there is no such directory")
    config: dict[str, Any]
    config, _ = PretrainedConfig.get_config_dict(name, revision=revision)
    if not config:
        raise FileNotFoundError("it has no config.json")
    return config


def _override(config: dict[str, Any], overrides: str | None) -> None:
    for name, value in json.loads(overrides or "{}").items():
        if isinstance(value, dict) and isinstance(config.get(name), dict):
            config[name].update(value)
        else:
            config[name] = value


def _quantised(config: Mapping[str, Any]) -> str | None:
    for part in (config, config.get("text_config") or {}):
        for name in ("quantization_config", "compression_config"):
            if part.get(name):
                return str(part[name].get("quant_method", name))
    return None


def _ceiling(findings: Findings, text: Mapping[str, Any], first: int) -> None:
    try:
        arithmetic = Arithmetic.of(text, first)
    except ValueError as why:
        findings.tell("saving at most", f"not counted: {why}")
        return
    ceiling = {str(tokens): round(arithmetic.ceiling(tokens), 2) for tokens in LENGTHS}
    findings.facts["ceiling"] = ceiling
    findings.tell("saving at most", ", ".join(f"{r}x at {t} tokens" for t, r in ceiling.items()))
    findings.tell("", "of a prefill's multiply-adds: arithmetic alone, not a measurement")


# -- the server ------------------------------------------------------------------------------


def _server(
    findings: Findings, config: Mapping[str, Any], flags: Sequence[str], said: io.StringIO
) -> None:
    findings.section("A server with these flags")
    findings.tell("flags", " ".join(flags))
    begun = said.tell()
    try:
        seams.publish_arguments(_without_directories(flags))
    except SystemExit as refused:
        lines = said.getvalue()[begun:].splitlines()
        raise CommandError(f"the server's flags: {_last_error(lines, refused.code)}") from None
    except Exception as failure:  # noqa: BLE001 - SGLang's own, of whatever kind
        why = " ".join(str(failure).split()) or repr(failure)
        findings.unknowns.append(
            f"SGLang does not resolve these flags on this machine ({type(failure).__name__}: {why})"
        )
        return
    argument = seams.server_arguments()
    assert argument is not None, "they have been published"
    _prefill_graphs(findings, config, argument)
    _judge(findings, config, argument)


def _prefill_graphs(findings: Findings, config: Mapping[str, Any], argument: Any) -> None:
    """Would SGLang start with the prefill graphs of these flags, and are replays shortened?"""
    graph = seams.prefill_graph()
    if graph is None or repair is None:
        return
    sees = argument("enable_multimodal") is not False
    multimodal = sees and not config.get("language_model_only", False)
    why = sglang.capture_error(multimodal=multimodal)
    cut = patch.is_installed() and not limits.server_reason()
    repaired = cut and repair.needed(multimodal=multimodal) is not None
    if why is None or repaired:
        how = f"SGLang's recording is repaired ({why})" if repaired else "SGLang records them"
        findings.tell("prefill graphs", f"backend {graph!r}: {how}")
        _replays(findings)
        return
    findings.tell("prefill graphs", f"backend {graph!r}: SGLang cannot record this model")
    if not settings.current.prefill_graphs:
        findings.tell("", f"{repair.OFF}: it is not repaired")
    findings.refusals.append(
        f"SGLang does not start with prefill CUDA graphs of this model ({why}); "
        "--cuda-graph-backend-prefill=disabled starts it"
    )


def _replays(findings: Findings) -> None:
    """What becomes of prefills that SGLang replays."""
    closed = repair.exits_refused()
    if closed is not None:
        findings.tell(
            "",
            f"prefills that are replayed are not shortened ({closed}); "
            "--cuda-graph-backend-prefill=disabled shortens them",
        )
        return
    findings.tell("", "prefills that are replayed are shortened, where the check at start agrees")
    longest = seams.longest_captured_prefill()
    if longest is not None and longest > _WORTH_RECORDING:
        findings.tell(
            "",
            f"recorded are up to {longest} tokens: try "
            f"--cuda-graph-max-bs-prefill={_WORTH_RECORDING} (docs/operating.md)",
        )


def _last_error(lines: Sequence[str], code: object) -> str:
    """What SGLang's parser printed last: ``sglang serve: error: ...``."""
    if code in (0, None):
        return "they ask for help or a version alone, and start no server"
    last = next((line for line in reversed(lines) if ": error: " in line), "")
    return last.partition(": error: ")[2] or "SGLang's parser refuses them"


def _without_directories(flags: Sequence[str]) -> list[str]:
    """Without what SGLang makes a directory for when it resolves it; the path is not affected."""
    kept: list[str] = []
    following = False
    for flag in flags:
        if following or flag.partition("=")[0] == _MAKES_A_DIRECTORY:
            following = flag == _MAKES_A_DIRECTORY
            continue
        kept.append(flag)
    return kept


def _judge(findings: Findings, config: Mapping[str, Any], argument: Any) -> None:
    """What a start asks of the flags, by the same gate; all else is settled at start."""
    if argument("model_impl") == "transformers":
        findings.refusals.append(metrics.NO_MODEL)
    if argument("is_embedding"):
        findings.refusals.append(gate.EMBEDDINGS)
    findings.refusals += filter(None, (gate.unseen_reason(), limits.server_reason()))
    quantised = next(filter(None, map(argument, _QUANTISING)), None) or _quantised(config)
    if quantised is not None:
        findings.unknowns.append(
            f"quantisation {quantised}: the kinds of layers are settled when weights are loaded "
            "(docs/quantised.md lists those that are admitted)"
        )
    common = argument("attention_backend")
    names = {argument(f"{part}_attention_backend") or common for part in ("prefill", "decode")}
    findings.facts["attention"] = sorted(map(str, names))
    findings.tell("attention backend", ", ".join(findings.facts["attention"]))
    others = [name for name in findings.facts["attention"] if name != seams.TAIL_BACKEND]
    if others:
        findings.unknowns.append(
            f"attention by {', '.join(others)}: settled when a server has built it "
            "(docs/modes.md lists those that are admitted)"
        )
    findings.tell("settled at start", ", ".join(AT_START))
