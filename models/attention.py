"""Attention of unrolled drafting: rows attend to step-0 keys of their own past and to their own later keys.

Row t at step k sees the step-0 keys of positions <= t of its document, and its own keys of steps 1 .. k
(design, definition 3): exactly what a draft with a key-value cache sees when it is served. The fast path
walks over blocks of rows of one document, so nothing larger than [block, document] exists, forward or
backward; only the output and its log-sum-exp are kept, and the scores are computed again in backward, as
in FlashAttention (arXiv 2205.14135). `attend_oracle` is the same written as one dense masked softmax.

Legend: R rows, T positions of a pack, S own steps, N heads, G key-value heads, M = N / G, E head size,
B rows of a block, L keys of a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

BLOCK_ROWS = 256


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
        if index == len(rows) or starts[index] != starts[first] or index - first == BLOCK_ROWS:
            blocks.append(Block(first, index, starts[first], rows[index - 1] + 1))
            first = index
    return blocks


class _Attend(torch.autograd.Function):
    @staticmethod
    def _scores(block: Block, q, k0, own_k, rows, compute):  # type: ignore[no-untyped-def]
        groups = k0.shape[1]
        b = slice(block.first, block.last)
        q_GBME = q[b].to(compute).unflatten(1, (groups, -1)).transpose(0, 1)
        k_GLE = k0[block.start : block.stop].to(compute).transpose(0, 1)
        s_GBML = (q_GBME.flatten(1, 2) @ k_GLE.transpose(1, 2)).unflatten(1, q_GBME.shape[1:3])
        keys_L = torch.arange(block.start, block.stop, device=rows.device)
        s_GBML.masked_fill_((keys_L > rows[b, None])[None, :, None], float("-inf"))
        k_GBSE = own_k[b].to(compute).permute(2, 0, 1, 3)
        s_GBMS = q_GBME @ k_GBSE.transpose(-1, -2)
        return b, q_GBME, k_GLE, k_GBSE, torch.cat((s_GBML, s_GBMS), -1)

    @staticmethod
    def forward(ctx: Any, q, k0, v0, own_k, own_v, rows, blocks, scale):  # type: ignore[no-untyped-def]
        compute = torch.promote_types(q.dtype, torch.float32)
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=compute)
        for block in blocks:
            b, _, k_GLE, _, s = _Attend._scores(block, q, k0, own_k, rows, compute)
            s *= scale
            lse_GBM = s.logsumexp(-1)
            p = (s - lse_GBM[..., None]).exp_()
            p_GBML, p_GBMS = p.split((k_GLE.shape[1], own_k.shape[1]), -1)
            v_GLE = v0[block.start : block.stop].to(compute).transpose(0, 1)
            o_GBME = (p_GBML.flatten(1, 2) @ v_GLE).unflatten(1, p.shape[1:3])
            o_GBME += p_GBMS @ own_v[b].to(compute).permute(2, 0, 1, 3)
            out[b] = o_GBME.transpose(0, 1).flatten(1, 2).to(q.dtype)
            lse[b] = lse_GBM.transpose(0, 1).flatten(1, 2)
        ctx.save_for_backward(q, k0, v0, own_k, own_v, rows, out, lse)
        ctx.blocks, ctx.scale, ctx.compute = blocks, scale, compute
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad_out,) = grads
        q, k0, v0, own_k, own_v, rows, out, lse = ctx.saved_tensors
        compute, groups = ctx.compute, k0.shape[1]
        dq, d_own_k, d_own_v = torch.empty_like(q), torch.empty_like(own_k), torch.empty_like(own_v)
        dk0, dv0 = torch.zeros_like(k0, dtype=compute), torch.zeros_like(v0, dtype=compute)
        for block in ctx.blocks:
            b, q_GBME, k_GLE, k_GBSE, s = _Attend._scores(block, q, k0, own_k, rows, compute)
            lse_GBM = lse[b].unflatten(1, (groups, -1)).transpose(0, 1)
            p = (s * ctx.scale - lse_GBM[..., None]).exp_()
            do_GBME = grad_out[b].to(compute).unflatten(1, (groups, -1)).transpose(0, 1)
            o_GBME = out[b].to(compute).unflatten(1, (groups, -1)).transpose(0, 1)
            delta_GBM1 = (do_GBME * o_GBME).sum(-1, keepdim=True)
            v_GLE = v0[block.start : block.stop].to(compute).transpose(0, 1)
            v_GBSE = own_v[b].to(compute).permute(2, 0, 1, 3)
            dp_GBML = (do_GBME.flatten(1, 2) @ v_GLE.transpose(1, 2)).unflatten(1, p.shape[1:3])
            dp = torch.cat((dp_GBML, do_GBME @ v_GBSE.transpose(-1, -2)), -1)
            ds = p * (dp - delta_GBM1) * ctx.scale
            sizes = (k_GLE.shape[1], own_k.shape[1])
            (p_GBML, p_GBMS), (ds_GBML, ds_GBMS) = p.split(sizes, -1), ds.split(sizes, -1)
            dq_GBME = (ds_GBML.flatten(1, 2) @ k_GLE).unflatten(1, p.shape[1:3]) + ds_GBMS @ k_GBSE
            dq[b] = dq_GBME.transpose(0, 1).flatten(1, 2).to(q.dtype)
            keys = slice(block.start, block.stop)
            dk0[keys] += (ds_GBML.flatten(1, 2).transpose(1, 2) @ q_GBME.flatten(1, 2)).transpose(0, 1)
            dv0[keys] += (p_GBML.flatten(1, 2).transpose(1, 2) @ do_GBME.flatten(1, 2)).transpose(0, 1)
            d_own_k[b] = (ds_GBMS.transpose(-1, -2) @ q_GBME).permute(1, 2, 0, 3).to(own_k.dtype)
            d_own_v[b] = (p_GBMS.transpose(-1, -2) @ do_GBME).permute(1, 2, 0, 3).to(own_v.dtype)
        return dq, dk0.to(k0.dtype), dv0.to(v0.dtype), d_own_k, d_own_v, None, None, None


def attend(
    q_RNE: torch.Tensor,
    k_TGE: torch.Tensor,
    v_TGE: torch.Tensor,
    own_k_RSGE: torch.Tensor,
    own_v_RSGE: torch.Tensor,
    rows_R: torch.Tensor,
    blocks: list[Block],
) -> torch.Tensor:
    """Attention output [R, N, E] of rows over step-0 keys <= their position and all their own keys.

    Args:
        q_RNE, k_TGE, v_TGE: queries of the rows, step-0 keys and values of the pack; any float dtype,
            scores and softmax in at least float32.
        own_k_RSGE, own_v_RSGE: keys and values of the rows' own steps 1 .. S (S may be 0).
        rows_R: int64 pack positions of the rows, ascending.
        blocks: `blocks_of(rows_R, starts_R)`.
    """
    scale = q_RNE.shape[-1] ** -0.5
    return _Attend.apply(q_RNE, k_TGE, v_TGE, own_k_RSGE, own_v_RSGE, rows_R, blocks, scale)


def attend_oracle(
    q_RNE: torch.Tensor,
    k_TGE: torch.Tensor,
    v_TGE: torch.Tensor,
    own_k_RSGE: torch.Tensor,
    own_v_RSGE: torch.Tensor,
    rows_R: torch.Tensor,
    starts_R: torch.Tensor,
) -> torch.Tensor:
    """The same as `attend`, dense: one [R, N, T + S] softmax. For tests."""
    repeat = q_RNE.shape[1] // k_TGE.shape[1]
    k, v = k_TGE.repeat_interleave(repeat, 1), v_TGE.repeat_interleave(repeat, 1)
    own_k, own_v = own_k_RSGE.repeat_interleave(repeat, 2), own_v_RSGE.repeat_interleave(repeat, 2)
    keys_T = torch.arange(k_TGE.shape[0])
    visible_RT = (keys_T <= rows_R[:, None]) & (keys_T >= starts_R[:, None])
    prefix = torch.einsum("rne,tne->rnt", q_RNE, k).masked_fill(~visible_RT[:, None], float("-inf"))
    scores = torch.cat((prefix, torch.einsum("rne,rsne->rns", q_RNE, own_k)), -1) * q_RNE.shape[-1] ** -0.5
    p = scores.softmax(-1)
    split = k_TGE.shape[0]
    return torch.einsum("rnt,tne->rne", p[..., :split], v) + torch.einsum("rns,rsne->rne", p[..., split:], own_v)
