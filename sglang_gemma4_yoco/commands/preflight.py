"""The part of ``doctor`` that needs SGLang: the model, and the server's flags.

Flags are judged by the code that judges them in a server.
"""

import argparse
import io
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sglang.srt import runtime_context, server_args
from transformers import PretrainedConfig

from sglang_gemma4_yoco import compat
from sglang_gemma4_yoco.commands.console import CommandError, Report
from sglang_gemma4_yoco.commands.redact import show_flags
from sglang_gemma4_yoco.compat.backends import READ, RUN, list_flags
from sglang_gemma4_yoco.core.model import TextModelAdapter
from sglang_gemma4_yoco.core.state import first_shared_layer
from sglang_gemma4_yoco.loading import metrics, patch, third_party, unsupported
from sglang_gemma4_yoco.models import registry
from sglang_gemma4_yoco.prefill_exits import exit_setup

# Beside the weights: what some tools write in place of an entry of the config.
_QUANTISATION_FILES = ("hf_quant_config.json", "quant_model_description.json")
# Arguments with which linear layers may be of another kind than the checkpoint's.
_QUANTISING = ("quantization", "modelopt_quant", "quantize_and_serve", "rl_quant_profile")


def examine(report: Report, given: argparse.Namespace, flags: Sequence[str]) -> None:
    """Add everything that needs SGLang, which has loaded its plugins.

    Args:
        given: the model and its revision, which ``flags`` name as well.
    """
    report.entries["plugins"]["installed"] = patch.installed
    untested = unsupported.find_release_reason()
    if untested is not None:
        report.refuse(untested)
    elif compat.release.is_newer_than_tested():
        report.add(
            "SGLang",
            f"{compat.release.INSTALLED} was not tested: {unsupported.RUNS_UNTESTED}",
        )
    config, adapter = _model(report, given.model_path, given.revision)
    if adapter is None:
        report.refusals.append(metrics.NO_MODEL)
    else:
        _server(report, config, adapter, flags)


def _model(
    report: Report, name: str, revision: str | None
) -> tuple[dict[str, Any], TextModelAdapter | None]:
    """Return the model's config, and what knows the model if it has a KV-shared tail.

    Raises:
        CommandError: the config cannot be loaded.
    """
    report.begin("Model")
    report.add("path", name, model=name)
    try:
        config: dict[str, Any] = PretrainedConfig.get_config_dict(name, revision=revision)[0]
        if not config:
            raise FileNotFoundError("it has no config.json")
    except Exception as failure:  # of a file, a network, a hub, or JSON
        why = next(iter(str(failure).splitlines()), "") or repr(failure)
        remedy = "give a directory with a config.json, or a name that this machine can download"
        raise CommandError(f"the model {name} cannot be read ({why}): {remedy}") from failure
    text = config.get("text_config") or config
    layers: Any = text.get("num_hidden_layers")
    adapter = registry.find_adapter_by_type(str(text.get("model_type")))
    first, shared = None, "none"
    if adapter is not None and layers is not None:
        report.refuse(compat.names.find_missing(adapter.SGLANG))
        first = first_shared_layer(SimpleNamespace(**text))
    if first is None:
        adapter = None
    else:
        shared = f"{first}: layers {first} to {layers - 1} have no K/V"
    quantised = None
    for part, entry in product((text, config), ("compression_config", "quantization_config")):
        if part.get(entry):
            quantised = str(part[entry].get("quant_method", entry))
    for file in _QUANTISATION_FILES:
        if Path(name, file).is_file():
            quantised = file
    report.add("architecture", ", ".join(config.get("architectures") or ["not named"]))
    report.add("layers", str(layers), layers=layers)
    report.add("quantisation", quantised or "none, by its config", quantisation=quantised)
    report.add("first shared layer", shared, first_shared=first)
    return config, adapter


def _server(
    report: Report, config: Mapping[str, Any], adapter: TextModelAdapter, flags: Sequence[str]
) -> None:
    """Resolve the flags by SGLang, as in a server's scheduler; nothing is started."""
    report.begin("A server with these flags")
    report.add("flags", show_flags(flags))
    ranks = runtime_context.SpawnRanks(world_rank=0, gpu_id=0)
    try:
        with redirect_stderr(io.StringIO()) as printed:
            args = server_args.prepare_server_args(list(flags))
            args.resolve_once()
            args.check_server_args()
            runtime_context.publish(args, role="scheduler", ranks=ranks)
    except SystemExit as refused:
        error = printed.getvalue().partition(": error: ")[2].partition("\n")[0]
        why = error or "--help or --version"
        raise CommandError(f"the server would not start with these flags: {why}") from refused
    except Exception as failure:  # SGLang's own, of whatever kind
        why = " ".join(f"{type(failure).__name__}: {failure}".split())
        unknown = f"SGLang does not resolve these flags on this machine ({why})"
        raise CommandError(unknown) from failure
    argument = compat.server.read_argument
    _prefill_graphs(report, adapter)
    _judge(report, adapter, argument)
    if patch.installed and argument("model_impl") != "transformers":
        _judge_classes(report, config.get("architectures") or [])


def _prefill_graphs(report: Report, adapter: TextModelAdapter) -> None:
    """Refuse flags with whose prefill graphs SGLang would stop."""
    backend = compat.server.get_cuda_graph_backend("prefill")
    if backend is None or compat.release.is_newer_than_tested():
        return
    is_cut = patch.installed and unsupported.find_server_reason() is None
    if is_cut and adapter.LEAVES_CAPTURED_PREFILLS and exit_setup.is_repaired():
        shortened = "replayed prefills are shortened, where the check at start agrees"
        report.add("prefill graphs", f"backend {backend!r}: {shortened}")
        return
    report.refusals.append(
        "SGLang does not start with prefill CUDA graphs of this model "
        f"({compat.captured_prefills.SHARED_LAYER_IDS}); "
        "--cuda-graph-backend-prefill=disabled starts it"
    )


def _judge(report: Report, adapter: TextModelAdapter, argument: Any) -> None:
    """Judge what the flags alone decide, by a server's own code; the rest is settled at start."""
    if compat.server.has_fast_prefill() and not argument(compat.server.FAST_PREFILL):
        report.add("fast prefill", "this package's serves: SGLang's own is off")
    if argument("model_impl") == "transformers":
        report.refusals.append(metrics.NO_MODEL)
    if argument("is_embedding"):
        report.refuse(unsupported.EMBEDDINGS)
    report.refuse(unsupported.find_argument_reason())
    quantised = next(filter(None, map(argument, _QUANTISING)), report.entries["quantisation"])
    if quantised is not None:
        report.unknowns.append(
            f"quantisation {quantised}: the kinds of layers are settled when weights are loaded. "
            "Those whose rows do not depend on each other are admitted: among them fp8, AWQ, GPTQ "
            "and compressed-tensors, but not GGUF and bitsandbytes of 8 bits"
        )
    cache = argument("kv_cache_dtype")
    if cache not in (None, "auto"):
        report.unknowns.append(f"K and V of type {cache}: admitted if it is the weights' own type")
    common = argument("attention_backend")
    names = {argument(f"{part}_attention_backend") or common for part in ("prefill", "decode")}
    attention = sorted(map(str, names))
    report.add("attention backend", ", ".join(attention), attention=attention)
    run = list_flags(adapter.ATTENTION, RUN)
    others = [name for name in attention if name not in run]
    if others:
        admitted = ", ".join(list_flags(adapter.ATTENTION, RUN, READ))
        report.unknowns.append(
            f"attention by {', '.join(others)}: settled when a server has built it. Admitted for "
            f"this model are {admitted}, and hybrids of them"
        )


def _judge_classes(report: Report, architectures: Sequence[str]) -> None:
    """Judge the class that SGLang would load, and its own classes as plugins have left them."""
    from sglang.srt.models.registry import ModelRegistry  # it imports all models

    try:
        outer: type = ModelRegistry.resolve_model_cls(list(architectures))[0]
    except ValueError as failure:
        raise CommandError(f"SGLang loads no {' or '.join(architectures)} here") from failure
    report.refuse(third_party.find_third_party_code(outer))
