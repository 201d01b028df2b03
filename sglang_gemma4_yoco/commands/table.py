"""What is shown in a terminal: the tables of commands and scripts, and verify's progress."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from sglang_gemma4_yoco.commands.console import say
from sglang_gemma4_yoco.commands.timing import Times

WIDTH = 110  # where there is no terminal
DISTANCES = ("mean_logprob_diff", "max_logprob_diff", "mean_kl")


def console_of(width: int) -> Console:
    """Where tables are printed; of so many columns where there is no terminal."""
    console = Console(highlight=False, markup=False)
    return console if console.is_terminal else Console(width=width, highlight=False, markup=False)


@contextmanager
def steps(total: int) -> Iterator[Callable[[str], None]]:
    """Tell of so many steps; call what it yields after each of them.

    In a terminal that is a bar, elsewhere a line for each tenth.
    """
    console = console_of(WIDTH)
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


def drawn(
    title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], *, words: Container[str]
) -> Table:
    """A table.

    Args:
        words: headings of the columns that hold words; the others hold numbers.
    """
    table = Table(title=title)
    for heading in headings:
        table.add_column(heading, justify="left" if heading in words else "right")
    for row in rows:
        table.add_row(*row)
    return table


def agreement_rows(
    document: dict[str, Any], distances: Sequence[str] = DISTANCES
) -> Iterator[list[str]]:
    """By kind of prompt: answers with the same tokens, and how far apart fast is, and stock."""
    for kind, found in document["agreement"].items():
        fast, stock = found["fast"], found["stock"]
        row = [kind, f"{fast['equal_answers']}/{fast['answers']}"]
        for key in distances:
            row += [small(fast[key]), small(stock[key]) if stock else ""]
        yield row


def time_rows(document: dict[str, Any]) -> Iterator[list[str]]:
    """By length: times to first token, stock and fast, and their ratio."""
    for point in document["times"]:
        times = (str(Times(**point[way])) for way in ("off", "on"))
        yield [str(point["tokens"]), *times, f"{point['ratio']:.2f}"]


def show(document: dict[str, Any]) -> None:
    """Print both tables and the verdict."""
    console = console_of(WIDTH)
    headings = ("mean |dlogp|", "stock", "max |dlogp|", "stock", "KL", "stock")
    console.print(
        drawn(
            "Answers: fast against stock, and stock against itself in other batches",
            ("prompts", "same tokens", *headings),
            agreement_rows(document),
            words=("prompts",),
        )
    )
    console.print(
        drawn(
            "Time to first token in seconds: median (20th to 80th percentile)",
            ("prompt tokens", "stock", "fast", "stock / fast"),
            time_rows(document),
            words=(),
        )
    )
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
