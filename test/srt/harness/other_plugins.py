"""Other SGLang plugins, made for a test."""

from __future__ import annotations

import textwrap
from pathlib import Path

#: Another plugin's hook around the model's forward.
AROUND = """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    def around(forward, *args, **kwargs):
        print("their hook saw a forward", flush=True)
        return forward(*args, **kwargs)
    HookRegistry.register(
        "sglang.srt.models.gemma4_causal.Gemma4TextModel.forward", around, HookType.AROUND
    )
"""


def plugin(directory: Path, name: str, code: str) -> Path:
    """Make a distribution with one general plugin of SGLang; ``code`` runs at its import.

    SGLang imports all plugins before it calls the first of them.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"{name}.py").write_text(textwrap.dedent(code) + "\ndef load():\n    pass\n")
    information = directory / f"{name}-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{name} = {name}:load\n")
    return directory
