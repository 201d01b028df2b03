"""Log lines, each logged once in a process."""

import logging
import traceback
from collections.abc import Hashable

#: A child of SGLang's logger, so that its lines follow the operator's logging configuration.
logger = logging.getLogger("sglang.srt.plugins.gemma4_yoco")

_logged: set[Hashable] = set()


def is_first(key: Hashable) -> bool:
    """Return True the first time it is called with this key."""
    is_new = key not in _logged
    _logged.add(key)
    return is_new


def log_once(line: str, level: int = logging.INFO) -> None:
    """Log ``line`` once per process."""
    if is_first(line):
        logger.log(level, "%s", line)


def log_warning(line: str) -> None:
    """Log ``line`` as a warning, once per process."""
    log_once(line, logging.WARNING)


def log_error(line: str) -> None:
    """Log ``line`` as an error, once per process."""
    log_once(line, logging.ERROR)


def log_failure(line: str, error: Exception) -> None:
    """Log ``line`` and the error with its traceback, once per type and place of the error.

    The error's message is not part of the key: it may vary, for example by a size.
    """
    raised = traceback.extract_tb(error.__traceback__)[-1:]
    if is_first((line, type(error), *map(tuple, raised))):
        logger.error("%s: %r", line, error, exc_info=error)
