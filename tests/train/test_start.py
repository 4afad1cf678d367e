"""Fitted start values: what is linear is known before the first optimizer step."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import rms_norm

from models.eagle3 import MLP, Eagle3Config, Eagle3Head, initialise
from tests.train.linear import LinearWorld
from tests.train.memory import MemoryStore, documents_of
from train import start
from train.config import ObjectiveConfig
from train.objective import Objective, judge
from train.packs import Pack, row_count
from train.plan import Corpus, Costs

HIDDEN, VOCABULARY, LENGTH = 24, 60, 600


@pytest.fixture(params=[(1, 2), ()], ids=["two planes", "no fc"])
def world(request: pytest.FixtureRequest) -> tuple[Objective, Pack]:
    """A target whose next state is linear in its present one and the token between; planes mix the present one.

    A head without fc reads the present state itself.
    """
    torch.manual_seed(0)
    known = LinearWorld(HIDDEN, VOCABULARY, LENGTH)
    state_TH, target = known.state_TH, known.target
    scale_AP = torch.tensor([1.0, 1000.0])[:, None] * torch.rand(2, HIDDEN)
    mixed_TAP = torch.stack((torch.randn(LENGTH, HIDDEN), state_TH @ torch.randn(HIDDEN, HIDDEN)), 1) * scale_AP
    pack = dataclasses.replace(known.pack, aux_TAP=mixed_TAP)
    config = Eagle3Config(
        hidden_size=HIDDEN,
        target_hidden_size=HIDDEN,
        vocab_size=VOCABULARY,
        draft_vocab_size=VOCABULARY,
        aux_layers=request.param,
        intermediate_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        rms_norm_eps=1e-6,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    if not request.param:
        pack = dataclasses.replace(pack, aux_TAP=pack.final_FP[:, None])
    head = Eagle3Head(config)
    initialise(head, target, pack.aux_TAP)
    return Objective(head, target, ObjectiveConfig(unroll_steps=3), "fp32"), pack


def kl_per_step(objective: Objective, pack: Pack) -> torch.Tensor:
    counts = torch.tensor([row_count(pack.spans, k) for k in range(3)])
    return objective(pack, counts.tolist(), 0).sums_K.detach() / counts


def test_a_linear_target_is_known_at_step_0(world, monkeypatch):
    objective, pack = world
    monkeypatch.setattr(start, "STEPS", 1)
    start.fit_start(objective, lambda: [pack])
    hits_RK, _ = judge(objective, pack, objective.unroll(pack, None))
    assert hits_RK[:, 0].mean() > 0.8


def test_every_step_starts_nearer_to_the_target(world):
    objective, pack = world
    before = kl_per_step(objective, pack)
    start.fit_start(objective, lambda: [pack])
    assert (kl_per_step(objective, pack) < 0.7 * before).all()


def test_logits_are_as_sure_as_they_are_right(world):
    objective, pack = world
    start.fit_start(objective, lambda: [pack])
    norm, fitted = objective.head.norm.weight, kl_per_step(objective, pack).sum()
    for factor in (0.8, 1.25):
        with torch.no_grad():
            norm.mul_(factor)
        assert kl_per_step(objective, pack).sum() > fitted
        with torch.no_grad():
            norm.div_(factor)


def test_a_map_of_small_rank_is_the_best_of_its_rank(monkeypatch):
    monkeypatch.setattr(start, "RIDGE", 0.0)
    torch.manual_seed(1)
    x = torch.randn(500, 12, dtype=torch.float64) * torch.logspace(-1, 2, 12, dtype=torch.float64)
    y = (x / x.std(0)) @ torch.randn(12, 8, dtype=torch.float64) + 0.1 * torch.randn(500, 8, dtype=torch.float64)
    regression = start.Regression(12, 8, x)
    for part in (slice(0, 200), slice(200, 500)):
        regression.add(x[part], y[part])
    value, output = regression.solve_truncated(3)
    left, singular, right = torch.linalg.svd(x @ torch.linalg.lstsq(x, y).solution)
    best = (left[:, :3] * singular[:3]) @ right[:3]  # Eckart and Young, within what x can say
    reached, least = ((y - x @ value @ output) ** 2).sum(), ((y - best) ** 2).sum()
    assert value.shape == (12, 3) and output.shape == (3, 8)
    assert reached < 1.001 * least


def test_a_head_of_another_width_is_left_alone(world):
    objective, pack = world
    objective.head.config = SimpleNamespace(hidden_size=HIDDEN, target_hidden_size=HIDDEN + 1)
    before = {name: value.clone() for name, value in objective.head.state_dict().items()}
    start.fit_start(objective, lambda: [pack])
    assert all(torch.equal(value, before[name]) for name, value in objective.head.state_dict().items())


def test_packs_without_rows_are_passed_over(world):
    objective, pack = world
    empty = dataclasses.replace(pack, spans=[(8, 10)])  # one row, but none that a third step supervises
    before = {name: value.clone() for name, value in objective.head.state_dict().items()}
    start.fit_start(objective, lambda: [empty])
    assert all(torch.equal(value, before[name]) for name, value in objective.head.state_dict().items())
    start.fit_start(objective, lambda: [empty, pack])
    assert all(value.isfinite().all() for value in objective.head.state_dict().values())
    changed = "midlayer.self_attn.o_proj.weight"
    assert not torch.equal(objective.head.state_dict()[changed], before[changed])


def test_the_scale_of_planes_is_measured_on_few_positions_of_long_documents():
    lengths = [20_000, 3, *[700] * 100]
    store: Any = MemoryStore(documents_of([(length, ((0, 3),)) for length in lengths]), hidden=2)
    planes_TAP = start.sample_planes(store, range(len(lengths)))
    assert len(planes_TAP) <= start.SAMPLE * start.SAMPLE_POSITIONS
    assert torch.equal(planes_TAP[0], store.read(0).aux[0])
    assert len(store.reads) == start.SAMPLE + 1


@pytest.mark.parametrize("answer", [2, 60], ids=["no row at the last step of the fit", "many rows"])
def test_the_sample_of_the_fit_is_small_and_in_few_places_of_a_large_store(world, answer):
    config = world[0].head.config
    documents = documents_of([(100, ((40, 40 + answer),))] * 50_000)
    corpus = Corpus.of(documents, Costs.of(config, 1.0), 5)
    chosen = start.sample(config, corpus, range(len(documents)))
    assert len(set(chosen)) == len(chosen)
    assert sum(after != before + 1 for before, after in zip(chosen, chosen[1:], strict=False)) < start.STRETCHES
    wanted, margin = start.rows_wanted(config), 1 + start.STRETCHES
    if answer == 60:
        assert wanted <= 57 * len(chosen) <= wanted + 57 * margin
    else:
        assert len(chosen) <= start.TOKENS_PER_ROW * wanted / 100 + margin


def test_all_documents_of_a_small_store_are_in_the_sample_once(world):
    config = world[0].head.config
    documents = documents_of([(30, ((10, 20),))] * 5)
    assert start.sample(config, Corpus.of(documents, Costs.of(config, 1.0), 1), [0, 2, 3]) == [0, 2, 3]


def test_no_more_rows_of_a_long_pack_are_held_than_fit(world, monkeypatch):
    monkeypatch.setattr(start, "ROWS_AT_ONCE", 100)
    assert 50 < len(start.Rows.of(*world).planes_RW) <= 100


def test_a_channel_that_the_targets_norm_silences_is_passed_over(world):
    objective, pack = world
    with torch.no_grad():
        objective.head.norm.weight[3] = 0
    pack.final_FP[:, 3] = 0
    start.fit_start(objective, lambda: [pack])
    assert all(value.isfinite().all() for value in objective.head.state_dict().values())


def test_the_mlp_starts_nearly_silent_however_wide_it_is(world):
    objective, pack = world
    head = objective.head
    head.config = dataclasses.replace(head.config, intermediate_size=16_384)
    head.midlayer.mlp = MLP(head.config)
    target: Any = SimpleNamespace(
        hidden_size=HIDDEN, load_lm_head=lambda: head.lm_head.weight, load_final_norm=lambda: head.norm.weight
    )
    initialise(head, target, pack.aux_TAP)
    assert head.midlayer.mlp(rms_norm(torch.randn(500, HIDDEN), (HIDDEN,))).pow(2).mean().sqrt() < 0.3
