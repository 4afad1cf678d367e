"""What a real run trains on, pack by pack: stopped in the middle and resumed with more processes, it is the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import conf
import featurize.__main__ as featurize_stage
from train.signals import PREEMPTED

ROOT = Path(__file__).parents[2]
RECORDED = Path(__file__).with_name("recorded.py")
Log = list[tuple[int, list[int]]]


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
        "objective.unroll_steps=3",
        "objective.row_share=0.8",
        "trainer.epochs=3",
        "trainer.pack_tokens=128",
        "trainer.packs_per_step=2",
        "trainer.precision=fp32",
    ]
    featurize_stage.work(conf.load(arguments))
    return arguments


def train(arguments: list[str], record: Path, *, processes: int = 1, stop_after: int = -1) -> tuple[int, Log, str]:
    """Exit code, what was trained on in the order of the plan, and what was said."""
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
    lines = [line for rank in range(processes) for line in Path(f"{record}.{rank}").read_text().splitlines()]
    return done.returncode, sorted((seed, documents) for seed, documents in map(json.loads, lines)), done.stderr


def test_b23_three_epochs_stopped_in_the_second_and_resumed_see_each_document_as_an_uninterrupted_run(
    arguments, tmp_path
):
    root = Path(next(a for a in arguments if a.startswith("root=")).removeprefix("root="))
    code, whole, said = train(arguments, tmp_path / "whole")
    assert code == 0, said
    everyone = [document for _, documents in whole for document in documents]
    assert len(everyone) == 3 * 17
    epochs = [everyone[at : at + 17] for at in (0, 17, 34)]
    assert all(sorted(epoch) == list(range(17)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert len({seed for seed, _ in whole}) == len(whole)

    manifest = json.loads((root / "run/train/manifest.json").read_text())
    features = json.loads((root / "run/features/manifest.json").read_text())
    assert manifest["data"]["training"] == 17
    assert manifest["data"]["max_tokens"] == 60
    assert manifest["data"]["truncated"] == features["totals"]["truncated"]["documents"] > 0
    assert "data: 17 documents to train on (0 held out, 0 without a supervised row)" in said
    assert said.count("data.max_tokens=60 cut") == 1

    (root / "run/train").rename(tmp_path / "first")
    stop_after = next(at for at, (_, d) in enumerate(whole, 1) if sum(len(e) for _, e in whole[:at]) >= 17) + 4
    code, before, said = train(arguments, tmp_path / "before", stop_after=stop_after)
    assert code == PREEMPTED, said
    assert 17 < sum(len(documents) for _, documents in before) < 34
    code, after, said = train(arguments, tmp_path / "after", processes=2)
    assert code == 0, said
    assert before + after == whole
