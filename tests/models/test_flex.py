"""FlexAttention over the prefix with own keys merged in: its blocks, its numbers, and how often it is compiled.

Without a GPU, `flex_attention` runs uncompiled: it applies the mask's function to all pairs and looks at no
block. So the blocks are compared with the dense mask here, and the numbers with the dense oracle.
"""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest
import torch
from torch._dynamo.backends.registry import lookup_backend
from torch.nn.attention import flex_attention as torch_flex
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from models import flex
from models.attention import attend_oracle
from models.flex import BLOCK, block_mask


@pytest.fixture
def on_cpu(monkeypatch):
    """`flex_attention` refuses gradients on the CPU, although its uncompiled form computes them."""
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    torch.compiler.reset()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
        yield


def starts_of(lengths: list[int]) -> torch.Tensor:
    """For each position of documents end to end, where its document begins."""
    return torch.cat([torch.full((n,), sum(lengths[:i])) for i, n in enumerate(lengths)])


def leaves(rows: int, positions: int, heads: int, groups: int, size: int, own: int, dtype=torch.float64) -> Any:
    """Random queries, keys, values, own keys and own values."""
    shapes = (rows, heads, size), (positions, groups, size), (positions, groups, size)
    own_shape = (rows, own, groups, size)
    return [torch.randn(*shape, dtype=dtype).requires_grad_() for shape in (*shapes, own_shape, own_shape)]


def assert_equal_to_oracle(inputs, rows_R: torch.Tensor, starts_R: torch.Tensor, rtol: float):
    got, wanted = flex.attend(*(*inputs, rows_R, starts_R)), attend_oracle(*(*inputs, rows_R, starts_R))
    torch.testing.assert_close(got, wanted, rtol=rtol, atol=rtol)
    weight, used = torch.randn_like(wanted), inputs if inputs[3].numel() else inputs[:3]
    gradients = zip(torch.autograd.grad(got, used, weight), torch.autograd.grad(wanted, used, weight), strict=True)
    for a, b in gradients:
        torch.testing.assert_close(a, b, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("own", [0, 1, 6])
@pytest.mark.parametrize(("heads", "groups", "size"), [(4, 4, 16), (6, 2, 80), (2, 1, 96), (3, 1, 100)])
def test_equals_the_dense_oracle_in_fp64(on_cpu, own, heads, groups, size):
    torch.manual_seed(heads + own)
    draw = random.Random(size + own)
    for share in (0.02, 0.4, 1.0):
        starts_T = starts_of([draw.choice([1, 5, 70, 128, 200]) for _ in range(4)])
        rows_R = torch.rand(len(starts_T)).lt(share).nonzero()[:, 0]
        if not len(rows_R):
            rows_R = torch.tensor([len(starts_T) // 2])
        inputs = leaves(len(rows_R), len(starts_T), heads, groups, size, own)
        assert_equal_to_oracle(inputs, rows_R, starts_T[rows_R], 1e-11)


def test_values_may_be_of_another_size_than_keys(on_cpu):
    torch.manual_seed(0)
    starts_T, rows_R = starts_of([150, 90]), torch.arange(10, 240, 3)
    shapes = (len(rows_R), 4, 48), (240, 2, 48), (240, 2, 32), (len(rows_R), 3, 2, 48), (len(rows_R), 3, 2, 32)
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    assert_equal_to_oracle(inputs, rows_R, starts_T[rows_R], 1e-11)


def listed(count: Any, order: Any, columns: int) -> torch.Tensor:
    """The boolean matrix that one pair of a BlockMask's tensors stands for; its indices must ascend.

    The kernels read both as contiguous memory; nothing checks it for them.
    """
    assert count.is_contiguous() and order.is_contiguous()
    assert count.dtype == order.dtype == torch.int32
    matrix = torch.zeros(count.shape[-1], columns, dtype=torch.bool)
    for line, (n, indices) in enumerate(zip(count[0, 0].tolist(), order[0, 0].tolist(), strict=True)):
        assert indices[:n] == sorted(set(indices[:n]))
        matrix[line, indices[:n]] = True
    return matrix


def brute_force(rows_R: torch.Tensor, starts_R: torch.Tensor, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs of blocks of which some entries are visible, and those of which all are, from the dense mask."""
    keys_T = torch.arange(positions)
    visible_RT = (keys_T <= rows_R[:, None]) & (keys_T >= starts_R[:, None])
    padding = (0, -positions % BLOCK, 0, -len(rows_R) % BLOCK)
    blocks = torch.nn.functional.pad(visible_RT, padding).unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
    return blocks.any(3).any(1), blocks.all(3).all(1)


PACKS: dict[str, tuple[list[int], Any]] = {
    "one row": ([300], [250]),
    "first row": ([300], [0]),
    "all rows of one document": ([512], range(512)),
    "all rows, documents begin inside blocks": ([100, 37, 300, 129, 1, 1, 200], range(768)),
    "whole blocks": ([128, 256, 128], range(512)),
    "sparse rows": ([1000], range(3, 1000, 9)),
    "a long document without rows": ([200, 700, 300], [*range(150, 200), *range(950, 1200)]),
    "rows at the head of long documents": ([600, 600], [*range(90), *range(600, 640)]),
    "short": ([5, 4], [2, 3, 7]),
}


@pytest.mark.parametrize("pack", PACKS)
def test_the_block_mask_is_that_of_the_dense_mask(pack):
    lengths, rows = PACKS[pack]
    starts_T, rows_R = starts_of(lengths), torch.tensor(list(rows))
    assert_blocks(rows_R, starts_T)


def test_the_block_mask_of_random_packs_is_that_of_the_dense_mask():
    draw = random.Random(0)
    torch.manual_seed(0)
    for _ in range(40):
        starts_T = starts_of([draw.choice([1, 60, 127, 128, 129, 500]) for _ in range(draw.randint(1, 6))])
        rows_T = torch.rand(len(starts_T)).lt(draw.choice([0.01, 0.3, 0.95]))
        answers = (torch.arange(len(starts_T)) // draw.choice([40, 200])) % 2 == 0
        rows_R = (rows_T & answers).nonzero()[:, 0]
        if len(rows_R):
            assert_blocks(rows_R, starts_T)


def assert_blocks(rows_R: torch.Tensor, starts_T: torch.Tensor) -> None:
    starts_R, positions = starts_T[rows_R], len(starts_T)
    mask: Any = block_mask(rows_R, starts_R, positions)
    some, full = brute_force(rows_R, starts_R, positions)
    lines, columns = mask.kv_num_blocks.shape[-1], mask.q_num_blocks.shape[-1]
    pad = torch.nn.ZeroPad2d((0, columns - some.shape[1], 0, lines - some.shape[0]))
    some, full = pad(some), pad(full)
    assert mask.shape == (1, 1, len(rows_R), positions)
    assert torch.equal(mask.to_dense()[0, 0].bool(), some)
    assert torch.equal(listed(mask.full_kv_num_blocks, mask.full_kv_indices, columns), full)
    assert torch.equal(listed(mask.kv_num_blocks, mask.kv_indices, columns), some & ~full)
    assert torch.equal(listed(mask.full_q_num_blocks, mask.full_q_indices, lines), full.T)
    assert torch.equal(listed(mask.q_num_blocks, mask.q_indices, lines), (some & ~full).T)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation makes, and operations that wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0
        self.waits: list[Any] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.elements = max([self.elements, *sizes])
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            self.waits.append(func)
        return result


def test_making_the_block_mask_takes_a_number_per_row_position_and_pair_of_blocks_and_waits_for_nothing():
    positions = 32_768
    rows_R = torch.arange(0, positions, 2)
    with Largest() as largest:
        block_mask(rows_R, torch.zeros_like(rows_R), positions)
    assert largest.elements == (positions // BLOCK) * (len(rows_R) // BLOCK)  # 32,768; the dense mask has 537 million
    assert not largest.waits


def test_rows_and_packs_of_all_sizes_share_three_compilations(on_cpu, monkeypatch):
    compiled = []

    def counting(graph: Any, inputs) -> Any:
        compiled.append(graph)
        return lookup_backend("aot_eager")(graph, inputs)

    compile_flex: Any = torch.compile
    fused = compile_flex(torch_flex.flex_attention, dynamic=True, fullgraph=True, backend=counting)
    monkeypatch.setattr(flex, "flex_attention", fused)
    torch.manual_seed(0)
    draw = random.Random(0)
    for turn in range(24):
        starts_T = starts_of([draw.choice([1, 5, 70, 128, 200] if turn % 3 else [2, 9]) for _ in range(5)])
        rows_R = torch.rand(len(starts_T)).lt(draw.choice([0.02, 0.3, 1.0])).nonzero()[:, 0]
        rows_R = rows_R if len(rows_R) else torch.tensor([0])
        inputs = leaves(len(rows_R), len(starts_T), 4, 2, 16, turn % 4, torch.float32)
        assert_equal_to_oracle(inputs, rows_R, starts_T[rows_R], 2e-5)
    # As many blocks of rows as of keys (the first pack), any, and one row.
    assert len(compiled) <= 3


def test_bf16_is_close_to_the_oracle_and_keeps_scores_in_fp32(on_cpu):
    torch.manual_seed(0)
    starts_T = starts_of([150, 90])
    rows_R = torch.arange(10, 240, 3)
    inputs = leaves(len(rows_R), 240, 4, 2, 32, 3, torch.bfloat16)
    exact = [each.detach().float().requires_grad_() for each in inputs]
    got, wanted = (
        function(*(*each, rows_R, starts_T[rows_R]))
        for function, each in ((flex.attend, inputs), (attend_oracle, exact))
    )
    assert got.dtype == torch.bfloat16
    weight = torch.randn_like(wanted).bfloat16()
    pairs = zip(
        [got, *torch.autograd.grad(got, inputs, weight)],
        [wanted, *torch.autograd.grad(wanted, exact, weight.float())],
        strict=True,
    )
    for a, b in pairs:  # a bf16 has 8 bits; scores of 8 bits would be wrong by several times this
        assert (a.float() - b).norm() < 2**-7 * b.norm()
