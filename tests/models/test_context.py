"""A head has its target's context in both engines, which derive it from max_position_embeddings, whatever its rope."""

from __future__ import annotations

import json
from typing import Any

import pytest

from models.config import DraftConfig, ExportConfig, TargetConfig
from models.doctor import diagnose
from models.eagle3 import Eagle3Config
from models.errors import Refused
from models.export import export_head
from models.target import describe_target
from tests.models.heads import save_trained
from tests.models.layouts import changed, exported
from tests.models.test_export_families import family

LONG = 1024
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 128}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1e4},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "llama3": LLAMA3 | {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 128},
}
WANTED = {"default": LONG, "linear": 4 * LONG, "llama3": LONG, "yarn": LONG}
"""As vLLM 0.32 and SGLang 0.5.23 derive them: linear scaling is applied to what is written, the others are in it."""


def derived(config: dict[str, Any], engine: str) -> int:
    """The context that an engine derives from config.json, its rope in either layout, after its own source."""
    longest = config["max_position_embeddings"]
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if engine == "vllm":
        kept = "gemma3" in config["model_type"] or scaling.get("rope_type") in ("llama3", "yarn", "longrope")
    else:
        kept = "original_max_position_embeddings" in scaling or scaling.get("rope_type") == "llama3"
    return int(longest * (1 if kept else scaling.get("factor", 1)))


def read(directory) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text())


@pytest.mark.parametrize("kind", ROPES)
def test_b34_a_head_says_what_its_target_says_and_both_engines_derive_one_context(make_target, tmp_path, kind):
    target_dir = make_target(rope_parameters=dict(ROPES[kind]))
    target, _ = save_trained(target_dir, tmp_path / "checkpoint")
    assert target.context_length == WANTED[kind]
    export_head(tmp_path / "checkpoint", tmp_path / "export", target, ExportConfig())
    config = read(tmp_path / "export")
    assert config["max_position_embeddings"] == LONG
    for engine in ("vllm", "sglang"):
        assert derived(config, engine) == derived(read(target_dir), engine) == WANTED[kind]


@pytest.mark.parametrize("own", ROPES)
@pytest.mark.parametrize("kind", ROPES)
def test_b34_a_head_with_a_rope_of_its_own_has_no_less_context_than_its_target(make_target, tmp_path, kind, own):
    target = describe_target(TargetConfig(path=str(make_target(rope_parameters=dict(ROPES[kind])))))
    rope = ROPES[own] | ({"factor": 32.0} if own == "yarn" else {})
    exported(target, tmp_path / "export", rope_parameters=rope)
    config = read(tmp_path / "export")
    for engine in ("vllm", "sglang"):
        assert derived(config, engine) >= WANTED[kind]
    assert config["max_position_embeddings"] >= LONG
    assert not [finding for finding in diagnose(tmp_path / "export", target) if finding.wrong]


def test_b34_gemma_3_is_not_stretched_twice(tmp_path):
    family("gemma3", tmp_path / "target")  # its layers with full attention are scaled by 8
    target, _ = save_trained(tmp_path / "target", tmp_path / "checkpoint", vocab=30)
    assert target.context_length == 512 == derived(read(tmp_path / "target"), "vllm")
    export_head(tmp_path / "checkpoint", tmp_path / "export", target, ExportConfig())
    assert read(tmp_path / "export")["max_position_embeddings"] == 512
    found = diagnose(tmp_path / "export", target, "vLLM")
    assert not [finding for finding in found if finding.about in ("max_position_embeddings", "rope")]


@pytest.mark.parametrize("kind", ROPES)
def test_the_doctor_compares_contexts_as_the_engines_derive_them(make_target, tmp_path, kind):
    target = describe_target(TargetConfig(path=str(make_target(rope_parameters=dict(ROPES[kind])))))
    exported(target, tmp_path / "export")
    good = changed(tmp_path / "export", tmp_path / "good", lambda *_: None)
    assert diagnose(good, target) == []
    short = changed(tmp_path / "export", tmp_path / "short", lambda config, _: config.update(max_position_embeddings=9))
    found = {(finding.about, finding.engines) for finding in diagnose(short, target) if finding.wrong}
    wanted = {("max_position_embeddings", ("SGLang",))}
    assert found == wanted | ({("max_position_embeddings", ("vLLM",))} if kind == "yarn" else set())


def test_b34_a_yarn_of_the_heads_own_that_ends_before_the_targets_context_is_refused(make_target, tmp_path):
    target = describe_target(TargetConfig(path=str(make_target())))
    short = ROPES["yarn"] | {"factor": 4.0}
    with pytest.raises(Refused, match=r"draft\.rope_parameters reach 512 positions .* the target 1024"):
        Eagle3Config.for_target(target, (2, 4, 5), DraftConfig(rope_parameters=short))
    exported(target, tmp_path / "export", rope_parameters=ROPES["yarn"])
    scaling = {key: value for key, value in short.items() if key != "rope_theta"}
    foreign = changed(tmp_path / "export", tmp_path / "foreign", lambda config, _: config.update(rope_scaling=scaling))
    assert "has a table of 512 positions" in str([finding.text for finding in diagnose(foreign, target)])
