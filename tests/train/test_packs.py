"""The order of an epoch is a function of (seed, epoch) alone, and every document is in it once."""

from __future__ import annotations

import pytest

from featurize.tokenised import Document
from train.config import OptimConfig
from train.loop import schedule as factor
from train.packs import held_out, plan_epoch, plan_packs

DOCUMENTS = [Document(f"d{i}", "chat", 20 + 7 * i % 50, ((5, 15),)) for i in range(17)]
PLAN = {"budget": 100, "packs_per_step": 2, "seed": 3}


def flat(plan):
    return [index for step in plan for pack in step for index in pack]


def test_b23_epochs_differ_and_each_holds_every_document_once():
    orders = [flat(plan_epoch(DOCUMENTS, range(17), **PLAN, epoch=epoch)) for epoch in range(3)]
    assert all(sorted(order) == list(range(17)) for order in orders)
    assert orders[0] != orders[1] != orders[2]
    assert orders[1] == flat(plan_epoch(DOCUMENTS, range(17), **PLAN, epoch=1))


def test_packs_keep_to_their_budget_and_a_longer_document_is_alone():
    documents = [Document(name, "", length, ()) for name, length in zip("abcd", (60, 300, 30, 70), strict=True)]
    assert plan_packs(documents, [0, 1, 2, 3], 100) == [[0], [1], [2, 3]]


def test_held_out_documents_are_chosen_by_their_id_alone():
    names = [f"chat-{i}" for i in range(4000)]
    share = sum(held_out(name, 0.1) for name in names) / len(names)
    assert share == pytest.approx(0.1, abs=0.02)
    assert {name for name in names if held_out(name, 0.05)} <= {name for name in names if held_out(name, 0.1)}
    assert not any(held_out(name, 0.0) for name in names)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_b22_the_learning_rate_is_a_function_of_the_step(schedule):
    optim = OptimConfig(schedule=schedule, warmup_steps=10, final_share=0.1)
    rates = [factor(optim, step, 100) for step in range(100)]
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert max(rates) == pytest.approx(1.0)
    assert rates[-1] == pytest.approx(1.0 if schedule == "constant" else 0.1, abs=0.02)
