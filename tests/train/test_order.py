"""What a real run trains on, pack by pack, and how fast it learns from it: stopped in the middle and resumed with more
processes, it is the same."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import conf
import featurize.__main__ as featurize_stage
from train.signals import PREEMPTED

ROOT = Path(__file__).parents[2]
RECORDED = Path(__file__).with_name("recorded.py")
PEAK, WARMUP = 1e-3, 3


@pytest.fixture(scope="module")
def arguments(tiny_target_dir, tiny_conversations, tmp_path_factory) -> list[str]:
    """A run of 17 documents, none held out, with its features."""
    arguments = [
        "name=run",
        f"root={tmp_path_factory.mktemp('runs')}",
        f"target.path={tiny_target_dir}",
        "target.dtype=float32",
        "target.aux_layers=[2,4,5]",
        f"data.conversations=[{tiny_conversations}]",
        "data.limit=17",
        "data.max_tokens=60",
        "data.validation_share=0",
        "featurize.shard_tokens=300",
        "draft.vocab_size=128",
        f"optim.lr={PEAK}",
        f"optim.warmup_steps={WARMUP}",
        "objective.unroll_steps=3",
        "objective.row_share=0.8",
        "trainer.epochs=3",
        "trainer.pack_tokens=128",
        "trainer.packs_per_step=2",
        "trainer.precision=fp32",
    ]
    featurize_stage.work(conf.load(arguments))
    return arguments


@dataclass
class Told:
    """Of a run: exit code and words, what it trained on in the order of the plan, and the rates of each process."""

    code: int
    said: str
    packs: list[tuple[int, list[int]]]
    rates: list[list[float]]

    @property
    def documents(self) -> list[int]:
        return [document for _, documents in self.packs for document in documents]


def train(arguments: list[str], record: Path, *, processes: int = 1, stop_after: int = -1) -> Told:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"] if processes > 1 else []
    done = subprocess.run(
        [sys.executable, *launcher, str(RECORDED), *arguments],
        cwd=ROOT,
        env=os.environ
        | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "RECORD": str(record), "STOP_AFTER": str(stop_after)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    packs, rates = (
        [Path(f"{record}.{rank}{end}").read_text().splitlines() for rank in range(processes)] for end in ("", ".rates")
    )
    return Told(
        done.returncode,
        done.stderr,
        sorted((seed, documents) for seed, documents in map(json.loads, sum(packs, []))),
        [[float(rate) for rate in each] for each in rates],
    )


@pytest.fixture(scope="module")
def told(arguments, tmp_path_factory) -> tuple[Told, Told, Told]:
    """One process uninterrupted; one that is stopped in the second epoch; two that go on from there."""
    root, record = folder(arguments), tmp_path_factory.mktemp("records")
    whole = train(arguments, record / "whole")
    (root / "run/train").rename(record / "first")
    until = next(at for at in range(len(whole.packs)) if sum(len(d) for _, d in whole.packs[:at]) >= 17) + 4
    before = train(arguments, record / "before", stop_after=until)
    return whole, before, train(arguments, record / "after", processes=2)


def folder(arguments: list[str]) -> Path:
    return Path(next(a for a in arguments if a.startswith("root=")).removeprefix("root="))


def test_b23_three_epochs_stopped_in_the_second_and_resumed_see_each_document_as_an_uninterrupted_run(arguments, told):
    whole, before, after = told
    assert (whole.code, before.code, after.code) == (0, PREEMPTED, 0), whole.said + before.said + after.said
    everyone = whole.documents
    assert len(everyone) == 3 * 17
    epochs = [everyone[at : at + 17] for at in (0, 17, 34)]
    assert all(sorted(epoch) == list(range(17)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert len({seed for seed, _ in whole.packs}) == len(whole.packs)
    assert 17 < len(before.documents) < 34
    assert before.packs + after.packs == whole.packs

    root = folder(arguments)
    manifest = json.loads((root / "run/train/manifest.json").read_text())
    features = json.loads((root / "run/features/manifest.json").read_text())
    assert manifest["data"]["training"] == 17
    assert manifest["data"]["max_tokens"] == 60
    assert manifest["data"]["truncated"] == features["totals"]["truncated"]["documents"] > 0
    assert "data: 17 documents to train on (0 held out, 0 without a supervised row)" in whole.said
    assert whole.said.count("data.max_tokens=60 cut") == 1


def test_b22_the_learning_rate_is_a_function_of_the_update_whoever_makes_it_and_after_a_resume(told):
    whole, before, after = told
    (alone,), (stopped,), (first, second) = whole.rates, before.rates, after.rates
    steps = len(alone)
    assert steps < len(whole.packs), "a process alone accumulates the packs that two share"
    assert WARMUP < len(stopped) < steps

    def rate(step: int) -> float:
        """Linear warm-up, then half a cosine."""
        if step < WARMUP:
            return PEAK * (step + 1) / WARMUP
        return PEAK * (1 + math.cos(math.pi * (step - WARMUP) / (steps - WARMUP))) / 2

    assert alone == pytest.approx([rate(step) for step in range(steps)], rel=1e-12)
    assert stopped + first == stopped + second == alone
