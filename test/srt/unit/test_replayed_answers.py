"""Answers of replayed prefills: what counts as right, as rounding, and as wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from harness.replayed_answers import Answer

RIGHT = Answer("active", torch.arange(4.0)[None].double(), [torch.ones(2, 1, 3)])


@pytest.mark.parametrize(
    ("other", "right", "same_cache"),
    [
        ({}, True, True),
        ({"cache": [torch.ones(2, 1, 3) + 1e-3]}, True, False),  # rounding
        ({"logits": torch.tensor([[3.0, 2.0, 1.0, 0.0]]).double()}, False, True),
        ({"logits": torch.full((1, 4), torch.nan).double()}, False, True),
        ({"cache": [torch.tensor([[[1.0, 1, 1]], [[1.0, 1, 1.1]]])]}, False, False),
        ({"cache": [torch.full((2, 1, 3), torch.nan)]}, False, False),
    ],
)
def test_answers(other: dict[str, Any], right: bool, same_cache: bool) -> None:
    found = replace(RIGHT, **other).beside(RIGHT)
    assert (found["right"], found["same_cache"]) == (right, same_cache)
    assert found["same_logits"] is ("logits" not in other)
