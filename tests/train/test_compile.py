"""The fused parts of a head compute what the plain ones do, whatever the number of rows."""

from __future__ import annotations

import shutil

import pytest
import torch

from tests.train.test_objective import random_head


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a compiler on the CPU")
def test_compiled_parts_give_the_same_outputs_and_gradients():
    torch.manual_seed(0)
    plain, fused = random_head().float(), random_head().float()
    fused.load_state_dict(plain.state_dict())
    fused.compile_parts()
    for rows in (5, 9, 2):
        x = torch.randn(rows, 12)
        for name in ("midlayer.mlp", "norm"):
            wanted, got = (head.get_submodule(name) for head in (plain, fused))
            torch.testing.assert_close(got(x), wanted(x))
            gradients = [torch.autograd.grad(part(x).square().sum(), list(part.parameters())) for part in (wanted, got)]
            for a, b in zip(*gradients, strict=True):
                torch.testing.assert_close(b, a)
    assert fused.state_dict().keys() == plain.state_dict().keys()
