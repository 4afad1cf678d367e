"""What vLLM itself makes of a head's and a target's configuration, where ours is written after its source."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from models.config import ExportConfig
from models.export import export_head
from models.serving import GEMMA3
from tests.integration.engine.test_heads import ROPES, VLLM
from tests.models.heads import save_trained
from tests.models.test_export_families import family

pytestmark = pytest.mark.engine

READINGS = """
import json
import sys
from vllm.config import ModelConfig
from vllm.model_executor.models.gemma3 import Gemma3ForCausalLM
from vllm.model_executor.models.interfaces import supports_eagle3
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.transformers import TransformersForCausalLM

own, contexts = {}, {}
for model in (LlamaForCausalLM, Gemma3ForCausalLM, TransformersForCausalLM):
    own[model.__name__] = supports_eagle3(model)
for name in sys.argv[2:]:
    contexts[name] = ModelConfig(model=name, tokenizer=name, dtype="float32", skip_tokenizer_init=True).max_model_len
open(sys.argv[1], "w").write(json.dumps([own, contexts]))
"""


def test_b34_vllm_derives_the_contexts_that_ours_says_and_serves_the_families_that_ours_names(make_target, tmp_path):
    wanted, heads = {}, {}
    for name, parameters in ROPES.items():
        checkpoint, directory = tmp_path / "checkpoints" / name, tmp_path / "heads" / name
        target, _ = save_trained(make_target(rope_parameters=dict(parameters)), checkpoint)
        export_head(checkpoint, directory, target, ExportConfig())
        wanted[target.path] = target.context_length
        heads[str(directory)] = target.path
    family("gemma3", tmp_path / "gemma3")
    gemma, _ = save_trained(tmp_path / "gemma3", tmp_path / "checkpoints/gemma3", vocab=30)
    export_head(tmp_path / "checkpoints/gemma3", tmp_path / "heads/gemma3", gemma, ExportConfig())
    wanted[gemma.path], heads[str(tmp_path / "heads/gemma3")] = gemma.context_length, gemma.path
    found: Path = tmp_path / "found.json"
    command = [str(VLLM), "-c", READINGS, str(found), *wanted, *heads]
    result = subprocess.run(command, capture_output=True, text=True, timeout=1200, cwd=tmp_path)
    assert result.returncode == 0, result.stderr[-3000:]
    supported, contexts = json.loads(found.read_text())
    assert {name: contexts[name] for name in wanted} == wanted
    assert all(contexts[head] >= wanted[target] for head, target in heads.items())
    native = {"LlamaForCausalLM": True, "Gemma3ForCausalLM": False, "TransformersForCausalLM": True}
    assert supported == native and GEMMA3.vllm_arguments == ("--model-impl", "transformers")
