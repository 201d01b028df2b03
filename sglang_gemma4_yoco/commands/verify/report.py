"""The report of ``verify`` for people, in Markdown, ready to be pasted into an issue."""

from sglang_gemma4_yoco.commands.console import Document
from sglang_gemma4_yoco.commands.verify.comparison import Times

#: Key in ``times`` -> name of the server.
SERVERS = {"off": "stock", "again": "stock again", "on": "fast"}
#: Key in ``agreement`` -> what stock is compared with.
OTHERS = {"fast": "fast", "again": "stock again", "stock": "stock in other batches"}
#: By whether two runs of stock in identical batches differ.
NOISE = {
    True: "Stock differs from itself in identical batches, which is not fast prefill's doing.",
    False: "Two runs of stock in identical batches agree.",
}
NOT_TRIED = "not tried"
VERDICTS = {
    True: "Fast prefill was active, and the answers agree.",
    False: "Fast prefill was active, and the answers do NOT agree.",
}
#: By ``exact``: whether all answers must be equal.
RULES = {
    True: "In float32 on a CPU tokens must be equal, and log-probabilities within 1e-3.",
    False: "Answers are judged by how far stock differs from itself.",
}

Rows = list[list[str]]


def _make_tables(document: Document) -> dict[str, Rows]:
    """Return tables by their titles; the first row is the header."""
    times: Rows = [["prompt tokens", "stock / fast", *SERVERS.values()]]
    for point in document["times"]:
        seconds = (str(Times(**point[way])) for way in SERVERS)
        times.append([str(point["tokens"]), f"{point['ratio']:.2f}", *seconds])
    kinds: Rows = [["prompts", "cut", "cached tokens", *OTHERS.values()]]
    for kind, found in document["agreement"].items():
        figures = [_format_figures(found[way]) for way in OTHERS]
        if kind in document["left_out"]:
            figures[0] = NOT_TRIED
        cut = f"{found['cut']}/{found['prefills']}"
        kinds.append([kind, cut, str(found["cached_tokens"]), *figures])
    for kind in document["left_out"]:
        if kind not in document["agreement"]:
            kinds.append([kind, "", "", NOT_TRIED, "", ""])
    timed = f"Time to first token of {document['repeats']} prompts of each length"
    return {
        f"{timed}, seconds: median (20th to 80th percentile)": times,
        "Stock against others: same tokens, mean difference of log-probabilities (largest)": kinds,
    }


def _format_figures(found: Document) -> str:
    """Return how many answers have the same tokens, and how far log-probabilities differ."""
    equal = f"{found['equal_answers']}/{found['answers']}"
    if found["max_logprob_diff"] is None:
        return f"{equal}, not finite"
    return f"{equal}, {found['mean_logprob_diff']:.2g} ({found['max_logprob_diff']:.2g})"


def _make_notes(document: Document) -> list[str]:
    """Return sentences on disagreements, prompts not tried, and stock's agreement with itself."""
    notes = [f"Problem: {problem}" for problem in document["problems"]]
    for kind, reason in document["left_out"].items():
        notes.append(f"Not tried: {kind}: {reason}")
    return [*notes, NOISE[document["stock_differs"]]]


def _make_verdict(document: Document) -> str:
    """Return the verdict, and what it says nothing about."""
    verdict = VERDICTS[document["agrees"]]
    if document["left_out"]:
        verdict += f" Not tried: {', '.join(document['left_out'])}."
    return verdict


def format_report(document: Document) -> str:
    """Return the verdict, what was run, the notes and the tables."""
    lines = [
        f"### YOCO fast prefill: {document['model']}",
        "",
        f"**{_make_verdict(document)}** {RULES[document['exact']]}",
        "",
        f"- SGLang {document['sglang']}, sglang-gemma4-yoco {document['package']}, commit "
        f"{document['commit']}, {document['date']}",
        f"- {document['device']}, {document['dtype']}, server flags: "
        f"`{document['server_args'] or 'none'}`",
    ]
    for note in _make_notes(document):
        lines.append(f"- {note}")
    for title, rows in _make_tables(document).items():
        lines += ["", title, "", *_align(rows)]
    return "\n".join(lines)


def _align(rows: Rows) -> list[str]:
    """Return the lines of a Markdown table with columns of equal width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    header, *others = (f"| {' | '.join(map(str.ljust, row, widths))} |" for row in rows)
    return [header, f"|{'|'.join('-' * (width + 2) for width in widths)}|", *others]
