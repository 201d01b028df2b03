"""Which attention backends and pools are admitted: the rules, on SGLang's classes without a device.

That the admitted ones give stock's answers is shown by forwards and servers.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend
from sglang.srt.layers.attention.torch_flex_backend import TorchFlexAttnBackend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from sglang_gemma4_yoco import seams
from sglang_gemma4_yoco.deciding import backends


class Derived(TritonAttnBackend):
    """Of a class that is derived from a known one nobody knows what it does otherwise."""


class Claiming(AttentionBackend):
    gemma4_yoco = frozenset({"front", "tail"})


class SilentHeir(Claiming):
    pass


def of(kind: type, **attributes: Any) -> Any:
    """An object of the class that was never initialised."""
    made: Any = object.__new__(kind)
    vars(made).update(attributes)
    return made


def named(name: str, **attributes: Any) -> Any:
    """One of a class by this name of SGLang's, whose module this machine may be unable to import.

    Their names in the installed release are compared by ``test_the_listed_classes_exist``.
    """
    kind = type(name, (AttentionBackend,), {"__module__": "sglang.srt.layers.attention.some"})
    return of(kind, **attributes)


def hybrid(prefill: Any, decode: Any) -> Any:
    return of(HybridAttnBackend, prefill_backend=prefill, decode_backend=decode)


def unproven(name: str) -> str:
    return f"the attention backend {name} is not proven"


TRTLLM = named("TRTLLMHAAttnBackend")
MAINS = [
    (of(TritonAttnBackend), None),
    (TRTLLM, None),
    (named("XPUAttentionBackend"), None),
    (named("FlashAttentionBackend", fa_impl_ver=4), None),
    (named("FlashAttentionBackend", fa_impl_ver=3), "FlashAttention 3 is not proven"),
    (named("AiterAttnBackend"), unproven("AiterAttnBackend")),
    (named("AscendAttnBackend"), unproven("AscendAttnBackend")),
    (named("IntelAMXAttnBackend"), unproven("IntelAMXAttnBackend")),
    (named("TboAttnBackend"), unproven("TboAttnBackend")),
    (of(TorchFlexAttnBackend), unproven("TorchFlexAttnBackend")),
    (of(TorchNativeAttnBackend), unproven("TorchNativeAttnBackend")),
    (of(Derived), unproven("Derived")),
    (of(Claiming), None),
    (of(SilentHeir), unproven("SilentHeir")),
    (hybrid(TRTLLM, of(TritonAttnBackend)), None),
    (hybrid(of(TritonAttnBackend), TRTLLM), None),
    (hybrid(named("AiterAttnBackend"), TRTLLM), unproven("AiterAttnBackend")),
    (hybrid(TRTLLM, named("AiterAttnBackend")), unproven("AiterAttnBackend")),
    (type("HybridAttnBackend", (AttentionBackend,), {})(), unproven("HybridAttnBackend")),
]


@pytest.mark.parametrize(("main", "reason"), MAINS)
def test_mains(main: Any, reason: str | None) -> None:
    assert backends.why_not_main(main) == reason


def test_a_claim_counts_for_no_class_of_sglangs() -> None:
    """A name there is admitted by the list or not at all."""
    assert backends.can(type(named("AiterAttnBackend", gemma4_yoco={"front"}))) == frozenset()


def test_the_listed_classes_exist() -> None:
    """Under these names, in modules of SGLang's that need another device to be imported."""
    modules = seams.gemma4_causal.__file__.replace("models/gemma4_causal.py", "layers/attention/")
    for name, file in {
        "TritonAttnBackend": "triton",
        "TRTLLMHAAttnBackend": "trtllm_mha",
        "FlashAttentionBackend": "flashattention",
        "XPUAttentionBackend": "xpu",
    }.items():
        assert name in backends.SGLANGS
        with open(f"{modules}{file}_backend.py") as source:
            assert f"\nclass {name}(" in source.read()
    assert len(backends.SGLANGS) == 4


@pytest.mark.parametrize(
    ("backend", "alone"),
    [
        (of(TritonAttnBackend), True),
        (of(Claiming), True),
        (of(Derived), False),
        (TRTLLM, False),
        (hybrid(of(TritonAttnBackend), of(TritonAttnBackend)), False),
    ],
)
def test_what_may_be_planned_anew_at_the_cut(backend: Any, alone: bool) -> None:
    """Never one that merely may be main: its decode steps are shown by nobody."""
    reason = f"the tail cannot run on the attention backend {type(backend).__name__}"
    assert backends.why_not_tail(backend) == (None if alone else reason)


# ---------------------------------------------------------------- pools


def pool(kind: type = MHATokenToKVPool, *, dims: int = 3, **attributes: Any) -> Any:
    buffers = [torch.zeros((2,) * dims) for _ in range(2)]
    fields = {"k_buffer": buffers, "v_buffer": buffers, "dtype": torch.float32}
    return of(kind, **(fields | attributes))


def both(full: Any, window: Any) -> Any:
    return of(SWAKVPool, full_kv_pool=full, swa_kv_pool=window, dtype=torch.float32)


class PoolOfAnotherKind(MHATokenToKVPool):
    pass


def quantised(method: str) -> Any:
    return pool(quant_method=SimpleNamespace(name=method))


UNKNOWN = "K and V lie in a PoolOfAnotherKind, whose layout is not known"
POOLS = [
    (pool(), None),
    (both(pool(), pool()), None),
    (quantised("unquantized"), None),
    (quantised("nvfp4"), "K and V are quantised (nvfp4)"),
    (pool(PoolOfAnotherKind), UNKNOWN),
    (both(pool(PoolOfAnotherKind), pool()), UNKNOWN),
    (both(pool(), pool(PoolOfAnotherKind)), UNKNOWN),
    (both(pool(), quantised("mxfp8")), "K and V are quantised (mxfp8)"),
    (pool(dims=4), "K and V do not lie slot by slot, but in 4 dimensions"),
    (both(pool(), pool(dims=5)), "K and V do not lie slot by slot, but in 5 dimensions"),
]


@pytest.mark.parametrize("main", [of(TritonAttnBackend), TRTLLM])
@pytest.mark.parametrize(("of_server", "reason"), POOLS)
def test_pools(of_server: Any, reason: str | None, main: Any) -> None:
    assert backends.why_not_pool(of_server, torch.float32, main) == reason


@pytest.mark.parametrize(
    ("main", "reason"),
    [
        (of(TritonAttnBackend), None),
        (of(Claiming), None),
        (TRTLLM, "a KV cache of torch.float8_e4m3fn beside TRTLLMHAAttnBackend"),
        (
            hybrid(TRTLLM, of(TritonAttnBackend)),
            "a KV cache of torch.float8_e4m3fn beside HybridAttnBackend",
        ),
    ],
)
def test_a_cache_of_another_type_is_read_beside_its_own_kind_alone(
    main: Any, reason: str | None
) -> None:
    rounded = pool(dtype=torch.float8_e4m3fn)
    assert backends.why_not_pool(rounded, torch.bfloat16, main) == reason
    assert backends.why_not_pool(pool(dtype=torch.bfloat16), torch.bfloat16, main) is None


def test_recordable_is_said_apart() -> None:
    assert backends.RECORDED in backends.can(TritonAttnBackend)
    assert backends.RECORDED not in backends.can(Claiming)
