"""Each engine's reading of an export gives the trainer's logits: for the rows it reads and for those it drafts."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from models.config import ExportConfig
from models.errors import Refused
from models.export import export_head, load_export
from tests.models.heads import save_trained
from tests.models.independent import ENGINES, Served

STEPS = 5
"""One row that is read and four that are drafted."""

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 128}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 128}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "reduced vocabulary, default layers, grouped heads": ({}, {}),
    "full vocabulary": ({}, {"vocab": None}),
    "custom layers": ({}, {"layers": (1, 3, 6)}),
    "four layers": ({}, {"layers": (1, 2, 4, 7)}),
    "two layers": ({}, {"layers": (3, 5)}),
    "norm_output": ({}, {"norm_output": True}),
    "norm_before_fc": ({}, {"norm_before_fc": True}),
    "fc_norm": ({}, {"fc_norm": True}),
    "no fc, reduced vocabulary": ({}, {"use_aux_hidden_state": False}),
    "no fc, full vocabulary, norm_output": ({}, {"use_aux_hidden_state": False, "vocab": None, "norm_output": True}),
    "all norms": ({}, {"norm_output": True, "norm_before_fc": True, "fc_norm": True, "layers": (2, 6), "vocab": None}),
    "explicit head_dim, one key-value head": ({}, {"head_dim": 24, "num_key_value_heads": 1}),
    "every head its own keys": ({"num_key_value_heads": 4, "hidden_size": 48, "head_dim": 16}, {}),
    "another MLP": ({}, {"intermediate_size": 40, "num_attention_heads": 6, "num_key_value_heads": 3}),
    "rope linear": ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}, {}),
    "rope llama3": ({"rope_parameters": LLAMA3 | {"low_freq_factor": 1.0, "high_freq_factor": 4.0}}, {}),
    "rope yarn": ({"rope_parameters": YARN}, {}),
    "rope yarn, ragged ramp": ({"rope_parameters": YARN | {"truncate": False, "beta_fast": 16.0}}, {}),
    "rope yarn, attention factor": ({"rope_parameters": YARN | {"attention_factor": 1.5}}, {}),
    "rope of the head's own": ({}, {"rope_parameters": YARN | {"attention_factor": 1.5}}),
    "rope of the head's own, the target's scaled": (
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 2e4}},
    ),
    "rope yarn, mscale": ({"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}, {}),
}


def trainers_logits(head, embedding, tokens, planes) -> list[torch.Tensor]:
    """Per unroll step, full-width logits [R, V] of every row that has the tokens it needs."""
    count = len(tokens)
    rows = [torch.arange(count - 1 - step) for step in range(STEPS)]
    aux = planes[:, list(head.config.planes)]
    out = []
    with torch.no_grad():
        for step in head.unroll(tokens, aux, torch.zeros(count, dtype=torch.int64), rows, embedding):
            full = torch.full((len(step.rows_R), head.config.vocab_size), -math.inf)
            full[:, head.ids_D] = head.lm_head(step.hidden_RH)
            out.append(full)
    return out


def check_reading(directory, engine, target, head) -> None:
    """Hold one engine's reading to the trainer, row by row as a server would go through an answer."""
    embedding = target.load_embedding().float()
    torch.manual_seed(1)
    tokens = torch.randint(3, target.vocab_size, (40,))
    planes = torch.randn(40, target.num_layers + 1, target.hidden_size)
    ours = trainers_logits(head, embedding, tokens, planes)
    served = Served(directory, engine, embedding)
    wide = planes[:, served.planes(target.num_layers)].flatten(1).double()
    read = 0
    for row in (0, 7, 8, 30):
        positions = torch.arange(read, row + 1)
        logits, back = served.forward(tokens[positions + 1], served.fuse(wide[positions]), positions)
        torch.testing.assert_close(logits.float(), ours[0][positions], rtol=1e-5, atol=1e-5)
        read, hidden = row + 1, back[-1:]
        for step in range(1, STEPS):
            logits, hidden = served.forward(tokens[row + 1 + step][None], hidden, torch.tensor([row + step]))
            torch.testing.assert_close(logits.float(), ours[step][row][None], rtol=1e-5, atol=1e-5)
        served.forget(STEPS - 1)
    assert served.used >= served.weights.keys(), served.weights.keys() - served.used


@pytest.mark.parametrize(("changes", "options"), CASES.values(), ids=CASES.keys())
def test_b17_b29_b33_b34_b36_every_engines_reading_gives_the_trainers_logits(make_target, tmp_path, changes, options):
    target, head = save_trained(make_target(**changes), tmp_path / "checkpoint", **options)
    export_head(tmp_path / "checkpoint", tmp_path / "export", target, ExportConfig(dtype="float32"))
    for engine in ENGINES:
        check_reading(tmp_path / "export", engine, target, head)


@pytest.mark.parametrize("case", ["all norms", "custom layers", "rope yarn, mscale", "rope llama3"])
def test_the_speculators_dialect_is_the_same_head_to_vllm(make_target, tmp_path, case):
    changes, options = CASES[case]
    target, head = save_trained(make_target(**changes), tmp_path / "checkpoint", **options)
    settings = ExportConfig(dtype="float32", dialect="speculators", k=4, base_model="owner/name")
    export_head(tmp_path / "checkpoint", tmp_path / "export", target, settings)
    for engine in ("vllm-v1", "vllm-v2"):
        check_reading(tmp_path / "export", engine, target, head)
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    assert "model_type" not in config and config["speculators_config"]["verifier"]["name_or_path"] == "owner/name"
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
    names = load_file(tmp_path / "export" / "model.safetensors").keys()
    assert "layers.0.mlp.up_proj.weight" in names and not [name for name in names if "midlayer" in name]
    again, _ = load_export(tmp_path / "export")
    assert again.config == head.config and torch.equal(again.ids_D, head.ids_D)
    assert torch.equal(again.midlayer.mlp.up_proj.weight, head.midlayer.mlp.up_proj.weight)


def test_the_speculators_dialect_without_a_k_is_refused(make_target, tmp_path):
    target, _ = save_trained(make_target(), tmp_path / "checkpoint")
    with pytest.raises(Refused, match=r"set export\.k"):
        export_head(tmp_path / "checkpoint", tmp_path / "export", target, ExportConfig(dialect="speculators"))
    assert not (tmp_path / "export").exists()


def test_the_speculators_dialect_of_a_head_without_fc_is_refused(make_target, tmp_path):
    target, _ = save_trained(make_target(), tmp_path / "checkpoint", use_aux_hidden_state=False)
    with pytest.raises(Refused, match=r"a head without fc; use export\.dialect=plain"):
        export_head(tmp_path / "checkpoint", tmp_path / "export", target, ExportConfig(dialect="speculators", k=2))


def test_b36_a_single_plane_which_sglang_would_not_fuse_is_refused(make_target, tmp_path):
    with pytest.raises(Refused, match=r"target\.aux_layers \[3\] must be two or more"):
        save_trained(make_target(), tmp_path / "checkpoint", layers=(3,))
