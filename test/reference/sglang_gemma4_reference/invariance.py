"""A server with ``--enable-deterministic-inference`` on a CPU.

SGLang then replaces PyTorch's own matrix products, norms and softmax by Triton kernels whose sums
do not depend on the batch, and starts on accelerators only. Here PyTorch's are kept. Everything
else that the argument changes is changed; the last bits of results may depend on the batch.
"""

from __future__ import annotations


def keep_pytorch() -> None:
    """Leave PyTorch's operations unpatched."""
    from sglang.srt import batch_invariant_ops

    batch_invariant_ops.enable_batch_invariant_mode = lambda *_: None
