"""Judgement of replayed prefills' answers: right, rounding, or wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from harness.replayed_answers import Answer

# K and V of one layer.
LAYER = torch.ones(2, 1, 3)
RIGHT = Answer("active", torch.arange(4.0)[None].double(), [LAYER, LAYER])
ROUNDING = 0.01


@pytest.mark.parametrize(
    ("other", "right", "same_cache"),
    [
        ({}, True, True),
        ({"cache": [LAYER, LAYER + 1e-3]}, True, False),  # rounding
        ({"logits": RIGHT.logits * (1 + 1.9 * ROUNDING)}, True, True),  # twice is allowed
        ({"logits": RIGHT.logits * (1 + 2.1 * ROUNDING)}, False, True),
        ({"logits": torch.full((1, 4), torch.nan).double()}, False, True),
        ({"cache": [LAYER, LAYER * 1.1]}, False, False),
        ({"cache": [LAYER, LAYER * torch.nan]}, False, False),
    ],
)
def test_answers(other: dict[str, Any], right: bool, same_cache: bool) -> None:
    found = replace(RIGHT, **other).beside(RIGHT, ROUNDING)
    assert (found["right"], found["same_cache"]) == (right, same_cache)
    assert found["same_logits"] is ("logits" not in other)
