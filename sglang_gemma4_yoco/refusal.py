"""Reasons for which a batch, or every batch of a server, runs as stock.

The text is for people: in log lines, in /server_info, and in a metric's label, which is made of it.
Nothing is decided by it.
"""

import logging
from dataclasses import dataclass

#: The label in metrics that most reasons of a whole server have in common.
SERVER_UNSUPPORTED = "server_unsupported"


@dataclass(frozen=True)
class Refusal:
    """The reason for which a batch runs as stock.

    Attributes:
        text: the reason.
        is_logged: it is logged for the first batch; it is counted for each in any case.
    """

    text: str
    is_logged: bool = True

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class ServerRefusal(Refusal):
    """The reason for which every batch of a server runs as stock; it is logged once, at start.

    Attributes:
        level: of its line in the log.
        label: under which its batches are counted in metrics.
    """

    level: int = logging.INFO
    label: str = SERVER_UNSUPPORTED
