"""The package's attention backends, and the evidence for each: ``harness/attention_backends.toml``.

Windows are computed from SGLang's source. What no test computes was read, and the source that was
read is pinned.
"""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.version import Version

from harness.attention_windows import SGLANG, digest, list_windows, name_of, source_of
from harness.documented import TESTS, missing_tests
from scripts import tables
from sglang_gemma4_yoco import compat
from sglang_gemma4_yoco.compat.backends import Backend, make_table
from sglang_gemma4_yoco.models import gemma3n, gemma4

EVIDENCE = tomllib.loads(tables.EVIDENCE.read_text())
BACKENDS = tables.get_backends()
ENTRIES = [(model, backend) for model, entries in BACKENDS.items() for backend in entries]
ADMITTED = {backend.path: backend for _, backend in ENTRIES if backend.is_admitted}
AS_READ = pytest.mark.skipif(
    Version(version("sglang")) != compat.release.LAST_TESTED,
    reason="the source of another SGLang was reviewed",
)
#: The window of a layer, its row's own key included. Tests run stock Triton's extend step, where a
#: row sees its own key and the 511 before it.
KEYS = 512


def in_words(value: Any) -> str:
    return name_of(value.path) if isinstance(value, Backend) else str(value)


def test_each_class_has_an_entry_in_both_lists() -> None:
    named = {model: {name_of(each.path) for each in BACKENDS[model]} for model in BACKENDS}
    assert named == {model: EVIDENCE[model].keys() for model in BACKENDS}
    assert len({(model, backend.path) for model, backend in ENTRIES}) == len(ENTRIES)
    assert EVIDENCE.keys() == {*BACKENDS, "stand_ins", "read"}


@pytest.mark.parametrize(("model", "backend"), ENTRIES, ids=in_words)
def test_evidence(model: str, backend: Backend) -> None:
    """Tests run SGLang's own class, or refuse it; or it was read."""
    evidence = EVIDENCE[model][name_of(backend.path)]
    assert backend.may_run_tail == ("tail" in evidence)
    assert backend.is_admitted == ("refused" not in evidence)
    assert backend.is_admitted or evidence["note"]
    ran = {*evidence.get("run", ()), *evidence.get("tail", ())}
    assert missing_tests(ran.union(evidence.get("refused", ()))) == []
    for test in ran:
        file, _, _ = test.partition("::")
        assert file.startswith(("triton/", "gpu/"))  # where SGLang's kernels run
        assert name_of(backend.path) in (TESTS / f"{file}.py").read_text()
    if backend.is_admitted and "run" not in evidence:
        assert missing_tests(EVIDENCE["stand_ins"][model]) == []
        assert name_of(backend.path) in EVIDENCE["read"]


@pytest.mark.parametrize("backend", ADMITTED.values(), ids=in_words)
def test_each_window_is_that_of_triton(backend: Backend) -> None:
    """A class without windows would show keys that stock hides; narrower ones hide a key."""
    windows = list_windows(backend.path, KEYS)
    others = [window for window in windows if window.keys != KEYS]
    assert others == [], f"a layer's window is {KEYS} keys; not these, or it cannot be computed"
    needed = {"forward_extend", "forward_decode"}
    if backend.may_run_tail:  # tests compare its decode step, whose keys are listed by its planner
        needed.remove("forward_decode")
    assert needed <= {window.method for window in windows}


@pytest.mark.parametrize("name", EVIDENCE["read"])
def test_the_source_is_the_one_that_was_read(name: str) -> None:
    """A release that changes these methods must be read again."""
    [path] = {backend.path for _, backend in ENTRIES if name_of(backend.path) == name}
    assert digest(path) in EVIDENCE["read"][name].values()


@AS_READ
@pytest.mark.parametrize(("model", "backend"), ENTRIES, ids=in_words)
def test_a_flag_builds_its_class(model: str, backend: Backend) -> None:
    """The class is the one in SGLang's registry."""
    registry = (SGLANG / "layers" / "attention" / "attention_registry.py").read_text()
    assert backend.flags
    for flag in backend.flags:
        [function] = re.findall(rf'_backend\("{flag}"\)\ndef (?s:.*?)(?=\n@|\Z)', registry)
        assert f"return {name_of(backend.path)}(" in function
    assert f"\nclass {name_of(backend.path)}(" in source_of(backend.path)


@AS_READ
def test_each_backend_that_sglang_takes_for_gemma_4_is_judged() -> None:
    [accepted] = re.findall(
        r'"Gemma4UnifiedForConditionalGeneration",\n    \):.*?accepted_backends = \((.*?)\)',
        (SGLANG / "arg_groups" / "model_hook.py").read_text(),
        re.DOTALL,
    )
    flags = {flag for backend in BACKENDS["Gemma 4"] for flag in backend.flags}
    assert set(re.findall(r'"(\w+)"', accepted)) == flags


@AS_READ
@pytest.mark.parametrize("card", tables.CARDS)
def test_what_sglang_chooses_on_a_card(card: str) -> None:
    from sglang.srt.arg_groups.model_overrides import gemma4 as overrides
    from sglang.srt.runtime_context import override_platform

    architecture, flag = tables.CARDS[card]
    unset = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
    given = SimpleNamespace(**dict.fromkeys((*unset, "moe_runner_backend")))
    with override_platform(is_sm100=architecture == "SM100"):
        assert overrides._gemma4_overrides(given, None) == {"attention_backend": flag}


def test_a_model_has_its_own_table() -> None:
    """One model's evidence admits no class for another, and no entry is elsewhere."""
    for model, adapter in (("Gemma 4", gemma4), ("Gemma 3n", gemma3n)):
        table = adapter.ATTENTION_BACKENDS.items()
        of_sglang = {path: backend for path, backend in table if path.startswith("sglang.")}
        assert of_sglang == make_table(BACKENDS[model])
        assert all(part.isidentifier() for path in of_sglang for part in path.split("."))
