"""What a head learns depends on the supervised rows alone: not on packs, padding, accumulation or who computes what."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from featurize.shards import teacher_positions
from featurize.store import DocumentFeatures
from models.eagle3 import Eagle3Config, Eagle3Head
from tests.train.memory import MemoryStore, documents_of
from train import losses
from train.config import ObjectiveConfig
from train.objective import Objective
from train.packs import Pack, build_pack
from train.plan import Corpus, Costs, Plan

HIDDEN, VOCAB = 12, 20
HEADS = [(4, 2, 6), (4, 4, 2), (6, 1, 8), (3, 3, 10)]
"""Attention heads, key-value heads, head size: grouped and not, narrower and wider than hidden / heads."""


def random_shapes(rng: random.Random, count: int) -> list[tuple[int, tuple[tuple[int, int], ...]]]:
    """Lengths and spans: several in a document or none, at position 0, at the end, touching, of length 1."""
    shapes = []
    for _ in range(count):
        length = rng.randint(1, 24)
        cuts = {*rng.sample(range(length + 1), rng.randint(0, min(7, length))), rng.choice([0, length])}
        pairs = zip(sorted(cuts), sorted(cuts)[1:], strict=False)
        shapes.append((length, tuple(pair for pair in pairs if rng.random() < 0.6)))
    return [*shapes, (rng.randint(6, 20), ((2, 6),))]


@pytest.fixture(autouse=True, params=[3, 1000])
def chunk(request, monkeypatch):
    """Positions whose logits are held at once: many chunks in a pack, or one."""
    monkeypatch.setitem(losses.SIZES, "cpu", losses.Sizes(request.param, 2, request.param))


class Case:
    """A random head, objective and documents, all from one seed."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float64, **settings: Any) -> None:
        rng = random.Random(seed)
        torch.manual_seed(seed)
        heads, groups, size = HEADS[seed % len(HEADS)]
        draft = rng.choice([9, VOCAB])
        config = Eagle3Config(
            hidden_size=HIDDEN, target_hidden_size=HIDDEN, vocab_size=VOCAB, draft_vocab_size=draft,
            aux_layers=(2, 4, 5), intermediate_size=20, num_attention_heads=heads, num_key_value_heads=groups,
            head_dim=size, rms_norm_eps=1e-5, max_position_embeddings=64,
            rope_parameters={"rope_type": "default", "rope_theta": 500.0}, norm_output=rng.random() < 0.5,
        )  # fmt: skip
        head = Eagle3Head(config, torch.arange(0, 2 * draft, 2) if draft < VOCAB else None)
        with torch.no_grad():
            for parameter in head.parameters():
                parameter.copy_(torch.randn_like(parameter) * 0.3 + (parameter.dim() == 1))
        embedding, lm_head = (torch.randn(VOCAB, HIDDEN) for _ in range(2))
        target: Any = SimpleNamespace(load_embedding=lambda: embedding, load_lm_head=lambda: lm_head)
        self.steps = rng.randint(1, 5)
        settings = {"unroll_steps": self.steps} | settings
        self.objective = Objective(head, target, ObjectiveConfig(**settings), "fp32").to(dtype)
        self.documents = documents_of(random_shapes(rng, rng.randint(3, 7)))
        self.store: Any = MemoryStore(self.documents, hidden=HIDDEN, vocab=VOCAB, dtype=dtype)
        self.rng = rng
        costs = Costs.of(config, settings.get("row_share", 1.0))
        self.corpus = Corpus.of(self.documents, costs, self.steps)
        self.counts = [max(1, rows) for rows in self.corpus.rows_NK.sum(0).tolist()]

    def packs(self, groups: Sequence[Sequence[int]]) -> list[Pack]:
        return [build_pack(self.store, group) for group in groups]

    def learn(self, packs: Sequence[Pack | None], seeds: Sequence[int] | None = None) -> list[torch.Tensor]:
        """The loss and every gradient, accumulated over packs in this order."""
        self.objective.zero_grad()
        total = torch.zeros(())
        for pack, seed in zip(packs, seeds or [0] * len(packs), strict=True):
            loss = self.objective(pack, self.counts, seed).loss
            loss.backward()
            total = total + loss.detach()
        return [total, *(p.grad.clone() for p in self.objective.head.parameters() if p.grad is not None)]


def assert_same(got: list[torch.Tensor], wanted: list[torch.Tensor], tolerance: float) -> None:
    assert len(got) == len(wanted) > 10
    assert any(gradient.any() for gradient in wanted[1:])
    for a, b in zip(got, wanted, strict=True):
        assert (a - b).abs().max() <= tolerance * max(b.abs().max().item(), 1e-3)


def random_groups(rng: random.Random, count: int) -> list[list[int]]:
    """A random partition of documents into packs, in random order."""
    order = rng.sample(range(count), count)
    cuts = sorted({0, count, *rng.sample(range(count), rng.randint(0, count - 1))})
    return [order[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=["fp64", "fp32"])
def test_b19_packed_in_any_way_and_separate_give_the_same_loss_and_gradients(seed, dtype, tolerance):
    case = Case(seed, dtype, loss="kl" if seed % 3 else "ce")
    everyone = range(len(case.documents))
    separate = case.learn(case.packs([[index] for index in everyone]))
    assert_same(case.learn(case.packs([list(everyone)])), separate, tolerance)
    for _ in range(2):
        assert_same(case.learn(case.packs(random_groups(case.rng, len(everyone)))), separate, tolerance)


@pytest.mark.parametrize("seed", range(8))
def test_b19_what_supervises_nothing_changes_nothing(seed):
    case = Case(seed)
    whole = case.learn(case.packs([list(range(len(case.documents)))]))
    first = len(case.documents)
    padding = documents_of([(7, ()), (1, ()), (5, ((0, 2),)), (6, ((3, 4),))])
    extended: Any = MemoryStore([*case.documents, *padding], hidden=HIDDEN, vocab=VOCAB)
    extended._features[:first] = case.store._features
    case.store = extended
    between = [first, *(each for index in range(first) for each in (index, first + index % 4)), first + 2]
    assert_same(case.learn(case.packs([between])), whole, 1e-10)
    assert_same(case.learn([None, *case.packs([list(range(first)), [first, first + 3]]), None]), whole, 1e-10)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("row_share", [1.0, 0.6])
def test_b19_the_number_of_processes_changes_no_gradient_of_any_step(seed, row_share):
    case = Case(seed, row_share=row_share)
    everyone = range(len(case.documents))
    plan = Plan(case.corpus, everyone, budget=30, packs_per_step=3, seed=seed, epochs=2)
    for step in range(len(plan)):
        case.counts = [max(1, rows) for rows in plan[step].rows_K]
        if not any(plan[step].rows_K):
            continue
        by_world = []
        for processes in (1, 2, 3, 5):
            hands = [planned for hand in plan[step].deal(processes) for planned in hand]
            packs = [build_pack(case.store, planned.documents) if planned else None for planned in hands]
            seeds = [planned.place if planned else 0 for planned in hands]
            by_world.append(case.learn(packs, seeds))
        for other in by_world[1:]:
            assert (other[0] - by_world[0][0]).abs() <= 1e-10
            assert all((a - b).abs().max() <= 1e-10 for a, b in zip(other[1:], by_world[0][1:], strict=True))


def logit_gradients(case: Case, pack: Pack) -> list[dict[int, torch.Tensor]]:
    """Per unroll step: row -> gradient of the loss in the row's draft logits, read through the hidden states."""
    outcome = case.objective(pack, case.counts, 0)
    hidden = [step.hidden_RH for step in outcome.steps]
    weight_DH = case.objective.draft_DH.detach()
    found = []
    for step, gradient_RH in zip(outcome.steps, torch.autograd.grad(outcome.loss, hidden), strict=True):
        gradient_RD = gradient_RH @ torch.linalg.pinv(weight_DH)  # exact: D < H, so the rows of W are independent
        found.append({int(row): gradient_RD[place] for place, row in enumerate(step.rows_R)})
    return found + [{}] * (case.steps - len(found))


# Eight tokens. Step k of row t feeds token t+1+k and predicts token t+2+k; its teacher is the plane of t+1+k.
#   position   0  1  2  3  4  5  6  7
#   mask       .  .  .  1  1  1  .  .      row 2 begins the answer: fed its first token (3), it predicts the second.
MIDDLE = [{2: 3, 3: 4}, {2: 4}, {}]
#   mask       .  .  .  .  .  1  1  1      the last row is 5: fed token 6, it predicts token 7. Rows 6 and 7: none.
EDGE = [{4: 5, 5: 6}, {4: 6}, {}]
#   mask       1  1  1  .  .  .  .  .      there is no row before the first token; row 0 predicts token 2.
START: list[dict[int, int]] = [{0: 1}, {}, {}]


@pytest.mark.parametrize(
    ("span", "table"), [((3, 6), MIDDLE), ((5, 8), EDGE), ((0, 3), START)], ids=["middle", "right edge", "start"]
)
def test_b14_the_rows_with_a_gradient_and_their_teachers_are_those_of_the_table(span, table):
    seed = next(seed for seed in range(99) if random.Random(seed).choice([9, VOCAB]) == 9)
    case = Case(seed, unroll_steps=3)
    case.steps = 3
    case.counts = [max(1, len(rows)) for rows in table]
    document = documents_of([(8, (span,))])[0]
    final_8H = torch.randn(8, HIDDEN, dtype=torch.float64)
    positions = teacher_positions(document)
    planes = torch.randn(8, 3, HIDDEN, dtype=torch.float64)
    features = DocumentFeatures(torch.randint(0, VOCAB, (8,)).int(), planes, final_8H[positions], positions)
    store: Any = SimpleNamespace(documents=[document], read=lambda index: features)
    pack = build_pack(store, [0])
    found = logit_gradients(case, pack)
    assert [sorted(rows) for rows in found] == [sorted(rows) for rows in table]
    objective = case.objective
    steps = objective.unroll(pack, None)
    for k, rows in enumerate(table):
        for place, (row, teacher) in enumerate(sorted(rows.items())):
            q = (objective.draft_DH @ steps[k].hidden_RH[place]).softmax(-1)
            p = (final_8H[teacher] @ objective.teacher_VP.T)[objective.head.ids_D].softmax(-1)
            wanted = objective.settings.decay**k * (q - p) / case.counts[k]
            assert wanted.abs().max() > 1e-6
            torch.testing.assert_close(found[k][row], wanted, rtol=1e-7, atol=1e-10)
