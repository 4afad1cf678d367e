"""A run on a real Slurm: to its end, interrupted in every way, cancelled, and submitted again."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import slurm.status
import slurm.submit
from featurize.claims import Claims
from slurm import scheduler
from tests.integration.slurm.conftest import Cluster, until
from train.measure import Journal

pytestmark = pytest.mark.slurm

STAGES = ["generate", "extract", "train", "export", "measure", "evaluate"]
ALONE = [stage for stage in STAGES if stage not in ("generate", "measure")]
"""Of the runs that have their data, and measure no server."""
PARTS = ["stub-eagle3", "stub-ngram"]
STUB = Path(__file__).resolve().parents[2] / "serve_eval/stub.py"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def settings(tiny_target_dir: Path, tiny_conversations: Path, tiny_prompts: Path, root: Path) -> list[str]:
    """All that the runs here have in common, but for their names; training is two processes of one node."""
    return [
        f"root={root}",
        f"target.path={tiny_target_dir}",
        "target.dtype=float32",
        "data.validation_share=0.2",
        f"data.conversations=[{tiny_conversations}]",
        "draft.vocab_size=128",
        "objective.unroll_steps=3",
        "optim.warmup_steps=2",
        "trainer.epochs=8",
        "trainer.pack_tokens=64",
        "trainer.packs_per_step=2",
        "trainer.precision=fp32",
        "trainer.log_every=1",
        "trainer.checkpoint_every=5",
        "featurize.shard_tokens=100",
        "engine=none",
        f"eval.prompts=[{tiny_prompts}]",
        "eval.k=3",
        "eval.max_new_tokens=16",
        "cluster=cpu",
        "cluster.train.processes_per_node=2",
        "cluster.requeues=5",
    ]


@pytest.fixture(scope="module", autouse=True)
def environment(cluster: Cluster) -> Iterator[None]:
    """Submit to our Slurm, from this process, with one thread per process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        yield


def jobs(run: Path) -> dict[str, str]:
    return json.loads((run / "slurm/jobs.json").read_text())["jobs"]


def submitted(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """Submit; what was done about each stage."""
    capsys.readouterr()
    slurm.submit.main(arguments)
    lines = capsys.readouterr().out.split("\n\n")[0].splitlines()
    return {stage: done.strip() for stage, _, done in (line.partition(" ") for line in lines)}


def said(run: Path) -> str:
    return "\n".join(f"== {path.name}\n{path.read_text()[-3000:]}" for path in sorted(run.glob("slurm/*.log")))


def status(run: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    capsys.readouterr()
    code = slurm.status.main([run.name, f"root={run.parent}"])
    return code, capsys.readouterr().out


def losses(run: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in Journal.read(run / "train/metrics.jsonl") if "loss" in line}


def processes(module: str, name: str) -> list[int]:
    """The processes of a stage of a run, but for those that only start them."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if words[0].decode() == sys.executable and module.encode() in words and f"name={name}".encode() in words:
                found.append(int(entry.name))
    return found


def steps(run: Path) -> int:
    return max(losses(run), default=0)


@pytest.fixture(scope="module")
def straight(cluster: Cluster, settings: list[str], root: Path) -> Path:
    """The whole chain, uninterrupted: it makes its conversations, answers of the target to prompts, itself."""
    run = root / "chain"
    shutil.copy(settings[4].partition("[")[2].rstrip("]"), root / "prompts.jsonl")
    (root / "engine/bin").mkdir(parents=True)
    (root / "engine/bin/python").write_text(f'#!/bin/sh\nexec {sys.executable} {STUB} "$@"\n')
    (root / "engine/bin/python").chmod(0o755)
    slurm.submit.main(chain_arguments(settings, root))
    states = {stage: cluster.wait(job) for stage, job in jobs(run).items()}
    assert states == dict.fromkeys(STAGES, "COMPLETED"), said(run)
    return run


def chain_arguments(settings: list[str], root: Path) -> list[str]:
    generate = ["generate.urls=[]", f"generate.prompts=[{root}/prompts.jsonl]", "generate.max_answer_tokens=24"]
    data = f"data.conversations=[{root}/chain/conversations.jsonl.gz]"
    engine = ["+engine@engines.stub=vllm", f"engines.stub.python={root}/engine/bin/python", "eval.served_k=3"]
    served = ["eval.methods=[{method: eagle3}, {method: ngram}]", "eval.concurrencies=[1]", "eval.warmup_requests=0"]
    return ["name=chain", *settings, *generate, data, "cluster.extract.tasks=2", *engine, *served]


def test_the_chain_ends_in_a_report_and_is_not_submitted_twice(
    straight: Path, settings: list[str], root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = json.loads((straight / "eval/summary.json").read_text())
    assert summary["lossless"]["reference"]["identical"] == 6
    assert (straight / "eval/report.html").exists()
    assert [row["part"] for row in summary["parts"]] == PARTS, "each measured by a task of its own, and joined"
    assert len(list(straight.glob("slurm/measure-*_*.log"))) == 2
    before = jobs(straight)
    done = submitted(chain_arguments(settings, root), capsys)
    assert done == dict.fromkeys(STAGES, "finished")
    assert jobs(straight) == before
    code, told = status(straight, capsys)
    assert code == 0
    assert re.findall(r"^(\w+) +finished", told, re.MULTILINE) == STAGES
    assert "simulated AL" in told
    assert re.findall(r"^  (\S+) +finished +\d+ windows measured$", told, re.MULTILINE) == PARTS


def test_only_what_is_missing_is_submitted_and_a_cancelled_stage_stops_the_chain(
    cluster: Cluster, straight: Path, settings: list[str], root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(straight / "export")
    # With --hold, what comes after would be held, too, and Slurm looks after such jobs once a minute only.
    held = [*chain_arguments(settings, root), "cluster.options=['--begin=now+1hour']"]
    done = submitted(held, capsys)
    assert [stage for stage, told in done.items() if "submitted" in told] == ["export", "measure", "evaluate"]
    waiting = jobs(straight)
    done = submitted(held, capsys)
    assert not [stage for stage, told in done.items() if "submitted" in told], "they are in the queue already"
    assert jobs(straight) == waiting
    code, told = status(straight, capsys)
    assert code == 0
    assert re.search(r"^export +PENDING", told, re.MULTILINE)

    scheduler.cancel(waiting["export"])
    assert cluster.wait(waiting["export"]) == cluster.wait(waiting["evaluate"]) == "CANCELLED"
    code, told = status(straight, capsys)
    assert code == 1
    assert re.findall(r"^(\w+) +CANCELLED", told, re.MULTILINE) == ["export", "measure", "evaluate"]
    done = submitted(held, capsys)
    assert [stage for stage, told in done.items() if "submitted" in told] == ["export", "measure", "evaluate"]
    for job in (jobs(straight)[stage] for stage in ("evaluate", "measure", "export")):
        scheduler.cancel(job)
        cluster.wait(job)


def test_b42_training_preempted_twice_ends_with_the_losses_of_one_that_was_not(
    cluster: Cluster, straight: Path, settings: list[str], root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once by `scontrol requeue`, once by USR1 before its time limit, which is brought near while they are held.

    The first may end in SIGKILL before all is saved: srun kills its tasks when Slurm's SIGTERM reaches it, too.
    """
    run = root / "preempted"
    shutil.copytree(straight / "features", run / "features")
    limit = ["cluster.train.time='01:00:00'", "cluster.signal_s=180"]
    slurm.submit.main(["name=preempted", *settings, *limit, "trainer.checkpoint_every=1"])
    job = jobs(run)["train"]
    until(lambda: steps(run) >= 3, "three steps of training", cluster, 600)
    cluster.command("scontrol", "requeue", job)
    cluster.requeued(job, 1)
    told, asked = run / f"slurm/train-{job}.log", f"job {job}: asked to stop"
    until(lambda: "going on after step" in told.read_text(), "training goes on", cluster, 600)
    first = steps(run)
    until(lambda: steps(run) > first, "another step", cluster, 600)
    held = processes("train", "preempted")
    assert len(held) == 2
    for process in held:
        os.kill(process, signal.SIGSTOP)
    try:
        used = cluster.command("squeue", "--noheader", f"--jobs={job}", "--format=%M").strip()
        cluster.command("scontrol", "update", f"JobId={job}", f"TimeLimit={scheduler.seconds(used) // 60 + 3}")
        until(lambda: asked in told.read_text(), "USR1 comes", cluster, 300)
        cluster.command("scontrol", "update", f"JobId={job}", "TimeLimit=60")
    finally:
        for process in held:
            os.kill(process, signal.SIGCONT)
    cluster.requeued(job, 2)
    assert cluster.wait(job) == "COMPLETED", said(run)
    assert cluster.restarts(job) == 2
    log = told.read_text()
    after = log[log.index(asked) :]
    assert len(re.findall(r"asked to stop: step \d+ is saved", after)) == 1, "all saved and left together"
    assert f"job {job}: exit code 75, requeued to go on" in after
    mine, others = losses(run), losses(straight)
    assert mine.keys() == others.keys()
    assert all(math.isclose(mine[step], others[step], rel_tol=1e-4) for step in mine)
    scheduler.cancel(jobs(run)["export"])


def test_a_task_of_an_array_that_is_killed_or_preempted_is_requeued_alone_and_the_last_finishes_the_store(
    cluster: Cluster, settings: list[str], root: Path
) -> None:
    """All wait for a unit that this process claims, until one was killed and one requeued."""
    run = root / "array"
    with Claims(run / "features").unit(1, wait=False):
        slurm.submit.main(["name=array", *settings, "cluster.extract.tasks=3"])
        job = jobs(run)["extract"]
        until(lambda: len(processes("featurize", "array")) == 3, "three tasks", cluster, 600)
        until(lambda: len(list(run.glob("features/shards/*.json"))) > 1, "shards", cluster, 600)
        os.kill(processes("featurize", "array")[0], signal.SIGKILL)
        until(lambda: cluster.restarts(job) == 1, "the task that was killed is requeued", cluster, 300)
        running = cluster.command("squeue", "--noheader", f"--jobs={job}", "--states=RUNNING", "--array", "--format=%i")
        assert len(running.split()) == 2, "the others go on"
        cluster.command("scontrol", "requeue", running.split()[0])
        cluster.requeued(job, 2)
        assert not (run / "features/manifest.json").exists()
    assert cluster.wait(job) == "COMPLETED", said(run)
    assert cluster.restarts(job) == 2
    assert (run / "features/manifest.json").exists()
    scheduler.cancel(jobs(run)["train"])


def test_streaming_is_one_job_on_two_nodes_that_is_requeued_as_a_whole_when_extraction_or_its_node_dies(
    cluster: Cluster, settings: list[str], root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Training stands still where it wants a shard that this process claims, until each has happened."""
    run = root / "streamed"
    spool = run / "spool"
    streaming = [
        "spool.gigabytes=1e-3",
        "trainer.shuffle_shards=1",
        "trainer.epochs=3",
        "trainer.checkpoint_every=1000",
    ]
    apart = ["cluster.train.cpus_per_node=5", "cluster.extract.cpus_per_node=5"]  # of eight: not on one node together
    done = submitted(["name=streamed", *settings, *streaming, *apart], capsys)
    assert list(done) == ["train", "export", "evaluate"]
    job = jobs(run)["train"]
    log = run / f"slurm/train-{job}.log"
    claims = Claims(spool)
    later = contextlib.ExitStack()
    with claims.unit(8, wait=False):
        until(lambda: steps(run) >= 3, "three steps of training", cluster, 600)
        nodes = cluster.command("squeue", "--noheader", f"--jobs={job}", "--format=%N").split()
        assert len(set(nodes)) == 2
        (extraction,) = processes("featurize", "streamed")
        os.kill(extraction, signal.SIGKILL)
        later.enter_context(claims.unit(20, wait=False))
        cluster.requeued(job, 1)
    assert "extract ended with exit code" in log.read_text()
    assert re.search(r"asked to stop: step \d+ is saved", log.read_text()), "training left with what it had"
    with later:
        until(lambda: steps(run) >= 10, "ten steps of training", cluster, 600)
        down = ("State=DOWN", "Reason=test")  # until it answers again
        cluster.command("scontrol", "update", f"NodeName={nodes[1]}", *down)
        until(lambda: cluster.restarts(job) == 2, "both are requeued", cluster, 120)
        cluster.requeued(job, 2)
    assert cluster.wait(job) == "COMPLETED", said(run)
    assert sorted(losses(run)) == list(range(1, steps(run) + 1)), "no step is missing"
    assert not list(spool.glob("shards/*")), "all that was made is used and gone"
    scheduler.cancel(jobs(run)["export"])


def test_what_comes_after_a_refused_stage_is_cancelled_and_status_tells_why(
    cluster: Cluster, settings: list[str], root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "broken.jsonl").write_text("{\n")
    slurm.submit.main(["name=refused", *settings, f"data.conversations=[{root}/broken.jsonl]"])
    states = {stage: cluster.wait(job) for stage, job in jobs(root / "refused").items()}
    assert states == {"extract": "FAILED"} | dict.fromkeys(ALONE[1:], "CANCELLED")
    code, told = status(root / "refused", capsys)
    assert code == 1
    assert "broken.jsonl:1 is not JSON" in told
    assert "it never began" in told


def test_a_job_that_makes_no_progress_is_given_up(
    cluster: Cluster, settings: list[str], root: Path, tmp_path: Path
) -> None:
    (tmp_path / "python").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "python").chmod(0o755)
    slurm.submit.main(["name=stuck", *settings, f"cluster.python={tmp_path}/python", "cluster.requeues=1"])
    job = jobs(root / "stuck")["extract"]
    cluster.requeued(job, 1)
    assert cluster.wait(job) == "FAILED"
    assert cluster.restarts(job) == 1
    assert "given up after 1 requeues without progress" in said(root / "stuck")


def test_a_sweep_is_an_array_that_shares_the_features_and_ends_in_a_table(
    cluster: Cluster, straight: Path, settings: list[str], root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = root / "swept"
    shutil.copytree(straight / "features", run / "features")
    slurm.submit.main(["--multirun", "name=swept", *settings, "trainer.epochs=1", "optim.lr=1e-3,1e-4"])
    assert list(jobs(run)) == ["train", "table"]
    assert cluster.wait(jobs(run)["train"]) == "COMPLETED", said(run)
    assert cluster.wait(jobs(run)["table"]) == "COMPLETED", said(run)
    table = (run / f"slurm/table-{jobs(run)['table']}.log").read_text()
    for name in ("swept-lr-0.001", "swept-lr-0.0001"):
        best = json.loads((root / name / "train/manifest.json").read_text())["best_al"]
        assert re.search(rf"{re.escape(name)} .*{best:.3f}.*finished", table), table
        assert (root / name / "features").is_symlink()
    done = submitted(["--multirun", "name=swept", *settings, "trainer.epochs=1", "optim.lr=1e-3,1e-4"], capsys)
    assert not [stage for stage, told in done.items() if "submitted" in told]
