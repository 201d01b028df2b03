"""One prefill that is cut: the layers before the cut, K and V, the tail, the scatter.

With T rows, B kept ones and S the first KV-shared layer, the FFNs of the L layers run
on ``[T] * (S - 1) + [B] * (L - S + 1)`` rows. For E2B (S = 15, L = 35) and a prompt of 2048 tokens,
14 layers run on 2048 rows and 21 layers on 1.
"""

from __future__ import annotations

pass
pass


class NotCuttableError(Exception):
    """This model's forward cannot be cut; the message has the reason.

    It is raised after the layers before the cut have run. Only time is lost: the stock forward then
    serves the batch from its beginning.
    """
