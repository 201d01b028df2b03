"""PyTorch implementations of the kernels that SGLang's speculative decoding has for accelerators.

Only for chains of drafts (``--speculative-eagle-topk 1``), verified greedily: each request has its
bonus token and D - 1 drafts after it, D tokens in all, in their order.
"""

from __future__ import annotations

from typing import Any

import torch


def install() -> None:
    """Patch SGLang to call the functions of this module."""
    from sglang.srt.managers import overlap_utils
    from sglang.srt.mem_cache import allocation, memory_pool
    from sglang.srt.speculative import eagle_utils, eagle_worker_common

    allocation.assign_req_to_token_pool_func = write_slots
    memory_pool.copy_all_layer_kv_cache_func = move_nothing
    overlap_utils.gather_spec_extras = gather_rows
    eagle_utils.build_tree_kernel_efficient_func = build_chain
    eagle_utils.verify_tree_greedy_func = verify_chain
    eagle_worker_common.fill_bonus_tokens_func = last_accepted


def write_slots(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    _batch_size: int,
) -> None:
    """Write newly allocated slots into the requests' rows of ``req_to_token``, [start, end)."""
    first = 0
    for row, start, end in zip(
        req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True
    ):
        req_to_token[row, start:end] = out_cache_loc[first : first + end - start]
        first += end - start


def move_nothing(
    _data_ptrs: torch.Tensor,
    _strides: torch.Tensor,
    target_slots: torch.Tensor,
    source_slots: torch.Tensor,
    *_: Any,
) -> None:
    """Replace the mover of K/V, which pools test when built, and chains never need."""
    if not torch.equal(target_slots, source_slots):
        raise NotImplementedError("K/V of accepted drafts is moved in trees of drafts only")


def gather_rows(
    indices: torch.Tensor, *buffers: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    """Return rows ``indices`` of every buffer that is not None."""
    return tuple(None if buffer is None else buffer[indices] for buffer in buffers)


def draft_slots(
    *,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    draft_token_num: int,
    **_: Any,
) -> torch.Tensor:
    """Return the slots of each request's next ``draft_token_num`` tokens: [requests * D] int64."""
    columns = start_offset[:, None] + torch.arange(draft_token_num)
    return req_to_token[req_pool_indices[:, None], columns].flatten().long()


def build_chain(
    _parent_list: torch.Tensor,
    _top_scores_index: torch.Tensor,
    seq_lens: torch.Tensor,
    _tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    _retrieve_next_sibling: torch.Tensor,
    topk: int,
    _spec_steps: int,
    num_verify_tokens: int,
    _tree_mask_mode: int,
) -> None:
    """Fill ``positions`` [requests * D] and the ``retrieve_*`` [requests, D] of a chain.

    The attention of this platform always uses a chain's mask, so it is not written.
    """
    if topk != 1:
        raise NotImplementedError(f"only chains of drafts: --speculative-eagle-topk 1, not {topk}")
    depth = torch.arange(num_verify_tokens)
    positions.copy_((seq_lens[:, None] + depth).flatten())
    retrieve_index.copy_(torch.arange(retrieve_index.numel()).view_as(retrieve_index))
    retrieve_next_token[:, :-1] = depth[1:]


def verify_chain(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    target_predict: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Accept drafts as long as each is what the target predicts from the ones before it.

    Args:
        predicts: [requests * D] int32, gets the target's token after each accepted one.
        accept_index: [requests, D] int32, gets the rows of the accepted ones, -1 after them.
        accept_token_num: [requests] int32, gets the number of accepted drafts.
        candidates: [requests, D], bonus token and drafts.
        target_predict: [requests, D], the target's next token after each candidate.
    """
    agrees = (candidates[:, 1:] == target_predict[:, :-1]).int()
    accept_token_num.copy_(agrees.cumprod(dim=1).sum(dim=1))
    accepted = torch.arange(candidates.shape[1]) <= accept_token_num[:, None]
    rows = torch.arange(candidates.numel()).view_as(candidates)
    accept_index.copy_(rows.masked_fill(~accepted, -1))
    predicts.copy_(target_predict.masked_fill(~accepted, 0).flatten())
    return predicts, accept_index, accept_token_num


def last_accepted(
    accept_tokens: torch.Tensor,
    accept_lens: torch.Tensor,
    bonus_tokens: torch.Tensor,
    accept_stride: int,
    batch_size: int,
) -> None:
    """Write the last accepted token of each request into ``bonus_tokens`` [requests]."""
    table = accept_tokens.view(batch_size, accept_stride)
    bonus_tokens.copy_(table.gather(1, accept_lens[:, None].long() - 1)[:, 0])
