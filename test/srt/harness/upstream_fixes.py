"""SGLang with the fixes of ``docs/upstream``, applied to its own functions."""

from __future__ import annotations

import functools
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
from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import PrefillCudaGraphRunner

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


def without_media(stock: Callable[..., bool]) -> Callable[..., bool]:
    """The other part of the second fix, which the report has in words."""

    @functools.wraps(stock)
    def can_run_graph(self: Any, forward_batch: Any) -> bool:
        parameters = inspect.signature(self.layer_model.forward).parameters
        if "per_layer_inputs" in parameters and forward_batch.contains_mm_inputs():
            return False
        return stock(self, forward_batch)

    return can_run_graph


@contextmanager
def repaired() -> Iterator[None]:
    """SGLang can capture these models in the span."""
    runner = prefill_cuda_graph_runner
    fixes = (
        (cuda_graph_setup, "index_attention_layers_by_global_id", "shared_layer_ids.md"),
        (runner, "_build_layer_model_forward_kwargs", "ids_and_embeddings.md"),
    )
    with ExitStack() as stack:
        for module, name, report in fixes:
            changed = fixed(getattr(module, name), REPORTS / report)
            stack.enter_context(mock.patch.object(module, name, changed))
        of_text = without_media(PrefillCudaGraphRunner.can_run_graph)
        stack.enter_context(mock.patch.object(PrefillCudaGraphRunner, "can_run_graph", of_text))
        yield
