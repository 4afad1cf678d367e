"""The card of an export says what is known of the head and nothing else; the hub hears of it only when asked."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
from omegaconf import OmegaConf

import conf
from models.artefact import file_sha256, write_json
from models.card import Story, public_name, write_card
from models.config import ExportConfig
from models.errors import Refused
from models.export import export_head, named, push
from tests.models.heads import save_trained

ROOT = Path(__file__).resolve().parents[2]
SECRET = "hf_not-to-be-found"


@pytest.fixture
def run(make_target, tmp_path):
    """A run with a finished training: its directory."""
    directory = tmp_path / "runs/tiny"
    checkpoint = directory / "train/checkpoints/step-0000012"
    target, _ = save_trained(make_target(), checkpoint)
    write_json(
        checkpoint / "state.json",
        {
            "progress": {"step": 12},
            "features": {"target_config": "c0ffee", "tokenizer": "70c3", "backend": "transformers", "encoding": "bf16"},
            "config": {"objective": {"unroll_steps": 5}, "optim": {"lr": 0.00025}, "trainer": {"epochs": 3}},
        },
    )
    best = {"best": "checkpoints/step-0000012", "last": "checkpoints/step-0000012"}
    data = {"training": 40, "validation": 8, "tokens": 1234, "rows": 567}
    write_json(directory / "train/manifest.json", {"steps": 20, "coverage": 0.98, "data": data, "checkpoints": best})
    lines = [
        {"step": 12, "loss": 1.0},
        {
            "step": 12,
            "val_al": 2.25,
            "val_al_sampled": 2.0,
            "val_accuracy": [0.5, 0.25, None],
        },  # none held out is as long
        {"step": 20, "val_al": 9.99, "val_accuracy": [0.9]},
    ]
    (directory / "train/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_json(directory / "features/manifest.json", {"inputs": {"data.conversations (contents)": ["ebd0ca0a"]}})
    export_head(checkpoint, directory / "export", target, ExportConfig())
    return directory


def card(run: Path, **options) -> str:
    """The card's text; it is written twice, and the second time changes nothing."""
    settings = ExportConfig(**{"base_model": "owner/target"} | options)
    story = Story.of(run, run / "train/checkpoints/step-0000012")
    write_card(run / "export", story, settings, "bfloat16")
    assert write_card(run / "export", story, settings, "bfloat16") is False
    return (run / "export/README.md").read_text()


def evaluation(run: Path, weights: str) -> None:
    """Leave an evaluation of these weights."""
    cell = {"route": "all", "concurrency": 4, "al": 2.9, "output_tokens_per_s": 81.5}
    routes = {
        "code": {"al": 3.125, "per_position": [0.9, 0.7], "rounds": 70, "tokens": 300},
        "chat": {"al": None, "per_position": [], "rounds": 0, "tokens": 0},
    }
    write_json(
        run / "eval/summary.json",
        {
            "weights": weights,
            "machine": "a machine",
            "k": 4,
            "best_k": 2,
            "reference": {
                "al": 2.875,
                "per_position": [0.8, 0.6],
                "rounds": 100,
                "routes": routes,
                "how": "greedy, a tree",
            },
            "served": {
                "engine": "vllm",
                "version": "0.32.0",
                "dtype": "float32",
                "k": 2,
                "cells": [cell | {"method": "none", "al": None}, cell | {"method": "eagle3"}],
            },
        },
    )


def test_the_card_tells_target_data_training_license_and_versions(run):
    text = card(run, license="apache-2.0")
    front = OmegaConf.create(text.split("---")[1])
    assert front == {"license": "apache-2.0", "base_model": "owner/target", "tags": ["speculative-decoding", "eagle3"]}
    record = json.loads((run / "export/export.json").read_text())
    told = [
        *record["target"].values(), file_sha256(run / "export/model.safetensors"), "ebd0ca0a", "c0ffee", "70c3",
        "| documents | 40 |", "| supervised rows | 567 |", "| learning rate | 0.00025 |", "step-0000012",
        "License: apache-2.0", "torch 2.", "transformers 5.", "100 of ",
    ]  # fmt: skip
    assert [each for each in told if each not in text] == []
    assert not re.search(r"(^|[\s\"'`(])/\w", text.replace("```bash", "")), "it names a path of this machine"
    assert "license" not in OmegaConf.create(card(run).split("---")[1])
    local = card(run, base_model="a-directory")
    assert "base_model" not in OmegaConf.create(local.split("---")[1]) and "`a-directory` stands for" in local
    assert "stands for" not in text


def test_the_card_has_the_evaluations_acceptance_by_route_when_it_measured_these_weights(run):
    assert "Not evaluated yet" in card(
        run
    ) and "AL 2.250 greedy, 2.000 sampled; accuracy by position 0.500, 0.250, n/a" in card(run)
    evaluation(run, file_sha256(run / "export/model.safetensors"))
    text = card(run)
    assert "included), greedy, a tree, measured by" in text
    assert "| all | 2.875 | 0.800, 0.600 | 100 |" in text and "| code | 3.125 | 0.900, 0.700 | 70 |" in text
    assert "| chat | n/a | n/a | 0 |" in text and "| 4 | 2.900 | 81.5 |" in text
    assert "Not evaluated" not in text and text.count("| 4 |") == 1
    evaluation(run, "of another head")
    assert "Not evaluated with these weights" in card(run) and "2.875" not in card(run)


def test_the_card_tells_of_the_server_alone_where_the_reference_decoder_was_left_out(run):
    evaluation(run, file_sha256(run / "export/model.safetensors"))
    summary = json.loads((run / "eval/summary.json").read_text())
    write_json(run / "eval/summary.json", summary | {"reference": None, "best_k": None})
    assert "| 4 | 2.900 | 81.5 |" in card(run) and "reference decoder" not in card(run)


def test_the_card_tells_of_the_head_alone_whatever_was_measured_beside_it(run):
    evaluation(run, file_sha256(run / "export/model.safetensors"))
    summary = json.loads((run / "eval/summary.json").read_text())
    served = summary["served"]
    served["cells"].append({**served["cells"][1], "method": "ngram", "al": 1.25, "output_tokens_per_s": 44.0})
    served |= {"head": "eagle3", "methods": {"eagle3": {"method": "eagle3"}, "ngram": {"method": "ngram"}}}
    write_json(run / "eval/summary.json", summary)
    assert "| 4 | 2.900 | 81.5 |" in card(run) and "44.0" not in card(run)
    served["cells"] = [each for each in served["cells"] if each["method"] != "eagle3"]
    served |= {"head": "ngram", "methods": {"ngram": {"method": "ngram"}}}
    write_json(run / "eval/summary.json", summary)
    assert "44.0" not in card(run) and "| all | 2.875 |" in card(run)


def test_the_cards_commands_draft_the_tokens_that_were_asked_for_or_are_best_or_were_trained(run):
    def drafted(text: str) -> tuple[int, int, int]:
        found = re.search(r'"num_speculative_tokens": (\d+)', text), re.search(r"--speculative-num-steps (\d+)", text)
        root = re.search(r"--speculative-num-draft-tokens (\d+)", text)
        assert found[0] and found[1] and root
        return int(found[0][1]), int(found[1][1]), int(root[1])

    assert drafted(card(run)) == (5, 5, 6)
    evaluation(run, file_sha256(run / "export/model.safetensors"))
    assert drafted(card(run)) == (2, 2, 3)
    assert drafted(card(run, k=7)) == (7, 7, 8)
    text = card(run, push_to="me/head")
    command = re.search(r"vllm serve owner/target --dtype bfloat16 --speculative-config '(.*)'", text)
    assert command and json.loads(command[1]) == {"method": "eagle3", "model": "me/head", "num_speculative_tokens": 2}
    assert "--speculative-draft-model-path me/head" in text


def test_a_head_from_elsewhere_has_a_card_that_claims_nothing(run, make_target, tmp_path):
    target, _ = save_trained(make_target(), tmp_path / "foreign")
    export_head(tmp_path / "foreign", tmp_path / "export", target, ExportConfig())
    story = Story.of(run, tmp_path / "foreign")
    write_card(tmp_path / "export", story, ExportConfig(base_model="owner/target"), "bfloat16")
    text = (tmp_path / "export/README.md").read_text()
    assert "neither evaluated nor trained here" in text and "n/a" in text and "2.25" not in text
    assert "does not say what it was trained on" in text and "License: not stated" in text


def test_two_exports_of_a_checkpoint_have_the_same_card(run, tmp_path, make_target):
    text = card(run)
    for name in ("a", "b"):
        checkpoint = run / "train/checkpoints/step-0000012"
        target, _ = save_trained(make_target(), tmp_path / "again")
        export_head(checkpoint, tmp_path / name, target, ExportConfig())
        write_card(tmp_path / name, Story.of(run, checkpoint), ExportConfig(base_model="owner/target"), "bfloat16")
        assert (tmp_path / name / "README.md").read_text() == text


@pytest.mark.parametrize(
    "given", ["{}", "{}/", "{}/.", "{}/../{name}", "./{name}", "./{name}/", "{name}", "sub/../{name}", "~/{name}"]
)
def test_a_target_given_as_a_directory_is_called_by_its_last_component(tmp_path, monkeypatch, given):
    directory = tmp_path / "home/some-target"
    directory.mkdir(parents=True)
    (directory.parent / "sub").mkdir()
    monkeypatch.chdir(directory.parent)
    monkeypatch.setenv("HOME", str(directory.parent))
    assert public_name(given.format(directory, name=directory.name)) == "some-target"


@pytest.mark.parametrize(
    ("known", "told"),
    [
        ("owner/some-target", "owner/some-target"),
        ("/data/models/some", "target"),
        ("./some", "target"),
        ("../some", "target"),
        ("runs/x/y", "target"),
        ("some", "target"),
        ("", "target"),
        (3, "target"),
        (None, "target"),
    ],
)
def test_a_targets_configuration_names_it_only_with_a_name_on_the_hub(tmp_path, known, told):
    (tmp_path / "target").mkdir()
    (tmp_path / "target/config.json").write_text(json.dumps({"_name_or_path": known}))
    assert public_name(f"{tmp_path}/target/") == told
    assert public_name("owner/on-the-hub") == "owner/on-the-hub"


@pytest.mark.parametrize("slash", ["", "/"])
def test_no_path_of_the_target_is_on_the_card(run, make_target, slash):
    settings = named(ExportConfig(), Story.of(run, run / "nowhere"), f"{make_target()}{slash}")
    assert settings.base_model == "target"
    text = card(run, base_model=settings.base_model)
    assert "vllm serve target " in text and str(run.parent) not in text


class Hub:
    """Stands in for the hub's client; `calls` is what it was asked."""

    calls: list[tuple] = []
    fault: Exception | None = None

    def __init__(self, token):
        self.calls.append(("token", token))

    def create_repo(self, repository, *, private, exist_ok):
        if self.fault:
            raise self.fault
        self.calls.append(("create", repository, private, exist_ok))

    def upload_folder(self, *, repo_id, folder_path, commit_message):
        self.calls.append(("upload", repo_id, sorted(path.name for path in Path(folder_path).iterdir())))


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(Hub, "calls", [])
    monkeypatch.setattr(Hub, "fault", None)
    monkeypatch.setenv("HF_TOKEN", SECRET)
    return Hub


def test_a_push_uploads_the_whole_export_to_a_private_repository_with_the_environments_token(run, hub):
    card(run)
    push(run / "export", "me/head")
    files = ["README.md", "config.json", "export.json", "model.safetensors"]
    assert hub.calls == [("token", SECRET), ("create", "me/head", True, True), ("upload", "me/head", files)]


def test_a_push_without_token_network_or_leave_is_refused_in_one_line(run, hub, monkeypatch):
    for fault in (OSError("no route"), huggingface_hub.errors.OfflineModeIsEnabled("offline\nand more")):
        monkeypatch.setattr(Hub, "fault", fault)
        with pytest.raises(Refused, match=r"export\.push_to=me/head: the hub cannot be reached or refuses") as told:
            push(run / "export", "me/head")
        assert "\n" not in str(told.value) and SECRET not in str(told.value)
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(Refused, match="set HF_TOKEN in the environment"):
        push(run / "export", "me/head")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(Refused, match="needs a network, and HF_HUB_OFFLINE is set"):
        push(run / "export", "me/head")
    assert [call for call in hub.calls if call[0] != "token"] == []


def test_the_command_exports_writes_the_card_and_keeps_the_token_to_itself(run, make_target, tmp_path):
    target = make_target()
    arguments = [sys.executable, "-m", "models.export", "name=tiny", f"root={run.parent}", f"target.path={target}"]

    def export(*more: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "HF_TOKEN": SECRET}
        return subprocess.run(
            [*arguments, *more], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
        )

    done = export("export.license=mit", "target.dtype=float32")
    assert done.returncode == 0, done.stderr
    assert "License: mit" in (run / "export/README.md").read_text()
    assert "nothing to do" in export("export.license=mit", "target.dtype=float32", "trainer.epochs=7").stdout
    assert "epochs: 7" in (run / "config/export.yaml").read_text(), "it is complete for these settings, too"
    refused = export("export.push_to=me/head")
    assert refused.returncode == 2 and "export.push_to=me/head needs a network" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    found = [path for path in run.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert found == [] and SECRET not in done.stdout + done.stderr + refused.stderr


@pytest.mark.parametrize(
    "override",
    [
        "export.base_model=/data/target",
        "export.base_model=~/t",
        "export.base_model=./t",
        "export.dialect=gguf",
        "export.k=0",
        "export.push_to=nowhere",
        "export.dtype=float8",
        "export.kk=1",
    ],
)
def test_b43_an_impossible_export_is_refused_with_its_key(override):
    with pytest.raises(Refused, match=override.split("=")[0].split(".")[1]):
        conf.load(["name=test", "target.path=somewhere", override])
