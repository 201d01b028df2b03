#!/usr/bin/env python3
"""Add the installed SGLang's new server arguments and environment variables to the reviewed ones.

Variables are those of SGLang's ``Envs`` and of its dumper. Each added name is printed: read what
SGLang's code does with it before you commit the list. A name belongs there if it changes neither
which rows of a prefill are read, nor where K and V are stored, nor how the layers are laid out,
split or replayed; or if the package checks its effect in any case: the attention backend, the
pools, the linear layers, each batch, the captured graphs. Any other name belongs in a table of
``admission/arguments.py``, which excludes it here. Names of a release that is no longer supported
may be removed.
"""

from __future__ import annotations

import dataclasses
import sys

sys.path.insert(0, __file__.rpartition("/scripts/")[0])  # it may be run by its path

from scripts.command_line import new_parser
from scripts.environment import REPO

FILE = REPO / "test" / "srt" / "unit" / "reviewed_arguments.txt"


def installed() -> set[str]:
    """Return the names of all server arguments and variables of the installed SGLang."""
    from sglang.srt.debug_utils.dumper import DumperConfig
    from sglang.srt.environ import EnvField, Envs
    from sglang.srt.server_args import ServerArgs

    names = set(ServerArgs.__struct_fields__)
    names |= {name for name, field in vars(Envs).items() if isinstance(field, EnvField)}
    names |= {f"DUMPER_{field.name.upper()}" for field in dataclasses.fields(DumperConfig)}
    return names


def reviewed() -> set[str]:
    """Return the names in the list."""
    return {line for line in FILE.read_text().splitlines() if not line.startswith("#")}


def main() -> None:
    """Add new names to the list, and remove those that ``arguments`` judges; print both."""
    new_parser(__doc__).parse_args()
    from sglang_gemma4_yoco.admission import arguments

    known, judged = reviewed(), arguments.list_judged_arguments()
    names = sorted((known | installed()) - judged)
    for name in sorted(set(names) - known):
        print(f"review {name}")
    for name in sorted(known & judged):
        print(f"removed {name}")
    about = [line for line in FILE.read_text().splitlines() if line.startswith("#")]
    FILE.write_text("\n".join([*about, *names, ""]))


if __name__ == "__main__":
    main()
