"""How much memory a pack takes on one GPU at the shapes of an 8B target, counted on tensors without storage.

The head itself runs, forward and backward, on PyTorch's meta device; only attention is stood in for, by
something that keeps what FlexAttention keeps. Weights, optimizer and loss are added by arithmetic.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from models import unroll
from models.eagle3 import Eagle3Head
from train import bench, losses

GB = 10**9
STEPS, SHAPES_8B = bench.SHAPES["8b"].steps, bench.SHAPES["8b"].head()


class Living(TorchDispatchMode):
    """Most bytes of tensors alive at once, after any operation; the planes and the embedding count as well."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.bound = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, result)):
            storage = leaf.untyped_storage() if isinstance(leaf, torch.Tensor) else None
            if storage is not None and (storage._cdata not in self.alive or self.alive[storage._cdata][0].expired()):
                self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                self.bound += storage.nbytes()
        if self.bound > self.peak:  # only then is it worth looking what has been freed
            self.alive = {key: value for key, value in self.alive.items() if not value[0].expired()}
            self.bound = sum(size for _, size in self.alive.values())
            self.peak = max(self.peak, self.bound)
        return result


class Attention(torch.autograd.Function):
    """Nothing but the memory of `models.flex.attend`: output, log-sum-exp, and the output merged with own keys."""

    @staticmethod
    def forward(ctx: Any, q_RNE: torch.Tensor, *keys_and_values: torch.Tensor) -> torch.Tensor:
        out_RNE, lse_RN = torch.empty_like(q_RNE), q_RNE.new_empty(q_RNE.shape[:2], dtype=torch.float32)
        merged_RNE = torch.empty_like(q_RNE)
        ctx.save_for_backward(q_RNE, *keys_and_values, out_RNE, lse_RN, merged_RNE)
        return merged_RNE

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return tuple(torch.empty_like(each) for each in ctx.saved_tensors[:5])


def unrolled_bytes(monkeypatch: pytest.MonkeyPatch, tokens: int, rows: int) -> int:
    """Peak bytes of planes, embedding, linear weights (bf16) with their gradients, and everything in an unroll."""
    monkeypatch.setattr(unroll, "attend", lambda *inputs, **_: Attention.apply(*inputs[:5]))
    with torch.device("meta"):
        head = Eagle3Head(SHAPES_8B, torch.arange(SHAPES_8B.draft_vocab_size))
        for module in head.modules():
            if isinstance(module, nn.Linear):  # as under autocast
                module.to(torch.bfloat16)
        ids_T, starts_T = torch.empty(2, tokens, dtype=torch.int64)
        aux_TAP = torch.empty(tokens, len(SHAPES_8B.planes), 4096, dtype=torch.bfloat16)
        embedding_VH = torch.empty(SHAPES_8B.vocab_size, 4096, dtype=torch.bfloat16)
        nested = [torch.empty(rows - k, dtype=torch.int64) for k in range(STEPS)]
    with Living() as living:
        hidden = [step.hidden_RH for step in head.unroll(ids_T, aux_TAP, starts_T, nested, embedding_VH)]
        torch.autograd.backward(hidden, [torch.empty_like(each) for each in hidden])  # the loss forms these in forward
    return living.peak


def other_bytes(rows: int) -> int:
    """fp32 weights, gradients and AdamW's two moments; the target's heads; final planes; chunks of the loss."""
    with torch.device("meta"):
        parameters = sum(each.numel() for each in Eagle3Head(SHAPES_8B, torch.arange(32_000)).parameters())
    teachers = (SHAPES_8B.vocab_size + SHAPES_8B.draft_vocab_size) * 4096 * 2
    size = losses.SIZES["cuda"]  # five fp32 tensors of its logits' size, and bf16 gradients of several chunks
    loss = SHAPES_8B.draft_vocab_size * (4096 * (4 + 2) + size.chunk * 5 * 4 + size.pending * 2)
    return 16 * parameters + teachers + (rows + STEPS) * 4096 * 2 + loss


@pytest.mark.parametrize("share", [0.01, 0.1, 0.125, 1.0])
def test_a_pack_of_131072_tokens_fits_one_gpu_of_80_gb_whatever_its_supervised_share(monkeypatch, share):
    rows = int(131_072 * share)
    total = unrolled_bytes(monkeypatch, 131_072, rows) + other_bytes(rows)
    print(f"{share:.1%} of 131,072 tokens supervised: {total / GB:.1f} GB")
    assert total < 72 * GB


def test_a_row_takes_no_more_memory_in_a_long_pack_than_in_a_short_one(monkeypatch):
    def per_row(tokens: int, rows: int) -> float:
        more, fewer = (unrolled_bytes(monkeypatch, tokens, n) for n in (rows, rows // 2))
        return (more - fewer) / (rows - rows // 2)

    assert per_row(16_384, 4096) == pytest.approx(per_row(4096, 4096), rel=0.02)


def test_a_position_without_supervision_costs_its_planes_keys_and_values_and_little_else(monkeypatch):
    longer, shorter = (unrolled_bytes(monkeypatch, tokens, 64) for tokens in (131_072, 65_536))
    planes, keys_and_values, feature = 3 * 4096 * 2, 2 * 2 * 8 * 128 * 2, 4096 * 2
    assert (longer - shorter) / 65_536 < planes + keys_and_values + 2.5 * feature
