"""Wrapped methods that only report: ``/server_info`` and ``/metrics``. SGLang may lack them."""

import functools
from collections.abc import Callable
from typing import Any

from sglang_gemma4_yoco import compat, log, metrics
from sglang_gemma4_yoco.compat.text_model import Method
from sglang_gemma4_yoco.startup.guard import Wrap, guarded


def _call_after(failed: str, call: Callable[[Any, Any], object]) -> Wrap:
    """Return a method wrapper that calls ``call(self, result)`` afterwards.

    Args:
        failed: the line that is logged if the call fails.
    """

    def wrap(stock: Method) -> Method:
        @functools.wraps(stock)
        def method(self: object, *args: object, **kwargs: object) -> object:
            result = stock(self, *args, **kwargs)
            with guarded(failed):
                call(self, result)
            return result

        return method

    return wrap


#: (class, attribute) -> its wrapper, with the reason and the change in SGLang that would make it
#: unnecessary.
OPTIONAL: dict[tuple[str, str], Wrap] = {
    # Adds the state to /server_info. Unnecessary once plugins can extend it.
    ("sglang.srt.managers.scheduler.Scheduler", "get_internal_state"): _call_after(
        "YOCO fast prefill: adding its state to /server_info failed",
        lambda _, output: output.internal_state.update(
            {metrics.SERVER_INFO_ENTRY: metrics.describe_state()}
        ),
    ),
    # Counts with the labels of SGLang's own metrics. Unnecessary once plugins receive these.
    (
        "sglang.srt.observability.metrics_collector.SchedulerMetricsCollector",
        "__init__",
    ): _call_after(
        "YOCO fast prefill: its metrics are not collected",
        lambda collector, _: metrics.collect_metrics(collector.labels),
    ),
}


def wrap_reports() -> None:
    """Wrap the methods that SGLang has, and warn about the others."""
    for (path, name), wrap in OPTIONAL.items():
        owner = compat.names.find_object(path)
        if owner and hasattr(owner, name):
            setattr(owner, name, wrap(getattr(owner, name)))
            continue
        missing = f"{path}.{name}"
        log.log_warning(
            f"YOCO fast prefill: SGLang {compat.release.INSTALLED} lacks {missing}, so "
            "/server_info, which status reads, or /metrics lacks its state; prefills are cut all "
            "the same. Install a supported SGLang, or a newer sglang-gemma4-yoco"
        )
