"""A KV cache of the weights' type, and of another one, on SGLang's Triton backend.

Under a cache of another type SGLang's own forward gets no further than the first shared layer: it
hands K and V that a shared layer reads back to its kernel in the cache's type, which the kernel
refuses, in the interpreter as on a GPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

from batches import batch_of
from layer_rows import INTERPRETED
from observe import Observed, watching
from sglang_gemma4_reference import interpreter
from sglang_gemma4_reference.checkpoint import (
    write_checkpoint,
)
from sglang_gemma4_reference.engine import Engine, switched
from sglang_gemma4_yoco.loading import start

interpreter.make_quick()
interpreter.make_exact()

RELEASE = pytest.mark.release
TYPES = {
    "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[RELEASE] * (name != "fp8_e4m3")) for name in TYPES]
)
@pytest.mark.usefixtures("forgotten_reports")
def test_a_cache_of_another_type_is_refused(tmp_path: Path, name: str) -> None:
    """Stock answers as it does without the package: with an error at the first shared layer."""
    checkpoint = write_checkpoint(tmp_path, INTERPRETED)
    engine = Engine(
        checkpoint, device="cpu", dtype="float32", max_total_tokens=512, kv_cache_dtype=name
    )
    assert type(engine.runner.attn_backend) is TritonAttnBackend
    assert start.of(engine.text_model).refused == (
        f"a KV cache of {TYPES[name]} beside weights of torch.float32"
    )
    for switch in ("0", "1"):
        seen, scheduled = Observed(), engine.schedule(batch_of((0, 20), (0, 7)))
        with (
            switched(switch),
            watching(engine, seen),
            pytest.raises(Exception, match=r"Unsupported rhs dtype|must be same dtype"),
        ):
            engine.forward(scheduled)
        assert seen.attention_rows == [27] * (INTERPRETED.layers - INTERPRETED.kv_shared_layers)
