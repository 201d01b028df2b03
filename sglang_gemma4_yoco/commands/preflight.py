"""The part of ``doctor`` that needs SGLang: the model, and the server's flags.

Flags are checked by the code that checks them in a server.
"""

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr

import torch
from sglang.srt import runtime_context, server_args
from sglang.srt.arg_groups.overrides import resolution_result
from sglang.srt.configs.model_config import ModelConfig

from sglang_gemma4_yoco import compat, metrics, settings
from sglang_gemma4_yoco.admission import arguments, third_party
from sglang_gemma4_yoco.captured import lifecycle
from sglang_gemma4_yoco.commands.console import CommandError, Report
from sglang_gemma4_yoco.commands.redact import show_flags
from sglang_gemma4_yoco.core.model import Adapter
from sglang_gemma4_yoco.core.state import first_shared_layer
from sglang_gemma4_yoco.models import registry
from sglang_gemma4_yoco.prefill_exits import exit_setup
from sglang_gemma4_yoco.startup import arguments_resolved, patch

# Arguments with which linear layers may be of another kind than the checkpoint's.
_QUANTISING = ("modelopt_quant", "quantize_and_serve", "rl_quant_profile")


def examine(report: Report, flags: Sequence[str]) -> None:
    """Add the entries that need SGLang; its plugins must have been loaded."""
    report.entries["plugins"]["installed"] = patch.installed
    untested = arguments.find_release_reason()
    report.refuse(untested)
    if not untested and compat.release.is_newer_than_tested():
        report.add(
            "SGLang",
            f"{compat.release.INSTALLED} was not tested: {arguments.RUNS_UNTESTED}",
        )
    with _explain("SGLang cannot parse these flags"):
        args = server_args.prepare_server_args(list(flags))
    config, adapter = _model(report, args)
    if adapter:
        report.begin("A server with these flags")
        report.add("flags", show_flags(flags))
        _server(report, config, adapter, args)


@contextmanager
def _explain(problem: str) -> Iterator[None]:
    """Raise CommandError if SGLang raises any exception, or exits."""
    try:
        with redirect_stderr(io.StringIO()) as printed:
            yield
    except SystemExit as refused:
        error = printed.getvalue().partition(": error: ")[2].partition("\n")[0]
        raise CommandError(
            f"the server would not start with these flags: {error or '--help or --version'}"
        ) from refused
    except Exception as failure:
        why = " ".join(f"{type(failure).__name__}: {failure}".split())
        raise CommandError(f"{problem} ({why})") from failure


def _model(report: Report, args: server_args.ServerArgs) -> tuple[ModelConfig, Adapter | None]:
    """Return the model's config, and its adapter if it has a KV-shared tail."""
    report.begin("Model")
    model: str = resolution_result(args, "model_path")
    report.add("path", model, model=model)
    with _explain(f"the model {model!r} does not exist, or cannot be read"):
        config = ModelConfig.from_server_args(args)
    text = config.hf_text_config
    layers = text.num_hidden_layers
    adapter = registry.find_adapter_by_type(text.model_type)
    first = None
    shared = "none"
    if adapter:
        report.refuse(compat.names.find_missing(adapter.SGLANG))
        first = first_shared_layer(text)
    if not first:
        adapter = None
        report.refuse(metrics.NO_MODEL)
    else:
        shared = f"{first}: layers {first} to {layers - 1} have no K/V"
    quantised = config.quantization
    report.add("architecture", ", ".join(config.hf_config.architectures))
    report.add("layers", str(layers), layers=layers)
    report.add("quantisation", quantised or "none, by its config", quantisation=quantised)
    report.add("first shared layer", shared, first_shared=first)
    return config, adapter


def _server(
    report: Report, config: ModelConfig, adapter: Adapter, args: server_args.ServerArgs
) -> None:
    """Resolve the arguments as a server's scheduler does, and check them; start nothing."""
    ranks = runtime_context.SpawnRanks(world_rank=0, gpu_id=0)
    argument = compat.server.read_argument
    with ExitStack() as platform:
        if not torch.accelerator.is_available():
            platform.enter_context(compat.resolution.as_on_cuda())
            report.add("GPU", "none here: prefill graphs are resolved as on CUDA")
        with _explain("SGLang does not resolve these flags on this machine"):
            args.resolve_once()
            args.check_server_args()
            runtime_context.publish(args, role="scheduler", ranks=ranks)
        _prefill_graphs(report, adapter)
    _judge(report, adapter, argument)
    if patch.installed and argument("model_impl") != "transformers":
        _judge_classes(report, config.hf_config.architectures)


def _prefill_graphs(report: Report, adapter: Adapter) -> None:
    """Report prefill graphs; refuse flags for them with which SGLang would not start."""
    backend = compat.server.get_cuda_graph_backend("prefill")
    may_be_cut = patch.installed and adapter.LEAVES_CAPTURED_PREFILLS
    if not backend:
        if may_be_cut and settings.current.prefill_graphs:
            report.add(
                "prefill graphs",
                f"off: {arguments_resolved.find_reason() or arguments_resolved.NOT_CHOSEN}",
            )
        return
    if compat.release.is_newer_than_tested():
        return
    if may_be_cut and not arguments.find_server_reason() and exit_setup.is_repaired():
        report.add(
            "prefill graphs",
            f"backend {backend!r}: replayed prefills are cut too, if the checks at start pass",
        )
        if lifecycle.find_known_reason():
            report.add("", "but with the eager tail only those that finish no prompt")
        return
    report.refuse(
        "SGLang does not start with prefill CUDA graphs of this model "
        f"({compat.captured_prefills.SHARED_LAYER_IDS}); "
        "--cuda-graph-backend-prefill=disabled starts it"
    )


def _judge(report: Report, adapter: Adapter, argument: Callable[..., object]) -> None:
    """Check the flags with a server's own code; the rest is known only when a server starts.

    Args:
        argument: returns a resolved server argument by its name.
    """
    if argument("model_impl") == "transformers":
        report.refuse(metrics.NO_MODEL)
    if argument("is_embedding"):
        report.refuse(arguments.EMBEDDINGS)
    report.refuse(arguments.find_argument_reason())
    eager = lifecycle.find_known_reason()
    if eager:
        report.add("eager tail", eager)
    quantised = next(filter(None, map(argument, _QUANTISING)), report.entries["quantisation"])
    if quantised is not None:
        report.unknowns.append(
            f"quantisation {quantised}: the kinds of layers are known when weights are loaded. "
            "Those whose rows do not depend on each other are admitted: among them fp8, AWQ, GPTQ "
            "and compressed-tensors, but not GGUF and 8-bit bitsandbytes"
        )
    cache = argument("kv_cache_dtype")
    if cache not in (None, "auto"):
        report.unknowns.append(f"K and V of type {cache}: admitted if it is the weights' own type")
    common = argument("attention_backend")
    own = map(argument, ("prefill_attention_backend", "decode_attention_backend"))
    attention = sorted({str(name or common) for name in own})
    report.add("attention backend", ", ".join(attention), attention=attention)
    entries = adapter.ATTENTION_BACKENDS.values()
    known = (entry.flags for entry in entries if entry.is_admitted and entry.may_run_tail)
    if others := sorted({*attention}.difference(*known)):
        report.unknowns.append(
            f"attention by {', '.join(others)}: known when a server has built it. docs/modes.md "
            "lists the admitted backends"
        )


def _judge_classes(report: Report, architectures: Sequence[str]) -> None:
    """Check the class that SGLang would load, and SGLang's own, which plugins may have changed."""
    from sglang.srt.models.registry import ModelRegistry  # it imports all models

    with _explain(f"SGLang loads no {' or '.join(architectures)} here"):
        outer = ModelRegistry.resolve_model_cls(list(architectures))[0]
    report.refuse(third_party.find_third_party_code(outer))
