"""Training from a spool, real processes on both sides: killed and restarted, it is as from the whole store."""

from __future__ import annotations

import json
import math
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import conf
import featurize.__main__ as featurize_stage
from featurize.store import FeatureStore
from models.errors import Refused
from tests.conftest import sentence, write_lines
from tests.train.runs import final_head, losses, overrides, start, train_here
from train.measure import Journal
from train.resume import checkpoints, step_of

BOUND = 250_000
"""Bytes; a tenth of what is trained on."""
PATIENCE_S = 300
SHARD_TOKENS = 60

Processes = list[subprocess.Popen[str]]


@pytest.fixture(scope="module")
def arguments(tiny_target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    rng = random.Random(5)
    rows = []
    for index in range(128):
        user, answer = sentence(rng, rng.randint(3, 12)), sentence(rng, rng.randint(10, 30))
        messages = [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]
        rows.append({"id": f"c{index:03d}", "messages": messages})
    conversations = write_lines(tmp_path_factory.mktemp("data") / "conversations.jsonl", rows)
    return [
        *overrides(tiny_target_dir, conversations, tmp_path_factory.mktemp("unused")),
        f"featurize.shard_tokens={SHARD_TOKENS}",
        "featurize.batch_tokens=300",
        "featurize.device=cpu",
        "trainer.shuffle_shards=1",
        "trainer.packs_per_step=1",
        "trainer.checkpoint_every=10",
        "trainer.validate_every=40",
    ]


@pytest.fixture(scope="module")
def whole(arguments: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Features in a whole store, and a run over them."""
    here = [*arguments, f"root={tmp_path_factory.mktemp('whole')}"]
    directory = conf.load(here).directory
    featurize_stage.work(conf.load(here))
    assert train_here(here) is True
    return directory


@pytest.fixture
def streamed(arguments: list[str], tmp_path: Path) -> list[str]:
    return [
        *arguments,
        f"root={tmp_path}",
        f"spool.gigabytes={BOUND / 1e9}",
        f"spool.patience_s={PATIENCE_S}",
    ]


@pytest.fixture
def running() -> Iterator[Processes]:
    """Processes that are over when the test is."""
    processes: Processes = []
    yield processes
    for process in processes:
        if process.poll() is None:
            kill(process)


def extract(streamed: list[str], running: Processes) -> subprocess.Popen[str]:
    running += start(["featurize", *streamed])
    return running[-1]


def look(spool: Path) -> dict[str, int]:
    """Files of the shards, half written ones too, with their sizes."""
    found = {}
    for path in [*spool.glob("shards/*"), *spool.glob("shards/.*")]:
        try:
            found[path.name] = path.stat().st_size
        except FileNotFoundError:
            continue
    return found


def taken(spool: Path) -> int:
    """What the shards take up: of two looks that agree, since one that takes its time sees what never was together."""
    first, second = look(spool), look(spool)
    while first != second:
        first, second = second, look(spool)
    return sum(first.values())


def watch(spool: Path, condition, *processes: subprocess.Popen[str]) -> int:
    """Wait for something, while none of these processes ends; returns the most that the shards took up."""
    deadline, most = time.monotonic() + 900, 0
    while not condition():
        most = max(most, taken(spool))
        for process in processes:
            assert process.poll() is None, process.stderr and process.stderr.read()[-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.002)
    return most


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


def test_both_sides_killed_and_restarted_it_trains_as_from_the_whole_store_within_the_bound(
    streamed: list[str], whole: Path, tmp_path: Path, running: Processes
) -> None:
    spool, train = tmp_path / "run/spool", tmp_path / "run/train"
    shards = json.loads((whole / "features/manifest.json").read_text())["files"]
    assert sum(entry["size"] for entry in shards) > 10 * BOUND

    one, other = extract(streamed, running), extract(streamed, running)
    running += start(["train", *streamed])
    trainer = running[-1]
    most = watch(spool, lambda: max(losses(train), default=0) >= 3, one, other, trainer)
    kill(one)
    one = extract(streamed, running)
    most = max(most, watch(spool, lambda: max(losses(train)) >= 15, other, trainer))
    kill(trainer)
    assert not (train / "manifest.json").exists()
    running += start(["train", *streamed])
    trainer = running[-1]
    most = max(most, watch(spool, lambda: trainer.poll() is not None))
    assert trainer.returncode == 0, trainer.communicate()[1]
    for process in (one, other):
        said = process.communicate(timeout=120)[1]
        assert process.returncode == 0, said

    assert losses(train) == losses(whole / "train")
    for name, value in final_head(whole / "train").items():
        assert torch.equal(final_head(train)[name], value), name
    judged = [
        [line["val_al"] for line in Journal.read(t / "metrics.jsonl") if "val_al" in line]
        for t in (train, whole / "train")
    ]
    assert judged[0] == pytest.approx(judged[1], rel=0.02)
    assert 0 < most <= BOUND
    assert taken(spool) == 0


def test_extraction_that_is_gone_stops_all_ranks_with_what_they_have_and_a_restart_goes_on(
    streamed: list[str], whole: Path, tmp_path: Path, running: Processes
) -> None:
    streamed = [*streamed, "trainer.packs_per_step=2", f"spool.gigabytes={2 * BOUND / 1e9}"]
    streamed += ["trainer.checkpoint_every=1000", "trainer.validate_every=1000"]
    spool, train = tmp_path / "run/spool", tmp_path / "run/train"
    extraction = extract(streamed, running)
    watch(spool, (spool / "manifest.json").is_file, extraction)
    command = ["train", *streamed, "spool.patience_s=2"]
    both = start(command, command)
    running += both
    watch(spool, lambda: len(losses(train)) > 2, extraction, *both)
    kill(extraction)
    said = [process.communicate(timeout=120)[1] for process in both]
    assert [process.returncode for process in both] == [2, 2], said
    told = [line for text in said for line in text.splitlines() if "nobody has been extracting into" in line]
    assert len(told) == 1 and told[0].startswith("train: ") and "start `python -m featurize`" in told[0]
    saved = checkpoints(train / "checkpoints")[-1]
    assert step_of(saved) == max(losses(train)) > 2, "what was trained is saved"

    extraction = extract(streamed, running)
    assert train_here(streamed) is True
    assert extraction.wait(timeout=60) == 0
    reference = [*streamed, f"root={tmp_path / 'whole'}", "spool.gigabytes=null"]
    (tmp_path / "whole/run").mkdir(parents=True)
    (tmp_path / "whole/run/features").symlink_to(whole / "features")
    assert train_here(reference) is True
    one, two = losses(tmp_path / "whole/run/train"), losses(train)
    assert one.keys() == two.keys()
    assert all(math.isclose(one[step], two[step], rel_tol=1e-4) for step in one)


def test_training_that_is_gone_stops_extraction_with_one_line(
    streamed: list[str], tmp_path: Path, running: Processes
) -> None:
    spool = tmp_path / "run/spool"
    extraction = extract([*streamed, "spool.patience_s=3"], running)
    running += start(["train", *streamed])
    trainer = running[-1]
    watch(spool, lambda: losses(tmp_path / "run/train"), extraction, trainer)
    kill(trainer)
    said = extraction.communicate(timeout=120)[1]
    assert extraction.returncode == 2, said
    (line,) = [line for line in said.splitlines() if line.startswith("featurize: ")]
    assert "nobody has been training from" in line and "start `python -m train`" in line
    assert taken(spool) <= BOUND


def test_training_that_finds_nobody_says_what_to_start(streamed: list[str], tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"nobody has been extracting into .* for 0.5 s and nothing is there yet; start"):
        train_here([*streamed, "spool.patience_s=0.5"])


def test_a_store_that_only_passes_through_is_none_to_open_as_a_whole(streamed: list[str]) -> None:
    with pytest.raises(Refused, match="no features in"):
        FeatureStore.open(conf.load(streamed).directory / "features")
