"""What Triton's kernels write that SGLang launches for a Gemma 4, in PyTorch.

Each function is given its kernel's arguments by name, with CPU tensors, after the real launch.
They stand for values alone: splits, blocks and roundings are a GPU's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from rehearsal import operations

# ---- numbers of a batch


def create_flashinfer_kv_indices_triton(a: Any) -> None:
    assert a.ENTRY_PAGE_SIZE == 1
    for request, row in enumerate(a.req_pool_indices_ptr.tolist()):
        start = 0 if a.kv_start_idx is None else int(a.kv_start_idx[request])
        length = int(a.page_kernel_lens_ptr[request])
        slots = a.req_to_token_ptr[row, start : start + length]
        if a.token_mapping is not None:
            slots = a.token_mapping[slots.long()]
        first = int(a.kv_indptr[request])
        a.kv_indices_ptr[first : first + length] = slots


def get_num_kv_splits_triton(a: Any) -> None:
    a.num_kv_splits_ptr.fill_(1)  # the only one that ``_fwd_kernel_stage2`` reads


def write_req_to_token_pool_triton(a: Any) -> None:
    offset = operations.RUNTIME.rehearsal_host_offset()
    done = 0
    for request, row in enumerate(a.req_pool_indices.tolist()):
        prefix, length = int(a.pre_lens[request]), int(a.seq_lens[request])
        if prefix:  # its slots lie at an address that a tensor holds
            address = int(a.prefix_tensors[request]) + offset
            slots = (ctypes.c_int64 * prefix).from_address(address)
            a.req_to_token_ptr[row, :prefix] = torch.tensor(list(slots))
        new = length - prefix
        a.req_to_token_ptr[row, prefix:length] = a.out_cache_loc[done : done + new]
        done += new


def compute_position_kernel(a: Any) -> None:
    done = 0
    for request, length in enumerate(a.extend_seq_lens.tolist()):
        prefix = int(a.extend_prefix_lens[request]) if a.has_prefix else 0
        a.positions[done : done + length] = torch.arange(prefix, prefix + length)
        a.extend_start_loc[request] = done
        done += length


def _small_copy_kernel(a: Any) -> None:
    strides = zip(a.source_strides, a.dest_strides, strict=True)
    fields = zip(a.sources, a.destinations, a.sizes, a.cols, strides, strict=True)
    for source, destination, size, columns, (from_strides, to_strides) in fields:
        shape = (size // columns, columns)
        copied = source.as_strided(shape, tuple(from_strides))
        destination.as_strided(shape, tuple(to_strides)).copy_(copied)


def get_and_clear_swa_pages_kernel(a: Any) -> None:
    assert a.page_size == 1
    assert not a.CHECK_PAGE_MAPPINGS
    slots = a.full_page_representatives.long()
    a.swa_pages.copy_(a.mapping[slots])
    a.peers_mapped.copy_(a.swa_pages > 0)
    a.mapping[slots] = 0


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


def _fwd_kernel(a: Any) -> None:
    assert a.mask_ptr is None, "an image's mask is of the tests with Triton's interpreter"
    for request in range(len(a.qo_indptr) - 1):
        first, end = a.qo_indptr[request : request + 2].tolist()
        slots = a.kv_indices[int(a.kv_indptr[request]) : int(a.kv_indptr[request + 1])].long()
        prefix, rows = len(slots), end - first
        keys = torch.cat([a.K_Buffer[slots], a.K_Extend[first:end]])
        values = torch.cat([a.V_Buffer[slots], a.V_Extend[first:end]])
        at = torch.arange(rows)[:, None] + prefix
        key = torch.arange(prefix + rows)[None]
        seen = key <= at
        if a.SLIDING_WINDOW_SIZE > 0:
            seen &= at <= key + a.SLIDING_WINDOW_SIZE
        a.O_Extend[first:end] = _attend(a.Q_Extend[first:end], keys, values, a.sm_scale, seen)


def _fwd_grouped_kernel_stage1(a: Any) -> None:
    for request in range(len(a.Q)):
        first, end = a.kv_indptr[request : request + 2].tolist()
        slots = a.kv_indices[first:end].long()
        row = a.Q[request : request + 1]
        attended = _attend(row, a.K_Buffer[slots], a.V_Buffer[slots], a.sm_scale_withk)
        a.Att_Out[request, :, 0, : attended.shape[-1]] = attended[0]


def _fwd_kernel_stage2(a: Any) -> None:
    a.O.copy_(a.Mid_O[: len(a.O), :, 0, : a.O.shape[-1]] * a.v_scale)


def _gemma_qkv_rmsnorm_kernel(a: Any) -> None:
    parts: list[tuple[Any, Tensor | None, int]] = [(a.Q_ptr, a.Q_w_ptr, a.NUM_Q_HEADS)]
    if a.HAS_KV:
        parts += [(a.K_ptr, a.K_w_ptr, a.NUM_KV_HEADS), (a.V_ptr, None, a.NUM_KV_HEADS)]
    for rows, weight, heads in parts:
        of_heads = rows.unflatten(-1, (heads, a.HEAD_DIM))
        scale = None if weight is None else weight.float()
        of_heads.copy_(rms_norm(of_heads.float(), (a.HEAD_DIM,), scale, a.eps))


def softcap_inplace_logits_kernel(a: Any) -> None:
    logits = a.full_logits_ptr.float()
    if a.softcapping_value is not None:
        logits = torch.tanh(logits / a.softcapping_value) * a.softcapping_value
    target = a.full_logits_ptr if a.output_ptr is None else a.output_ptr
    target.copy_(logits)


def _row_logsumexp_kernel(a: Any) -> None:
    largest = a.x_ptr.float().amax(-1)
    a.out_max_ptr.copy_(largest)
    a.out_log_sum_ptr.copy_(a.x_ptr.float().logsumexp(-1) - largest)


def _row_logsumexp_topk_kernel(a: Any) -> None:
    _row_logsumexp_kernel(a)
    largest = a.x_ptr.float().topk(a.K)
    a.out_top_vals_ptr.copy_(largest.values)
    a.out_top_idx_ptr.copy_(largest.indices)


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
