#!/usr/bin/env python3
"""Count false alarms of ``verify``, and the defects that it misses.

Random models in bf16 whose heads attend to few keys are served on a CPU, stock and fast (with a
captured tail if the seed is odd). Each round sends new prompts of all kinds and compares as
``verify`` does. In some rounds the package is right. In the others the fast server takes the row
before the kept one for a single prompt, of each kind in turn
(``test/srt/harness/verify_rounds.py``)::

    python scripts/bench/verify_rounds.py --results benchmark/results/verify_rounds_cpu.json

The default takes an hour; the file is updated after each model. Output contract: a line for each
round on stdout; the last line is one JSON document. Exit status: 1 after a false alarm, or if fewer
than 9 of 10 defects of a kind were found; 2 if the run failed.
"""

from __future__ import annotations

import os
import random
import sys
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, __file__.rpartition("/scripts/")[0])  # it may be run by its path

from scripts.command_line import failed, new_parser
from scripts.environment import HARNESS
from scripts.result_files import origin, write_result
from sglang_gemma4_yoco.commands.console import CommandError, say
from sglang_gemma4_yoco.commands.verify.prompts import KINDS
from sglang_gemma4_yoco.commands.verify.verify import parse_positive

sys.path.append(HARNESS)
RIGHT = "no defect"


def main() -> int:
    """Run all rounds, print the counts, and return the exit status."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--seeds", type=int, nargs="+", default=[0, 1, 2, 3], help="models, by their seeds")
    add("--right", type=parse_positive, default=10, help="rounds of each model, package unchanged")
    add("--wrong", type=parse_positive, default=3, help="rounds of each model and kind of defect")
    add("--results", type=Path, help="where to put the counts, as JSON")
    args = parser.parse_args()
    from harness import verify_rounds

    os.environ["SGLANG_PLATFORM"] = "gemma4_cpu"
    about = origin()
    rounds = Counter[str]()
    reported = Counter[str]()
    kinds = [None] * args.right + [*KINDS] * args.wrong
    try:
        for seed in args.seeds:
            draw = random.Random(seed)
            with (
                TemporaryDirectory() as directory,
                verify_rounds.serve(Path(directory), seed) as servers,
            ):
                for kind in kinds:
                    name = kind or RIGHT
                    found = verify_rounds.run_round(servers, draw, kind)
                    while kind and not found.shown:  # its prompt was not cut
                        found = verify_rounds.run_round(servers, draw, kind)
                    rounds[name] += 1
                    reported[name] += found.is_reported(kind)
                    say(f"== model {seed}, {name}: {found.document['problems']}")
            # So an interrupted run leaves the counts so far.
            document = about | {"seed": seed, "rounds": rounds, "reported": reported}
            write_result(args.results, document)
    except (CommandError, OSError) as failure:
        return failed(failure)
    say(document)
    missed = [kind for kind in KINDS if reported[kind] < 0.9 * rounds[kind]]
    return int(reported[RIGHT] > 0 or bool(missed))


if __name__ == "__main__":
    raise SystemExit(main())
