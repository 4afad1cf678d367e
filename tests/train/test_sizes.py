"""What is told of memory before a run agrees with what a head keeps, counted on tensors without storage."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
import torch

from models.config import DraftConfig, TargetConfig
from models.eagle3 import Eagle3Head
from models.engines import expected_mtp_tensors
from models.mtp import MtpConfig
from models.target import describe_target
from tests.train import test_memory
from train.bench import SHAPES
from train.config import ObjectiveConfig, TrainerConfig
from train.plan import Costs
from train.sizes import memory, parameters

HEAD = SHAPES["8b"].head()
OBJECTIVE = ObjectiveConfig(unroll_steps=7)


def test_the_weights_are_those_of_the_head() -> None:
    with torch.device("meta"):
        head = Eagle3Head(HEAD, torch.arange(HEAD.draft_vocab_size))
    assert parameters(HEAD) == sum(each.numel() for each in head.parameters())


def test_the_weights_of_an_mtp_head_are_those_that_are_exported(make_target) -> None:
    target = describe_target(TargetConfig(path=str(make_target())))
    head = MtpConfig.for_target(target, DraftConfig(algorithm="mtp"))
    assert parameters(head) == sum(prod(shape) for shape in expected_mtp_tensors(head).values())


@pytest.mark.parametrize(
    ("changes", "tokens", "rows"),
    [
        ({}, 16_384, 16_384),
        ({"intermediate_size": 28_672, "num_key_value_heads": 16}, 8192, 4096),
        ({"aux_layers": ()}, 16_384, 4096),
        ({}, 65_536, 65_536),
    ],
    ids=["8b", "other shapes", "without fc", "rows in chunks"],
)
def test_memory_is_told_to_within_a_tenth_of_what_is_counted(monkeypatch, changes, tokens, rows) -> None:
    head = replace(HEAD, **changes)
    monkeypatch.setattr(test_memory, "SHAPES_8B", head)
    counted = test_memory.unrolled_bytes(monkeypatch, tokens, rows) + test_memory.other_bytes(rows)
    told = memory(head, OBJECTIVE, TrainerConfig(pack_tokens=tokens), rows=rows).total
    assert told == pytest.approx(counted, rel=0.1)


def test_strategies_share_what_they_shard_and_nothing_else() -> None:
    alone, *shared = (
        memory(HEAD, OBJECTIVE, TrainerConfig(strategy=strategy), rows=512, processes=8)
        for strategy in ("ddp", "zero1", "zero2", "zero3", "fsdp2")
    )
    assert alone.state == 16 * parameters(HEAD)
    assert [each.state for each in shared] == [parameters(HEAD) * n for n in (9, 5.5, 2, 2)]
    assert {each.total - each.state for each in shared} == {alone.total - alone.state}


def test_arithmetic_counts_the_products_of_the_head() -> None:
    hidden, wide, draft = 4096, 4096, 32_000
    body = 2 * hidden * wide + wide * hidden + 3 * hidden * 14_336
    key_value = 2 * 2 * hidden * 8 * 128
    assert Costs.of(HEAD, 1.0).row == body + key_value + hidden * draft
