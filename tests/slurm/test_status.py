"""slurm.status with stubs for Slurm's commands: how far every stage is, what failed and why."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import pytest

import slurm.status
import slurm.submit
from models.errors import Refused
from slurm import scheduler
from tests.slurm.conftest import STAGES, Slurm, finish

RUNNING_S = 3723
"""As the stub of squeue tells it: 1:02:03."""


def status(run: Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    capsys.readouterr()
    code = slurm.status.main([run.name, f"root={run.parent}", *words])
    return code, capsys.readouterr().out


def write(path: Path, text: str = "{}", *, age_s: float = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.utime(path, (time.time() - age_s,) * 2)


def begin_extraction(run: Path) -> None:
    """Ten shards, four of them there: one from before the present start."""
    documents = [["id", "route", 60]] * 19  # two fill a shard
    write(run / "features/tokenised.json", json.dumps({"documents": documents}))
    write(run / "features/inputs.json", json.dumps({"featurize.shard_tokens": 100}))
    for index in range(4):
        write(run / f"features/shards/{index:05d}.json", age_s=0 if index else RUNNING_S + 60)


def test_it_tells_what_is_done_of_all_for_how_long_and_how_long_the_rest_takes(
    stub: Slurm, overrides: list[str], run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.submit.main(overrides)
    begin_extraction(run)
    extract = [("101_[3-7]", "extract", "PENDING"), ("101_1", "extract", "RUNNING")]
    stub.queue(*extract, *((str(102 + i), stage, "PENDING") for i, stage in enumerate(STAGES[1:])), run=run)
    code, told = status(run, capsys)
    assert code == 0
    left = "2:04:06"  # six shards, when three took 1:02:03
    assert re.search(
        rf"^extract +5 PENDING \+ RUNNING +101 +1:02:03 .left {left}. +4 of 10 shards$", told, re.MULTILINE
    )
    assert re.search(r"^train +PENDING \(Dependency\) +102$", told, re.MULTILINE)
    assert told.endswith(f"\nchain: 0 of 4 stages finished; extract runs, about {left} left of it; 1:02:03 so far\n")


def test_of_training_it_tells_steps_of_all_and_the_pace_since_a_checkpoint_of_this_start(
    stub: Slurm, overrides: list[str], run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.submit.main(overrides)
    finish(run, overrides, "extract")
    stub.queue(
        *((str(102 + i), stage, "RUNNING" if i == 0 else "PENDING") for i, stage in enumerate(STAGES[1:])), run=run
    )
    lines = [{"step": 40, "of": 240, "loss": 1.0}, {"step": 60, "val_al": 1.5}, {"step": 100, "of": 240, "loss": 1.0}]
    write(run / "train/metrics.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    write(run / "train/checkpoints/step-20/state", age_s=0)
    os.utime(run / "train/checkpoints/step-20", (time.time() - RUNNING_S - 9,) * 2)
    said = r"^train +RUNNING +102 +1:02:03 \(left {}\) +100 of 240 steps, simulated AL 1.500 at step 60$"
    code, told = status(run, capsys)
    assert code == 0
    assert re.search(said.format("1:48:3[0-9]"), told, re.MULTILINE), told  # 140 steps, when 80 took 1:02:03
    write(run / "train/checkpoints/step-60/state")
    os.utime(run / "train/checkpoints/step-60", (time.time() - 400,) * 2)
    assert re.search(said.format("0:23:[23][0-9]"), status(run, capsys)[1], re.MULTILINE), (
        "140 steps, when 40 took 400 s"
    )


def test_it_is_there_for_programs_too(
    stub: Slurm, overrides: list[str], run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.submit.main(overrides)
    begin_extraction(run)
    stub.queue(("101", "extract", "RUNNING"), run=run)
    stub.say("sacct", "echo TIMEOUT")
    write(run / "slurm/train-102.log", "step 7 of 9\nslurmstepd: error: CANCELLED DUE TO TIME LIMIT\n")
    code, told = status(run, capsys, "--json")
    assert code == 1
    found = json.loads(told)
    assert (found["run"], [stage["stage"] for stage in found["stages"]]) == (str(run), STAGES)
    extract, train, *_ = found["stages"]
    assert (extract["state"], extract["elapsed_s"], extract["failed"]) == ("RUNNING", RUNNING_S, False)
    assert (extract["pace"]["done"], extract["pace"]["of"], round(extract["pace"]["left_s"])) == (4, 10, 2 * RUNNING_S)
    assert (train["state"], train["failed"], train["log"][-1]) == (
        "TIMEOUT",
        True,
        "slurmstepd: error: CANCELLED DUE TO TIME LIMIT",
    )


@pytest.mark.parametrize("state", ["FAILED", "TIMEOUT", "CANCELLED by 0", "NODE_FAIL", "OUT_OF_MEMORY"])
def test_what_failed_is_told_with_the_end_of_its_log_and_what_never_began_as_such(
    stub: Slurm, overrides: list[str], run: Path, capsys: pytest.CaptureFixture[str], state: str
) -> None:
    slurm.submit.main(overrides)
    write(run / "slurm/extract-1010.log", "of another job\n")
    write(run / "slurm/extract-101.log", "".join(f"line {index}\n" for index in range(30)), age_s=9)
    stub.say("sacct", f"echo {state}")
    code, told = status(run, capsys)
    assert code == 1
    word = state.split()[0]
    assert f"\nextract: job 101 {word}\n    {run}/slurm/extract-101.log\n    line 22\n" in told
    assert "line 29" in told
    assert f"\ntrain: job 102 {word}\n    it never began\n" in told
    assert f"chain: 0 of 4 stages finished; extract failed ({word}); train failed" in told


def test_what_is_finished_is_told_with_the_time_that_it_took(
    stub: Slurm, overrides: list[str], run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.submit.main(overrides)
    finish(run, overrides, *STAGES)
    write(run / "timings.json", '{"featurize": 61.2, "train": 3600}')
    code, told = status(run, capsys)
    assert code == 0
    assert re.search(r"^extract +finished +101 +0:01:01 +1 tokens, 0.00 GB$", told, re.MULTILINE)
    assert told.endswith("\nchain: 4 of 4 stages finished; 1:01:01 so far\n")


@pytest.mark.parametrize(("told", "meant"), [("0:07", 7), ("1:02:03", 3723), ("2-00:00:01", 172_801), ("INVALID", 0)])
def test_times_are_read_as_slurm_tells_them(told: str, meant: int) -> None:
    assert scheduler.seconds(told) == meant


def test_a_run_that_was_never_submitted_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="was not submitted"):
        slurm.status.main(["mine", f"root={tmp_path}"])


@pytest.mark.parametrize("words", [[], ["a", "b"], ["a", "--jason"], ["a", "job=3"]])
def test_a_mistake_on_the_command_line_is_refused(words: list[str]) -> None:
    with pytest.raises(Refused, match="usage: python -m slurm.status NAME"):
        slurm.status.main(words)
