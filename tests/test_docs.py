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


def first_page() -> list[list[str]]:
    """The commands of docs/getting-started.md, as they stand."""
    lines = [line for text in blocks(ROOT / "docs/getting-started.md", "sh") for line in text.splitlines()]
    return [shlex.split(line)[2:] for line in lines]


def test_the_first_page_runs_on_a_tiny_target(tmp_path, tiny_target_dir, tiny_conversations, tiny_prompts) -> None:
    given = [
        f"root={tmp_path}",
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
    made = tmp_path / "one_gpu"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    commands = first_page()
    stages = ["featurize", "train", "models.export", "serve_eval"]
    assert [words[0] for words in commands] == [*stages, "featurize.inspect", *stages]
    for words in commands:
        module, overrides = words[0], words[1:]
        server = ["engine.kind=none"] if module == "serve_eval" else []
        done = subprocess.run(
            [sys.executable, "-m", module, *overrides, *given, *server],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, f"{words}: {done.stderr}"
        if "dry_run=true" in overrides:
            assert "writes: " in done.stdout
            assert not made.exists()
    for left in ("features/manifest.json", "train/curves.png", "export/export.json", "eval/report.html"):
        assert (made / left).exists()
