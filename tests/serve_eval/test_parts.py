"""One method on one engine as a job of its own, and the evaluation that joins them."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import conf
import serve_eval.__main__ as evaluation
import serve_eval.compare
from models.config import TargetConfig
from models.errors import Refused
from models.target import describe_target
from serve_eval.apart import measure
from serve_eval.parts import folder, measured, part_asked, parts_of
from serve_eval.policy import make_policy, read_records, windows_of
from serve_eval.subject import read_subject
from tests.models.layouts import exported
from tests.serve_eval.conftest import STUB
from tests.serve_eval.stub import Behaviour

NAMES = ["here-eagle3-k3", "here-ngram", "there-eagle3-k3", "there-ngram"]


def options(place: Path, target: Path, prompts: Path) -> list[str]:
    """A run with two engines, played by stubs, and two methods."""
    script = place / "env/bin/python"
    script.parent.mkdir(parents=True)
    script.write_text(f'#!/bin/sh\nexec {sys.executable} {STUB} "$@"\n')
    script.chmod(0o755)
    words = [f"name=apart root={place}/runs target.path={target} target.dtype=float32 eval.prompts=[{prompts}]"]
    words += ["engine=none eval.k=2 eval.max_new_tokens=12 eval.served_new_tokens=8 eval.concurrencies=[1,2]"]
    words += ["eval.requests_per_route=2 eval.warmup_requests=0 eval.ignore_eos=true eval.served_k=2"]
    for name in ("here", "there"):
        told = json.dumps(asdict(Behaviour(chunk_ms=1.0, own_figures=True)))
        words += [f"+engine@engines.{name}=vllm engines.{name}.dtype=float32 engines.{name}.python={script}"]
        words += [f"engines.{name}.max_model_len=512 engines.{name}.startup_timeout_s=60"]
        words += ["+engines." + name + ".environment.STUB_BEHAVIOUR='" + told.replace(" ", "") + "'"]
    found = [word for line in words for word in line.split(" ")]
    return [*found, "eval.methods=[{method: eagle3, k: 3}, {method: ngram}]"]


@pytest.fixture(scope="module")
def arguments(tiny_target_dir: Path, tiny_prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    place = tmp_path_factory.mktemp("apart")
    target = describe_target(TargetConfig(path=str(tiny_target_dir), dtype="float32"))
    (place / "runs/apart").mkdir(parents=True)
    exported(target, place / "runs/apart/export", dtype="float32")
    return options(place, tiny_target_dir, tiny_prompts)


def apart(arguments: list[str], name: str) -> bool:
    """Measure a part, as a task of the array does."""
    run = conf.load([*arguments, f"eval.part={name}"])
    part = part_asked(conf.resolved(run))
    settings = part.settings(run.eval)
    subject = read_subject(run.directory / "export", settings, run.target, {})
    return measure(part, run.engines[part.engine], settings, subject, folder(run.directory / "eval", part))[1]


@pytest.fixture(scope="module")
def parts(arguments: list[str]) -> Path:
    """The eval folder after all parts."""
    assert [apart(arguments, name) for name in NAMES] == [True] * 4
    return conf.load(arguments).directory / "eval"


def summary_of(place: Path) -> dict[str, Any]:
    return json.loads((place / "summary.json").read_text())


def test_there_is_a_part_for_each_engine_and_method(arguments: list[str]) -> None:
    found = parts_of(conf.resolved(conf.load(arguments)))
    assert list(found) == NAMES
    run = conf.load(arguments)
    assert [each.method for each in found["there-ngram"].settings(run.eval).methods] == ["ngram"]
    without = conf.load([*arguments[:-1], "eval.methods=[]"])
    assert list(parts_of(conf.resolved(without))) == ["here-head", "there-head"]
    either = conf.load([*arguments[:-1], "eval.methods=[{method: head, k: 3}, {method: ngram}]"])
    assert list(parts_of(conf.resolved(either)))[:2] == ["here-head-k3", "here-ngram"]
    assert parts_of(conf.resolved(conf.load(["name=x", "target.path=y"]))) == {}


@pytest.mark.parametrize(
    ("override", "told"),
    {
        "eval.served_k=null": "eval.served_k must be given, or k with method ngram",
        "eval.methods=[{method: none}]": "eval.methods names nothing but none",
        "eval.methods=[{method: ngram}, {method: ngram}]": "eval.methods names ngram twice",
        "engines.here.kind=none": "engines: 'here' .kind=none. must be a plain name, and serve",
        "+engines={a/b: {kind: vllm}}": "engines: 'a/b' .kind=vllm. must be a plain name",
        "+engines={sg: {kind: sglang}}": "engines.sg: sglang has no method suffix",
        "eval.methods=[{method: none, url: 'http://a'}, {method: ngram, url: 'http://b'}]": "servers run already",
    }.items(),
)
def test_b43_parts_that_are_not_possible_are_refused(arguments: list[str], override: str, told: str) -> None:
    words = [*arguments, "eval.methods=[{method: suffix}]"] if "sglang" in override else arguments
    with pytest.raises(Refused, match=told):
        parts_of(conf.resolved(conf.load([*words, override])))


def test_each_part_measures_its_method_and_the_server_alone_in_a_folder_of_its_own(parts: Path) -> None:
    assert sorted(path.name for path in (parts / "parts").iterdir()) == NAMES
    for name in NAMES:
        place, method = parts / "parts" / name, name.split("-")[1]
        windows = [json.loads(line) for line in (place / "cells.jsonl").read_text().splitlines()]
        assert {window["method"] for window in windows} == {"none", method}
        assert len(windows) == 2 * 2 * 2, "methods, concurrencies, routes"
        assert (place / "report.html").exists() and (place / f"server-{method}.log").exists()
    assert not (parts / "summary.json").exists(), "that is the evaluation's"
    assert not (parts.parent / "config").exists() and not (parts.parent / "timings.json").exists()


def test_the_evaluation_joins_the_parts_in_one_table(
    parts: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluation.main(conf.load(arguments)) is True
    summary = summary_of(parts)
    assert [(row["part"], row["concurrency"]) for row in summary["parts"]] == [(n, c) for n in NAMES for c in (1, 2)]
    for row in summary["parts"]:
        mine = summary_of(parts / "parts" / row["part"])["served"]
        alone, ours = (
            next(
                cell["output_tokens_per_s"]
                for cell in mine["cells"]
                if (cell["method"], cell["concurrency"], cell["route"]) == (method, row["concurrency"], "all")
            )
            for method in ("none", row["method"])
        )
        assert (row["alone_tokens_per_s"], row["tokens_per_s"]) == (alone, ours)
        assert row["speedup"] == round(ours / alone, 4), "over its own server alone"
        assert row["k"] == (3 if row["method"] == "eagle3" else 2)
    assert len({row["alone_tokens_per_s"] for row in summary["parts"]}) == 8, "no baseline is shared"
    assert (summary["part"], summary["served"]["head"]) == ("here-eagle3-k3", "eagle3")
    assert summary["reference"]["al"] and summary["lossless"]["vllm_fp32"]["prompts"]
    told = capsys.readouterr().out
    assert "Engines and methods" in told and all(name in told for name in NAMES)
    report = (parts / "report.html").read_text()
    assert all(f'href="parts/{name}/report.html"' in report for name in NAMES)
    assert evaluation.main(conf.load(arguments)) is False, "nothing is done twice"


def test_policy_and_comparison_read_the_windows_of_the_part_that_is_told_of(parts: Path, arguments: list[str]) -> None:
    evaluation.main(conf.load(arguments))
    policy = make_policy(summary_of(parts), read_records(windows_of(parts, summary_of(parts))))
    assert [level.candidate for level in policy.routes["all"].levels] == ["eagle3-k3"] * 2
    assert serve_eval.compare.main([str(parts), str(parts / "parts/here-eagle3-k3")]) == 0


def test_a_part_that_is_done_starts_no_server_again(parts: Path, arguments: list[str]) -> None:
    log = parts / "parts/here-ngram/server-ngram.log"
    before = log.stat().st_mtime_ns
    assert not apart([*arguments, "eval.compare_with=[other]", "engines.here.python=python3"], "here-ngram")
    assert log.stat().st_mtime_ns == before
    later = parts_of(conf.resolved(conf.load([*arguments, "engines.here.python=python3"])))
    assert measured(parts, later["here-ngram"]), "it is complete for today's configuration, too"
    assert not measured(parts, later["here-eagle3-k3"])
    apart(arguments, "here-ngram")


def test_a_part_that_is_missing_or_of_other_settings_is_named_and_not_joined(parts: Path, arguments: list[str]) -> None:
    with pytest.raises(Refused, match="there-eagle3-k3 is not measured, or with other settings; run .*apart. with"):
        evaluation.main(conf.load([*arguments, "engines.there.max_model_len=600"]))
    more = [*arguments[:-1], "eval.methods=[{method: eagle3, k: 3}, {method: ngram}, {method: ngram, k: 4}]"]
    with pytest.raises(Refused, match="here-ngram-k4 is not measured"):
        evaluation.main(conf.load(more))
    found = parts_of(conf.resolved(conf.load(more)))
    assert measured(parts, found["there-ngram"]), "a further method leaves the other parts finished"


def test_a_part_that_is_not_asked_for_is_refused_with_those_there_are(arguments: list[str]) -> None:
    with pytest.raises(Refused, match=f"eval.part=here-mtp is not one of: {', '.join(NAMES)}"):
        apart(arguments, "here-mtp")


def test_a_dry_run_tells_of_every_part(parts: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    evaluation.dry_run(conf.load(arguments))
    told = capsys.readouterr().out
    assert [line for line in told.splitlines() if line.startswith("part ")] == [f"part {name}:" for name in NAMES]
    assert told.count("server none:") == 4 and told.count("server eagle3:") == 2


def test_b41_prompts_are_rendered_with_the_arguments_of_the_training_data(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(settings: Any, renderer: Any, arguments: dict[str, Any]) -> None:
        raise Refused(f"rendered with {arguments}")

    for module in ("subject", "dry_run"):
        monkeypatch.setattr(f"serve_eval.{module}.load_workload", told)
    run = conf.load([*arguments, "data.chat_template_kwargs={enable_thinking: false}"])
    for work in (evaluation.main, evaluation.dry_run):
        with pytest.raises(Refused, match="rendered with {'enable_thinking': False}"):
            work(run)
    before, after = (parts_of(conf.resolved(each))["here-ngram"].made_by for each in (conf.load(arguments), run))
    assert before != after, "a part that was measured with other prompts is not joined"


def test_credentials_of_engines_are_masked_wherever_they_are_kept(arguments: list[str]) -> None:
    values = conf.resolved(conf.load([*arguments, "+engines.here.environment.HF_TOKEN=very-secret"]))
    assert "very-secret" not in json.dumps(values)
    assert "very-secret" not in json.dumps([dict(part.made_by) for part in parts_of(values).values()])
