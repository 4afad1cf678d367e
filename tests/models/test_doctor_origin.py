"""The doctor, and the evaluation, hold an export of ours to what it says that it was when it was written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from models.artefact import differences, tensor_sha256
from models.doctor import diagnose
from models.errors import Refused
from models.export import load_export
from models.heads import IDS
from tests.models.layouts import Edit, as_speculators, changed, exported, rope_of_transformers_5
from tests.models.test_doctor import all_fresh, fresh, key, norms_of_ones, run, tensor, without


@pytest.fixture(scope="module")
def good(target, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("good") / "export"
    exported(target, directory, norm_output=True)
    return directory


def nested(config: dict[str, Any], _: Any) -> None:
    config["eagle_config"]["norm_before_fc"] = True


EDITS: dict[str, tuple[Edit, str]] = {
    "flag off": (key(norm_output=False), "norm_output: was True when it was exported, is False: not served as it"),
    "flag on": (key(norm_before_residual=True), "norm_before_residual: was False when it was exported, is True: not"),
    "flag gone": (without("norm_output"), "norm_output: was True when it was exported, is missing: not served as it"),
    "nested flag": (nested, "eagle_config.norm_before_fc: was missing when it was exported, is True: not served"),
    "epsilon": (key(rms_norm_eps=1e-3), "rms_norm_eps: was 1e-06 when it was exported, is 0.001: not served as it"),
    "rope": (key(rope_theta=10_000.0), "rope_theta: was 50000.0 when it was exported, is 10000.0: not served as it"),
    "planes": (key(**{IDS: [2, 4, 6]}), f"{IDS}: was [2, 4, 5] when it was exported, is [2, 4, 6]: not served as"),
    "scale": (key(logit_scale=0.5), "logit_scale: was missing when it was exported, is 0.5: not served as it was"),
    "context": (
        key(max_position_embeddings=1023),
        "max_position_embeddings: was 1024 when it was exported, is 1023: n",
    ),
}


@pytest.mark.parametrize("edit", EDITS)
def test_b36_an_edited_key_of_an_export_of_ours_is_named_with_what_it_was_and_is(
    good, target, tmp_path, monkeypatch, capsys, edit
):
    change, told = EDITS[edit]
    head = changed(good, tmp_path / "head", change, own=True)
    for asked in ((), ("--target", target.path)):
        assert run(monkeypatch, head, *asked) == 1
        assert f"wrong: vLLM and SGLang: {told}" in capsys.readouterr().out


@pytest.mark.parametrize("edit", EDITS)
def test_b36_the_evaluation_refuses_an_edited_export_and_names_the_key(good, tmp_path, edit):
    change, told = EDITS[edit]
    with pytest.raises(
        Refused, match=rf"config\.json was edited: {told.split(':')[0]} was .*is .*export` for this run"
    ):
        load_export(changed(good, tmp_path / "head", change, own=True))


def test_what_no_engine_reads_is_a_note_and_another_spelling_none(good, target, tmp_path):
    edits = key(eos_token_id=7, my_own="x", max_position_embeddings=4096)
    found = diagnose(changed(good, tmp_path / "notes", edits, own=True), target)
    assert {finding.about for finding in found} == {"eos_token_id", "my_own", "max_position_embeddings"}
    assert not any(finding.wrong for finding in found)
    assert diagnose(changed(good, tmp_path / "spelt", rope_of_transformers_5, own=True), target) == []


def test_a_tensor_that_was_changed_after_the_export_is_found_and_not_evaluated(good, target, tmp_path):
    head = changed(good, tmp_path / "head", tensor("lm_head.weight", lambda weight: weight * 1.5), own=True)
    assert "lm_head.weight is not the tensor that was exported" in str([f"{f.about} {f.text}" for f in diagnose(head)])
    with pytest.raises(Refused, match=r"lm_head\.weight is not the tensor that was exported"):
        load_export(head)


UNTRAINED: dict[str, Edit] = {
    "weights": all_fresh,
    "fc.weight": tensor("fc.weight", fresh),
    "lm_head.weight": tensor("lm_head.weight", torch.zeros_like),
    "norms": norms_of_ones,
    "norm.weight": tensor("norm.weight", torch.ones_like),
    "midlayer.hidden_norm.weight": tensor("midlayer.hidden_norm.weight", torch.zeros_like),
}


@pytest.mark.parametrize("about", UNTRAINED)
def test_an_export_of_ours_that_was_hardly_trained_is_sound_with_a_note_and_a_strangers_is_not(
    good, target, tmp_path, monkeypatch, capsys, about
):
    edited = changed(good, tmp_path / "head", UNTRAINED[about], own=True)
    assert [f.wrong for f in diagnose(edited, target) if f.about == about and "exported" not in f.text] == [True]
    record = json.loads((edited / "export.json").read_text())
    for name, value in load_file(edited / "model.safetensors").items():
        record["tensors"][name]["sha256"] = tensor_sha256(value)
    (edited / "export.json").write_text(json.dumps(record))
    (note,) = diagnose(edited, target)
    assert note.about == about and note.text.endswith(": as it was exported") and not note.wrong
    capsys.readouterr()
    assert run(monkeypatch, edited, "--target", target.path) == 0
    (edited / "export.json").unlink()
    assert run(monkeypatch, edited, "--target", target.path) == 1


def test_an_export_of_before_configurations_were_recorded_is_still_sound_and_still_read(good, target, tmp_path):
    head = changed(good, tmp_path / "head", lambda *_: None, own=True)
    record = json.loads((head / "export.json").read_text())
    del record["config"], record["target_type"]
    (head / "export.json").write_text(json.dumps(record))
    assert diagnose(head, target) == []
    found, wanted = (load_export(each)[0].state_dict() for each in (head, good))
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("own", [{"rope_type": "default", "rope_theta": 777.0}, {"rope_type": "yarn"}], ids=str)
def test_b34_a_head_of_ours_that_rotates_otherwise_on_purpose_is_sound_with_a_note(target, tmp_path, own):
    yarn = {"rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 128, "attention_factor": 1.5}
    rope = own if "rope_theta" in own else own | yarn
    exported(target, tmp_path / "export", rope_parameters=rope)
    (note,) = diagnose(tmp_path / "export", target)
    assert not note.wrong and note.about == "rope" and "as it was trained (export.json)" in note.text
    foreign = changed(tmp_path / "export", tmp_path / "foreign", lambda *_: None)
    assert [finding.wrong for finding in diagnose(foreign, target) if finding.about == "rope"] == [True]
    edited = changed(tmp_path / "export", tmp_path / "edited", key(rope_theta=778.0), own=True)
    told = [finding.text for finding in diagnose(edited, target) if finding.wrong and finding.about == "rope"]
    assert "positions are not rotated as in training" in str(told)


def test_an_export_in_the_speculators_dialect_is_held_to_its_record_too(good, target, tmp_path):
    speculators = changed(good, tmp_path / "head", as_speculators, own=True)
    record = json.loads((speculators / "export.json").read_text())
    record["config"] = json.loads((speculators / "config.json").read_text())
    (speculators / "export.json").write_text(json.dumps(record))
    assert diagnose(speculators, target, "vLLM") == []
    edited = changed(speculators, tmp_path / "edited", key(norm_output=False), own=True)
    (found,) = [finding for finding in diagnose(edited, target, "vLLM") if finding.wrong]
    assert found.about == "norm_output" and "was True when it was exported, is False" in found.text


def test_differences_are_told_by_dotted_key_and_null_is_missing():
    was, now = {"a": 1, "b": {"c": [1], "d": 2}, "e": None}, {"b": {"c": [2], "d": 2}, "f": 0}
    assert list(differences(was, now)) == [("a", 1, None), ("b.c", [1], [2]), ("f", None, 0)]
    assert list(differences(was, was)) == []
