"""``python -m sglang_gemma4_yoco``: the ``sglang-gemma4-yoco`` command."""

from sglang_gemma4_yoco.commands.main import main

if __name__ == "__main__":
    raise SystemExit(main())
