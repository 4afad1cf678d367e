"""On a GPU (`make gpu-check`): attention, loss, gradients, training and memory, against the oracle on the CPU.

Tolerances are relative errors in norm. In fp32 the kernels round as fp32 does (TF32 is off). In bf16, which has
8 bits, inputs, softmax weights and outputs are rounded to 1 in 512 each, the same order for every gradient;
the loss adds four unroll steps of a residual stream that is rounded likewise.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import conf
import featurize.__main__ as featurize_stage
import train.__main__ as train_stage
from models.attention import attend, attend_oracle
from models.eagle3 import Eagle3Config, Eagle3Head
from models.flex import block_mask
from train import bench
from train.config import ObjectiveConfig, OptimConfig
from train.measure import Journal
from train.objective import Objective, judge
from train.optimizer import Optimizer
from train.packs import Pack, row_count, supervised_rows
from train.resume import checkpoints

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative error in norm."""
    return ((got.detach().cpu().double() - wanted.double()).norm() / wanted.double().norm()).item()


def starts_of(lengths: list[int]) -> torch.Tensor:
    """For each position of documents end to end, where its document begins."""
    return torch.cat([torch.full((n,), sum(lengths[:i])) for i, n in enumerate(lengths)])


@pytest.mark.parametrize("own", [0, 6])
@pytest.mark.parametrize(
    ("dtype", "heads", "groups", "size", "value", "allowed"),
    [
        (torch.float32, 4, 2, 64, 64, 1e-5),
        (torch.float32, 3, 1, 80, 80, 1e-5),
        (torch.bfloat16, 4, 2, 64, 64, 1e-2),
        (torch.bfloat16, 3, 1, 80, 80, 1e-2),
        (torch.bfloat16, 32, 8, 128, 128, 1e-2),
        (torch.bfloat16, 16, 16, 192, 128, 1e-2),  # latent attention
    ],
)
def test_attention_and_its_gradients_equal_the_oracle(own, dtype, heads, groups, size, value, allowed):
    torch.manual_seed(own)
    starts_T = starts_of([300, 77, 1, 129, 500])
    for share in (1.0, 0.4, 0.02):
        rows_R = torch.rand(len(starts_T)).lt(share).nonzero()[:, 0]
        rows, positions = len(rows_R), len(starts_T)
        shapes = (rows, heads, size), (positions, groups, size), (positions, groups, value)
        own_shapes = (rows, own, groups, size), (rows, own, groups, value)
        inputs = [torch.randn(*shape).to(dtype) for shape in (*shapes, *own_shapes)]
        exact = [each.double().requires_grad_() for each in inputs]
        ours = [each.to(DEVICE).requires_grad_() for each in inputs]
        got = attend(*(*ours, rows_R.to(DEVICE), starts_T[rows_R].to(DEVICE)))
        wanted = attend_oracle(*(*exact, rows_R, starts_T[rows_R]))
        assert got.dtype == dtype
        assert error(got, wanted) < allowed
        weight, used = torch.randn_like(wanted).to(dtype), 5 if own else 3
        for a, b in zip(
            torch.autograd.grad(got, ours[:used], weight.to(DEVICE)),
            torch.autograd.grad(wanted, exact[:used], weight.double()),
            strict=True,
        ):
            assert error(a, b) < 2 * allowed


def test_attention_waits_for_nothing():
    rows_R = torch.arange(100, 600, 2, device=DEVICE)
    starts_R = torch.zeros_like(rows_R)
    shapes = (250, 4, 64), (700, 2, 64), (700, 2, 64), (250, 2, 2, 64), (250, 2, 2, 64)
    inputs = [torch.randn(shape, device=DEVICE, requires_grad=True) for shape in shapes]
    attend(*(*inputs, rows_R, starts_R)).sum().backward()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        block_mask(rows_R, starts_R, 700)
        attend(*(*inputs, rows_R, starts_R)).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


CONFIG = Eagle3Config(
    hidden_size=128,
    target_hidden_size=128,
    vocab_size=300,
    draft_vocab_size=96,
    aux_layers=(2, 4, 5),
    intermediate_size=256,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    rms_norm_eps=1e-5,
    max_position_embeddings=1024,
    rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
)
SPANS = [(250, 380), (395, 401), (500, 690)]


def make_objective(precision: str) -> Objective:
    """A small random head, the same for every precision, on the CPU."""
    torch.manual_seed(0)
    head = Eagle3Head(CONFIG, torch.arange(0, 288, 3))
    embedding, teacher = torch.randn(300, 128), torch.randn(300, 128) * 0.2
    target: Any = SimpleNamespace(load_embedding=lambda: embedding, load_lm_head=lambda: teacher)
    return Objective(head, target, ObjectiveConfig(unroll_steps=4), precision)


def make_pack() -> Pack:
    """Two documents of which three spans are supervised; its planes are exact in bf16."""
    torch.manual_seed(1)
    teacher_T = torch.full((800,), -1)
    wanted = torch.cat([torch.arange(start, end - 1) for start, end in SPANS])
    teacher_T[wanted] = torch.arange(len(wanted))
    return Pack(
        tokens_T=torch.randint(0, 300, (800,)),
        starts_T=starts_of([390, 410]),
        aux_TAP=torch.randn(800, 3, 128).bfloat16().float(),
        final_FP=torch.randn(len(wanted), 128).bfloat16().float(),
        teacher_T=teacher_T,
        spans=SPANS,
        documents=[],
    )


COUNTS = [float(row_count(SPANS, k)) for k in range(4)]


@pytest.mark.parametrize(("precision", "allowed"), [("fp32", 1e-4), ("bf16", 5e-2)])
def test_loss_gradients_and_judgement_equal_those_in_fp64_on_the_cpu(precision, allowed):
    exact, pack = make_objective("fp32").double(), make_pack()
    in_fp64 = Pack(**vars(pack) | {"aux_TAP": pack.aux_TAP.double(), "final_FP": pack.final_FP.double()})
    wanted = exact(in_fp64, COUNTS, 0)
    ours = make_objective(precision).to(DEVICE)
    got = ours(pack.to(DEVICE), COUNTS, 0)
    assert error(got.loss, wanted.loss) < allowed / 10
    gradients = zip(
        torch.autograd.grad(got.loss, list(ours.head.parameters())),
        torch.autograd.grad(wanted.loss, list(exact.head.parameters())),
        strict=True,
    )
    assert max(error(a, b) for a, b in gradients) < allowed
    with torch.no_grad():
        (hits, accepted), (_, accepted_exact) = (
            judge(each, its, each.unroll(its, None)) for each, its in ((ours, pack.to(DEVICE)), (exact, in_fp64))
        )
    assert hits.nansum() > 0
    assert error(accepted.nan_to_num(), accepted_exact.nan_to_num()) < allowed


def train_steps(precision: str, steps: int, muon_lr: float | None = None) -> tuple[list[float], Objective, Optimizer]:
    objective, pack = make_objective(precision).to(DEVICE), make_pack().to(DEVICE)
    optimizer = Optimizer(objective.head, OptimConfig(lr=1e-3, muon_lr=muon_lr))
    return [advance(objective, optimizer, pack) for _ in range(steps)], objective, optimizer


def advance(objective: Objective, optimizer: Optimizer, pack: Pack) -> float:
    loss = objective(pack, COUNTS, 0).loss
    loss.backward()
    optimizer.step(1.0)
    return loss.item()


def test_bf16_training_follows_fp32_and_moves_norm_weights():
    exact, _, _ = train_steps("fp32", 30)
    rough, objective, _ = train_steps("bf16", 30)
    assert exact[-1] < 0.7 * exact[0]
    assert all(abs(a - b) < 0.03 * b for a, b in zip(rough, exact, strict=True))
    parameters = dict(objective.head.named_parameters())
    assert all(each.dtype == torch.float32 for each in parameters.values())
    assert all((each != 1).any() for name, each in parameters.items() if "norm" in name)


def test_optimizer_state_goes_through_the_cpu_and_back():
    _, objective, optimizer = train_steps("fp32", 5, muon_lr=1e-3)
    pack, other = make_pack().to(DEVICE), make_objective("fp32").to(DEVICE)
    other.head.load_state_dict({name: value.cpu() for name, value in objective.head.state_dict().items()})
    restored = Optimizer(other.head, OptimConfig(lr=1e-3, muon_lr=1e-3))
    saved = {f"{name}/{key}": value.to("cpu", copy=True) for name, key, value in optimizer.moments()}
    restored.load_moments(saved, 5)
    going_on = [advance(objective, optimizer, pack) for _ in range(3)]
    assert [advance(other, restored, pack) for _ in range(3)] == pytest.approx(going_on, rel=1e-5)


def test_the_train_stage_on_a_gpu_trains_resumes_and_validates_as_on_the_cpu(
    make_target: Callable[..., Path], tiny_conversations: Path, tmp_path: Path
):
    def overrides(root: str) -> list[str]:
        return [
            "name=run",
            f"root={tmp_path / root}",
            f"target.path={make_target_once}",
            "target.dtype=float32",
            f"data.conversations=[{tiny_conversations}]",
            "data.validation_share=0.15",
            "draft.vocab_size=128",
            "objective.unroll_steps=3",
            "optim.lr=1e-3",
            "optim.warmup_steps=2",
            "trainer.epochs=2",
            "trainer.pack_tokens=256",
            "trainer.precision=fp32",
            "trainer.validate_every=8",
            "trainer.checkpoint_every=4",
            "trainer.log_every=1",
        ]

    make_target_once = make_target(hidden_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
    featurize_stage.work(conf.load(overrides("cpu")))
    shutil.copytree(tmp_path / "cpu", tmp_path / "gpu")
    assert train_stage.main(conf.load([*overrides("cpu"), "trainer.device=cpu"]))
    assert train_stage.main(conf.load([*overrides("gpu"), f"trainer.device={DEVICE.type}"]))

    def figures(root: str, key: str) -> list[float]:
        lines = Journal.read(tmp_path / root / "run/train/metrics.jsonl")
        return [line[key] for line in lines if key in line]

    assert figures("gpu", "loss") == pytest.approx(figures("cpu", "loss"), rel=2e-3)
    assert figures("gpu", "val_al") == pytest.approx(figures("cpu", "val_al"), abs=0.05)

    straight, directory = figures("gpu", "loss"), tmp_path / "gpu/run/train"
    (directory / "manifest.json").unlink()
    shutil.rmtree(checkpoints(directory / "checkpoints")[-1])
    assert train_stage.main(conf.load([*overrides("gpu"), f"trainer.device={DEVICE.type}"]))
    assert figures("gpu", "loss") == pytest.approx(straight, rel=1e-4)
    assert json.loads((directory / "manifest.json").read_text())["steps"] == len(straight)


def test_131072_tokens_of_an_8b_target_train_in_one_pack():
    if torch.cuda.get_device_properties(DEVICE).total_memory < 75e9:
        pytest.skip("needs a GPU of 80 GB")
    tokens, answer = 131_072, 13_000
    config = bench.SHAPES["8b"].head()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    spans = [(tokens - answer, tokens)]
    with DEVICE:
        weights = torch.randn(128_256, 4096, dtype=torch.bfloat16) * 0.02
        head = Eagle3Head(config, torch.arange(32_000))
        teacher_T = torch.full((tokens,), -1)
        teacher_T[tokens - answer : tokens - 1] = torch.arange(answer - 1)
        pack = Pack(
            tokens_T=torch.randint(0, 128_256, (tokens,)),
            starts_T=torch.zeros(tokens, dtype=torch.int64),
            aux_TAP=torch.randn(tokens, 3, 4096, dtype=torch.bfloat16),
            final_FP=torch.randn(answer - 1, 4096, dtype=torch.bfloat16),
            teacher_T=teacher_T,
            spans=spans,
            documents=[],
        )
    target: Any = SimpleNamespace(load_embedding=lambda: weights, load_lm_head=lambda: weights)
    objective = Objective(head, target, ObjectiveConfig(), "bf16").to(DEVICE)
    assert len(supervised_rows(spans, 0)) == answer - 1
    loss = objective(pack, [float(row_count(spans, k)) for k in range(7)], 0).loss
    loss.backward()
    assert loss.isfinite()
    peak = torch.cuda.max_memory_allocated()
    print(
        f"\n131,072 tokens, {answer / tokens:.0%} supervised, 8B shapes: peak {peak / 1e9:.1f} GB without an optimizer"
    )
    assert peak < 60e9
