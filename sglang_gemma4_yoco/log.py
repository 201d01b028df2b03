"""Log lines, each logged once in a process."""

import logging
import re
import traceback
from collections.abc import Hashable

#: Below SGLang's own, so that its lines go where SGLang's go, whatever the operator has configured.
logger = logging.getLogger("sglang.srt.plugins.gemma4_yoco")

_logged: set[Hashable] = set()
# Seconds and errors, which differ from one time to the next; counts and sizes are whole numbers.
_MEASURED = re.compile(r"\d+\.\d+(e[-+]\d+)?")


def is_first(key: Hashable) -> bool:
    """Return True the first time it is called with this key."""
    is_new = key not in _logged
    _logged.add(key)
    return is_new


def log_once(line: str, level: int = logging.INFO) -> None:
    """Log ``line`` the first time in this process, whatever it has measured."""
    if is_first(_MEASURED.sub("", line)):
        logger.log(level, "%s", line)


def log_error(line: str) -> None:
    """Log ``line`` as an error the first time in this process."""
    log_once(line, logging.ERROR)


def log_failure(line: str, error: Exception) -> None:
    """Log ``line`` and the error with its traceback, the first time for this kind of error.

    The kind is its type and where it was raised: messages of one kind differ, say in a size.
    """
    raised = traceback.extract_tb(error.__traceback__)[-1:]
    kind = (line, type(error), *((frame.filename, frame.lineno) for frame in raised))
    if is_first(kind):
        logger.error("%s: %r", line, error, exc_info=error)
