"""conf/: every file in it composes, and a mistake on the command line costs one line and two seconds."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import conf
from models.config import DraftConfig
from models.errors import Refused

ROOT = Path(__file__).resolve().parents[2]
GROUPS = sorted((path.parent.name, path.stem) for path in (ROOT / "conf").glob("*/*.yaml"))
MINIMAL = ["name=test", "target.path=somewhere"]
PAGE = (ROOT / "docs/mtp.md").read_text()


@pytest.mark.parametrize(("group", "option"), GROUPS, ids=lambda value: value)
def test_every_option_of_every_group_composes(group: str, option: str) -> None:
    base = [] if group == "experiment" else MINIMAL[:1] if group == "target" else MINIMAL
    wanted = ["data.conversations=[some.jsonl]"] if group == "data" else []
    run = conf.load([*base, f"{group}={option}", *wanted])
    assert run.name
    assert run.target.path != "???"


def test_every_group_on_disk_is_in_the_root_configuration() -> None:
    root = (ROOT / "conf/run.yaml").read_text()
    for group in {group for group, _ in GROUPS}:
        assert f"- {group}: null" in root, f"conf/{group} cannot be chosen: conf/run.yaml does not list it"


def test_paths_derive_from_the_name_alone() -> None:
    first, second = (conf.load([*MINIMAL, "root=somewhere"]) for _ in range(2))
    assert first.directory == second.directory == Path("somewhere/test")


MISTAKES = {
    "no draft vocabulary": (["draft.vocab_size=0"], "draft.vocab_size=0"),
    "negative head": (["draft.head_dim=-16"], "draft.head_dim=-16"),
    "one beta": (["optim.betas=[0.9]"], "optim.betas"),
    "seed beyond its range": (["trainer.seed=99999999999999999"], "trainer.seed"),
    "decay that overflows": (["objective.decay=1e30"], "objective.decay"),
    "unknown key": (["optim.lrr=1"], "lrr"),
    "unknown section": (["optimizer.lr=1"], "optimizer"),
    "wrong type": (["optim.lr=abc"], "lr"),
    "unknown group option": (["experiment=demoo"], "demoo"),
    "unknown group": (["experiments=demo"], "experiments"),
    "value out of range": (["objective.unroll_steps=0"], "objective.unroll_steps=0"),
    "not one of the choices": (["trainer.precision=fp8"], "trainer.precision=fp8"),
    "a run that is all runs": (["name=."], "name=. names no folder below root=runs"),
    "a run outside of all runs": (["name=../other"], "name=../other names no folder"),
    "a run anywhere": (["name=/tmp/other"], "name=/tmp/other names no folder"),
    "empty name": (["name="], "name= names no folder"),
    "no accelerator": (["engine.tensor_parallel_size=0"], "engine.tensor_parallel_size=0"),
    "no context": (["engine.max_model_len=0"], "engine.max_model_len=0"),
    "a dtype that is none": (["engine.dtype=fp8"], "engine.dtype=fp8 is not one of bfloat16, float16, float32"),
    "negative port": (["gateway.port=-1"], "gateway.port=-1"),
    "port beyond its range": (["monitor.port=65536"], "monitor.port=65536"),
    "name missing": (["name=???"], "name"),
}


@pytest.mark.parametrize(("overrides", "key"), MISTAKES.values(), ids=MISTAKES.keys())
def test_b43_a_mistake_is_refused_with_the_key_in_the_message(overrides: list[str], key: str) -> None:
    with pytest.raises(Refused, match=re.escape(key)):
        conf.load([*MINIMAL, *overrides])


@pytest.mark.parametrize("mistake", ["unknown key", "wrong type", "unknown group option"])
def test_b43_on_the_command_line_a_mistake_is_one_line_and_exit_code_2(mistake: str, tmp_path: Path) -> None:
    overrides, key = MISTAKES[mistake]
    result = subprocess.run(
        [sys.executable, "-m", "models.packaged", *MINIMAL, f"root={tmp_path}", *overrides],
        cwd=ROOT,
        env=os.environ | {"HYDRA_FULL_ERROR": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 2
    assert key in result.stderr
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert "Traceback" not in result.stderr + result.stdout
    assert not list(tmp_path.iterdir()), "something was written before the configuration was checked"


def test_the_heads_rotation_can_be_set_on_the_command_line() -> None:
    rope = {"rope_type": "yarn", "rope_theta": 10000, "factor": 2.0}
    given = "draft.rope_parameters={rope_type:yarn,rope_theta:10000,factor:2.0}"
    assert conf.load([*MINIMAL, given]).draft.rope_parameters == rope


@pytest.mark.parametrize("target", sorted(path.stem for path in (ROOT / "conf/target").glob("*.yaml")))
def test_what_a_target_says_of_an_eagle3_head_is_not_said_to_an_mtp_head(target: str) -> None:
    for chosen, algorithm in (("draft=mtp", "mtp"), ("draft.algorithm=mtp_native", "mtp_native")):
        assert conf.load(["name=test", f"target={target}", chosen]).draft == DraftConfig(algorithm=algorithm)
    says = target != "smollm2-135m"
    assert conf.load(["name=test", f"target={target}"]).draft.vocab_size == (32_000 if says else None)


def test_the_commands_on_mtp_heads_give_the_section_draft_nothing_that_such_a_head_refuses() -> None:
    lines = re.findall(r"^python -m (?:featurize|train|models\.export|serve_eval) (.*)$", PAGE, re.MULTILINE)
    drafts = [conf.load(words).draft for words in map(shlex.split, lines) if "draft" in " ".join(words)]
    assert len(drafts) >= 6 and all(each == DraftConfig(algorithm=each.algorithm) for each in drafts)
    assert {each.algorithm for each in drafts} == {"mtp", "mtp_native"}
