"""Teachers kept as their likeliest draft tokens: the losses they give, what is judged by them, and a run over them."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch

import conf
import featurize.__main__ as featurize_stage
from featurize.teacher import TopK
from models.errors import Refused
from tests.train.runs import finish, losses, overrides, place, start, train_here
from tests.train.test_objective import DOCUMENTS, DRAFT_IDS, make_objective, random_head, random_pack
from train import losses as losses_module
from train.losses import Teacher, divergence
from train.measure import Journal
from train.objective import Objective, judge
from train.packs import Pack, row_count

D = len(DRAFT_IDS)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Five positions a chunk, two rows a strip, ten a product: so that these small packs cross all borders."""
    monkeypatch.setitem(losses_module.SIZES, "cpu", losses_module.Sizes(5, 2, 10))


def kept(log_p_FV: torch.Tensor, ids_D: torch.Tensor, count: int) -> TopK:
    """The likeliest tokens as extraction keeps them, but unrounded."""
    log_p_FS, index_FS = log_p_FV[:, ids_D].sort(-1, descending=True)
    rest_F = log_p_FS[:, count:].exp().sum(-1)
    return TopK(index_FS[:, :count].to(torch.int16), log_p_FS[:, :count], rest_F, log_p_FV.argmax(-1).int())


def with_top(objective: Objective, pack: Pack, count: int) -> Pack:
    log_p_FV = (pack.final_FP @ objective.teacher_VP.T).log_softmax(-1)
    return dataclasses.replace(
        pack, final_FP=torch.empty(0, 12, dtype=torch.float64), top=kept(log_p_FV, objective.head.ids_D, count)
    )


def oracle(kind: str, p_D: torch.Tensor, count: int, logits_D: torch.Tensor) -> torch.Tensor:
    """The loss of one row over the partition {token, ..., token, all others}, left to autograd."""
    likeliest = p_D.argsort(descending=True)
    some, others = likeliest[:count], likeliest[count:]
    q_D = logits_D.softmax(-1)
    p_parts = torch.cat((p_D[some], p_D[others].sum()[None]))[: count + bool(len(others))]
    q_parts = torch.cat((q_D[some], q_D[others].sum()[None]))[: count + bool(len(others))]
    kl, alpha = (p_parts * (p_parts / q_parts).log()).sum(), torch.minimum(p_D[some], q_D[some]).sum()
    blend = (-3 * alpha.detach()).exp()
    return {
        "kl": kl,
        "ce": -q_D[p_D.argmax()].log(),
        "nla": -alpha.log(),
        "lk_hybrid": blend * kl + (1 - blend) * (1 - alpha),
    }[kind]


@pytest.mark.parametrize("count", [1, 4, D - 1, D])
@pytest.mark.parametrize("kind", ["kl", "ce", "nla", "lk_hybrid"])
def test_losses_and_gradients_are_those_of_the_known_partition(kind: str, count: int) -> None:
    torch.manual_seed(2)
    log_p_nV, logits_nD = torch.randn(40, 20).double().mul(2).log_softmax(-1), torch.randn(40, D).double() * 2
    teacher = Teacher.kept(kept(log_p_nV, DRAFT_IDS, count), kind, torch.float64)
    loss_n, gradient_nD = divergence(kind, teacher, logits_nD.clone())
    free_nD = logits_nD.clone().requires_grad_()
    p_nD = log_p_nV[:, DRAFT_IDS].softmax(-1)
    wanted_n = torch.stack([oracle(kind, p, count, logits) for p, logits in zip(p_nD, free_nD, strict=True)])
    torch.testing.assert_close(loss_n, wanted_n.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient_nD, torch.autograd.grad(wanted_n.sum(), free_nD)[0], rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("kind", ["kl", "lk_hybrid"])
def test_a_target_that_is_sure_of_a_token_outside_the_draft_vocabulary_teaches_all_the_same(kind: str) -> None:
    logits_nD = torch.randn(2, D)
    usual = TopK(torch.tensor([[2, 0]] * 2), torch.tensor([[-1.0, -3.0]] * 2), torch.zeros(2), torch.zeros(2).int())
    sure = dataclasses.replace(usual, log_p_FS=usual.log_p_FS - 200)  # e ** -200 is 0 in fp32
    found = [divergence(kind, Teacher.kept(top, kind, torch.float32), logits_nD.clone()) for top in (usual, sure)]
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("out_of_vocabulary", ["renormalise", "skip"])
@pytest.mark.parametrize("kind", ["kl", "ce", "nla", "lk_hybrid"])
def test_a_teacher_of_all_draft_tokens_is_the_whole_teacher(kind: str, out_of_vocabulary: str) -> None:
    torch.manual_seed(1)
    objective = make_objective(random_head(), loss=kind, out_of_vocabulary=out_of_vocabulary)
    pack = random_pack(DOCUMENTS)
    counts, parameters = [float(row_count(pack.spans, k)) for k in range(4)], list(objective.head.parameters())
    whole, top = (objective(each, counts, 0) for each in (pack, with_top(objective, pack, D)))
    torch.testing.assert_close(top.loss, whole.loss, rtol=1e-10, atol=0)
    torch.testing.assert_close(top.sums_K, whole.sums_K, rtol=1e-10, atol=0)
    pairs = zip(torch.autograd.grad(top.loss, parameters), torch.autograd.grad(whole.loss, parameters), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-13)


def test_over_a_pack_the_loss_is_the_oracles_row_for_row() -> None:
    torch.manual_seed(3)
    objective, pack = make_objective(random_head()), random_pack(DOCUMENTS)
    counts = [float(row_count(pack.spans, k)) for k in range(4)]
    got = objective(with_top(objective, pack, 3), counts, 0)
    wanted = torch.zeros((), dtype=torch.float64)
    for k, step in enumerate(got.steps):
        for row, hidden in zip(step.rows_R.tolist(), step.hidden_RH, strict=True):
            teacher_V = objective.teacher_VP @ pack.final_FP[pack.teacher_T[row + 1 + k]]
            p_D = teacher_V[objective.head.ids_D].softmax(-1)
            wanted = wanted + 0.8**k / counts[k] * oracle("kl", p_D, 3, objective.draft_DH @ hidden)
    torch.testing.assert_close(got.loss, wanted, rtol=1e-10, atol=0)
    parameters = list(objective.head.parameters())
    found = torch.autograd.grad(got.loss, parameters, retain_graph=True)
    for ours, theirs in zip(found, torch.autograd.grad(wanted, parameters), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-12)


def test_the_more_tokens_are_kept_the_nearer_the_losses_come_to_the_whole_from_their_sides() -> None:
    torch.manual_seed(4)
    log_p_nV, logits_nD = torch.randn(30, 20).double().mul(2).log_softmax(-1), torch.randn(30, D).double() * 2
    by_count = {
        kind: torch.stack(
            [
                divergence(kind, Teacher.kept(kept(log_p_nV, DRAFT_IDS, count), kind, torch.float64), logits_nD)[0]
                for count in range(1, D + 1)
            ]
        )
        for kind in ("kl", "nla", "ce")
    }
    assert (by_count["kl"].diff(dim=0) >= -1e-12).all() and (by_count["kl"] >= -1e-12).all()
    assert (by_count["nla"].diff(dim=0) <= 1e-12).all()
    assert (by_count["ce"] == by_count["ce"][0]).all()


@pytest.mark.parametrize("kind", ["kl", "lk_hybrid"])
def test_a_head_that_is_sure_of_one_token_has_a_finite_loss_and_gradient(kind: str) -> None:
    top = kept(torch.randn(2, 20).log_softmax(-1), DRAFT_IDS, 3)
    logits_nD = torch.zeros(2, D)
    logits_nD[range(2), top.index_FS[:, 0].long()] = 300.0  # all others are 0 in fp32
    loss_n, gradient_nD = divergence(kind, Teacher.kept(top, kind, torch.float32), logits_nD)
    assert loss_n.isfinite().all() and (loss_n > 1).all()
    torch.testing.assert_close(gradient_nD.sum(-1), torch.zeros(2), rtol=0, atol=1e-4)


def test_greedy_hits_are_exact_and_acceptances_are_bounded_from_below() -> None:
    torch.manual_seed(5)
    objective, pack = make_objective(random_head()), random_pack(DOCUMENTS)
    steps = objective.unroll(pack, None)
    hits_RK, accept_RK = judge(objective, pack, steps)
    assert 0 < hits_RK.nansum() < (~hits_RK.isnan()).sum()
    for count in (1, 4, D):
        top_pack = with_top(objective, pack, count)
        assert top_pack.top is not None
        moved = top_pack.to(torch.device("meta")).top
        assert moved is not None and all(tensor.device.type == "meta" for tensor in vars(moved).values())
        hits, accept = judge(objective, top_pack, steps)
        torch.testing.assert_close(hits, hits_RK, equal_nan=True, rtol=0, atol=0)
        for k, step in enumerate(steps):
            rest_R = top_pack.top.rest_F[pack.teacher_T[step.rows_R + 1 + k]]
            place_R = torch.searchsorted(steps[0].rows_R, step.rows_R)
            short_R = accept_RK[place_R, k] - accept[place_R, k]
            assert (short_R > -1e-6).all() and (short_R <= rest_R + 1e-6).all()
            assert count < D or short_R.abs().max() < 1e-6


def test_teachers_that_are_not_finite_are_no_acceptance_length() -> None:
    torch.manual_seed(5)
    objective, pack = make_objective(random_head()), random_pack(DOCUMENTS)
    top_pack = with_top(objective, pack, 3)
    assert top_pack.top is not None
    top_pack.top.log_p_FS[0] = torch.nan
    with pytest.raises(Refused, match="not finite"):
        judge(objective, top_pack, objective.unroll(pack, None))


def extracted(target: Path, conversations: Path, root: Path, *more: str) -> tuple[Path, list[str]]:
    arguments = [*overrides(target, conversations, root), *more]
    featurize_stage.work(conf.load(arguments))
    return root / "run" / "features", arguments


@pytest.fixture(scope="module")
def top_features(tiny_target_dir: Path, tiny_conversations: Path, tmp_path_factory) -> tuple[Path, list[str]]:
    root = tmp_path_factory.mktemp("top")
    more = ["featurize.teacher_k=16", "featurize.shard_tokens=400", "featurize.encoding=int8"]
    return extracted(tiny_target_dir, tiny_conversations, root, *more)


def verdicts(train: Path, key: str) -> list[float]:
    return [line[key] for line in Journal.read(train / "metrics.jsonl") if key in line]


def test_a_head_learns_from_such_a_store_and_a_run_over_it_is_resumed(
    top_features: tuple[Path, list[str]], tmp_path: Path, caplog
) -> None:
    caplog.set_level("INFO")
    more = ["trainer.epochs=12", "optim.lr=3e-3", "optim.muon_lr=3e-3", "objective.row_share=1"]
    arguments = [*place(top_features, tmp_path), *more]
    assert train_here(arguments) is True
    train = tmp_path / "run" / "train"
    told = losses(train)
    assert told[max(told)] < 0.6 * told[1]
    assert "start values are not fitted" in caplog.text
    greedy, sampled = verdicts(train, "val_al"), verdicts(train, "val_al_sampled")
    assert greedy[-1] > 1 and all(1 <= each < 4 for each in sampled)
    (train / "manifest.json").unlink()
    shutil.rmtree(sorted((train / "checkpoints").glob("step-*"))[-1])
    assert train_here(arguments) is True
    assert losses(train) == told


def test_another_draft_vocabulary_than_the_stores_is_refused_in_one_line_with_the_option(
    top_features: tuple[Path, list[str]], tmp_path: Path
) -> None:
    arguments = place(top_features, tmp_path)
    for change in ("draft.vocab_size=120", "data.validation_share=0.5", "draft.vocab_size=null"):
        with pytest.raises(
            Refused, match=r"another draft vocabulary, of 128 .* same draft\.vocab_size and data"
        ) as told:
            train_here([*arguments, change])
        assert "\n" not in str(told.value)
    with pytest.raises(Refused, match=r"keeps no final plane \(featurize\.teacher_k\); extract again"):
        train_here([*arguments, "draft.use_aux_hidden_state=false"])


def test_from_a_store_of_all_draft_tokens_training_is_as_from_the_final_planes(
    tiny_target_dir: Path, tiny_conversations: Path, tmp_path: Path, features, whole: Path, monkeypatch
) -> None:
    """But for the start values, which are not fitted: so both runs go on from the head of one that was."""
    manifest = whole / "checkpoints"
    init = [f"trainer.init_from={sorted(manifest.glob('step-*'))[-1]}", "trainer.epochs=1"]
    top = extracted(tiny_target_dir, tiny_conversations, tmp_path / "top", "featurize.teacher_k=128")
    assert train_here([*top[1], *init]) is True
    assert train_here([*place(features, tmp_path / "plain"), *init]) is True
    ours, theirs = (tmp_path / name / "run" / "train" for name in ("top", "plain"))
    assert losses(ours).keys() == losses(theirs).keys()
    for step, loss in losses(ours).items():
        assert loss == pytest.approx(losses(theirs)[step], rel=2e-3), "fp16 log-probabilities"
    assert verdicts(ours, "val_al") == pytest.approx(verdicts(theirs, "val_al"), abs=0.02)
    assert verdicts(ours, "val_al_sampled") == pytest.approx(verdicts(theirs, "val_al_sampled"), rel=2e-3)


def test_through_a_spool_it_trains_as_from_the_whole_store(
    top_features: tuple[Path, list[str]], tmp_path: Path
) -> None:
    common = ["trainer.shuffle_shards=1", "trainer.epochs=1", "trainer.packs_per_step=1"]
    assert train_here([*place(top_features, tmp_path / "whole"), *common]) is True
    streamed = [*top_features[1], f"root={tmp_path}", *common, "spool.gigabytes=0.0012"]
    extraction = start(["featurize", *streamed])
    assert train_here(streamed) is True
    finish(extraction)
    assert losses(tmp_path / "run" / "train") == losses(tmp_path / "whole" / "run" / "train")
