"""Wrapped methods that only report: ``/server_info`` and ``/metrics``."""

import functools
from collections.abc import Callable
from typing import Any

from sglang_gemma4_yoco import compat, metrics
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
WRAPPED: dict[tuple[type, str], Wrap] = {
    # Adds the state to /server_info. Unnecessary once plugins can extend it.
    (compat.server.Scheduler, "get_internal_state"): _call_after(
        "YOCO fast prefill: adding its state to /server_info failed",
        lambda _, output: output.internal_state.update(
            {metrics.SERVER_INFO_ENTRY: metrics.describe_state()}
        ),
    ),
    # Counts with the labels of SGLang's own metrics. Unnecessary once plugins receive these.
    (compat.server.SchedulerMetricsCollector, "__init__"): _call_after(
        "YOCO fast prefill: its metrics are not collected",
        lambda collector, _: metrics.collect_metrics(collector.labels),
    ),
}
