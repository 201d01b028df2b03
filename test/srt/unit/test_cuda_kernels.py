"""The stand-ins of CUDA's compiled kernels: what they write, and that each check refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn.functional import gelu, rms_norm

from sglang_gemma4_reference import cuda_kernels
from sglang_gemma4_reference.cuda_kernels import RefusedByKernelError

ROWS, HEADS, KV_HEADS, HEAD = 5, 4, 2, 64
WIDTH, KV_WIDTH = HEADS * HEAD, KV_HEADS * HEAD
SLOTS = 9


@pytest.fixture(autouse=True)
def _always_the_same() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    cuda_kernels.calls.clear()


# Each kernel with arguments that it takes, which a test changes.


def norm_arguments() -> dict[str, Any]:
    return {"input": torch.randn(ROWS, WIDTH), "weight": torch.randn(WIDTH), "eps": 1e-6}


def add_norm_arguments() -> dict[str, Any]:
    return {**norm_arguments(), "residual": torch.randn(ROWS, WIDTH)}


def gelu_arguments() -> dict[str, Any]:
    return {"input": torch.randn(ROWS, 2 * WIDTH), "out": torch.empty(ROWS, WIDTH)}


def activation_arguments() -> dict[str, Any]:
    given = gelu_arguments()
    return {"rows": given["input"], "out": given["out"], "kind": "gelu_tanh"}


def qkv() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Columns of one projection's output, as a layer splits them: rows lie apart."""
    q, k, v = torch.randn(ROWS, WIDTH + 2 * KV_WIDTH).split([WIDTH, KV_WIDTH, KV_WIDTH], dim=-1)
    return q, k, v


def angles() -> torch.Tensor:
    """Cosines, then sines, of 20 positions."""
    each = torch.rand(20, HEAD // 2)
    return torch.cat((each.cos(), each.sin()), dim=-1)


def rope_arguments() -> dict[str, Any]:
    q, k, _ = qkv()
    return {
        "q": q.unflatten(-1, (HEADS, HEAD)),
        "k": k.unflatten(-1, (KV_HEADS, HEAD)),
        "cos_sin": angles(),
        "positions": torch.arange(3, 3 + ROWS),
    }


def flat_rope_arguments() -> dict[str, Any]:
    q, k, _ = qkv()
    return {
        "positions": torch.arange(3, 3 + ROWS),
        "query": q,
        "key": k,
        "head_size": HEAD,
        "cos_sin": angles(),
        "neox": True,
    }


def store_arguments() -> dict[str, Any]:
    _, k, v = qkv()
    return {
        "k": k,
        "v": v,
        "k_cache": torch.zeros(SLOTS, KV_WIDTH),
        "v_cache": torch.zeros(SLOTS, KV_WIDTH),
        "indices": torch.tensor([7, 0, 3, 1, 8]),
        "size_limit": SLOTS,
        "skipped": 0,
    }


def fused_rope(q_type: str = "fp32_t") -> Any:
    return cuda_kernels.load_jit("fused_rope", "true", str(HEAD), "true", "fp32_t", q_type)


def store(parts: int = 1) -> Any:
    width = str(4 * KV_WIDTH)
    return cuda_kernels.load_jit("kvcache", width, width, str(32 * parts), "true")


KERNELS: dict[str, tuple[Callable[..., Any], Callable[[], dict[str, Any]]]] = {
    "rmsnorm": (cuda_kernels.rmsnorm, norm_arguments),
    "fused_add_rmsnorm": (cuda_kernels.fused_add_rmsnorm, add_norm_arguments),
    "sgl_kernel.gelu_tanh_and_mul": (cuda_kernels.gelu_tanh_and_mul, gelu_arguments),
    "run_activation": (
        lambda **given: cuda_kernels.load_jit("activation", "fp32_t", "true").run_activation(
            **given
        ),
        activation_arguments,
    ),
    "run_rope": (lambda **given: fused_rope().run_rope(**given), rope_arguments),
    "rotary_embedding": (
        lambda **given: cuda_kernels.load_jit("rotary_embedding").rotary_embedding(**given),
        flat_rope_arguments,
    ),
    "store_cache": (lambda **given: store().store_cache(**given), store_arguments),
}


@pytest.mark.parametrize("name", KERNELS)
def test_takes_what_gemma_4_gives_and_counts(name: str) -> None:
    kernel, arguments = KERNELS[name]
    kernel(**arguments())
    assert cuda_kernels.calls == {name: 1}


# -- what they write -------------------------------------------------------------------------------


def test_fused_add_rmsnorm_norms_the_sum_before_it_is_rounded() -> None:
    given = add_norm_arguments()
    for name in ("input", "residual", "weight"):
        given[name] = given[name].bfloat16()
    total = given["input"].float() + given["residual"].float()
    want = rms_norm(total, (WIDTH,), given["weight"].float(), 1e-6)
    cuda_kernels.fused_add_rmsnorm(**given)
    assert torch.equal(given["residual"], total.bfloat16())
    torch.testing.assert_close(given["input"], want.bfloat16())


@pytest.mark.parametrize("name", ["sgl_kernel.gelu_tanh_and_mul", "run_activation"])
def test_activations(name: str) -> None:
    kernel, arguments = KERNELS[name]
    given = arguments()
    both = given["input" if "input" in given else "rows"]
    kernel(**given)
    want = gelu(both[:, :WIDTH], approximate="tanh") * both[:, WIDTH:]
    torch.testing.assert_close(given["out"], want)


def test_store_cache_leaves_out_the_reserved_slot() -> None:
    given = store_arguments()
    store().store_cache(**given)
    for name in ("k", "v"):
        want = torch.zeros(SLOTS, KV_WIDTH)
        want[given["indices"]] = given[name]
        want[0] = 0
        assert torch.equal(given[f"{name}_cache"], want)


# -- what they refuse ------------------------------------------------------------------------------


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, neighbours of the last dimension two apart."""
    return torch.stack((tensor, tensor), dim=-1)[..., 0]


def with_gap(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, with another row's width between two rows."""
    return torch.cat((tensor, tensor), dim=-1)[:, : tensor.shape[-1]]


def off_by_one(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, beginning one element behind an aligned address."""
    flat = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:]
    return flat.view(tensor.shape).copy_(tensor)


Change = Callable[[Any], Any]
REFUSED: list[tuple[str, str, Change, str]] = [
    ("rmsnorm", "input", strided, "not contiguous"),
    ("rmsnorm", "input", torch.Tensor.double, "float64"),
    ("rmsnorm", "weight", lambda t: t[1:], "size of 255"),
    ("rmsnorm", "weight", torch.Tensor.bfloat16, "one type"),
    ("fused_add_rmsnorm", "residual", lambda t: t[1:], "size of 4"),
    ("fused_add_rmsnorm", "residual", with_gap, "not contiguous"),
    ("sgl_kernel.gelu_tanh_and_mul", "out", lambda t: t[1:], "row counts"),
    ("sgl_kernel.gelu_tanh_and_mul", "out", lambda t: t[:, 1:], "twice as wide"),
    ("sgl_kernel.gelu_tanh_and_mul", "out", with_gap, "contiguous"),
    ("sgl_kernel.gelu_tanh_and_mul", "input", lambda t: t[:, 1:], "16 bytes"),
    ("run_activation", "rows", with_gap, "not contiguous"),
    ("run_activation", "rows", lambda t: t[1:], "size of 4"),
    ("run_activation", "rows", lambda t: t[:, 2:].contiguous(), "two halves"),
    ("run_activation", "out", torch.Tensor.bfloat16, "bfloat16"),
    ("run_activation", "kind", lambda _: "silu", "no silu"),
    ("run_rope", "q", lambda t: t[1:], "size of 5"),
    ("run_rope", "k", lambda t: t[1:], "size of 4"),
    ("run_rope", "k", lambda t: t.flatten(1), "2 dimensions"),
    ("run_rope", "k", strided, "stride"),
    ("run_rope", "k", lambda t: t.transpose(0, 1).contiguous().transpose(0, 1), "stride"),
    ("run_rope", "k", torch.Tensor.bfloat16, "bfloat16"),
    ("run_rope", "positions", lambda t: t[1:], "size of 4"),
    ("run_rope", "positions", strided, "not contiguous"),
    ("run_rope", "positions", torch.Tensor.float, "float32"),
    ("run_rope", "cos_sin", torch.Tensor.bfloat16, "bfloat16"),
    ("run_rope", "cos_sin", lambda t: t[:, 2:].contiguous(), "size of 62"),
    ("rotary_embedding", "query", lambda t: t[1:], "rows"),
    ("rotary_embedding", "key", lambda t: t[1:], "rows"),
    ("rotary_embedding", "positions", lambda t: t[1:], "rows"),
    ("rotary_embedding", "positions", torch.Tensor.int, "int64"),
    ("rotary_embedding", "key", lambda t: t[:, 1:], "heads"),
    ("rotary_embedding", "key", lambda t: torch.cat((t, t[:, :HEAD]), dim=-1), "heads"),
    ("rotary_embedding", "key", strided, "side by side"),
    ("rotary_embedding", "cos_sin", torch.Tensor.bfloat16, "one type"),
    ("store_cache", "k", lambda t: t[1:], "size of 5"),
    ("store_cache", "v", lambda t: t[1:], "size of 4"),
    ("store_cache", "k", strided, "stride of 2"),
    ("store_cache", "k", off_by_one, "aligned"),
    ("store_cache", "v", lambda t: t[:, 1:], "aligned"),
    ("store_cache", "v", lambda t: t[:, :HEAD], "size of 128"),
    ("store_cache", "k", lambda t: t.unflatten(-1, (-1, HEAD)), "3 dimensions"),
    ("store_cache", "v", torch.Tensor.bfloat16, "bfloat16"),
    ("store_cache", "v_cache", torch.Tensor.bfloat16, "bfloat16"),
    ("store_cache", "indices", lambda t: t[1:], "size of 4"),
    ("store_cache", "indices", torch.Tensor.float, "float32"),
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
