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
from tests.slurm.conftest import APART, PARTS, STAGES, Slurm, finish, measure

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
    extract = [(f"101_{index}", "extract", "RUNNING" if index == 1 else "PENDING") for index in (3, 4, 5, 6, 7, 1)]
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
    now = (run / "train/metrics.jsonl").stat().st_mtime
    write(run / "train/checkpoints/step-20/state", age_s=0)
    os.utime(run / "train/checkpoints/step-20", (now - RUNNING_S - 9,) * 2)
    said = r"^train +RUNNING +102 +1:02:03 \(left {}\) +100 of 240 steps, simulated AL 1.500 at step 60$"
    code, told = status(run, capsys)
    assert code == 0
    assert re.search(said.format("1:48:3[0-9]"), told, re.MULTILINE), told  # 140 steps, when 80 took 1:02:03
    write(run / "train/checkpoints/step-60/state")
    os.utime(run / "train/checkpoints/step-60", (now - 400,) * 2)
    assert re.search(said.format("0:23:20"), status(run, capsys)[1], re.MULTILINE), "140 steps, when 40 took 400 s"


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


def test_of_an_evaluation_in_parts_it_tells_each_task(
    stub: Slurm, overrides: list[str], run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*overrides, *APART]
    finish(run, overrides, *STAGES[:3])
    slurm.submit.main(words)
    measure(words, run, PARTS[0])
    write(run / "eval/parts" / PARTS[1] / "cells.jsonl", "{}\n{}\n")
    stub.queue(
        ("101_1", "measure", "RUNNING"), ("101_3", "measure", "PENDING"), ("102", "evaluate", "PENDING"), run=run
    )
    stub.say("sacct", """[[ $* == *--jobs=101_2* ]] && echo TIMEOUT""")
    code, told = status(run, capsys)
    assert re.search(r"^measure +RUNNING . PENDING +101 +1:02:03 +1 of 4 parts$", told, re.MULTILINE), told
    lines = [line.split() for line in told.splitlines() if line.startswith("  ")]
    assert lines == [
        [PARTS[0], "finished"],
        [PARTS[1], "RUNNING", "2", "windows", "measured"],
        [PARTS[2], "TIMEOUT"],
        [PARTS[3], "PENDING"],
    ]
    assert code == 0
    found = json.loads(status(run, capsys, "--json")[1])["stages"]
    assert [task["state"] for task in found[3]["tasks"]] == ["finished", "RUNNING", "TIMEOUT", "PENDING"]
    stub.queue(run=run)
    stub.say("sacct", "echo FAILED")
    write(run / "slurm/measure-101_1.log", "no such model\n", age_s=9)
    write(run / "slurm/measure-101_0.log", "done\n")
    code, told = status(run, capsys)
    assert code == 1
    assert f"\nmeasure: job 101 FAILED\n    {run}/slurm/measure-101_1.log\n    no such model\n" in told
    measure(words, run, *PARTS[1:])
    assert re.search(r"^measure +finished +101 +4 of 4 parts$", status(run, capsys)[1], re.MULTILINE)


@pytest.mark.parametrize(("told", "meant"), [("0:07", 7), ("1:02:03", 3723), ("2-00:00:01", 172_801), ("INVALID", 0)])
def test_times_are_read_as_slurm_tells_them(told: str, meant: int) -> None:
    assert scheduler.seconds(told) == meant


def test_how_a_job_ended_is_asked_of_accounting_then_of_the_controller(stub: Slurm) -> None:
    """Of an array, the end that is not well counts."""
    stub.say("sacct", "printf 'COMPLETED\\nCANCELLED by 0\\nCOMPLETED\\n'")
    assert scheduler.how_it_ended("7") == "CANCELLED"
    stub.say("sacct", "echo 'Slurm accounting storage is disabled' >&2; exit 1")
    stub.say("scontrol", """printf 'JobId=7 JobState=COMPLETED\\n\\nJobId=8 JobState=TIMEOUT Reason=None\\n'""")
    assert scheduler.how_it_ended("7") == "TIMEOUT"
    stub.say("scontrol", "echo 'Invalid job id specified' >&2; exit 1")
    assert scheduler.how_it_ended("7") == "ENDED"
    stub.say("sacct", "exit 0")
    assert scheduler.how_it_ended("7") == "ENDED", "it has not been told yet"


def test_a_job_that_is_just_ending_is_waited_for(
    stub: Slurm, overrides: list[str], run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub.queue(("7", "extract", "COMPLETING"), run=run)
    monkeypatch.setattr(scheduler.time, "sleep", lambda _: (stub.folder / "queue").unlink())
    assert scheduler.queued(run, STAGES) == {}
    stub.queue(("7", "extract", "COMPLETING"), run=run)
    monkeypatch.setattr(scheduler, "SETTLING_S", -1)
    assert scheduler.queued(run, STAGES)["extract"].states == {"COMPLETING": 1}


def test_a_stage_that_is_in_the_queue_twice_is_for_a_person_to_mend(
    stub: Slurm, overrides: list[str], run: Path
) -> None:
    stub.queue(("7", "extract", "RUNNING"), ("9", "extract", "PENDING"), run=run)
    with pytest.raises(Refused, match="extract is in the queue twice, as jobs 7 and 9; scancel one of them"):
        slurm.submit.main(overrides)
    assert stub.submitted() == {}


def test_a_run_that_was_never_submitted_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="was not submitted"):
        slurm.status.main(["mine", f"root={tmp_path}"])


@pytest.mark.parametrize("words", [[], ["a", "b"], ["a", "--jason"], ["a", "job=3"]])
def test_a_mistake_on_the_command_line_is_refused(words: list[str]) -> None:
    with pytest.raises(Refused, match="usage: python -m slurm.status NAME"):
        slurm.status.main(words)
