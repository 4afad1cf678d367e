"""Shards in random order, few in use at a time: which ones a step needs, and when they are done with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from featurize.tokenised import Document
from models.errors import Refused
from tests.train.memory import documents_of
from train.feed import Feed
from train.plan import Corpus, Costs, Plan

COSTS = Costs(token=1.0, row=20.0, key=0.01, teacher=2.0, row_share=1.0)
SHARDS, EACH = 40, 5
DOCUMENTS = documents_of([(10 + 7 * i % 50, ((5, 9),)) for i in range(SHARDS * EACH)])
HELD = set(range(3, len(DOCUMENTS), 11)) | set(range(60, 65))  # one shard is held out as a whole
TRAINING = [index for index in range(len(DOCUMENTS)) if index not in HELD]


def make_plan(documents: list[Document] = DOCUMENTS, **changes: Any) -> Plan:
    settings: dict[str, Any] = {"budget": 100, "packs_per_step": 2, "seed": 3, "epochs": 3, "mixing": 4}
    settings |= {"firsts": range(0, len(documents), EACH)} | changes
    return Plan(Corpus.of(documents, COSTS, 3), TRAINING, **settings)


def make_feed(plan: Plan, bound: int = 10**9) -> Feed:
    store: Any = SimpleNamespace(spool=SimpleNamespace(bound=bound), sizes=lambda epoch: [1000] * SHARDS)
    return Feed(store, plan, 0, 1)


def documents_in(plan: Plan, step: int) -> list[int]:
    return [index for pack in plan[step].packs for index in pack.documents]


def test_an_epoch_holds_every_document_once_and_the_next_one_in_another_order() -> None:
    plan = make_plan()
    orders = [[index for step in steps for index in documents_in(plan, step)] for _, steps in plan.by_epoch(0)]
    assert [sorted(order) for order in orders] == [TRAINING] * 3
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert orders[0] == [i for step in next(make_plan().by_epoch(0))[1] for i in documents_in(make_plan(), step)]


def test_documents_mix_over_neighbouring_shards_and_few_shards_are_in_use_at_a_time() -> None:
    plan = make_plan(budget=10**6, packs_per_step=1, epochs=1, seed=1)
    narrow = make_plan(epochs=1)
    order = np.array([index for step in range(len(narrow)) for index in documents_in(narrow, step)])
    turns = narrow.turns(0, order)
    assert len(documents_in(plan, 0)) == len(TRAINING)
    spans = [turns[at:].min() - turns[: at + 1].max() for at in range(len(turns))]
    assert min(spans) >= -7, "a document was drawn long after its shard's turn"
    assert (np.diff(turns) < 0).mean() > 0.25, "shards are not mixed"
    within = [set(turns[at : at + 10].tolist()) for at in range(20, 150, 10)]
    assert all(len(each) >= 3 for each in within)


def test_all_of_it_mixes_unless_asked_otherwise() -> None:
    everything = make_plan(mixing=None)
    assert everything.opening() == (TRAINING, SHARDS)
    with pytest.raises(Refused, match="set trainer.shuffle_shards"):
        make_feed(everything)


@pytest.mark.parametrize("mixing", [1, 4, 100])
@pytest.mark.parametrize("packs_per_step", [1, 3])
def test_needs_are_those_of_the_documents_of_each_step(mixing: int, packs_per_step: int) -> None:
    plan = make_plan(mixing=mixing, packs_per_step=packs_per_step)
    feed = make_feed(plan)
    numbers = []
    for epoch, steps in plan.by_epoch(0):
        for step in steps:
            turns = plan.turns(epoch, np.array(documents_in(plan, step)))
            numbers.append([epoch * SHARDS + int(turn) for turn in turns])
    for step in range(len(plan)):
        seen = {number for each in numbers[: step + 1] for number in each}
        later = {number for each in numbers[step:] for number in each}
        if step:
            assert feed.needed(step) == max(seen) + 1
        # Done with: everything before the first shard that this step or a later one needs.
        assert feed.done(step) <= min(later)
        assert not set(range(feed.done(step), min(later))) & seen, "a shard that nobody needs is not given back"
    assert feed.done(len(plan)) == 3 * SHARDS
    documents, count = plan.opening()
    assert documents == [i for i in TRAINING if plan.turns(0, np.array([i]))[0] < count]
    assert feed.needed(0) == count >= max(numbers[0]) + 1


def test_a_bound_that_cannot_hold_what_is_in_use_is_refused_and_one_that_just_can_is_not() -> None:
    plan = make_plan()
    feed = make_feed(plan)
    most = max(feed.needed(step) - feed.done(step) for step in range(len(plan)))
    assert 4 < most <= 10
    make_feed(plan, most * 1000)
    with pytest.raises(Refused, match=r"spool.gigabytes=.* is too small: .* trainer.shuffle_shards=4 and"):
        make_feed(plan, most * 1000 - 1)
