"""What ``verify`` shows in a terminal: progress while it runs, and tables in the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from sglang_gemma4_yoco.commands.console import say

WIDTH = 110  # where there is no terminal


def _console() -> Console:
    console = Console(highlight=False, markup=False)
    return console if console.is_terminal else Console(width=WIDTH, highlight=False, markup=False)


@contextmanager
def steps(total: int) -> Iterator[Callable[[str], None]]:
    """Tell of so many steps; call what it yields after each of them.

    In a terminal that is a bar, elsewhere a line for each tenth.
    """
    console = _console()
    if not console.is_terminal:
        yield _tenths(total)
        return
    columns = (
        TextColumn("{task.description:34}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("asking", total=total)
        yield lambda description: progress.update(task, advance=1, description=description)


def _tenths(total: int) -> Callable[[str], None]:
    done = 0

    def advance(description: str) -> None:
        nonlocal done
        done += 1
        if done * 10 // total > (done - 1) * 10 // total:
            say(f"   {done} of {total} requests; {description}")

    return advance


def small(number: float | None) -> str:
    """A difference; None is one that is not known, or infinite."""
    return "-" if number is None else f"{number:.1e}"


def agreement(document: dict[str, Any]) -> Table:
    """How far answers are apart, by kind of prompt."""
    table = Table(title="Answers: fast against stock, and stock against itself in other batches")
    table.add_column("prompts")
    for heading in ("same tokens", "mean |dlogp|", "stock", "max |dlogp|", "stock", "KL", "stock"):
        table.add_column(heading, justify="right")
    for kind, found in document["agreement"].items():
        fast, stock = found["fast"], found["stock"] or {}
        cells = [f"{fast['equal_answers']}/{fast['answers']}"]
        for key in ("mean_logprob_diff", "max_logprob_diff", "mean_kl"):
            cells += [small(fast[key]), small(stock[key]) if stock else ""]
        table.add_row(kind, *cells)
    return table


def times(document: dict[str, Any]) -> Table:
    """Times to first token, by length."""
    table = Table(title="Time to first token in seconds: median (20th to 80th percentile)")
    for heading in ("prompt tokens", "stock", "fast", "stock / fast"):
        table.add_column(heading, justify="right")
    for point in document["times"]:
        table.add_row(
            str(point["tokens"]),
            *("{median:.3f} ({p20:.3f}-{p80:.3f})".format(**point[way]) for way in ("off", "on")),
            f"{point['ratio']:.2f}",
        )
    return table


def show(document: dict[str, Any]) -> None:
    """Print both tables and the verdict."""
    console = _console()
    console.print(agreement(document))
    console.print(times(document))
    for kind, reason in document["left_out"].items():
        console.print(f"Not tried: {kind}: {reason}")
    console.print(verdict(document), style="green" if document["agrees"] else "bold red")
    for problem in document["problems"]:
        console.print(f"  {problem}", style="red")


def verdict(document: dict[str, Any]) -> str:
    """One sentence."""
    forwards = sum(document["forwards"].values())
    rule = {
        "exact": "float32 on a CPU: tokens equal, log-probabilities within 1e-3",
        "noise floor": "judged by what stock differs from itself",
    }[document["rule"]]
    if document["agrees"]:
        return f"Fast prefill was active ({forwards} prefills), and the answers agree ({rule})."
    return f"Fast prefill was active ({forwards} prefills), and THE ANSWERS DO NOT AGREE ({rule})."
