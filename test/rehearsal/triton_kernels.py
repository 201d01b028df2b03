"""What Triton's kernels write that SGLang launches for a Gemma 4, in PyTorch.

Each function has the parameters of its kernel that it reads; ``kernels`` calls it on CPU tensors
after the real launch. They stand for values alone: splits, blocks and roundings are a GPU's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.functional import rms_norm

import operations

Tensor = torch.Tensor


# ---- numbers of a batch


def create_flashinfer_kv_indices_triton(
    req_to_token_ptr: Tensor,
    req_pool_indices_ptr: Tensor,
    page_kernel_lens_ptr: Tensor,
    kv_indptr: Tensor,
    kv_start_idx: Tensor | None,
    kv_indices_ptr: Tensor,
    ENTRY_PAGE_SIZE: int = 1,
    token_mapping: Tensor | None = None,
    **_: object,
) -> None:
    assert ENTRY_PAGE_SIZE == 1
    for request, row in enumerate(req_pool_indices_ptr.tolist()):
        start = 0 if kv_start_idx is None else int(kv_start_idx[request])
        length = int(page_kernel_lens_ptr[request])
        slots = req_to_token_ptr[row, start : start + length]
        if token_mapping is not None:
            slots = token_mapping[slots.long()]
        first = int(kv_indptr[request])
        kv_indices_ptr[first : first + length] = slots


def get_num_kv_splits_triton(num_kv_splits_ptr: Tensor, **_: object) -> None:
    num_kv_splits_ptr.fill_(1)  # the only one that ``_fwd_kernel_stage2`` reads


def write_req_to_token_pool_triton(
    req_to_token_ptr: Tensor,
    req_pool_indices: Tensor,
    prefix_tensors: Tensor,
    pre_lens: Tensor,
    seq_lens: Tensor,
    out_cache_loc: Tensor,
    **_: object,
) -> None:
    offset = operations.RUNTIME.rehearsal_host_offset()
    done = 0
    for request, row in enumerate(req_pool_indices.tolist()):
        prefix, length = int(pre_lens[request]), int(seq_lens[request])
        if prefix:  # its slots lie at an address that a tensor holds
            address = int(prefix_tensors[request]) + offset
            slots = (ctypes.c_int64 * prefix).from_address(address)
            req_to_token_ptr[row, :prefix] = torch.tensor(list(slots))
        new = length - prefix
        req_to_token_ptr[row, prefix:length] = out_cache_loc[done : done + new]
        done += new


def compute_position_kernel(
    positions: Tensor,
    extend_start_loc: Tensor,
    extend_prefix_lens: Tensor,
    extend_seq_lens: Tensor,
    has_prefix: bool,
    **_: object,
) -> None:
    done = 0
    for request, length in enumerate(extend_seq_lens.tolist()):
        prefix = int(extend_prefix_lens[request]) if has_prefix else 0
        positions[done : done + length] = torch.arange(prefix, prefix + length)
        extend_start_loc[request] = done
        done += length


def _small_copy_kernel(
    sources: Sequence[Tensor],
    destinations: Sequence[Tensor],
    sizes: Sequence[int],
    cols: Sequence[int],
    source_strides: Sequence[Sequence[int]],
    dest_strides: Sequence[Sequence[int]],
    **_: object,
) -> None:
    strides = zip(source_strides, dest_strides, strict=True)
    fields = zip(sources, destinations, sizes, cols, strides, strict=True)
    for source, destination, size, columns, (from_strides, to_strides) in fields:
        shape = (size // columns, columns)
        copied = source.as_strided(shape, tuple(from_strides))
        destination.as_strided(shape, tuple(to_strides)).copy_(copied)


def get_and_clear_swa_pages_kernel(
    full_page_representatives: Tensor,
    mapping: Tensor,
    swa_pages: Tensor,
    peers_mapped: Tensor,
    page_size: int,
    CHECK_PAGE_MAPPINGS: bool,
    **_: object,
) -> None:
    assert page_size == 1
    assert not CHECK_PAGE_MAPPINGS
    slots = full_page_representatives.long()
    swa_pages.copy_(mapping[slots])
    peers_mapped.copy_(swa_pages > 0)
    mapping[slots] = 0


# ---- a layer


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Tensor | None = None) -> Tensor:
    """[rows, heads, width] over [keys, KV heads, width], in fp32; ``seen`` is [rows, keys]."""
    group = q.shape[1] // k.shape[1]
    keys = k.float().repeat_interleave(group, 1)
    values = v.float().repeat_interleave(group, 1)
    scores = torch.einsum("mhd,nhd->hmn", q.float(), keys) * scale
    if seen is not None:
        scores = scores.masked_fill(~seen, float("-inf"))
    return torch.einsum("hmn,nhd->mhd", scores.softmax(-1), values)


def _fwd_kernel(
    Q_Extend: Tensor,
    K_Extend: Tensor,
    V_Extend: Tensor,
    O_Extend: Tensor,
    K_Buffer: Tensor,
    V_Buffer: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    mask_ptr: Tensor | None,
    sm_scale: float,
    SLIDING_WINDOW_SIZE: int,
    **_: object,
) -> None:
    assert mask_ptr is None, "an image's mask is of the tests with Triton's interpreter"
    for request in range(len(qo_indptr) - 1):
        first, end = qo_indptr[request : request + 2].tolist()
        slots = kv_indices[int(kv_indptr[request]) : int(kv_indptr[request + 1])].long()
        prefix, rows = len(slots), end - first
        keys = torch.cat([K_Buffer[slots], K_Extend[first:end]])
        values = torch.cat([V_Buffer[slots], V_Extend[first:end]])
        at = torch.arange(rows)[:, None] + prefix
        key = torch.arange(prefix + rows)[None]
        seen = key <= at
        if SLIDING_WINDOW_SIZE > 0:
            seen &= at <= key + SLIDING_WINDOW_SIZE
        O_Extend[first:end] = _attend(Q_Extend[first:end], keys, values, sm_scale, seen)


def _fwd_grouped_kernel_stage1(
    Q: Tensor,
    K_Buffer: Tensor,
    V_Buffer: Tensor,
    sm_scale_withk: float,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    Att_Out: Tensor,
    **_: object,
) -> None:
    for request in range(len(Q)):
        first, end = kv_indptr[request : request + 2].tolist()
        slots = kv_indices[first:end].long()
        row = Q[request : request + 1]
        attended = _attend(row, K_Buffer[slots], V_Buffer[slots], sm_scale_withk)
        Att_Out[request, :, 0, : attended.shape[-1]] = attended[0]


def _fwd_kernel_stage2(Mid_O: Tensor, O: Tensor, v_scale: float, **_: object) -> None:
    O.copy_(Mid_O[: len(O), :, 0, : O.shape[-1]] * v_scale)


def _gemma_qkv_rmsnorm_kernel(
    Q_ptr: Tensor,
    K_ptr: Tensor | None,
    V_ptr: Tensor | None,
    Q_w_ptr: Tensor,
    K_w_ptr: Tensor | None,
    NUM_Q_HEADS: int,
    NUM_KV_HEADS: int,
    HEAD_DIM: int,
    eps: float,
    HAS_KV: bool,
    **_: object,
) -> None:
    parts: list[tuple[Any, Tensor | None, int]] = [(Q_ptr, Q_w_ptr, NUM_Q_HEADS)]
    if HAS_KV:
        parts += [(K_ptr, K_w_ptr, NUM_KV_HEADS), (V_ptr, None, NUM_KV_HEADS)]
    for rows, weight, heads in parts:
        of_heads = rows.unflatten(-1, (heads, HEAD_DIM))
        scale = None if weight is None else weight.float()
        of_heads.copy_(rms_norm(of_heads.float(), (HEAD_DIM,), scale, eps))


def softcap_inplace_logits_kernel(
    full_logits_ptr: Tensor,
    softcapping_value: float | None,
    output_ptr: Tensor | None = None,
    **_: object,
) -> None:
    logits = full_logits_ptr.float()
    if softcapping_value is not None:
        logits = torch.tanh(logits / softcapping_value) * softcapping_value
    target = full_logits_ptr if output_ptr is None else output_ptr
    target.copy_(logits)


def _row_logsumexp_kernel(
    x_ptr: Tensor, out_max_ptr: Tensor, out_log_sum_ptr: Tensor, **_: object
) -> None:
    largest = x_ptr.float().amax(-1)
    out_max_ptr.copy_(largest)
    out_log_sum_ptr.copy_(x_ptr.float().logsumexp(-1) - largest)


def _row_logsumexp_topk_kernel(
    x_ptr: Tensor,
    out_max_ptr: Tensor,
    out_log_sum_ptr: Tensor,
    out_top_vals_ptr: Tensor,
    out_top_idx_ptr: Tensor,
    K: int,
    **_: object,
) -> None:
    _row_logsumexp_kernel(x_ptr, out_max_ptr, out_log_sum_ptr)
    largest = x_ptr.float().topk(K)
    out_top_vals_ptr.copy_(largest.values)
    out_top_idx_ptr.copy_(largest.indices)


KERNELS: tuple[Callable[..., Any], ...] = (
    create_flashinfer_kv_indices_triton,
    get_num_kv_splits_triton,
    write_req_to_token_pool_triton,
    compute_position_kernel,
    _small_copy_kernel,
    get_and_clear_swa_pages_kernel,
    _fwd_kernel,
    _fwd_grouped_kernel_stage1,
    _fwd_kernel_stage2,
    _gemma_qkv_rmsnorm_kernel,
    softcap_inplace_logits_kernel,
    _row_logsumexp_kernel,
    _row_logsumexp_topk_kernel,
)
