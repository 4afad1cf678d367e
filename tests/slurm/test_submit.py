"""slurm.submit with stubs for Slurm's commands: what is submitted, after what, with which options."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import conf
import slurm.status
import slurm.submit
from models.errors import Refused
from tests.slurm.conftest import ROOT, SBATCH, STAGES, Slurm, finish, option, stages_of


def test_every_stage_waits_for_the_one_before_it(stub: Slurm, overrides: list[str], run: Path) -> None:
    slurm.submit.main(overrides)
    assert stages_of(stub) == STAGES
    jobs = stub.submitted()
    assert [option(words, "dependency") for words in jobs.values()] == [
        None,
        "afterok:101",
        "afterok:102",
        "afterok:103",
    ]
    assert all("--kill-on-invalid-dep=yes" in words for words in list(jobs.values())[1:])
    assert jobs[101][-6:] == ["featurize", *overrides]
    assert jobs[102][-5:] == overrides
    assert Path(jobs[102][-6]).name == "train.sbatch"
    assert all((option(words, "comment") or "").split(" ")[0] == str(run) for words in jobs.values())
    assert json.loads((run / "slurm/jobs.json").read_text())["jobs"] == dict(zip(STAGES, map(str, jobs), strict=True))


def test_a_packaged_target_is_prepared_and_data_of_its_own_is_generated_first(
    stub: Slurm, overrides: list[str], tmp_path: Path
) -> None:
    own = f"data.conversations=[{tmp_path}/runs/mine/conversations.jsonl.gz]"
    slurm.submit.main([*overrides, "target=smollm2-135m", "generate=demo", own])
    assert stages_of(stub) == ["prepare", "generate", *STAGES]


def test_the_cluster_says_what_each_job_asks_for(stub: Slurm, overrides: list[str], monkeypatch) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "7")
    monkeypatch.setenv("RANK", "3")
    slurm.submit.main(
        [*overrides, "cluster=gpu", "cluster.train.nodes=16", "cluster.partition=fast", "cluster.export.partition=slow"]
        + ["cluster.account=us", "cluster.qos=high", "cluster.constraint=h200", "cluster.options=['--exclude=n1']"]
        + ["cluster.modules=[cuda/13, gcc]", "+cluster.environment.NCCL_SOCKET_IFNAME=ib0", "cluster.requeues=9"]
    )
    extract, train, export, evaluate = stub.submitted().values()
    wanted = {"nodes": "16", "gpus-per-node": "8", "partition": "fast", "account": "us", "qos": "high"}
    wanted |= {"constraint": "h200", "exclude": "n1", "time": "24:00:00", "mem": "768G", "cpus-per-task": "96"}
    assert {name: option(train, name) for name in wanted} == wanted
    assert {option(words, "signal") for words in (train, extract, evaluate)} == {"B:USR1@120"}
    assert option(export, "signal") is None
    assert (option(extract, "array"), option(train, "array")) == ("0-7", None)
    assert (option(export, "partition"), option(export, "gpus-per-node")) == ("slow", None)
    told = stub.environment(102)
    assert told["NCCL_SOCKET_IFNAME"] == "ib0"
    assert told["DRAFTSMITH_MODULES"] == "cuda/13 gcc"
    assert told["DRAFTSMITH_REQUEUES"] == "9"
    assert not {"SLURM_NTASKS", "RANK"} & told.keys(), "the job that we are in ourselves is none of its business"


def test_a_second_submission_submits_what_is_missing(stub: Slurm, overrides: list[str], run: Path, capsys) -> None:
    finish(run, overrides, "extract")
    stub.queue(("7", "train", "RUNNING"), ("8", "export", "PENDING"), run=run)
    slurm.submit.main(overrides)
    assert stages_of(stub) == ["evaluate"]
    assert option(stub.submitted()[101], "dependency") == "afterok:8"
    told = capsys.readouterr().out
    assert re.search(r"extract +finished\ntrain +job 7, RUNNING\nexport +job 8, PENDING \(Dependency\)\n", told)


def test_what_waits_for_a_job_that_failed_is_submitted_again(stub: Slurm, overrides: list[str], run: Path) -> None:
    finish(run, overrides, "extract", "evaluate")
    stub.queue(("8", "export", "PENDING"), run=run)
    slurm.submit.main(overrides)
    assert stub.cancelled == ["8"]
    assert stages_of(stub) == ["train", "export", "evaluate"]


def test_what_runs_on_something_that_must_be_made_again_is_not_touched(stub: Slurm, overrides, run: Path) -> None:
    stub.queue(("8", "export", "RUNNING"), run=run)
    with pytest.raises(Refused, match="export is running .job 8.*scancel 8"):
        slurm.submit.main(overrides)
    assert (stub.submitted(), stub.cancelled) == ({}, [])


def test_a_run_of_the_same_name_elsewhere_is_another_run(stub: Slurm, overrides: list[str], tmp_path: Path) -> None:
    stub.queue(("8", "extract", "RUNNING"), run=tmp_path / "others" / "mine")
    slurm.submit.main(overrides)
    assert stages_of(stub) == STAGES


def test_b42_a_run_is_one_folder_whenever_it_is_submitted_and_jobs_start_where_it_was(
    stub: Slurm, overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    relative = ["root=runs" if word.startswith("root=") else word for word in overrides]
    slurm.submit.main(relative)
    slurm.submit.main(relative)
    jobs = stub.submitted()
    assert {stub.environment(job)["DRAFTSMITH_RUN"] for job in jobs} == {str(tmp_path / "runs/mine")}
    assert {stub.environment(job)["PWD"] for job in jobs} == {str(tmp_path)}
    for words in jobs.values():
        assert option(words, "chdir") is None, "relative paths of data are from here"
        assert words[-len(relative) :] == relative
    first, second = ([word for word in jobs[job] if not word.startswith("--dep")] for job in (102, 106))
    assert first == second, "nothing in a job's words or paths is of the moment"


def test_other_settings_make_a_stage_and_all_after_it_run_again(stub: Slurm, overrides: list[str], run: Path) -> None:
    finish(run, overrides, *STAGES)
    slurm.submit.main([*overrides, "eval.k=3", "cluster=gpu"])
    assert stages_of(stub) == ["evaluate"]
    slurm.submit.main([*overrides, "optim.lr=3e-4"])
    assert stages_of(stub)[1:] == ["train", "export", "evaluate"]


STREAMED = ["train", "export", "evaluate"]
STREAMING = ["spool=bounded", "cluster=gpu", "cluster.extract.tasks=2", "cluster.train.nodes=3"]


def groups(words: list[str]) -> list[list[str]]:
    """The options of each group of a heterogeneous job."""
    ends = [i for i, word in enumerate([*words, ":"]) if word == ":"]
    return [words[begin:end] for begin, end in zip([0, *(end + 1 for end in ends)], ends, strict=False)]


def test_streaming_is_one_job_of_a_group_that_trains_and_others_that_extract(
    stub: Slurm, overrides: list[str], run: Path, capsys
) -> None:
    slurm.submit.main([*overrides, *STREAMING])
    assert stages_of(stub) == STREAMED
    train, *extract = groups(stub.submitted()[101])
    assert (option(train, "nodes"), option(train, "gpus-per-node"), option(train, "signal")) == ("3", "8", "B:USR1@120")
    assert len(extract) == 2
    for group in extract:
        wanted = {"nodes": "1", "gpus-per-node": "1", "cpus-per-task": "12", "mem": "96G", "time": "24:00:00"}
        wanted |= {"job-name": "mine:train", "ntasks-per-node": "1", "open-mode": "append"}
        wanted["comment"] = option(train, "comment") or ""
        assert {name: option(group, name) for name in wanted} == wanted
        assert "--requeue" in group
        assert (option(group, "signal"), option(group, "array")) == (None, None)
    told = stub.environment(101)
    assert (told["DRAFTSMITH_BESIDE"], told["DRAFTSMITH_SPOOL"]) == ("extract", f"{run}/spool")
    assert "(24 processes)" in (said := capsys.readouterr().out) and "beside extract on 2 x 1 node of 1 GPU" in said
    assert ":" not in stub.submitted()[102]
    stub.queue(("101+0", "train", "RUNNING"), ("102+1", "train", "RUNNING"), ("102", "export", "PENDING"), run=run)
    slurm.submit.main([*overrides, *STREAMING])
    assert stages_of(stub) == [*STREAMED, "evaluate"]
    assert "job 101, RUNNING\n" in capsys.readouterr().out


def test_the_spool_lies_where_the_cluster_has_scratch(stub: Slurm, overrides: list[str], tmp_path: Path) -> None:
    slurm.submit.main([*overrides, *STREAMING, f"cluster.scratch={tmp_path}/fast"])
    words = stub.submitted()[101]
    assert conf.load(words[-len(overrides) - 6 :]).spool.directory == f"{tmp_path}/fast/mine"
    assert stub.environment(101)["DRAFTSMITH_SPOOL"] == f"{tmp_path}/fast/mine"
    slurm.submit.main([*overrides, f"cluster.scratch={tmp_path}/fast"])
    assert "spool.directory" not in "".join(stub.submitted()[104]), "nothing is streamed"


def test_a_run_that_was_trained_from_a_spool_is_finished(stub: Slurm, overrides: list[str], run: Path) -> None:
    finish(run, [*overrides, *STREAMING], *STREAMED)
    slurm.submit.main([*overrides, *STREAMING, "cluster.extract.tasks=9"])
    assert stub.submitted() == {}
    slurm.submit.main([*overrides, *STREAMING, "featurize.encoding=int8"])
    assert stages_of(stub) == STREAMED


def test_two_submissions_at_once_submit_everything_once(stub: Slurm, overrides: list[str], run: Path) -> None:
    row = f"$count|$count|PENDING|Dependency|0:00|$(sed -n 's/^--job-name=//p' {stub.folder}/sbatch-$count)|{run}"
    stub.say(
        "sbatch", SBATCH.format(folder=stub.folder) + f'sleep 0.2; let count++; echo "{row}" >>{stub.folder}/queue'
    )
    words = [sys.executable, "-m", "slurm.submit", *overrides]
    both = [subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    told = sorted(process.communicate()[0].count("submitted") for process in both)
    assert [process.returncode for process in both] == [0, 0]
    assert told == [0, 4]
    assert stages_of(stub) == STAGES


def test_a_submitter_killed_between_two_jobs_leaves_what_the_next_one_completes(
    stub: Slurm, overrides: list[str], run: Path, capsys
) -> None:
    stub.say("sbatch", SBATCH.format(folder=stub.folder) + "((count == 101)) && kill -KILL $PPID || true")
    words = [sys.executable, "-m", "slurm.submit", *overrides]
    assert subprocess.run(words, cwd=ROOT, stdout=subprocess.DEVNULL).returncode == -signal.SIGKILL
    assert stages_of(stub) == STAGES[:2]
    assert list(json.loads((run / "slurm/jobs.json").read_text())["jobs"]) == STAGES[:1], "the second is in no record"
    stub.say("sbatch", SBATCH.format(folder=stub.folder))
    stub.queue(("101", "extract", "RUNNING"), ("102", "train", "PENDING"), run=run)
    slurm.submit.main(overrides)
    assert stages_of(stub) == STAGES
    assert option(stub.submitted()[103], "dependency") == "afterok:102"
    capsys.readouterr()
    stub.queue(*((str(101 + i), stage, "PENDING") for i, stage in enumerate(STAGES)), run=run)
    assert slurm.status.main(["mine", f"root={run.parent}"]) == 0
    assert re.search(r"^train +PENDING \(Dependency\) +102", capsys.readouterr().out, re.MULTILINE)


def test_what_sbatch_says_of_a_limit_is_told_with_the_stage(stub: Slurm, overrides: list[str]) -> None:
    limit = "AssocMaxSubmitJobLimit\nsbatch: error: Batch job submission failed: Job violates accounting/QOS policy"
    stub.say("sbatch", f"printf 'sbatch: error: {limit}\\n' >&2; exit 1")
    said = "extract: sbatch: AssocMaxSubmitJobLimit; Batch job submission failed: Job violates accounting/QOS policy; "
    with pytest.raises(Refused, match=re.escape(said)):
        slurm.submit.main(overrides)


@pytest.mark.parametrize("command", ["submit", "status"])
def test_a_controller_that_does_not_answer_is_told_and_nothing_is_submitted(
    stub: Slurm, overrides: list[str], run: Path, command: str
) -> None:
    slurm.submit.main(overrides)
    stub.say("squeue", "echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1")
    with pytest.raises(Refused, match="squeue: slurm_load_jobs error: Unable to contact slurm controller"):
        slurm.submit.main(overrides) if command == "submit" else slurm.status.main(["mine", f"root={run.parent}"])
    assert len(stub.submitted()) == len(STAGES), "it cannot be known what is in the queue"


@pytest.mark.parametrize("name", ["my run", "a,b", "a|b", "a$(x)", "a;b", "a%j", "run[1]", "run*", "a:b"])
def test_a_name_that_means_something_to_shell_queue_or_container_is_refused(
    stub: Slurm, overrides: list[str], name: str
) -> None:
    with pytest.raises(Refused, match="on a cluster, name=, root= and cluster.scratch= are made of letters"):
        slurm.submit.main([*overrides, f"name='{name}'"])
    assert stub.submitted() == {}


def test_a_folder_that_cannot_be_written_is_told_in_one_line(stub: Slurm, overrides: list[str], run: Path) -> None:
    run.parent.mkdir()
    run.write_text("no folder")
    words = [sys.executable, "-m", "slurm.submit", *overrides]
    told = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert (told.returncode, told.stderr) == (2, f"submit: Not a directory: {run}/slurm\n")


def test_a_submission_that_slurm_refuses_halfway_is_completed_by_the_next(stub: Slurm, overrides, run: Path) -> None:
    stub.say(
        "sbatch",
        f"[[ -e {stub.folder}/sbatch-102 ]] && {{ echo no such account >&2; exit 1; }}"
        + SBATCH.format(folder=stub.folder),
    )
    with pytest.raises(Refused, match="export: sbatch: no such account; what comes before it stays"):
        slurm.submit.main(overrides)
    stub.say("sbatch", SBATCH.format(folder=stub.folder))
    stub.queue(("101_0", "extract", "PENDING"), ("101_2", "extract", "RUNNING"), ("102", "train", "PENDING"), run=run)
    slurm.submit.main(overrides)
    assert stages_of(stub) == STAGES


MISTAKES = ["cluster.trainn.nodes=2", "cluster.train.nodes=0", "cluster.extract.nodes=2", "cluster=nowhere"]
MISTAKES += ["cluster.options=['--comment=mine']", "cluster.options=['-a0-3']", "cluster.options=['--no-requeue']"]
MISTAKES += ["cluster.export.tasks=2", "cluster.container.kind=docker", "cluster.scrach=x"]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_b43_a_mistake_is_told_before_any_job_is_submitted(stub: Slurm, overrides: list[str], mistake: str) -> None:
    with pytest.raises(Refused, match=re.escape(mistake.partition("=")[0].split(".")[-1])):
        slurm.submit.main([*overrides, mistake])
    assert stub.submitted() == {}


def test_a_dry_run_shows_sizes_commands_and_scripts_and_submits_nothing(
    overrides: list[str], run: Path, capsys, monkeypatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    slurm.submit.main([*overrides, "cluster=gpu", "cluster.train.nodes=3", "dry_run=true"])
    told = capsys.readouterr().out
    assert re.search(r"^train +3 nodes of 8 GPUs \(24 processes\) 96 CPUs 768G 24:00:00$", told, re.MULTILINE)
    assert "'--dependency=afterok:<job of extract>'" in told
    for script in ("stage.sbatch", "train.sbatch", "job.sh"):
        assert (ROOT / "slurm" / script).read_text() in told
    assert [line.split()[0] for line in told.splitlines()[-4:]] == STAGES, "behind the scripts, which are long"
    assert not run.exists()


IMPOSSIBLE = {
    "extract": (
        ["featurize=vllm", "engine.tensor_parallel_size=4"],
        "cluster.extract.gpus_per_node=1 is less than engine.tensor_parallel_size=4: the server of stage extract would "
        "not start; set cluster.extract.gpus_per_node=4",
    ),
    "streamed": (
        ["featurize=vllm", "engine.tensor_parallel_size=4", "spool=bounded"],
        "cluster.extract.gpus_per_node=1 is less than engine.tensor_parallel_size=4: the server of stage train ",
    ),
    "evaluate": (["engine.tensor_parallel_size=2"], "cluster.evaluate.gpus_per_node=1 is less than engine.tensor"),
    "measure": (
        ["+engine@engines.a=vllm", "engines.a.tensor_parallel_size=2", "eval.served_k=3"],
        "cluster.evaluate.gpus_per_node=1 is less than engines.a.tensor_parallel_size=2: the server of stage measure ",
    ),
    "generate": (
        ["generate=demo", "engine.tensor_parallel_size=2", "data.conversations=['${generate.output}.gz']"],
        "cluster.generate.gpus_per_node=1 is less than engine.tensor_parallel_size=2",
    ),
    "nothing to generate": (
        ["data.conversations=['${generate.output}.gz']"],
        "generate.prompts and generate.routes are empty",
    ),
    "prompts to answer": (
        ["data.conversations=['${generate.output}.gz']", "generate.prompts=[nope.jsonl]"],
        "no such file: nope.jsonl (generate.prompts; ",
    ),
    "conversations": (["data.conversations=[nope.jsonl]"], "no such file: nope.jsonl (data.conversations; "),
    "mixture": (
        ["data.conversations=[]", "data.mixture={a: {paths: [./nope]}}"],
        "no such file: nope (data.conversations; ",
    ),
    "no conversations": (["data.conversations=[]"], "data.conversations names no file"),
    "evaluation prompts": (["eval.prompts=[owner/nope]"], "eval.prompts: no file owner/nope"),
    "no evaluation prompts": (["eval.prompts=[]"], "eval.prompts names no file"),
    "data set": (["eval.datasets={gsm8k: /nope}"], "no such file: /nope (eval.datasets; "),
}


@pytest.mark.parametrize(("given", "told"), IMPOSSIBLE.values(), ids=IMPOSSIBLE.keys())
def test_what_would_fail_after_hours_in_the_queue_is_refused(
    overrides: list[str], run: Path, given: list[str], told: str
) -> None:
    with pytest.raises(Refused, match=re.escape(told)):
        slurm.submit.main([*overrides, "cluster=gpu", *given, "dry_run=true"])
    assert not run.exists()


POSSIBLE = [
    ["featurize=vllm", "engine.tensor_parallel_size=4"]
    + ["cluster.extract.gpus_per_node=4", "cluster.evaluate.gpus_per_node=8"],
    ["engine.tensor_parallel_size=2", "engine.kind=none"],
    ["engine.tensor_parallel_size=2"]
    + ["eval.methods=[{method: none, url: 'http://a:1'}, {method: head, url: 'http://a:2'}]"],
    ["data.conversations=[owner/name]", "eval.prompts=[]", "eval.datasets={gsm8k: null}"],
    ["cluster=cpu", "engine=vllm-cpu"],
    ["cluster=pyxis", "cluster.container.mounts=['/data:/of/image']"]
    + ["data.conversations=[/of/image/a.jsonl]", "eval.prompts=[/of/image/b.jsonl]"],
]


@pytest.mark.parametrize("given", POSSIBLE)
def test_what_may_go_well_is_not_refused(overrides: list[str], given: list[str], capsys, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)  # a container is told it
    slurm.submit.main([*overrides, "cluster=gpu", *given, "dry_run=true"])
    assert "\nevaluate " in capsys.readouterr().out


def test_what_is_finished_needs_its_files_no_more(stub: Slurm, overrides: list[str], run: Path, tmp_path: Path) -> None:
    finish(run, overrides, "extract")
    (tmp_path / "a b.jsonl").unlink()
    slurm.submit.main(overrides)
    assert stages_of(stub) == STAGES[1:]


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "conf/experiment").glob("*.yaml")))
def test_every_experiment_can_be_submitted_with_prompts_to_answer(name: str, tmp_path: Path, capsys) -> None:
    given = [f"experiment={name}", "cluster=gpu", "generate.prompts=[data/demo/prompts.jsonl]"]
    slurm.submit.main([*given, f"root={tmp_path}", "dry_run=true"])
    assert "\nevaluate " in capsys.readouterr().out


def test_a_dry_run_shows_no_credentials(overrides: list[str], capsys) -> None:
    secrets = ["+cluster.environment.WANDB_API_KEY=very-secret", "+engine.environment.HF_TOKEN=very-secret"]
    slurm.submit.main([*overrides, *secrets, "dry_run=true"])
    told = capsys.readouterr().out
    assert "WANDB_API_KEY='***'" in told
    assert "engine.environment.HF_TOKEN=***" in told
    assert "very-secret" not in told


def test_variables_of_a_job_that_we_are_in_and_of_sbatch_itself_do_not_leak(
    stub: Slurm, overrides: list[str], monkeypatch
) -> None:
    ours = {"DRAFTSMITH_TASKS": "/of/another", "SBATCH_NO_REQUEUE": "1", "SBATCH_ARRAY_INX": "0-9"}
    ours["SBATCH_ACCOUNT"] = "my-project"
    for name, value in ours.items():
        monkeypatch.setenv(name, value)
    slurm.submit.main(overrides)
    told = stub.environment(101)
    assert [name for name in ours if name in told] == ["SBATCH_ACCOUNT"], "where a site sets that for its users"


def test_a_job_that_waits_with_other_settings_is_replaced_and_one_that_runs_is_not_touched(
    stub: Slurm, overrides: list[str], run: Path, capsys
) -> None:
    slurm.submit.main(overrides)
    extract = ("101", "extract", "RUNNING")
    waiting = [(str(102 + i), stage, "PENDING") for i, stage in enumerate(STAGES[1:])]
    stub.queue(extract, *waiting, run=run)
    slurm.submit.main([*overrides, "optim.lr=3e-4"])
    assert stages_of(stub)[4:] == ["train", "export", "evaluate"], "the one that waited would train with another rate"
    assert stub.cancelled == ["102", "103", "104"]
    waiting = [(str(105 + i), stage, "PENDING") for i, stage in enumerate(STAGES[1:])]
    stub.queue(extract, *waiting, run=run)
    slurm.submit.main([*overrides, "optim.lr=3e-4"])
    assert len(stub.submitted()) == 7
    with pytest.raises(Refused, match=r"extract is running .job 101. with other settings .target, data, featurize."):
        slurm.submit.main([*overrides, "optim.lr=3e-4", "data.max_tokens=77"])
    assert (len(stub.submitted()), len(stub.cancelled)) == (7, 3)


def test_a_task_of_an_array_has_a_row_of_its_own(stub: Slurm, overrides: list[str], run: Path) -> None:
    """In one row for those that wait, Slurm shortens a long list of them: 7_[0,2,4,...]."""
    stub.say("squeue", f'[[ " $* " == *" --array "* ]] || exit 1; cat {stub.folder}/queue')
    stub.queue(("7_0", "extract", "RUNNING"), *((f"7_{i}", "extract", "PENDING") for i in range(2, 99, 2)), run=run)
    slurm.submit.main(overrides)
    assert stages_of(stub) == STAGES[1:]


def test_the_present_folder_goes_into_containers_too(
    stub: Slurm, overrides: list[str], tmp_path: Path, monkeypatch
) -> None:
    (tmp_path / "my,folder").mkdir()
    monkeypatch.chdir(tmp_path / "my,folder")
    with pytest.raises(Refused, match="my,folder has a ',' in it"):
        slurm.submit.main([*overrides, "cluster=pyxis"])
    slurm.submit.main(overrides)


def test_a_generated_file_may_have_any_name(stub: Slurm, overrides: list[str], tmp_path: Path) -> None:
    output = tmp_path / "answers [1].jsonl"
    output.touch()
    slurm.submit.main([*overrides, "generate=demo", f"generate.output='{output}'", f"data.conversations=['{output}']"])
    assert stages_of(stub)[0] == "generate"
    pattern = stub.environment(101)["DRAFTSMITH_PROGRESS"]
    seen = subprocess.run(["bash", "-c", 'compgen -G "$0"', pattern], capture_output=True, text=True).stdout
    assert seen == f"{output}\n"


def commands() -> list[str]:
    """Every call of slurm.submit in the documents, and what the files of clusters say about how they are chosen."""
    texts = [(ROOT / name).read_text() for name in ("README.md", "docs/slurm.md", "slurm/submit.py")]
    called = r"^(?:    )?python -m slurm\.submit ([^#\n]*)"
    chosen = r"^# (cluster=.*)$"
    clusters = [path.read_text() for path in sorted((ROOT / "conf/cluster").glob("*.yaml"))]
    return [match[1] for text in texts for match in re.finditer(called, text, re.MULTILINE)] + [
        f"experiment=demo {match[1]}" for text in clusters for match in re.finditer(chosen, text, re.MULTILINE)
    ]


@pytest.mark.parametrize("command", commands())
def test_b43_every_submission_in_the_documents_composes_and_renders(command: str, tmp_path: Path, capsys) -> None:
    slurm.submit.main([*shlex.split(command), f"root={tmp_path}", "dry_run=true"])  # nothing is finished there
    assert "sbatch --parsable" in capsys.readouterr().out


def test_there_are_submissions_in_the_documents() -> None:
    assert len(commands()) >= 10
    assert any("engine@engines" in command for command in commands())
    assert sum("cluster.container.image" in command for command in commands()) == 2
