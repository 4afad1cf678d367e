"""The documents: every block in them parses or composes, links lead somewhere, and the first page runs as it stands."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import conf

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(page: Path, kind: str) -> Iterator[str]:
    """The fenced blocks of a kind."""
    yield from (text for name, text in FENCED.findall(page.read_text()) if name == kind)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_every_block_says_what_it_is_and_parses(page: Path) -> None:
    assert {name for name, _ in FENCED.findall(page.read_text())} <= {"sh", "yaml", "json", "text"}
    for text in blocks(page, "json"):
        json.loads(text)
    for text in blocks(page, "sh"):
        checked = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
        assert not checked.stderr, checked.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_every_link_leads_to_a_file(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / link).exists(), f"{page.name} links to {link}"


def test_the_configurations_in_the_documents_compose(tmp_path: Path) -> None:
    found = 0
    for page in PAGES:
        for text in blocks(page, "yaml"):
            group = "experiment" if "_global_" in text else "cluster"
            (tmp_path / group).mkdir(exist_ok=True)
            (tmp_path / group / "mine.yaml").write_text(text)
            given = [] if group == "experiment" else ["name=mine", "target.path=somewhere"]
            run = conf.load([f"hydra.searchpath=[file://{tmp_path}]", *given, f"{group}=mine"])
            assert run.name == "mine"
            found += 1
    assert found == 2


def commands(page: str) -> list[list[str]]:
    """The commands of ours on a page, as they stand, without `python -m`."""
    lines = [line for text in blocks(ROOT / page, "sh") for line in text.replace("\\\n", " ").splitlines()]
    return [shlex.split(line)[2:] for line in lines if line.startswith("python -m ")]


def run(words: list[str], given: list[str]) -> str:
    """What a command prints with these options besides its own."""
    module, overrides = words[0], words[1:]
    server = ["engine.kind=none"] if module == "serve_eval" else []
    done = subprocess.run(
        [sys.executable, "-m", module, *overrides, *given, *server],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, f"{words}: {done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def given(tmp_path_factory, tiny_target_dir, tiny_conversations, tiny_prompts) -> list[str]:
    """What makes the pages' run one of seconds, in a folder of its own."""
    return [
        f"root={tmp_path_factory.mktemp('runs')}",
        f"target.path={tiny_target_dir}",
        "target.dtype=float32",
        f"data.conversations=[{tiny_conversations}]",
        "data.validation_share=0.2",
        "draft.vocab_size=64",
        "objective.unroll_steps=3",
        "trainer.device=cpu",
        "trainer.precision=fp32",
        "trainer.compile=false",
        "trainer.pack_tokens=256",
        f"eval.prompts=[{tiny_prompts}]",
        "eval.concurrencies=[1,2]",
        "eval.max_new_tokens=8",
    ]


@pytest.fixture(scope="module")
def made(given: list[str]) -> Path:
    """The folder of the run of docs/getting-started.md, whose commands have run as they stand."""
    folder = Path(given[0].removeprefix("root=")) / "one_gpu"
    page = commands("docs/getting-started.md")
    stages = ["featurize", "train", "models.export", "serve_eval"]
    assert [words[0] for words in page] == [*stages, "featurize.inspect", *stages]
    for words in page:
        told = run(words, given)
        if "dry_run=true" in words:
            assert "writes: " in told
            assert not folder.exists()
    return folder


def test_the_first_page_runs_on_a_tiny_target(made: Path) -> None:
    for left in ("features/manifest.json", "train/curves.png", "export/export.json", "eval/report.html"):
        assert (made / left).exists()


@pytest.mark.parametrize("page", ["data", "training", "choosing-k", "serving"])
def test_what_needs_no_engine_on_the_other_pages_runs_on_what_the_first_made(
    page: str, made: Path, given: list[str]
) -> None:
    here = {"featurize.inspect", "featurize.verify", "train", "train.sweep"}
    ours = [
        [word.replace("experiment=demo", "experiment=one_gpu") for word in words]
        for words in commands(f"docs/{page}.md")
        if words[0] in here or "engine=none" in words
    ]
    assert ours
    for words in ours:
        assert run(words, given).strip(), f"{words} says nothing"
