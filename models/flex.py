"""Attention of unrolled drafting on a GPU: FlexAttention over the prefix, a row's own keys merged in exactly.

The rows of a step are a sparse, ascending subset of the positions, and so are the starts of their documents.
Hence the rows that see any key of a block of keys are consecutive, and those that see all of its keys are
consecutive too: two pairs of binary searches give the whole block mask of FlexAttention (arXiv 2412.05496).
No [R, T] mask is ever made, only one entry per pair of blocks, and nothing waits for the device. A row's own
keys are few; their scores are merged with the prefix through its log-sum-exp, forward and backward.

Legend: as in models/attention.py, and Q blocks of rows, K blocks of keys.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

BLOCK = 128
"""Rows and keys of a block: what FlexAttention's kernels are tuned for."""


@functools.cache
def _fused() -> Callable[..., Any]:
    """FlexAttention compiled once for all numbers of rows and positions.

    A few shapes (one row, as many rows as positions, fewer rows than a block) and gradients on or off each
    compile once more. Past the limit it raises: the fallback would hold all scores at once.
    """
    return torch.compile(flex_attention, dynamic=True, fullgraph=True, recompile_limit=64)  # type: ignore[call-overload]


def block_mask(rows_R: torch.Tensor, starts_R: torch.Tensor, positions: int) -> BlockMask:
    """Which of `positions` step-0 keys the rows see, block by block; int64 [R] both, ascending.

    Key t is visible to row r when starts_R[r] <= t <= rows_R[r].
    """
    # Dimensions of one would be compiled apart from all others, so there are two blocks at least.
    key_K = torch.arange(0, max(positions, BLOCK + 1), BLOCK, device=rows_R.device)
    last_K = key_K + BLOCK - 1
    row_Q1 = torch.arange(0, max(rows_R.numel(), BLOCK + 1), BLOCK, device=rows_R.device)[:, None]
    some_first, some_end = torch.searchsorted(rows_R, key_K), torch.searchsorted(starts_R, last_K, right=True)
    full_first, full_end = torch.searchsorted(rows_R, last_K), torch.searchsorted(starts_R, key_K, right=True)
    some_QK = (row_Q1 < some_end) & (row_Q1 + BLOCK > some_first) & (some_first < some_end)
    full_QK = (row_Q1 >= full_first) & (row_Q1 + BLOCK <= full_end)
    partial_QK = some_QK & ~full_QK
    rows, starts = rows_R.int(), starts_R.int()

    def visible(batch: torch.Tensor, head: torch.Tensor, row: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key <= rows[row]) & (key >= starts[row])

    return BlockMask(
        (rows_R.numel(), positions),
        *_listed(partial_QK), *_listed(full_QK), *_listed(partial_QK.T), *_listed(full_QK.T),
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=visible,
    )  # fmt: skip


def _listed(blocks_QK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FlexAttention's form of a boolean matrix: per line the number of true columns, and these first, ascending.

    Its kernels take each line for contiguous, whatever the strides say.
    """
    columns_QK = blocks_QK.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)
    return blocks_QK.sum(-1, dtype=torch.int32)[None, None], columns_QK.int().contiguous()[None, None]


class _MergeOwn(torch.autograd.Function):
    """The prefix's output and log-sum-exp, with the row's own keys added; keeps its inputs only, recomputes the rest.

    To the softmax over everything, the prefix is one more key: its score is its log-sum-exp, its value its output.
    """

    @staticmethod
    def _weights(
        lse_RN: torch.Tensor, q_RNE: torch.Tensor, own_k_RSGE: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Softmax weights of the prefix [R, N] and of the own keys [R, G, M, S], queries and keys; in lse's dtype."""
        q_RGME = q_RNE.to(lse_RN.dtype).unflatten(1, (own_k_RSGE.shape[2], -1))
        k_RGSE = own_k_RSGE.to(lse_RN.dtype).transpose(1, 2)
        scores_RGMS = (q_RGME @ k_RGSE.transpose(2, 3)) * q_RNE.shape[-1] ** -0.5
        merged_RN = torch.logaddexp(lse_RN, scores_RGMS.logsumexp(-1).flatten(1))
        p_RGMS = (scores_RGMS - merged_RN.unflatten(1, scores_RGMS.shape[1:3])[..., None]).exp()
        return (lse_RN - merged_RN).exp(), p_RGMS, q_RGME, k_RGSE

    @staticmethod
    def forward(ctx: Any, out_RNE, lse_RN, q_RNE, own_k_RSGE, own_v_RSGE):  # type: ignore[no-untyped-def]
        weight_RN, p_RGMS, _, _ = _MergeOwn._weights(lse_RN, q_RNE, own_k_RSGE)
        own_RNE = (p_RGMS @ own_v_RSGE.to(p_RGMS.dtype).transpose(1, 2)).flatten(1, 2)
        merged_RNE = own_RNE.addcmul_(out_RNE, weight_RN[..., None]).to(q_RNE.dtype)
        ctx.save_for_backward(out_RNE, lse_RN, q_RNE, own_k_RSGE, own_v_RSGE, merged_RNE)
        return merged_RNE

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        out_RNE, lse_RN, q_RNE, own_k_RSGE, own_v_RSGE, merged_RNE = ctx.saved_tensors
        weight_RN, p_RGMS, q_RGME, k_RGSE = _MergeOwn._weights(lse_RN, q_RNE, own_k_RSGE)
        do_RNE = grads[0].to(lse_RN.dtype)
        delta_RN = (do_RNE * merged_RNE).sum(-1)
        d_lse_RN = ((do_RNE * out_RNE).sum(-1) - delta_RN) * weight_RN
        do_RGME = do_RNE.unflatten(1, p_RGMS.shape[1:3])
        v_RGSE = own_v_RSGE.to(lse_RN.dtype).transpose(1, 2)
        ds_RGMS = do_RGME @ v_RGSE.transpose(2, 3) - delta_RN.unflatten(1, p_RGMS.shape[1:3])[..., None]
        ds_RGMS.mul_(p_RGMS).mul_(q_RNE.shape[-1] ** -0.5)
        dq_RNE = (ds_RGMS @ k_RGSE).flatten(1, 2).to(q_RNE.dtype)
        dk_RSGE = (ds_RGMS.transpose(2, 3) @ q_RGME).transpose(1, 2).to(own_k_RSGE.dtype)
        dv_RSGE = (p_RGMS.transpose(2, 3) @ do_RGME).transpose(1, 2).to(own_v_RSGE.dtype)
        return (do_RNE * weight_RN[..., None]).to(out_RNE.dtype), d_lse_RN, dq_RNE, dk_RSGE, dv_RSGE


def attend(
    q_RNE: torch.Tensor,
    k_TGE: torch.Tensor,
    v_TGE: torch.Tensor,
    own_k_RSGE: torch.Tensor,
    own_v_RSGE: torch.Tensor,
    rows_R: torch.Tensor,
    starts_R: torch.Tensor,
) -> torch.Tensor:
    """`models.attention.attend` by FlexAttention: compiled on a GPU, and uncompiled (for tests) anywhere else.

    Queries, keys and values have one dtype; scores and softmax are in float32 at least. Head sizes from 16.
    """
    flex: Any = _fused() if q_RNE.is_cuda else flex_attention
    out_1NRE, aux = flex(
        *(each.transpose(0, 1)[None] for each in (q_RNE, k_TGE, v_TGE)),
        block_mask=block_mask(rows_R, starts_R, k_TGE.shape[0]),
        enable_gqa=True,
        return_aux=AuxRequest(lse=True),
    )
    out_RNE = out_1NRE[0].transpose(0, 1)
    if not own_k_RSGE.shape[1]:
        return out_RNE
    return _MergeOwn.apply(out_RNE, aux.lse[0].T, q_RNE, own_k_RSGE, own_v_RSGE)
