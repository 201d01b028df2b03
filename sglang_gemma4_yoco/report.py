"""The counters of ``telling.report``, for those who serve in a process of their own."""

from sglang_gemma4_yoco.telling.report import forwards, reset, rows

__all__ = ["forwards", "reset", "rows"]
