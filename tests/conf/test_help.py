"""--help of every command: what it does, its options and two examples, each of which composes."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import runpy
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import conf
from conf import help
from conf.sweep import expand

ROOT = Path(__file__).resolve().parents[2]


def commands() -> set[str]:
    """Every module that does something under `python -m`."""
    found = set()
    for package in ("models", "featurize", "train", "serve_eval", "slurm"):
        for path in (ROOT / package).glob("*.py"):
            guards = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.If)]
            if any("__name__" in ast.unparse(guard.test) for guard in guards):
                found.add(package if path.stem == "__main__" else f"{package}.{path.stem}")
    return found


def test_every_command_has_its_help_and_nothing_else_has() -> None:
    assert commands() == help.COMMANDS.keys()


def test_a_dry_run_is_told_of_by_the_commands_that_have_one() -> None:
    have = {
        command
        for command, (keys, _) in help.COMMANDS.items()
        if keys and "dry_run=true only tells" in help.render(command)
    }
    texts = {command: Path(importlib.util.find_spec(command).origin) for command in help.COMMANDS}  # type: ignore
    texts = {c: path.with_name("__main__.py") if path.stem == "__init__" else path for c, path in texts.items()}
    does = {c for c, path in texts.items() if re.search(r"stage\(.*dry_run=|if run\.dry_run", path.read_text())}
    assert have == does == set(help.DRY)


def test_a_headline_with_options_names_a_run() -> None:
    lines = [help._docstring(command).splitlines()[0] for command in help.COMMANDS]
    called = [match[1].split() for line in lines if (match := re.match("`python -m ([^`]*)`", line))]
    with_options = [words for words in called if any(re.match(r"'?[a-z.]+=", word) for word in words)]
    assert len(with_options) >= 5
    assert [words for words in with_options if not words[1].startswith("experiment=")] == []


@pytest.mark.parametrize("command", sorted(help.COMMANDS))
def test_help_tells_purpose_options_and_two_examples_and_exits_with_0(command, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", [command, "--help"])
    with pytest.raises(SystemExit) as left:
        # run_module takes the place of __main__ only in part; `python -m` finds the name in its spec
        monkeypatch.setattr(help, "running", lambda: command)
        runpy.run_module(command, run_name="__main__")
    assert not left.value.code
    text = capsys.readouterr().out
    examples = text.split("examples:\n")[1].splitlines()
    assert len([line for line in examples if line.startswith(f"  python -m {command}")]) == 2
    docstring = help._docstring(command)
    assert docstring and docstring.splitlines()[0] in text
    for key in help.COMMANDS[command][0]:
        assert f"\n  {key}." in text
    assert max(map(len, text.splitlines())) < 200


def test_the_name_of_the_command_is_what_python_runs() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "slurm.submit", "--help"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert "cluster.signal_s=120" in result.stdout


def test_the_version_is_ours_and_not_hydras(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["train", "--version"])
    with pytest.raises(SystemExit) as left:
        conf.stage("train", lambda run: None)
    assert (left.value.code, capsys.readouterr().out) == (0, f"draftsmith {metadata.version('draftsmith')}\n")


@pytest.mark.parametrize("module", ["hydra", "torch"])
def test_an_interruption_while_a_command_is_imported_is_one_line(tmp_path, module) -> None:
    (tmp_path / f"{module}.py").write_text("raise KeyboardInterrupt\n")  # Ctrl-C, at an import that takes long
    result = subprocess.run(
        [sys.executable, "-m", "train", "experiment=demo"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (result.returncode, result.stdout) == (130, "")
    assert result.stderr == "train: interrupted; run it again to go on\n"


@pytest.mark.parametrize("command", sorted(help.COMMANDS))
def test_b43_every_example_composes(command) -> None:
    for example in help.COMMANDS[command][1]:
        words = shlex.split(example)
        if any(word.startswith(("experiment=", "name=")) for word in words):
            fixed = [word for word in words if word != "--multirun"]
            run = conf.load(fixed) if fixed == words else expand(fixed).base
            assert run.name


def test_options_are_explained_in_the_words_of_their_sections() -> None:
    told = help.explained(type(conf.load(["name=a", "target.path=b"]).trainer))
    assert told["pack_tokens"] == "documents are laid end to end up to this many tokens."
    assert told["validate_every"] == told["checkpoint_every"] == "in optimizer steps; both also happen at the end."
    assert told["strategy"].startswith("how processes share the step") and told["strategy"].endswith("with another.")
