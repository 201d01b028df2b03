#!/usr/bin/env python3
"""Add the installed SGLang's new server arguments and environment variables to the reviewed ones.

Variables are those of SGLang's ``Envs`` and of its dumper. Each name that is added is printed: read
what SGLang's code does with it before you commit the list. It belongs there if it changes neither
which rows of a prefill are read, nor where K and V are stored, nor how the layers are laid out,
split or replayed; or if what it makes is judged in any case: the attention backend, the pools, the
linear layers, each batch, the captured graphs. One that does not belongs into a table of
``loading/limits.py``, and is then left out here. None is ever taken out: an older release may have
it.
"""

from __future__ import annotations

import sys

sys.path.insert(0, __file__.rpartition("/scripts/")[0])  # it may be run by its path

from scripts.command_line import new_parser


def installed() -> frozenset[str]:
    """The names of all server arguments and environment variables of the installed SGLang."""
    from sglang.srt.server_args import ServerArgs

    from sglang_gemma4_yoco import compat

    listed = getattr(ServerArgs, "__struct_fields__", None)  # 0.5.21; before, a dataclass
    return frozenset(listed or ServerArgs.__dataclass_fields__).union(
        compat.server.list_set_variables()
    )


def main() -> None:
    """Add what is new to the list."""
    new_parser(__doc__).parse_args()
    from sglang_gemma4_yoco.loading import limits

    reviewed, judged = limits.REVIEWED_ARGUMENTS, limits.list_judged_arguments()
    names = sorted((reviewed | installed()) - judged)
    for name in names:
        if name not in reviewed:
            print(f"review {name}")
    written = limits.REVIEWED_FILE.read_text().splitlines()
    about = [line for line in written if line.startswith("#")]
    limits.REVIEWED_FILE.write_text("\n".join([*about, *names, ""]))


if __name__ == "__main__":
    main()
