"""The benchmark of the unroll for MTP modules says what it is there to say."""

from __future__ import annotations

import torch

from train.bench_mtp import compare


def test_training_with_the_unroll_gives_a_higher_al_than_the_same_steps_with_one():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = compare(joint_steps=250, steps=60, k=3)
    finally:
        torch.set_num_threads(threads)
    before, single, unrolled = (al for al, _ in found.values())
    assert unrolled > single + 0.05 and unrolled > before
    assert all(len(hits) == 3 for _, hits in found.values())
