"""The stand-ins of CUDA's compiled kernels refuse what the kernels refuse.

What they write, ``triton/test_cuda_branches`` compares with Hugging Face's model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn.functional import rms_norm

from sglang_gemma4_reference import cuda_kernels
from sglang_gemma4_reference.cuda_kernels import RefusedByKernelError

ROWS, HEADS, HEAD = 5, 2, 64
WIDTH = HEADS * HEAD
SLOTS = 9


@pytest.fixture(autouse=True)
def _always_the_same() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    cuda_kernels.calls.clear()
    cuda_kernels.norms.clear()


# Each kernel with arguments that it takes, which a test changes. Rows are columns of one
# projection's output, as a layer splits them: they are not contiguous.


def norm_arguments() -> dict[str, Any]:
    rows = {name: torch.randn(ROWS, WIDTH) for name in ("input", "residual")}
    return {**rows, "weight": torch.randn(WIDTH), "eps": 1e-6}


def activation_arguments() -> dict[str, Any]:
    rows, out = torch.randn(ROWS, 2 * WIDTH), torch.empty(ROWS, WIDTH)
    return {"rows": rows, "out": out, "kind": "gelu_tanh"}


def rope_arguments() -> dict[str, Any]:
    q, k = torch.randn(ROWS, 2 * WIDTH).unflatten(-1, (-1, HEAD)).split(HEADS, dim=1)
    angles = torch.rand(20, HEAD // 2)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    return {"q": q, "k": k, "cos_sin": cos_sin, "positions": torch.arange(3, 3 + ROWS)}


def store_arguments() -> dict[str, Any]:
    k, v = torch.randn(ROWS, 2 * WIDTH).split(WIDTH, dim=-1)
    caches = {name: torch.zeros(SLOTS, WIDTH) for name in ("k_cache", "v_cache")}
    slots = {"indices": torch.tensor([7, 0, 3, 1, 8]), "size_limit": SLOTS, "skipped": 0}
    return {"k": k, "v": v, **caches, **slots}


def compiled(source: str, *template: str) -> Any:
    return cuda_kernels.load_jit(source, *template)


ROW = str(4 * WIDTH)
KERNELS: dict[str, tuple[Callable[..., Any], Callable[[], dict[str, Any]]]] = {
    "fused_add_rmsnorm": (cuda_kernels.fused_add_rmsnorm, norm_arguments),
    "run_activation": (
        compiled("activation", "fp32_t", "true").run_activation,
        activation_arguments,
    ),
    "run_rope": (
        compiled("fused_rope", "true", str(HEAD), "true", "fp32_t", "fp32_t").run_rope,
        rope_arguments,
    ),
    "store_cache": (compiled("kvcache", ROW, ROW, "32", "true").store_cache, store_arguments),
}


@pytest.mark.parametrize("name", KERNELS)
def test_takes_what_gemma_4_gives_and_counts(name: str) -> None:
    kernel, arguments = KERNELS[name]
    kernel(**arguments())
    assert cuda_kernels.calls == {name: 1}


def test_fused_add_rmsnorm_norms_the_sum_before_it_is_rounded() -> None:
    given = norm_arguments()
    for name in ("input", "residual", "weight"):
        given[name] = given[name].bfloat16()
    total = given["input"].float() + given["residual"].float()
    want = rms_norm(total, (WIDTH,), given["weight"].float(), 1e-6)
    cuda_kernels.fused_add_rmsnorm(**given)
    assert torch.equal(given["residual"], total.bfloat16())
    torch.testing.assert_close(given["input"], want.bfloat16())


def halves(tensor: torch.Tensor, width: int) -> torch.Tensor:
    """The same rows as columns of a wider tensor, in two bytes."""
    wider = torch.zeros(len(tensor), width, dtype=torch.bfloat16)
    return wider[:, : tensor.shape[-1]].copy_(tensor)


def test_flashinfers_norms_are_compiled_for_dense_rows_and_for_others() -> None:
    given = norm_arguments()
    weight, dense = given["weight"].bfloat16(), given["input"].bfloat16()
    compiled = set[tuple[str, int, bool]]()
    for rows, kernel in ((dense, True), (dense[1:], True), (halves(dense, 2 * WIDTH), False)):
        compiled.add(("rmsnorm", WIDTH, kernel))
        want = rms_norm(rows.float(), (WIDTH,), weight.float(), 1e-6).bfloat16()
        torch.testing.assert_close(cuda_kernels.rmsnorm(rows, weight), want)
        assert cuda_kernels.norms == compiled
    for unaligned in (off_by_one(dense), halves(dense, WIDTH + 1), halves(dense, WIDTH + 4)):
        with pytest.raises(RefusedByKernelError, match="aligned"):
            cuda_kernels.rmsnorm(unaligned, weight)
    with pytest.raises(RefusedByKernelError, match="weight is not aligned to 16"):
        cuda_kernels.rmsnorm(dense, off_by_one(weight))
    wide = torch.zeros(4 * WIDTH, dtype=torch.bfloat16)[8:][:WIDTH].view(1, WIDTH)
    with pytest.raises(RefusedByKernelError, match="aligned to 128"):
        cuda_kernels.rmsnorm(wide, weight)


def test_store_cache_leaves_out_the_reserved_slot() -> None:
    kernel, arguments = KERNELS["store_cache"]
    given = arguments()
    kernel(**given)
    for name in ("k", "v"):
        want = torch.zeros(SLOTS, WIDTH)
        want[given["indices"]] = given[name]
        want[0] = 0
        assert torch.equal(given[f"{name}_cache"], want)


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, neighbours of the last dimension two apart."""
    return torch.stack((tensor, tensor), dim=-1)[..., 0]


def off_by_one(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, beginning one element after an aligned address."""
    flat = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:]
    return flat.view(tensor.shape).copy_(tensor)


Change = Callable[[Any], Any]
REFUSED: list[tuple[str, str, Change, str]] = [
    ("fused_add_rmsnorm", "input", strided, "not contiguous"),
    ("fused_add_rmsnorm", "input", torch.Tensor.double, "float64"),
    ("fused_add_rmsnorm", "weight", lambda t: t[1:], "size of 127"),
    ("fused_add_rmsnorm", "residual", lambda t: t[1:], "size of 4"),
    ("fused_add_rmsnorm", "residual", torch.Tensor.bfloat16, "one type"),
    ("run_activation", "rows", strided, "not contiguous"),
    ("run_activation", "rows", lambda t: t[1:], "size of 4"),
    ("run_activation", "rows", lambda t: t[:, 2:].contiguous(), "two halves"),
    ("run_activation", "out", torch.Tensor.bfloat16, "bfloat16"),
    ("run_rope", "q", lambda t: t[1:], "size of 5"),
    ("run_rope", "k", lambda t: t[1:], "size of 4"),
    ("run_rope", "k", strided, "stride"),
    ("run_rope", "k", torch.Tensor.bfloat16, "bfloat16"),
    ("run_rope", "positions", lambda t: t[1:], "size of 4"),
    ("run_rope", "positions", torch.Tensor.float, "float32"),
    ("store_cache", "k", lambda t: t[1:], "size of 5"),
    ("store_cache", "v", lambda t: t[1:], "size of 4"),
    ("store_cache", "k", strided, "stride of 2"),
    ("store_cache", "k", off_by_one, "aligned"),
    ("store_cache", "v", torch.Tensor.bfloat16, "bfloat16"),
    ("store_cache", "indices", lambda t: t[1:], "size of 4"),
    ("store_cache", "indices", lambda t: t + 1, "not in"),
    ("store_cache", "indices", lambda t: t - 1, "not in"),
]


@pytest.mark.parametrize(
    ("name", "argument", "change", "message"),
    REFUSED,
    ids=[f"{name}-{argument}-{i}" for i, (name, argument, *_) in enumerate(REFUSED)],
)
def test_refuses(name: str, argument: str, change: Change, message: str) -> None:
    kernel, arguments = KERNELS[name]
    given = arguments()
    given[argument] = change(given[argument])
    with pytest.raises(RefusedByKernelError, match=message):
        kernel(**given)
