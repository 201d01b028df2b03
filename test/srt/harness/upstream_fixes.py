"""SGLang with the fixes of ``docs/upstream``, applied to its own functions."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from sglang.srt.model_executor.model_runner_components import cuda_graph_setup
from sglang.srt.model_executor.runner import prefill_cuda_graph_runner

REPORTS = Path(__file__).resolve().parents[3] / "docs" / "upstream"


def fixed(function: Callable[..., Any], report: Path) -> Any:
    """``function`` with the changes of the report's diff made in its source."""
    [diff] = re.findall(r"```diff\n(.*?)```", report.read_text(), re.DOTALL)
    lines = diff.splitlines(keepends=True)
    old, new = ("".join(line[1:] for line in lines if line[0] != other) for other in "+-")
    source = inspect.getsource(function)
    assert source.count(old) == 1, f"{report.name} is of another release"
    made: dict[str, Any] = {}
    exec(textwrap.dedent(source.replace(old, new)), function.__globals__, made)
    return made[function.__name__]


@contextmanager
def repaired() -> Iterator[None]:
    """SGLang can capture these models in the span; batches with media are not sent in it."""
    runner = prefill_cuda_graph_runner
    fixes = (
        (cuda_graph_setup, "index_attention_layers_by_global_id", "shared_layer_ids.md"),
        (runner, "_build_layer_model_forward_kwargs", "ids_and_embeddings.md"),
    )
    with ExitStack() as stack:
        for module, name, report in fixes:
            changed = fixed(getattr(module, name), REPORTS / report)
            stack.enter_context(mock.patch.object(module, name, changed))
        yield
