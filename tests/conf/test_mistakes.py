"""What is told of mistakes on the command line and in files of settings: one line, and what to write instead."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import conf
from models.errors import Refused

MINIMAL = ["name=test", "target.path=somewhere"]
HEADER = "# @package _global_\n"


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["optm.lr=1"], "there is no option optm.lr; did you mean optim.lr?"),
        (["lr=1"], "there is no option lr; did you mean optim.lr?"),
        (["experiments=demo"], "there is no option experiments; did you mean experiment?"),
        (["eval.methods=[{methd: eagle3}]"], "there is no option methd (in eval.methods)"),
        (["trainer=fsdp"], "there is no trainer=fsdp, only ddp, demo, fsdp2, single, "),
        (["trainer=fsdp"], "; did you mean fsdp2?"),
        (["optim.lr=abc"], "optim.lr=abc: Value 'abc' of type 'str' could not be converted to Float"),
        (["data.conversations=a.jsonl"], "several values are written data.conversations=[a,b]"),
        (["experiment"], "experiment: options are KEY=VALUE"),
        (["eval.prompts=[a,b"], "eval.prompts=[a,b: options are KEY=VALUE"),
        (["name=???"], "name is not given; say name=..., or choose an experiment=NAME that does"),
    ],
)
def test_b43_a_mistake_is_told_with_what_to_write_instead(overrides: list[str], told: str) -> None:
    with pytest.raises(Refused) as refused:
        conf.load([*MINIMAL, *overrides])
    message = str(refused.value)
    assert told in message
    assert "\n" not in message
    for noise in ("Config search path", "full_key", "_type=", "use +", "hydra.cc"):
        assert noise not in message


@pytest.mark.parametrize("added", ["+optim.foo=1", "++optim.foo=1", "+foo=1", "+eval.methods=[{method: ngram}]"])
def test_b43_an_option_that_is_added_with_a_plus_is_unknown_all_the_same(added: str) -> None:
    if "methods" in added:  # an option that is there
        assert conf.load([*MINIMAL, added]).eval.methods[0].method == "ngram"
    else:
        with pytest.raises(Refused, match=r"there is no option (optim\.)?foo"):
            conf.load([*MINIMAL, added])


def test_mappings_take_any_key() -> None:
    given = ["engine.environment.SOME_KEY=1", "+engine.environment.OTHER_KEY=2"]
    assert conf.load([*MINIMAL, *given]).engine.environment == {"SOME_KEY": "1", "OTHER_KEY": "2"}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            HEADER + "optim: {lrr: 1}\n",
            "conf/experiment/mine.yaml: there is no option optim.lrr; did you mean optim.lr?",
        ),
        (HEADER + "optim: {lr: fast}\n", "conf/experiment/mine.yaml: optim.lr: Value 'fast' of type 'str'"),
        (
            "optim: {lr: 1}\n",
            "conf/experiment/mine.yaml: a file of this group begins with the line `# @package _global_`",
        ),
        (
            "defaults: [override /data: demo]\n",
            "conf/experiment/mine.yaml: a file of this group begins with the line `# @package _global_`",
        ),
        (HEADER + "optim:\n\tlr: 1\n", 'mine.yaml", line 3'),
        (HEADER + "defaults: [override /target: llama]\n", "there is no target=llama, only deepseek-v3, "),
    ],
)
def test_b43_a_mistake_in_a_file_names_the_file_or_what_it_chose(text: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/mine.yaml").write_text(text)
    with pytest.raises(Refused) as refused:
        conf.load([f"hydra.searchpath=[file://{tmp_path}]", "experiment=mine", *MINIMAL])
    assert told in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("flag", ["--lr", "--experiment"])  # Hydra has an --experimental-rerun
def test_a_flag_that_no_command_has_is_told_in_one_line(flag: str) -> None:
    command = [sys.executable, "-m", "models.packaged", flag, "demo"]
    result = subprocess.run(command, cwd=Path(conf.__file__).parents[1], capture_output=True, text=True, timeout=300)
    assert result.returncode == 2
    assert result.stderr.splitlines() == [
        f"prepare: unrecognized arguments: {flag}; options are KEY=VALUE, and --help lists them"
    ]
