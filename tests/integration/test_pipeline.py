"""The whole pipeline on a tiny random target, as a user runs it: four commands, one after the other, in a fresh folder.

A random target cannot be drafted for, so no acceptance length is asked for here: what is asked is that every stage
reads what the one before it wrote, that a second launch finds everything done, and that each mistake of a
new user is told in one line.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import conf

ROOT = Path(__file__).resolve().parents[2]
STAGES = ["featurize", "train", "models.export", "serve_eval"]


def run_stage(stage: str, overrides: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    """`python -m stage overrides`, started in `cwd` (relative data paths are the user's, not the repository's)."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HYDRA_FULL_ERROR": ""}
    return subprocess.run(
        [sys.executable, "-m", stage, *overrides], cwd=cwd, env=environment, capture_output=True, text=True, timeout=180
    )


@pytest.fixture(scope="module")
def overrides(tiny_target_dir: Path, tiny_conversations: Path, tiny_prompts: Path) -> list[str]:
    return [
        "name=tiny",
        f"target.path={tiny_target_dir}",
        "target.dtype=float32",
        f"data.conversations=[{tiny_conversations}]",
        "data.validation_share=0.2",
        "draft.vocab_size=128",
        "objective.unroll_steps=3",
        "trainer.precision=fp32",
        "trainer.pack_tokens=256",
        "export.dtype=float32",
        "engine=none",
        f"eval.prompts=[{tiny_prompts}]",
        "eval.k=3",
        "eval.max_new_tokens=16",
    ]


@pytest.fixture(scope="module")
def folder(overrides: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder in which all four stages have run once."""
    cwd = tmp_path_factory.mktemp("user")
    for stage in STAGES:
        result = run_stage(stage, overrides, cwd)
        assert result.returncode == 0, f"{stage} failed:\n{result.stdout}\n{result.stderr}"
    return cwd


def contents(directory: Path) -> dict[str, int]:
    """Every file below `directory` with the time of its last change."""
    return {
        str(path.relative_to(directory)): path.stat().st_mtime_ns for path in directory.rglob("*") if path.is_file()
    }


def test_the_summary_tells_acceptance_by_route_and_that_nothing_was_lost(folder: Path) -> None:
    summary = json.loads((folder / "runs/tiny/eval/summary.json").read_text())
    assert {"target", "head", "machine", "k", "reference", "lossless"} <= summary.keys()
    assert summary["k"] == 3
    reference = summary["reference"]
    assert 1 <= reference["al"] <= 4
    assert len(reference["per_position"]) == 3
    assert set(reference["routes"]) == {"chat", "json"}
    for route in reference["routes"].values():
        assert 1 <= route["al"] <= 4
        assert route["tokens"] > 0
    told = summary["lossless"]["reference"]
    assert (told["prompts"], told["identical"]) == (6, 6)


def test_the_report_stands_alone(folder: Path) -> None:
    report = (folder / "runs/tiny/eval/report.html").read_text()
    assert "<html" in report
    for outside in ('src="http', "src='http", 'href="http', "@import"):
        assert outside not in report, f"the report loads something from outside: {outside}"


def test_the_seconds_of_each_stage_are_kept(folder: Path) -> None:
    timings = json.loads((folder / "runs/tiny/timings.json").read_text())
    assert len(timings) == len(STAGES)
    assert sum(timings.values()) > 0


def test_b43_the_configuration_in_force_is_saved_by_every_stage(folder: Path, overrides: list[str]) -> None:
    for stage in STAGES:
        saved = OmegaConf.load(folder / f"runs/tiny/config/{stage.removeprefix('models.')}.yaml")
        assert saved == conf.resolved(conf.load(overrides))


def test_nothing_was_written_outside_the_run(folder: Path) -> None:
    assert [path.name for path in folder.iterdir()] == ["runs"]
    assert [path.name for path in (folder / "runs").iterdir()] == ["tiny"]


def test_nothing_half_written_is_left(folder: Path) -> None:
    assert not [name for name in contents(folder) if name.endswith(".tmp")]


def test_a_second_launch_does_nothing_twice(folder: Path, overrides: list[str]) -> None:
    before = contents(folder)
    for stage in STAGES:
        result = run_stage(stage, overrides, folder)
        assert result.returncode == 0, result.stderr
        assert "nothing to do" in result.stdout, f"{stage}:\n{result.stdout}\n{result.stderr}"
    after = contents(folder)
    assert {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)} == set()


def refused(stage: str, overrides: list[str], cwd: Path) -> str:
    """The one line with which a stage refuses these overrides."""
    result = run_stage(stage, overrides, cwd)
    assert "Traceback" not in result.stderr + result.stdout, result.stderr
    assert result.returncode == 2, result.stderr
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    return lines[0]


@pytest.mark.parametrize("stage", STAGES)
def test_a_typing_error_in_an_override_names_the_key(stage: str, overrides: list[str], tmp_path: Path) -> None:
    assert "optim.lrr" in refused(stage, [*overrides, "optim.lrr=1"], tmp_path)


def test_a_target_that_is_not_there_is_named(overrides: list[str], tmp_path: Path) -> None:
    assert "no/such/model" in refused("featurize", [*overrides, "target.path=no/such/model"], tmp_path)


def test_conversations_that_are_not_there_are_named(overrides: list[str], tmp_path: Path) -> None:
    assert "nowhere.jsonl" in refused("featurize", [*overrides, "data.conversations=[nowhere.jsonl]"], tmp_path)


def test_a_target_without_a_chat_template_is_refused(
    tiny_target_dir: Path, overrides: list[str], tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(tiny_target_dir, bare)
    (bare / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((bare / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (bare / "tokenizer_config.json").write_text(json.dumps(settings))
    assert "chat template" in refused("featurize", [*overrides, f"target.path={bare}"], tmp_path)


def test_a_layer_index_out_of_range_is_refused(overrides: list[str], tmp_path: Path) -> None:
    assert "aux_layers" in refused("featurize", [*overrides, "target.aux_layers=[2,4,8]"], tmp_path)


@pytest.mark.parametrize(("stage", "before"), [*zip(STAGES[1:], STAGES, strict=False)])
def test_a_stage_whose_input_is_missing_names_the_stage_that_makes_it(
    stage: str, before: str, overrides: list[str], tmp_path: Path
) -> None:
    assert before in refused(stage, overrides, tmp_path)
