"""What the doctor says of heads of others against their target: no fault where engines see none, each where they do."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from models.config import TargetConfig
from models.doctor import diagnose
from models.doctor_config import judge_planes
from models.doctor_values import map_faults
from models.heads import IDS, HeadFiles
from models.rope import attention_scales
from models.target import describe_target
from tests.models.layouts import TARGET, Edit, changed, exported, sharded
from tests.models.test_doctor import added, run
from tests.models.test_export_families import family

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 128}
USUAL = 0.1 * math.log(8.0) + 1


@pytest.fixture(scope="module")
def good(target, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("good") / "export"
    exported(target, directory)
    return directory


def scaling(**values: Any) -> Edit:
    """Change rope_scaling; None takes a key away."""

    def edit(config: dict[str, Any], _: Any) -> None:
        merged = config["rope_scaling"] | values
        config["rope_scaling"] = {key: value for key, value in merged.items() if value is not None}

    return edit


@pytest.mark.parametrize(
    ("values", "vllm", "sglang"),
    [
        ({}, USUAL, USUAL),
        ({"attention_factor": 1.5}, 1.5, USUAL),
        ({"attn_factor": 1.5}, USUAL, 1.5 * USUAL),
        ({"attention_factor": 1.5, "attn_factor": 1.5 / USUAL}, 1.5, 1.5),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0, 1.0),
        ({"mscale": 1.0, "mscale_all_dim": 0.0}, USUAL, USUAL),
        ({"mscale": 2.0}, USUAL, USUAL),
        ({"mscale": 1.0, "mscale_all_dim": 1.0, "attn_factor": 2.0}, 1.0, 2.0),
        ({"factor": 0.5}, 1.0, 1.0),
    ],
    ids=str,
)
def test_b34_each_engine_takes_yarns_attention_factor_from_its_own_key(values, vllm, sglang):
    assert attention_scales(YARN | values) == pytest.approx((vllm, sglang))


@pytest.mark.parametrize("factor", [1.5, None])
@pytest.mark.parametrize(("attn", "wrong"), [(None, True), (1.7, True), ("right", False)])
def test_b34_a_lost_or_wrong_attn_factor_is_found(make_target, tmp_path, monkeypatch, capsys, factor, attn, wrong):
    own = YARN if factor is None else YARN | {"attention_factor": factor}
    target = describe_target(TargetConfig(path=str(make_target(rope_parameters=own)), dtype="float32"))
    exported(target, tmp_path / "export")
    if attn == "right":
        attn = 1.0 if factor is None else factor / USUAL
    elif attn is None and factor is None:
        attn = 0.5
    head = changed(tmp_path / "export", tmp_path / "head", scaling(attn_factor=attn))
    sglang = f"{(1.0 if attn is None else attn) * USUAL:g}"
    assert run(monkeypatch, head, "--target", target.path) == int(wrong)
    told = capsys.readouterr().out
    assert (f"wrong: SGLang: attn_factor: makes SGLang multiply cosines and sines by {sglang} instead" in told) == wrong
    assert run(monkeypatch, head) == int(wrong)
    assert ("vLLM and SGLang: attn_factor: makes SGLang multiply" in capsys.readouterr().out) == wrong


def test_b34_a_lost_attention_factor_is_found(make_target, tmp_path):
    target = describe_target(TargetConfig(path=str(make_target(rope_parameters=YARN | {"attention_factor": 1.5}))))
    exported(target, tmp_path / "export")
    head = changed(tmp_path / "export", tmp_path / "head", scaling(attention_factor=None))
    assert [(f.about, f.engines) for f in diagnose(head, target)] == [("rope", ("vLLM", "SGLang"))]


@pytest.mark.parametrize("buffer", ["rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_pos_emb.inv_freq"])
@pytest.mark.parametrize("prefix", ["midlayer", "layers.0"])
def test_rotary_caches_that_both_engines_skip_are_no_fault(good, target, tmp_path, buffer, prefix):
    edit = added(f"{prefix}.self_attn.{buffer}", torch.ones(8))
    assert diagnose(changed(good, tmp_path / "head", edit), target) == []


def test_b29_a_small_map_without_neighbours_is_no_list_of_ids(target, tmp_path):
    assert list(map_faults(torch.tensor([1, 3, 5]), None, 10)) == []  # ids 1, 4 and 7
    assert "target ids" in next(map_faults(torch.tensor([1, 4, 9]), None, 10))  # read as offsets, beyond the end
    ids = torch.arange(0, 64_000, 2)
    assert "target ids" in next(map_faults(ids, None, 151_936))  # within it, but 32,000 without one neighbour

    def spread(_: Any, tensors: dict[str, torch.Tensor]) -> None:
        tensors["d2t"] = torch.tensor([1, 3, 5])
        del tensors["t2d"]

    exported(target, tmp_path / "export", vocab=3)
    found = diagnose(changed(tmp_path / "export", tmp_path / "head", spread), target)
    (note,) = [finding for finding in found if finding.about == "d2t"]
    assert not note.wrong and "always grow" in note.text


def test_gemma_3_is_served_by_vllm_with_an_argument_and_by_sglang_not_at_all(tmp_path, monkeypatch, capsys):
    family("gemma3", tmp_path / "target")
    target = describe_target(TargetConfig(path=str(tmp_path / "target"), dtype="float32"))
    exported(target, tmp_path / "export", vocab=30)
    for asked in ((), ("--target", target.path)):
        assert run(monkeypatch, tmp_path / "export", *asked) == 1
        told = capsys.readouterr().out
        assert "wrong: SGLang: target: is of a family that SGLang does not serve with a head" in told
        assert "note: vLLM: target: needs vLLM to be started with --model-impl transformers" in told
        assert run(monkeypatch, tmp_path / "export", *asked, "--engine", "vllm") == 0
        capsys.readouterr()


@pytest.mark.parametrize(("model_type", "ids", "sound"), [("llama", [3, 4], False), ("deepseek_v3", [3, 4], True),
    ("deepseek_v3", [2, 3], False), (None, [2, 3], True)])  # fmt: skip
def test_b36_sglangs_ids_are_read_as_its_deepseek_reads_them(target, tmp_path, model_type, ids, sound):
    exported(target, tmp_path / "export", layers=(3, 4))
    head = changed(tmp_path / "export", tmp_path / "head", lambda config, _: config["eagle_config"].update({IDS: ids}))
    assert (list(judge_planes(HeadFiles.open(head), 8, model_type)) == []) == sound


@pytest.mark.parametrize("text", ["[]", "3", '{"weight_map": []}', "{}"])
def test_an_index_that_is_none_is_one_line(good, tmp_path, monkeypatch, capsys, text):
    head = sharded(changed(good, tmp_path / "head", lambda *_: None))
    (head / "model.safetensors.index.json").write_text(text)
    assert run(monkeypatch, head) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert "model.safetensors.index.json is no index of shards" in told


def test_the_message_about_a_target_names_the_doctors_own_option(good, tmp_path, monkeypatch, capsys):
    for place in (tmp_path / "nowhere", tmp_path):
        assert run(monkeypatch, good, "--target", place) == 2
        (told,) = capsys.readouterr().err.splitlines()
        assert f"--target {place} " in told and "target.path" not in told


def test_an_export_for_another_target_says_which_hash_differs(good, make_target, tmp_path):
    other = describe_target(TargetConfig(path=str(make_target(**TARGET | {"rms_norm_eps": 1e-4})), dtype="float32"))
    made_for = json.loads((good / "export.json").read_text())["target"]["config_hash"]
    found = [finding for finding in diagnose(good, other) if finding.about == "export.json"]
    assert [(f.wrong, made_for in f.text and other.config_hash in f.text) for f in found] == [(False, True)]
