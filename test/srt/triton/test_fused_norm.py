"""SGLang's fused norm of q, k and v as the package calls it; no other test on a CPU runs it.

The rehearsal launches it and computes its values by a stand-in; here it is the kernel itself.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn.functional import rms_norm

from sglang_gemma4_yoco.models import gemma4


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("rows", [3, 260])  # above 256 rows a program walks over all heads
@pytest.mark.parametrize("width", [64, 256])
def test_one_kind_of_heads_is_normed_in_place(rows: int, heads: int, width: int) -> None:
    """Keys are a slice of a projection's columns, so they are not contiguous."""
    torch.manual_seed(0)
    projected = torch.randn(rows, 2 * heads * width)
    keys, values = projected.split(heads * width, dim=1)
    wanted_values = values.clone()
    weight = torch.rand(width) + 0.5
    wanted = rms_norm(keys.unflatten(1, (heads, width)), (width,), weight, 1e-6).flatten(1)
    norm: Any = SimpleNamespace(weight=torch.nn.Parameter(weight), eps=1e-6, scale_shift=0.0)
    with mock.patch.object(torch.Tensor, "is_cuda", property(lambda _: True)):
        normed = gemma4._norm_heads(norm, keys, heads, width)
    assert normed is keys
    torch.testing.assert_close(keys, wanted)
    assert torch.equal(values, wanted_values)
