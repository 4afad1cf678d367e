"""Attention of unrolled drafting: rows attend to step-0 keys of their own past and to their own later keys.

Row t at step k sees the step-0 keys of positions <= t of its document, and its own keys of steps 1 .. k
(docs/concepts.md): exactly what a draft with a key-value cache sees when it is served. The fast path
walks over blocks of rows of one document, so nothing larger than [block, document] exists, forward or
backward; only the output and its log-sum-exp are kept, and the scores are computed again in backward, as
in FlashAttention (arXiv 2205.14135). `attend_oracle` is the same written as one dense masked softmax.

Legend: R rows, T positions of a pack, S own steps, N heads, G key-value heads, M = N / G, E head size,
Ev size of a value, B rows of a block, L keys of a block, X = B * M.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from models import flex

BLOCK_ROWS = 64
BLOCK_PAIRS = 1 << 18
"""Rows times keys of a block: its scores stay in the cache, and small, however long the document."""


@dataclass(frozen=True)
class Block:
    """Rows [first, last) of one document and the step-0 keys [start, stop) that any of them can see."""

    first: int
    last: int
    start: int
    stop: int


def blocks_of(rows_R: torch.Tensor, starts_R: torch.Tensor) -> list[Block]:
    """Cut ascending `rows_R` (pack positions) into blocks within one document; `starts_R` is where it begins."""
    rows, starts = rows_R.tolist(), starts_R.tolist()
    blocks, first = [], 0
    for index in range(1, len(rows) + 1):
        pairs = (index + 1 - first) * (rows[min(index, len(rows) - 1)] + 1 - starts[first])
        full = index - first == BLOCK_ROWS or pairs > BLOCK_PAIRS
        if index == len(rows) or starts[index] != starts[first] or full:
            blocks.append(Block(first, index, starts[first], rows[index - 1] + 1))
            first = index
    return blocks


class _Attend(torch.autograd.Function):
    """Inputs and results are laid out [G, R, M, E] and [G, T, E] inside, so that a block is a view of them.

    The prefix part is computed block by block; own keys are few, so their part is computed for all rows at
    once. Both parts are merged exactly through their log-sum-exp.
    """

    @staticmethod
    def _prefix_scores(block: Block, q_GRME, k_GTE, rows_R):  # type: ignore[no-untyped-def]
        """Masked scores [G, B * M, L] of a block."""
        first, last = block.first, block.last
        q_GXE = q_GRME[:, first:last].flatten(1, 2)
        scores_GXL = q_GXE @ k_GTE[:, block.start : block.stop].transpose(1, 2)
        keys_L = torch.arange(block.start, block.stop, device=rows_R.device)
        hidden_BL = keys_L > rows_R[first:last, None]
        scores_GXL.unflatten(1, (last - first, -1)).masked_fill_(hidden_BL[None, :, None], float("-inf"))
        return q_GXE, scores_GXL

    @staticmethod
    def forward(ctx: Any, q_RNE, k_TGE, v_TGE, own_k_RSGE, own_v_RSGE, rows_R, blocks):  # type: ignore[no-untyped-def]
        compute, groups = torch.promote_types(q_RNE.dtype, torch.float32), k_TGE.shape[1]
        scale = q_RNE.shape[-1] ** -0.5
        q_GRME = (q_RNE.to(compute) * scale).unflatten(1, (groups, -1)).transpose(0, 1).contiguous()
        k_GTE, v_GTE = (each.to(compute).transpose(0, 1).contiguous() for each in (k_TGE, v_TGE))
        own_k_GRSE, own_v_GRSE = (
            each.to(compute).permute(2, 0, 1, 3).contiguous() for each in (own_k_RSGE, own_v_RSGE)
        )
        lse_GRM = q_GRME.new_empty(q_GRME.shape[:-1])
        out_GRME = q_GRME.new_empty(*lse_GRM.shape, v_GTE.shape[-1])
        for block in blocks:
            _, scores_GXL = _Attend._prefix_scores(block, q_GRME, k_GTE, rows_R)
            most_GX1 = scores_GXL.amax(-1, keepdim=True)
            e_GXL = scores_GXL.sub_(most_GX1).exp_()
            sum_GX1 = e_GXL.sum(-1, keepdim=True)
            here, shape = slice(block.first, block.last), (block.last - block.first, -1)
            out_GRME[:, here] = (e_GXL @ v_GTE[:, block.start : block.stop]).div_(sum_GX1).unflatten(1, shape)
            lse_GRM[:, here] = most_GX1.add_(sum_GX1.log_()).squeeze(-1).unflatten(1, shape)
        if own_k_GRSE.shape[2]:
            own_GRMS = q_GRME @ own_k_GRSE.transpose(2, 3)
            merged_GRM = torch.logaddexp(lse_GRM, own_GRMS.logsumexp(-1))
            out_GRME *= (lse_GRM - merged_GRM).exp_()[..., None]
            p_GRMS = own_GRMS.sub_(merged_GRM[..., None]).exp_()
            out_GRME += p_GRMS @ own_v_GRSE
            lse_GRM = merged_GRM
        ctx.save_for_backward(q_GRME, k_GTE, v_GTE, own_k_GRSE, own_v_GRSE, rows_R, out_GRME, lse_GRM)
        ctx.blocks, ctx.scale, ctx.dtype, ctx.key_dtype = blocks, scale, q_RNE.dtype, k_TGE.dtype
        return out_GRME.transpose(0, 1).flatten(1, 2).to(q_RNE.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad_RNE,) = grads
        q_GRME, k_GTE, v_GTE, own_k_GRSE, own_v_GRSE, rows_R, out_GRME, lse_GRM = ctx.saved_tensors
        do_GRME = grad_RNE.to(q_GRME.dtype).unflatten(1, (q_GRME.shape[0], -1)).transpose(0, 1).contiguous()
        delta_GRM = (do_GRME * out_GRME).sum(-1)
        dq_GRME, dk_GTE, dv_GTE = torch.empty_like(q_GRME), torch.zeros_like(k_GTE), torch.zeros_like(v_GTE)
        for block in ctx.blocks:
            here, keys = slice(block.first, block.last), slice(block.start, block.stop)
            q_GXE, scores_GXL = _Attend._prefix_scores(block, q_GRME, k_GTE, rows_R)
            p_GXL = scores_GXL.sub_(lse_GRM[:, here].flatten(1)[..., None]).exp_()
            do_GXE = do_GRME[:, here].flatten(1, 2)
            dv_GTE[:, keys] += p_GXL.transpose(1, 2) @ do_GXE
            ds_GXL = do_GXE @ v_GTE[:, keys].transpose(1, 2)
            ds_GXL.sub_(delta_GRM[:, here].flatten(1)[..., None]).mul_(p_GXL)
            dq_GRME[:, here] = (ds_GXL @ k_GTE[:, keys]).unflatten(1, (block.last - block.first, -1))
            dk_GTE[:, keys] += ds_GXL.transpose(1, 2) @ q_GXE
        d_own_k_GRSE, d_own_v_GRSE = torch.zeros_like(own_k_GRSE), torch.zeros_like(own_v_GRSE)
        if own_k_GRSE.shape[2]:
            p_GRMS = (q_GRME @ own_k_GRSE.transpose(2, 3)).sub_(lse_GRM[..., None]).exp_()
            d_own_v_GRSE = p_GRMS.transpose(2, 3) @ do_GRME
            ds_GRMS = (do_GRME @ own_v_GRSE.transpose(2, 3)).sub_(delta_GRM[..., None]).mul_(p_GRMS)
            dq_GRME += ds_GRMS @ own_k_GRSE
            d_own_k_GRSE = ds_GRMS.transpose(2, 3) @ q_GRME
        dtype = ctx.dtype
        dq_RNE = (dq_GRME * ctx.scale).transpose(0, 1).flatten(1, 2).to(dtype)
        dk_TGE, dv_TGE = (each.transpose(0, 1).to(ctx.key_dtype) for each in (dk_GTE, dv_GTE))
        d_own = (each.permute(1, 2, 0, 3).to(dtype) for each in (d_own_k_GRSE, d_own_v_GRSE))
        return dq_RNE, dk_TGE, dv_TGE, *d_own, None, None


def laid_out(keys_TGE: torch.Tensor) -> torch.Tensor:
    """Step-0 keys or values [T, G, E] as the blocks on the CPU read them, so that all steps share one copy."""
    if keys_TGE.device.type != "cpu":
        return keys_TGE
    compute = torch.promote_types(keys_TGE.dtype, torch.float32)
    return keys_TGE.to(compute).transpose(0, 1).contiguous().transpose(0, 1)


def attend(
    q_RNE: torch.Tensor,
    k_TGE: torch.Tensor,
    v_TGE: torch.Tensor,
    own_k_RSGE: torch.Tensor,
    own_v_RSGE: torch.Tensor,
    rows_R: torch.Tensor,
    starts_R: torch.Tensor,
    *,
    scale: float | None = None,
) -> torch.Tensor:
    """Attention output [R, N, Ev] of rows over step-0 keys <= their position and all their own keys.

    The one place where the device decides: FlexAttention on a GPU, the blocks above elsewhere.

    Args:
        q_RNE, k_TGE, v_TGE: queries of the rows, step-0 keys and values of the pack; any float dtype,
            scores and softmax in at least float32. Values may be of another size Ev than keys.
        own_k_RSGE, own_v_RSGE: keys and values of the rows' own steps 1 .. S (S may be 0).
        rows_R: int64 pack positions of the rows, ascending.
        starts_R: where their documents begin.
        scale: of the scores; None is E ** -0.5.
    """
    if scale is not None:
        q_RNE = q_RNE * (scale * q_RNE.shape[-1] ** 0.5)
    with torch.autocast(q_RNE.device.type, enabled=False):  # it would make scores bf16 again, in forward only
        if q_RNE.is_cuda:
            return flex.attend(q_RNE, k_TGE, v_TGE, own_k_RSGE, own_v_RSGE, rows_R, starts_R)
        blocks = blocks_of(rows_R, starts_R)
        return _Attend.apply(q_RNE, k_TGE, v_TGE, own_k_RSGE, own_v_RSGE, rows_R, blocks)


def attend_oracle(
    q_RNE: torch.Tensor,
    k_TGE: torch.Tensor,
    v_TGE: torch.Tensor,
    own_k_RSGE: torch.Tensor,
    own_v_RSGE: torch.Tensor,
    rows_R: torch.Tensor,
    starts_R: torch.Tensor,
    *,
    scale: float | None = None,
) -> torch.Tensor:
    """The same as `attend`, dense: one [R, N, T + S] softmax. For tests."""
    repeat = q_RNE.shape[1] // k_TGE.shape[1]
    k, v = k_TGE.repeat_interleave(repeat, 1), v_TGE.repeat_interleave(repeat, 1)
    own_k, own_v = own_k_RSGE.repeat_interleave(repeat, 2), own_v_RSGE.repeat_interleave(repeat, 2)
    keys_T = torch.arange(k_TGE.shape[0], device=rows_R.device)
    visible_RT = (keys_T <= rows_R[:, None]) & (keys_T >= starts_R[:, None])
    prefix = torch.einsum("rne,tne->rnt", q_RNE, k).masked_fill(~visible_RT[:, None], float("-inf"))
    scores = torch.cat((prefix, torch.einsum("rne,rsne->rns", q_RNE, own_k)), -1)
    p = (scores * (q_RNE.shape[-1] ** -0.5 if scale is None else scale)).softmax(-1)
    split = k_TGE.shape[0]
    return torch.einsum("rnt,tne->rne", p[..., :split], v) + torch.einsum("rns,rsne->rne", p[..., split:], own_v)
