"""SGLang's wrapped methods, on servers and models that are not this package's.

Whatever the package reads or calls there may raise: SGLang's method runs once, and its result is
returned. The last test asserts that no other method of SGLang is wrapped.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import prometheus_client
import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.models.gemma4_causal import Gemma4TextModel

from harness.call_sites import is_of_package, watched
from harness.fixtures import Said
from harness.forwards import InjectedError
from sglang_gemma4_reference.engine import reset_log
from sglang_gemma4_yoco import compat, counters, plugin
from sglang_gemma4_yoco.core import forward
from sglang_gemma4_yoco.models import registry
from sglang_gemma4_yoco.startup import patch

pytestmark = pytest.mark.usefixtures("outside_of_a_server", "forgotten_reports")

WRAPS = dict(patch.WRAPPED)
for text_model in registry.list_text_models():
    WRAPS[text_model, "forward"] = forward.wrap_model_forward
EACH = pytest.mark.parametrize("place", WRAPS, ids=lambda place: f"{place[0].__name__}.{place[1]}")
ERRORS = pytest.mark.parametrize("error", [InjectedError, KeyboardInterrupt])


@contextmanager
def only_exits_raised(error: type[BaseException]) -> Iterator[None]:
    """Assert that the block raises ``error`` only if it is an exit; with several ranks too."""
    with mock.patch.object(compat.server, "is_single_rank", return_value=False):
        if issubclass(error, Exception):
            yield
            return
        with pytest.raises(error):
            yield


# ---------------------------------------------------------------- unreadable objects


class Unreadable:
    """Object each of whose attributes raises."""

    def __init__(self, error: type[BaseException]) -> None:
        object.__setattr__(self, "_error", error)

    def __getattribute__(self, _: str) -> Any:
        raise object.__getattribute__(self, "_error")


@EACH
@ERRORS
def test_objects_that_cannot_be_read(
    place: tuple[Any, str], error: type[BaseException], said: Said
) -> None:
    """SGLang's runner on MLX, whose model has no modules, was such an object."""
    unreadable, calls = Unreadable(error), list[tuple[Any, ...]]()

    def stock(*given: Any) -> Any:
        calls.append(given)
        return unreadable

    given = (unreadable,) * 5
    with only_exits_raised(error):
        assert WRAPS[place](stock)(*given) is unreadable
        assert calls == [given]
        assert len(said(logging.ERROR)) == 1


# ---------------------------------------------------------------- calls, one by one


def text_model_without_a_tail() -> Any:
    model = Gemma4TextModel.__new__(Gemma4TextModel)
    torch.nn.Module.__init__(model)
    model.config = SimpleNamespace(num_hidden_layers=4, num_kv_shared_layers=0)
    return model


def another_server(name: str) -> list[Any]:
    """Return the arguments, self included, of this method's call on another model's server."""
    if name == "forward":
        return [
            text_model_without_a_tail(),
            None,
            None,
            SimpleNamespace(forward_mode=ForwardMode.EXTEND),
        ]
    if name == "__init__":
        return [SimpleNamespace(labels={"tp_rank": 0})]
    return [SimpleNamespace(model=torch.nn.ModuleList([text_model_without_a_tail()]))]


def run_watched(place: tuple[Any, str], on_site: Callable[[str], object]) -> None:
    """Run a wrapped method; ``on_site`` is called before each call that the package makes."""
    calls, result = [], SimpleNamespace(internal_state={})

    def stock(*_: Any) -> Any:
        calls.append(place)
        return result

    def note(caller: Any, callee: str) -> None:
        if not callee.endswith(stock.__qualname__):
            on_site(f"{caller.f_code.co_filename}:{caller.f_lineno} calls {callee}")

    method, given = WRAPS[place](stock), another_server(place[1])
    metrics_client = mock.patch.object(prometheus_client, "Counter")
    with metrics_client, mock.patch.object(counters.served, "observers", []), watched(note):
        assert method(*given) is result
    assert calls == [place]


@EACH
@ERRORS
def test_each_call_fails(place: tuple[Any, str], error: type[BaseException], said: Said) -> None:
    sites: dict[str, None] = {}
    run_watched(place, sites.setdefault)
    assert sites
    for site in sites:
        reset_log()
        before = len(said(logging.ERROR))

        def fail(reached: str, chosen: str = site) -> None:
            if reached == chosen:
                raise error

        with only_exits_raised(error):
            run_watched(place, fail)
            assert len(said(logging.ERROR)) == before + 1, site


# ---------------------------------------------------------------- completeness


def wraps_of_the_package(owner: Any) -> list[tuple[Any, str]]:
    """Return the functions of this module or class that the package has wrapped."""
    found = []
    for name, value in list(vars(owner).items()):
        wraps = isinstance(value, FunctionType) and hasattr(value, "__wrapped__")
        if wraps and is_of_package(value.__code__.co_filename):
            found.append((owner, name))
    return found


@pytest.mark.usefixtures("not_loaded")
def test_these_are_all_that_are_wrapped() -> None:
    plugin.load()
    owners = set[Any]()
    for name, module in list(sys.modules.items()):
        if name.startswith("sglang.") and isinstance(module, ModuleType):
            owners |= {module, *filter(inspect.isclass, vars(module).values())}
    found = [place for owner in owners for place in wraps_of_the_package(owner)]
    assert set(found) == set(WRAPS)
