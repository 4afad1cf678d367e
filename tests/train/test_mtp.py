"""An MTP head in the trainer: the target's frozen output head, its own start, and all that EAGLE-3 heads have."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import conf
import featurize.__main__ as featurize_stage
from models.checkpoint import load_head
from models.config import DraftConfig, ExportConfig, TargetConfig
from models.errors import Refused
from models.export import export_head, find_checkpoint
from models.mtp import MtpConfig, MtpHead, initialise
from models.target import describe_target
from tests.models.mtp_targets import random_head
from tests.train.linear import LinearWorld
from tests.train.runs import final_head, finish, losses, overrides, place, start, train_here
from train import losses as loss_module
from train.config import ObjectiveConfig
from train.measure import Journal
from train.objective import Objective, judge
from train.optimizer import Optimizer
from train.packs import Pack, row_count
from train.plan import Costs
from train.start import Regression, Rows, add_projected, fit_start

HIDDEN, VOCABULARY = 12, 20
MTP = ["draft.algorithm=mtp", "draft.vocab_size=null"]


def config(**changes: Any) -> MtpConfig:
    block = {
        "hidden_size": HIDDEN,
        "intermediate_size": 22,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        "max_position_embeddings": 1024,
        "vocab_size": VOCABULARY,
    }
    return MtpConfig(family="mimo", native=False, block=block | changes)


def frozen(vocabulary: int = VOCABULARY, hidden: int = HIDDEN) -> Any:
    embedding, head = torch.randn(2, vocabulary, hidden, dtype=torch.float64)
    return SimpleNamespace(load_embedding=lambda: embedding, load_lm_head=lambda: head)


def a_pack(length: int = 14) -> Pack:
    final = torch.randn(length, HIDDEN, dtype=torch.float64)
    return Pack(
        tokens_T=torch.randint(0, VOCABULARY, (length,)),
        starts_T=torch.zeros(length, dtype=torch.int64),
        aux_TAP=final[:, None],
        final_FP=final,
        teacher_T=torch.arange(length),
        spans=[(3, length)],
        documents=[],
    )


@pytest.mark.parametrize("settings", [{}, {"loss": "lk_hybrid"}, {"step_weights": [0.51, 0.31, 0.18]}], ids=str)
def test_loss_and_gradients_are_those_of_full_logits_and_the_output_head_stays_as_it_is(settings, monkeypatch):
    monkeypatch.setitem(loss_module.SIZES, "cpu", loss_module.Sizes(5, 2, 10))
    torch.manual_seed(0)
    head = random_head(config()).double()
    objective = Objective(head, frozen(), ObjectiveConfig(**{"unroll_steps": 3} | settings), "fp32").double()
    pack = a_pack()
    counts = [float(row_count(pack.spans, k)) for k in range(3)]
    parameters = dict(objective.named_parameters())
    assert all(name.startswith("head.") and len(p) != VOCABULARY for name, p in parameters.items())
    before = objective.teacher_VP.clone()
    outcome = objective(pack, counts, 0)
    wanted = torch.zeros((), dtype=torch.float64)
    for k, step in enumerate(objective.unroll(pack, None)):
        log_q = (step.hidden_RH @ before.T).log_softmax(-1)
        log_p = (pack.final_FP[step.rows_R + 1 + k] @ before.T).log_softmax(-1)
        kl = (log_p.exp() * (log_p - log_q)).sum(-1)
        if settings.get("loss") == "lk_hybrid":
            alpha = torch.minimum(log_p, log_q).exp().sum(-1)
            share = (-3 * alpha.detach()).exp()
            kl = share * kl + (1 - share) * (1 - alpha)
        wanted = wanted + settings.get("step_weights", [1, 0.8, 0.64])[k] * kl.sum() / counts[k]
    torch.testing.assert_close(outcome.loss, wanted, rtol=1e-10, atol=1e-12)
    got = torch.autograd.grad(outcome.loss, list(parameters.values()))
    for name, a, b in zip(parameters, got, torch.autograd.grad(wanted, list(parameters.values())), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-10, msg=name)
    assert torch.equal(objective.teacher_VP, before) and not objective.draft_DH.requires_grad


def test_no_more_logits_are_held_than_a_chunk_has(monkeypatch):
    sizes = loss_module.Sizes(4, 2, 1000)
    monkeypatch.setitem(loss_module.SIZES, "cpu", sizes)
    made, empty = [], torch.empty

    def counted(*shape: Any, **options: Any) -> torch.Tensor:
        made.append(shape)
        return empty(*shape, **options)

    monkeypatch.setattr(torch, "empty", counted)
    torch.manual_seed(0)
    objective = Objective(random_head(config()).double(), frozen(), ObjectiveConfig(unroll_steps=3), "fp32").double()
    pack = a_pack(40)
    objective(pack, [1.0, 1.0, 1.0], 0).loss.backward()
    assert (4, VOCABULARY) in made and not [shape for shape in made if shape[-1] == VOCABULARY and shape[0] > 4]


def test_muon_has_the_matrices_and_adamw_the_rest():
    from train.config import OptimConfig

    head = random_head(config())
    (_, adamw), (_, muon) = Optimizer(head, OptimConfig(muon_lr=1e-3)).parts
    names = {parameter: name for name, parameter in head.named_parameters()}
    ours = {names[p] for group in muon.param_groups for p in group["params"]}
    assert "input_proj.weight" in ours and "layer.mlp.up_proj.weight" in ours
    rest = {names[p] for group in adamw.param_groups for p in group["params"]}
    assert all(names_.endswith(("norm.weight", "bias")) for names_ in rest) and ours | rest == set(names.values())


def test_costs_count_the_products_of_a_head():
    costs, head = Costs.of(config(), 1.0), MtpHead(config())
    layer = sum(p.numel() for name, p in head.named_parameters() if p.dim() == 2)
    assert costs.row == layer + HIDDEN * VOCABULARY
    assert costs.token == head.input_proj.weight.numel() + 2 * head.layer.self_attn.k_proj.weight.numel()


def test_a_linear_target_is_known_at_the_start():
    torch.manual_seed(0)
    known = LinearWorld(24, 60, 600)
    pack, target = known.pack, known.target
    head = MtpHead(config(hidden_size=24, vocab_size=60, num_attention_heads=4, num_key_value_heads=2))
    initialise(head, target, pack.aux_TAP)
    objective = Objective(head, target, ObjectiveConfig(unroll_steps=3), "fp32")
    before, _ = judge(objective, pack, objective.unroll(pack, None))
    fit_start(objective, lambda: [pack])
    after, _ = judge(objective, pack, objective.unroll(pack, None))
    assert after[:, 0].mean() > 0.8 and (after.nanmean(0) > before.nanmean(0) + 0.3).all()


@pytest.mark.parametrize("normed", [True, False])
def test_later_steps_of_the_start_are_fitted_on_what_the_projection_so_far_feeds_back(normed):
    torch.manual_seed(0)
    head = random_head(config()).double()
    head.family = dataclasses.replace(head.family, normed_feedback=normed)
    objective: Any = SimpleNamespace(head=head, settings=ObjectiveConfig(unroll_steps=3))
    feature, embedded, wanted, whole = (
        torch.randn(*shape, HIDDEN, dtype=torch.float64) for shape in ((7,), (3, 7), (3, 7), (2 * HIDDEN,))
    )
    found = Regression(2 * HIDDEN, HIDDEN, whole)
    add_projected(found, objective, Rows(feature, embedded, wanted), whole)

    def norm(x: torch.Tensor, by: torch.nn.Module) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * by.get_parameter("weight")

    gram, cross = torch.zeros_like(found.gram_WW), torch.zeros_like(found.cross_WH)
    for k in range(3):
        x = torch.cat((norm(feature, head.hidden_norm), embedded[k]), -1)
        gram, cross = gram + 0.8**k * x.T @ x, cross + 0.8**k * x.T @ wanted[k]
        feature = norm(x @ whole, head.final_norm) if normed else x @ whole
    torch.testing.assert_close(found.gram_WW, gram, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.cross_WH, cross, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def everywhere(tiny_target_dir, tiny_conversations, tmp_path_factory) -> tuple[Path, list[str]]:
    root = tmp_path_factory.mktemp("everywhere")
    arguments = [*overrides(tiny_target_dir, tiny_conversations, root), "featurize.final_everywhere=true"]
    featurize_stage.work(conf.load(arguments))
    return root / "run" / "features", arguments


@pytest.fixture(scope="module")
def trained(everywhere, tmp_path_factory) -> tuple[Path, list[str]]:
    arguments = [*place(everywhere, tmp_path_factory.mktemp("mtp")), *MTP]
    assert train_here(arguments) is True
    root = next(each for each in arguments if each.startswith("root="))
    return Path(root.removeprefix("root=")) / "run" / "train", arguments


def test_it_is_trained_and_its_checkpoint_says_what_it_is(trained):
    train, arguments = trained
    told, tensors = list(losses(train).values()), final_head(train)
    half = len(told) // 2  # an epoch
    assert sum(told[half:]) < sum(told[:half])
    assert not any("lm_head" in name or "embed_tokens" in name for name in tensors)
    manifest = json.loads((train / "manifest.json").read_text())
    checkpoint = train / manifest["checkpoints"]["last"]
    assert json.loads((checkpoint / "head.json").read_text())["algorithm"] == "mtp"
    head, made_for = load_head(checkpoint)
    target = describe_target(conf.load(arguments).target)
    assert isinstance(head, MtpHead) and made_for["weights_hash"] == target.weights_hash
    assert manifest["coverage"] == 1.0 and manifest["best_al"] >= 1
    assert train_here(arguments) is False


def test_b25_stopped_and_resumed_it_is_bitwise_the_same(trained, tmp_path):
    train, arguments = trained
    mine = [each if not each.startswith("root=") else f"root={tmp_path}" for each in arguments]
    shutil.copytree(train.parent, tmp_path / "run")
    (tmp_path / "run/train/manifest.json").unlink()
    shutil.rmtree(sorted((tmp_path / "run/train/checkpoints").glob("step-*"))[-1])
    assert train_here(mine) is True
    again = final_head(tmp_path / "run/train")
    assert all(torch.equal(value, again[name]) for name, value in final_head(train).items())


def test_b16_two_processes_train_it_as_one_does(everywhere, trained, tmp_path):
    launch = ["torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "train"]
    finish(start([*launch, *place(everywhere, tmp_path), *MTP]))
    one, two = losses(trained[0]), losses(tmp_path / "run" / "train")
    assert one.keys() == two.keys() and all(abs(one[step] / two[step] - 1) < 1e-4 for step in one)


def test_weights_of_its_steps_are_an_option_that_must_fit(everywhere, tmp_path):
    arguments = place(everywhere, tmp_path)
    with pytest.raises(Refused, match=r"objective\.step_weights=\[0\.5, 0\.3\] are not unroll_steps=3 numbers above 0"):
        train_here([*arguments, *MTP, "objective.step_weights=[0.5,0.3]"])
    train_here([*arguments, *MTP, "objective.step_weights=[0.51,0.31,0.18]", "trainer.epochs=1"])
    lines = [line for line in Journal.read(tmp_path / "run/train/metrics.jsonl") if "loss" in line]
    steps = lines[0]["loss_per_step"]
    assert lines[0]["loss"] == pytest.approx(sum(w * s for w, s in zip([0.51, 0.31, 0.18], steps, strict=True)))


def test_b37_the_targets_own_module_is_trained_on_from_its_files_and_put_back(everywhere, tiny_target_dir, tmp_path):
    target_dir = tmp_path / "target"
    shutil.copytree(tiny_target_dir, target_dir)
    target = describe_target(TargetConfig(path=str(target_dir), dtype="float32"))
    own = random_head(MtpConfig.for_target(target, DraftConfig(algorithm="mtp"))).stored()
    tensors = load_file(target_dir / "model.safetensors") | {name: tensor.clone() for name, tensor in own.items()}
    save_file(tensors, target_dir / "model.safetensors", {"format": "pt"})
    arguments = [each for each in everywhere[1] if not each.startswith(("root=", "target.path="))]
    arguments += [
        f"root={tmp_path}",
        f"target.path={target_dir}",
        "draft.algorithm=mtp_native",
        "draft.vocab_size=null",
    ]
    featurize_stage.work(conf.load(arguments))
    still = [*arguments, "optim.lr=1e-12", "optim.muon_lr=1e-12", "trainer.epochs=1"]
    assert train_here(still) is True
    train = tmp_path / "run" / "train"
    head, _ = load_head(find_checkpoint(train, "last"))
    assert isinstance(head, MtpHead) and head.config.native
    for name, tensor in head.stored().items():
        torch.testing.assert_close(tensor, own[name], rtol=0, atol=1e-6)
    shutil.rmtree(train)
    assert train_here([*arguments, "trainer.epochs=1"]) is True
    export_head(
        find_checkpoint(train, "last"),
        tmp_path / "export",
        describe_target(conf.load(arguments).target),
        ExportConfig(),
    )
    copied = describe_target(TargetConfig(path=str(tmp_path / "export"), dtype="float32"))
    changed = {name for name in copied.files if not torch.equal(copied.read(name), tensors[name])}
    assert copied.files.keys() == tensors.keys() and changed == own.keys()


def test_what_it_cannot_be_is_refused_by_name(everywhere, features, trained, tmp_path):
    with pytest.raises(Refused, match=r"extract again with featurize\.final_everywhere=true"):
        train_here([*place(features, tmp_path / "a"), *MTP])
    with pytest.raises(Refused, match=r"draft\.vocab_size=128: an MTP head has its target's vocabulary"):
        train_here([*place(everywhere, tmp_path / "b"), "draft.algorithm=mtp"])
    with pytest.raises(Refused, match=r"draft\.algorithm=medusa is not one of eagle3, mtp, mtp_native"):
        train_here([*place(everywhere, tmp_path / "c"), "draft.algorithm=medusa"])
    checkpoint = sorted((trained[0] / "checkpoints").glob("step-*"))[-1]
    with pytest.raises(Refused, match=r"another shape; give draft\.algorithm=mtp$"):
        train_here([*place(everywhere, tmp_path / "d"), f"trainer.init_from={checkpoint}"])
