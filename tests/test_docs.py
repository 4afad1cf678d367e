"""The documents: every block in them parses or composes, links lead somewhere, and the first page runs as it stands."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import conf
from tests.models.mtp_targets import save_native

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
    found = [shlex.split(line, comments=True)[2:] for line in lines if line.startswith("python -m ")]
    return [words for words in found if (ROOT / words[0].partition(".")[0]).is_dir()]


def run(words: list[str], given: list[str]) -> str:
    """What a command prints with these options besides its own, when it ends well."""
    done = subprocess.run(
        [sys.executable, "-m", *words, *given],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, f"{words}: {done.stderr}"
    assert done.stdout.strip(), f"{words} says nothing"
    return done.stdout


def tiny(target: Path, conversations: Path, prompts: Path) -> list[str]:
    """What makes any run one of seconds."""
    return [
        f"target.path={target}",
        "target.dtype=float32",
        f"data.conversations=[{conversations}]",
        "data.validation_share=0.2",
        "objective.unroll_steps=3",
        "trainer.device=cpu",
        "trainer.precision=fp32",
        "trainer.compile=false",
        "trainer.pack_tokens=256",
        f"eval.prompts=[{prompts}]",
        "eval.max_new_tokens=8",
    ]


@pytest.fixture(scope="module")
def given(tmp_path_factory, tiny_target_dir, tiny_conversations, tiny_prompts) -> list[str]:
    """What makes the pages' run one of seconds, in a folder of its own, served by an engine that is a script."""
    engine = tmp_path_factory.mktemp("engine") / "bin/python"
    engine.parent.mkdir()
    engine.write_text(f'#!/bin/sh\nexec {sys.executable} {ROOT / "tests/serve_eval/stub.py"} "$@"\n')
    engine.chmod(0o755)
    return [
        f"root={tmp_path_factory.mktemp('runs')}",
        *tiny(tiny_target_dir, tiny_conversations, tiny_prompts),
        "draft.vocab_size=64",
        f"engine.python={engine}",
        "engine.dtype=float32",
        "eval.concurrencies=[1,2]",
        "eval.requests_per_route=2",
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


NOT_HERE = {
    "featurize.generate": "asks a server of the target",
    "featurize featurize=vllm": "is about vLLM itself",
    "featurize experiment=streaming": "waits for a training of four processes beside it",
    "serve_eval.agreement": "is about vLLM's own benchmark",
    "serve_eval.gateway": "runs until it is stopped",
    "serve_eval.monitor": "runs until it is stopped",
}
"""Commands on the pages that no test of this file runs, and why; each has tests of its own."""


def runs_here(words: list[str]) -> bool:
    return not any(set(each.split()) <= set(words) for each in NOT_HERE)


@pytest.mark.parametrize("page", ["data", "training", "choosing-k", "serving"])
def test_the_other_pages_run_on_what_the_first_made(
    page: str, made: Path, given: list[str], tiny_target_dir: Path, tmp_path: Path
) -> None:
    stands_for = {
        "experiment=demo": "experiment=one_gpu",
        "DIR": str(made / "export"),
        "TARGET": str(tiny_target_dir),
        "OUT": str(tmp_path / "imported"),
        "runs/a": str(made),
        "runs/b": str(made),
    }
    ours = [words for words in commands(f"docs/{page}.md") if runs_here(words)]
    assert ours
    for words in ours:
        plain = words[0] in ("models.doctor", "models.importer", "serve_eval.compare")  # they take no options of a run
        run([stands_for.get(word, word) for word in words], [] if plain else given)


def test_the_page_on_mtp_runs_with_a_new_module_and_with_a_targets_own(
    given: list[str], tmp_path: Path, tiny_target_dir: Path, tiny_conversations: Path, tiny_prompts: Path
) -> None:
    layers = ["linear_attention", "full_attention"] * 4
    changes: dict[str, Any] = {
        "vocab_size": 400,
        "max_position_embeddings": 1024,
        "num_hidden_layers": 8,
        "layer_types": layers,
    }
    own = save_native("qwen3_5", tmp_path / "own", **changes)
    for file in tiny_target_dir.glob("tokenizer*"):
        shutil.copy(file, own)
    shutil.copy(tiny_target_dir / "chat_template.jinja", own)
    seen = set()
    for words in commands("docs/mtp.md"):
        target = own if "name=tuned" in words else tiny_target_dir
        served = [each for each in given if each.startswith(("root=", "engine.", "eval."))]
        run(words, [*tiny(target, tiny_conversations, tiny_prompts), *served])
        seen.add(words[1])
    assert seen == {"name=mine", "name=mine_mtp", "name=tuned"}


def test_the_page_on_slurm_shows_its_chains_without_a_slurm(given: list[str]) -> None:
    shown = [words for words in commands("docs/slurm.md") if "dry_run=true" in words]
    assert len(shown) == 4
    for words in shown:
        assert "sbatch" in run(words, given)
