"""The blocked attention of unrolled rows equals one dense masked softmax, forward and backward."""

from __future__ import annotations

import pytest
import torch

from models import attention
from models.attention import attend, attend_oracle, blocks_of


@pytest.mark.parametrize("own_steps", [0, 1, 4])
@pytest.mark.parametrize(("heads", "groups", "size"), [(4, 4, 8), (6, 2, 16), (3, 1, 4)])
def test_equals_the_dense_oracle_in_fp64(own_steps, heads, groups, size, monkeypatch):
    monkeypatch.setattr(attention, "BLOCK_ROWS", 3)
    torch.manual_seed(own_steps * 100 + heads)
    lengths = [7, 1, 12, 5]
    starts_T = torch.cat([torch.full((n,), sum(lengths[:i])) for i, n in enumerate(lengths)])
    rows_R = torch.rand(len(starts_T)).lt(0.6).nonzero()[:, 0]

    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, requires_grad=True)

    positions, rows = len(starts_T), len(rows_R)
    q, k, v = leaf(rows, heads, size), leaf(positions, groups, size), leaf(positions, groups, size)
    own_k, own_v = leaf(rows, own_steps, groups, size), leaf(rows, own_steps, groups, size)
    inputs = (q, k, v, own_k, own_v)
    fast = attend(q, k, v, own_k, own_v, rows_R, starts_T[rows_R])
    slow = attend_oracle(q, k, v, own_k, own_v, rows_R, starts_T[rows_R])
    torch.testing.assert_close(fast, slow, rtol=1e-12, atol=1e-12)
    weight = torch.randn_like(slow)
    for got, wanted in zip(
        torch.autograd.grad(fast, inputs, weight), torch.autograd.grad(slow, inputs, weight), strict=True
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-12)


def test_values_of_another_size_and_a_scale_of_ones_own(monkeypatch):
    monkeypatch.setattr(attention, "BLOCK_ROWS", 3)
    torch.manual_seed(0)
    starts_T = torch.tensor([0] * 9 + [9] * 6)
    rows_R = torch.tensor([1, 2, 5, 8, 10, 14])
    shapes = (6, 4, 12), (15, 2, 12), (15, 2, 7), (6, 2, 2, 12), (6, 2, 2, 7)
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    fast, slow = (each(*(*inputs, rows_R, starts_T[rows_R]), scale=0.7) for each in (attend, attend_oracle))
    assert fast.shape == (6, 4, 7)
    torch.testing.assert_close(fast, slow, rtol=1e-12, atol=1e-12)
    weight = torch.randn_like(slow)
    for got, wanted in zip(*(torch.autograd.grad(each, inputs, weight) for each in (fast, slow)), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-12)


def test_blocks_stay_within_documents_and_see_no_key_after_their_last_row():
    starts_T = torch.tensor([0] * 5 + [5] * 4)
    rows_R = torch.tensor([1, 3, 5, 7])
    blocks = blocks_of(rows_R, starts_T[rows_R])
    assert [(b.first, b.last, b.start, b.stop) for b in blocks] == [(0, 2, 0, 4), (2, 4, 5, 8)]


def test_autocast_does_not_reach_the_scores():
    torch.manual_seed(0)
    starts_T, rows_R = torch.tensor([0] * 40 + [40] * 30), torch.arange(1, 70, 2)
    shapes = (35, 4, 16), (70, 2, 16), (70, 2, 16), (35, 3, 2, 16), (35, 3, 2, 16)
    inputs = [(3 * torch.randn(shape)).bfloat16().requires_grad_() for shape in shapes]
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out = attend(*(*inputs, rows_R, starts_T[rows_R]))
        results.append([out, *torch.autograd.grad(out.float().pow(2).sum(), inputs)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
