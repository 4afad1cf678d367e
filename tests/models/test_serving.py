"""What a family of targets needs is in the command of its server and on the card of its head."""

from __future__ import annotations

import json

import pytest

from models.card import Story, write_card
from models.checkpoint import describe, save_head
from models.config import DraftConfig, EngineConfig, ExportConfig
from models.export import engines_that_load, export_head
from models.mtp import MtpConfig
from models.native import load_native
from models.servers import command
from models.serving import remarks_on, vllm_arguments
from tests.models.heads import save_trained
from tests.models.mtp_targets import described, save_native
from tests.models.test_export_families import family

TRANSFORMERS = "--model-impl transformers"


@pytest.mark.parametrize("model_type", ["gemma3", "gemma3_text", "llama", None])
def test_the_launcher_starts_vllm_for_gemma_3_on_the_transformers_backend(tmp_path, model_type):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    engine = EngineConfig(python="true", arguments=["--enforce-eager"])
    for purpose in ((), ("--speculative-config", "{}")):
        words = command(engine, str(tmp_path), 8000, purpose)
        assert (TRANSFORMERS in " ".join(words)) == str(model_type).startswith("gemma3")
        assert words[-1] == "--enforce-eager", "what the configuration says comes last, and wins"


@pytest.mark.parametrize("text", ["[]", "3"])
def test_a_target_without_a_configuration_needs_nothing(tmp_path, text):
    assert vllm_arguments("owner/name") == vllm_arguments(str(tmp_path)) == ()
    (tmp_path / "config.json").write_text(text)
    assert vllm_arguments(str(tmp_path)) == () == remarks_on(None).vllm_arguments


def test_the_card_for_gemma_3_has_the_argument_and_no_command_for_sglang(tmp_path):
    family("gemma3", tmp_path / "target")
    target, _ = save_trained(tmp_path / "target", tmp_path / "checkpoint", vocab=30)
    export_head(tmp_path / "checkpoint", tmp_path / "export", target, ExportConfig())
    story = Story.of(tmp_path, tmp_path / "checkpoint")
    write_card(tmp_path / "export", story, ExportConfig(base_model="google/gemma"), "bfloat16")
    text = (tmp_path / "export/README.md").read_text()
    assert f"vllm serve google/gemma --dtype bfloat16 {TRANSFORMERS} --speculative-config" in text
    assert "SGLang does not serve this target with a head" in text and "sglang.launch_server" not in text


def test_the_card_of_a_module_of_mimos_own_target_has_no_command_for_vllm(tmp_path):
    target = described(save_native("mimo", tmp_path / "target"))
    head = load_native(target, MtpConfig.for_target(target, DraftConfig(algorithm="mtp_native"), native=True))
    (tmp_path / "checkpoint").mkdir()
    save_head(tmp_path / "checkpoint", head, describe(target))
    target.config.model_type = "mimo"  # whose code does not come with transformers
    export_head(tmp_path / "checkpoint", tmp_path / "export", target, ExportConfig())
    write_card(tmp_path / "export", Story.of(tmp_path, tmp_path / "checkpoint"), ExportConfig(), "bfloat16")
    text = (tmp_path / "export/README-mtp.md").read_text()
    assert "vLLM does not serve this target with a head: its own MiMo" in text and "vllm serve" not in text
    assert "--speculative-algorithm NEXTN" in text


def test_the_engines_that_load_an_export_are_told_by_dialect_and_target():
    told = [engines_that_load(*each) for each in (("plain", "llama"), ("speculators", "llama"), ("plain", "mimo"))]
    assert told == ["vLLM and SGLang load", "vLLM loads", "SGLang loads"]
    assert engines_that_load("speculators", "mimo") == "no engine loads"
