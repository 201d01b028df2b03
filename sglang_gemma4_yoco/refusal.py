"""Reasons why a batch, or every batch of a server, runs as stock.

The text is for people: log lines, /server_info, and a metric's label, which is derived from it. No
decision depends on it, except that ranks compare it at start.
"""

import logging
from dataclasses import dataclass

#: The metrics label that most server-wide reasons share.
SERVER_UNSUPPORTED = "server_unsupported"


@dataclass(frozen=True)
class Refusal:
    """The reason why a batch runs as stock.

    Attributes:
        text: the reason.
        is_logged: log it for the first batch; every batch is counted.
    """

    text: str
    is_logged: bool = True

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class ServerRefusal(Refusal):
    """The reason why every batch of a server runs as stock; logged once, when it is found.

    Attributes:
        level: the level of its log line.
        label: the metrics label of its batches.
    """

    level: int = logging.INFO
    label: str = SERVER_UNSUPPORTED
