"""The order of an epoch is a function of (seed, epoch) alone, and every process gets the same share of its work."""

from __future__ import annotations

import dataclasses
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from featurize.tokenised import Document
from models.eagle3 import Eagle3Config
from tests.train.memory import documents_of
from train.loop import Trainer
from train.packs import row_count, supervised_rows
from train.plan import Corpus, Costs, PackPlan, Plan, StepPlan, lay_out, plan_packs

HEAD = Eagle3Config(
    hidden_size=4096, target_hidden_size=4096, vocab_size=128_000, draft_vocab_size=32_000, aux_layers=(2, 16, 29),
    intermediate_size=14_336, num_attention_heads=32, num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-5,
    max_position_embeddings=8192, rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
)  # fmt: skip
COSTS = Costs.of(HEAD, row_share=0.8)
SEVENTEEN = documents_of([(20 + 7 * i % 50, ((5, 15),)) for i in range(17)])


def corpus_of(documents: list[Document], steps: int = 3) -> Corpus:
    return Corpus.of(documents, COSTS, steps)


def make_plan(documents: list[Document] = SEVENTEEN, steps: int = 3, **changes: Any) -> Plan:
    settings: dict[str, Any] = {"budget": 100, "packs_per_step": 2, "seed": 3, "epochs": 3} | changes
    return Plan(corpus_of(documents, steps), range(len(documents)), **settings)


def flat(steps: list[StepPlan]) -> list[int]:
    return [index for step in steps for pack in step.packs for index in pack.documents]


def of_epoch(plan: Plan, epoch: int) -> list[int]:
    layout = plan.epoch(epoch)
    return [index for step in range(len(layout)) for pack in layout[step] for index in pack]


def skewed() -> list[Document]:
    """A third long prompts with short answers, the rest short chats that are mostly answer."""
    rng = random.Random(0)
    shapes: list[tuple[int, tuple[tuple[int, int], ...]]] = []
    for _ in range(4000):
        long = rng.random() < 0.3
        length = rng.randint(3000, 8000) if long else rng.randint(50, 600)
        answer = int(length * (rng.uniform(0.01, 0.1) if long else rng.uniform(0.5, 0.95)))
        shapes.append((length, ((length - answer, length),)))
    return documents_of(shapes)


def chats() -> list[Document]:
    """Lognormal lengths, about half supervised."""
    rng = random.Random(2)
    shapes: list[tuple[int, tuple[tuple[int, int], ...]]] = []
    for _ in range(8000):
        length = min(4096, max(20, int(rng.lognormvariate(6.3, 0.9))))
        shapes.append((length, ((length - max(2, int(length * rng.betavariate(1.5, 1.5))), length),)))
    return documents_of(shapes)


def test_b23_epochs_differ_and_each_holds_every_document_once():
    orders = [of_epoch(make_plan(), epoch) for epoch in range(3)]
    assert all(sorted(order) == list(range(17)) for order in orders)
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert of_epoch(make_plan(seed=4), 0) != orders[0]


def test_b23_stopped_in_the_second_epoch_and_resumed_on_any_number_of_processes_the_order_is_the_same():
    def log(first: int, last: int | None, processes: int) -> list[tuple[int, int, list[int]]]:
        """(step, place, documents) of every pack that any process computes, from a plan of its own."""
        plan = make_plan()
        seen = []
        for step in range(first, len(plan) if last is None else last):
            for hand in plan[step].deal(processes):
                seen += [(step, pack.place, pack.documents) for pack in hand if pack is not None]
        return sorted(seen)

    plan = make_plan()
    stop = len(plan.epoch(0)) + 3
    assert stop < len(plan.epoch(0)) + len(plan.epoch(1))
    whole = log(0, None, 1)
    assert [index for _, _, documents in whole for index in documents] == sum((of_epoch(plan, e) for e in range(3)), [])
    for before, after in ((1, 1), (1, 2), (2, 1), (2, 8)):
        assert log(0, stop, before) + log(stop, None, after) == whole


def test_a_pack_keeps_its_place_and_so_its_sample_of_rows_whoever_computes_it():
    for packs_per_step in (1, 2, 5):
        plan = make_plan(packs_per_step=packs_per_step)
        one = [(pack.place, pack.documents) for step in range(len(plan)) for pack in plan[step].packs]
        assert len({place for place, _ in one}) == len(one)
        for processes in (1, 2, 3, 8):
            hands = [hand for step in range(len(plan)) for hand in plan[step].deal(processes)]
            assert sorted((p.place, p.documents) for hand in hands for p in hand if p) == sorted(one)


def test_a_plan_can_be_read_in_any_order_and_knows_its_length_at_once():
    plan = make_plan(epochs=5)
    forwards = [plan[step] for step in range(len(plan))]
    assert [plan[step] for step in reversed(range(len(plan)))] == forwards[::-1]
    assert flat(forwards) == sum((of_epoch(plan, epoch) for epoch in range(5)), [])
    with pytest.raises(IndexError, match=f"step {len(plan)} of a plan of {len(plan)}"):
        plan[len(plan)]


def test_packs_keep_to_their_budget_and_a_longer_document_is_alone():
    documents = documents_of([(length, ()) for length in (60, 300, 30, 70, 120, 100)])
    packs = plan_packs(corpus_of(documents), range(6), 100)
    assert sorted(index for pack in packs for index in pack) == list(range(6))
    assert [1] in packs and [4] in packs
    assert all(sum(documents[i].length for i in pack) <= 100 for pack in packs if pack not in ([1], [4]))
    for plan in (make_plan(documents, packs_per_step=p) for p in (1, 2, 7)):
        steps = [plan[step] for step in range(len(plan))]
        assert all(len(step.packs) <= plan.packs_per_step for step in steps)
        packs = [pack.documents for step in steps for pack in step.packs]
        assert all(len(pack) == 1 or sum(documents[i].length for i in pack) <= 100 for pack in packs)


def test_who_finds_no_room_is_first_in_the_next_step():
    # Of 60 tokens each, only one fits into a pack of 100: every step draws more documents than it has packs.
    documents = documents_of([(60, ((50 - i % 40, 60),)) for i in range(40)])
    corpus = corpus_of(documents)
    layout = lay_out(corpus, np.arange(40), 100, 4)
    when = {index: step for step in range(len(layout)) for pack in layout[step] for index in pack}
    assert len(layout) == 10 and sorted(when) == list(range(40))
    assert all(abs(when[index] - index // 4) <= 1 for index in range(40))
    assert any(when[index] != index // 4 for index in range(40))


def test_rows_and_work_of_a_document_are_those_of_its_spans():
    rng = random.Random(1)
    shapes = []
    for _ in range(50):
        cuts = sorted(rng.sample(range(40), 2 * rng.randint(0, 4)))
        shapes.append((rng.randint(40, 60), tuple(zip(cuts[::2], cuts[1::2], strict=True))))
    documents = documents_of([*shapes, (9, ((0, 1),)), (9, ((0, 2), (4, 5)))])
    corpus = corpus_of(documents, 4)
    for index, document in enumerate(documents):
        rows = [supervised_rows(document.spans, k).tolist() for k in range(4)]
        assert corpus.rows_NK[index].tolist() == [len(each) for each in rows]
        assert corpus.rows_NK[index].tolist() == [row_count(document.spans, k) for k in range(4)]
        work = COSTS.token * document.length + COSTS.teacher * sum(e - s - 1 for s, e in document.spans)
        for k, each in enumerate(rows):
            work += sum(COSTS.row + COSTS.key * (row + 1 + k) for row in each) * COSTS.row_share**k
        assert corpus.work_N[index] == pytest.approx(work)


def test_a_row_costs_one_layer_and_the_head_and_a_token_its_fusion_and_its_key():
    head = dataclasses.replace(
        HEAD, hidden_size=10, target_hidden_size=6, draft_vocab_size=50, aux_layers=(1, 2), intermediate_size=30,
        num_attention_heads=4, num_key_value_heads=2, head_dim=5,
    )  # fmt: skip
    costs = Costs.of(head, 1.0)
    assert costs.token == 12 * 10 + 2 * 20 * 10
    assert costs.row == 20 * 20 + 20 * 10 + 3 * 10 * 30 + 2 * 20 * 10 + 10 * 50
    assert costs.key == 2 * 20
    assert costs.teacher == 6 * 50 / 3


def in_turn(documents: list[Document], budget: int, per_step: int, processes: int) -> list[list[list[list[int]]]]:
    """Packs of each process in each step, if they closed at the first document that does not fit, dealt in turn."""
    order = list(range(len(documents)))
    random.Random(5).shuffle(order)
    packs: list[list[int]] = []
    room = 0
    for index in order:
        if documents[index].length > room:
            packs.append([])
            room = budget
        packs[-1].append(index)
        room -= documents[index].length
    return [
        [packs[at : at + per_step][process::processes] for process in range(processes)]
        for at in range(0, len(packs), per_step)
    ]


def slowest(corpus: Corpus, steps: list[list[list[list[int]]]]) -> float:
    """Time of all steps, each as long as its slowest process, over that of a perfect balance."""
    works = [[sum(corpus.work_N[pack].sum() for pack in hand) for hand in step] for step in steps]
    assert sum(map(sum, works)) == pytest.approx(corpus.work_N.sum())
    return sum(max(work) for work in works) / sum(sum(work) / len(work) for work in works)


@pytest.mark.parametrize(
    ("make", "per_step", "before", "after", "full"),
    [
        (chats, 8, 1.3, 1.05, 0.94),
        (chats, 32, 1.15, 1.02, 0.93),
        (skewed, 8, 1.9, 1.11, 0.83),
        (skewed, 32, 1.4, 1.05, 0.84),
    ],
)
def test_the_slowest_process_has_little_more_than_the_mean_work(make, per_step, before, after, full):
    documents, budget, processes = make(), 8192, 8
    corpus = corpus_of(documents, 7)
    plan = make_plan(documents, steps=7, budget=budget, packs_per_step=per_step, epochs=1)
    dealt = [
        [[pack.documents for pack in hand if pack is not None] for hand in plan[step].deal(processes)]
        for step in range(len(plan))
    ]
    assert slowest(corpus, in_turn(documents, budget, per_step, processes)) > before
    assert slowest(corpus, dealt) < after
    packs = sum(len(hand) for step in dealt for hand in step)
    assert corpus.tokens_N.sum() / (packs * budget) > full


def test_every_process_runs_as_many_passes_and_none_fills_up():
    packs = [PackPlan(place, [place], work) for place, work in enumerate((9.0, 5.0, 4.0, 3.0, 1.0))]
    hands = StepPlan(packs, 0, []).deal(2)
    assert [[pack and pack.place for pack in hand] for hand in hands] == [[None, 3, 0], [4, 2, 1]]
    assert [[pack and pack.place for pack in hand] for hand in StepPlan(packs[:1], 0, []).deal(3)] == [
        [0],
        [None],
        [None],
    ]


def test_b21_processes_are_dealt_by_their_global_rank_disjointly_and_completely():
    plan = make_plan(packs_per_step=16, epochs=1, budget=60)
    shards = []
    for rank in range(8):
        accelerator = SimpleNamespace(num_processes=8, process_index=rank, local_process_index=rank % 4)
        trainer: Any = SimpleNamespace(plan=plan, accelerator=accelerator)
        mine = [pack for step in range(len(plan)) for pack in Trainer._mine(trainer, step)]
        shards.append({index for pack in mine if pack is not None for index in pack.documents})
    assert all(shards)
    assert sum(len(shard) for shard in shards) == 17
    assert set().union(*shards) == set(range(17))


def test_packs_of_a_single_token_hold_a_document_each():
    corpus = corpus_of(SEVENTEEN)
    assert sorted(plan_packs(corpus, range(17), budget=1)) == [[index] for index in range(17)]
