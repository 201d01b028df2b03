"""The windows that SGLang's attention backends give their kernels, computed from the source.

A class is parsed, not imported: most need another platform. Every expression in it that reads a
layer's window is evaluated for a layer of a known window, so that a class whose window differs is
found whatever is claimed of it.
"""

from __future__ import annotations

import ast
import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import sglang.srt

SGLANG = Path(sglang.srt.__path__[0])
READ_METHODS = ("forward_extend", "forward_decode", "init_forward_metadata")

# The names under which kernels take the number of keys before a row's own, and those of variables
# that hold it. ``window_size`` is a pair, of which the second part counts keys after the row's own.
_KEYS_BEFORE = ("sliding_window_size", "window_left", "window_size")
_ARITHMETIC = (ast.BinOp, ast.UnaryOp, ast.AugAssign)
_USES = (ast.keyword, ast.Call, ast.Compare, ast.JoinedStr, ast.stmt)


class Window(NamedTuple):
    """The window of one call, or of the variable that it passes on."""

    method: str
    source: str
    keys: int | None  # the row's own included; None if it was not computed


def name_of(path: str) -> str:
    """Return the name of a class, without its module."""
    return path.rpartition(".")[2]


def source_of(path: str) -> str:
    """Return the source of a class's module."""
    module = path.rpartition(".")[0].removeprefix("sglang.srt.")
    return (SGLANG / f"{module.replace('.', '/')}.py").read_text()


def list_methods(path: str) -> list[ast.FunctionDef]:
    """Return the methods that a class itself defines."""
    for kind in ast.parse(source_of(path)).body:
        if isinstance(kind, ast.ClassDef) and kind.name == name_of(path):
            return [method for method in kind.body if isinstance(method, ast.FunctionDef)]
    return []


def digest(path: str) -> str:
    """Return a digest of the source of ``READ_METHODS``."""
    source, methods = source_of(path), {method.name: method for method in list_methods(path)}
    read = "\n".join(str(ast.get_source_segment(source, methods[name])) for name in READ_METHODS)
    return hashlib.sha256(read.encode()).hexdigest()[:16]


def list_windows(path: str, keys: int) -> set[Window]:
    """Return every window that a class makes of that of a layer with ``keys`` keys."""
    found = set()
    for method in list_methods(path):
        parents = {}
        for node in ast.walk(method):
            for child in ast.iter_child_nodes(node):
                parents[child] = node
        for node in parents:
            window = _find_window(node, parents, keys)
            if window is not None:
                found.add(Window(method.name, *window))
    return found


def _find_window(
    node: ast.AST, parents: dict[ast.AST, ast.AST], keys: int
) -> tuple[str, int | None] | None:
    """Return the source and the keys of the window that reads this node, or None if none does."""
    value = node
    while isinstance(parents[value], (*_ARITHMETIC, ast.Subscript)):
        value = parents[value]
    use = value
    while not isinstance(use, _USES):
        use = parents[use]
    if isinstance(node, ast.Name) and node.id in _KEYS_BEFORE and isinstance(value, _ARITHMETIC):
        return ast.unparse(use), None  # it is changed after it was computed
    if not isinstance(node, ast.Attribute) or ast.unparse(node) != "layer.sliding_window_size":
        return None
    asks = isinstance(use, ast.Compare) and not any(map(_has_name, use.comparators))
    if isinstance(use, ast.JoinedStr) or (asks and value is node):  # a message, or: has it a window
        return None
    if _get_name(use) not in _KEYS_BEFORE:
        return ast.unparse(use), None
    return ast.unparse(use), _compute_keys(value, keys)


def _has_name(node: ast.AST) -> bool:
    return any(isinstance(part, ast.Name) for part in ast.walk(node))


def _get_name(use: ast.AST) -> str | None:
    """Return the name of the argument or the variable, or None."""
    if isinstance(use, ast.keyword):
        return use.arg
    if isinstance(use, ast.Assign) and isinstance(use.targets[0], ast.Name):
        return use.targets[0].id
    return None


def _compute_keys(value: ast.AST, keys: int) -> int | None:
    layer = SimpleNamespace(sliding_window_size=keys - 1)
    try:
        before: int = eval(ast.unparse(value), {"layer": layer})
    except NameError:
        return None
    return before + 1
