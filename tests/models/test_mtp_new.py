"""A new MTP head: over which targets it can stand, what shape it has, and where it starts."""

from __future__ import annotations

import json
import types
from typing import Any

import pytest
import torch
import transformers

from models import mtp_families as families
from models.config import DraftConfig
from models.errors import Refused
from models.mtp import MtpConfig, MtpHead, initialise
from models.mtp_families import FAMILIES
from tests.models.mtp_targets import SHAPE, described, save_plain


def dense(tmp_path, model: str = "LlamaForCausalLM", **changes: Any):
    """A target of some dense class, heads of 8 unless `changes` say otherwise."""
    model_class = getattr(transformers, model)
    loaded = model_class(model_class.config_class(**(SHAPE | changes)))
    with torch.no_grad():
        loaded.model.norm.weight.uniform_(0.5, 1.5)
    loaded.save_pretrained(tmp_path / "target")
    return described(tmp_path / "target")


@pytest.mark.parametrize("model", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM"])
def test_a_new_head_has_a_dense_targets_dimensions_and_heads_of_hidden_by_heads(model, tmp_path):
    target = dense(
        tmp_path, model, head_dim=16, rms_norm_eps=1e-4, rope_parameters={"rope_type": "default", "rope_theta": 7e3}
    )
    config = MtpConfig.for_target(target, DraftConfig(vocab_size=50))
    head = MtpHead(config)
    assert config.family == "mimo" and not config.native
    assert {name: tuple(tensor.shape) for name, tensor in head.stored().items()} == {
        **{f"model.mtp_layers.0.{name}_layernorm.weight": (32,) for name in ("token", "hidden", "final")},
        **{f"model.mtp_layers.0.{name}_layernorm.weight": (32,) for name in ("input", "post_attention")},
        "model.mtp_layers.0.input_proj.weight": (32, 64),
        **{f"model.mtp_layers.0.self_attn.{name}_proj.weight": (32, 32) for name in "qo"},
        **{f"model.mtp_layers.0.self_attn.{name}_proj.weight": (16, 32) for name in "kv"},
        "model.mtp_layers.0.self_attn.q_proj.bias": (32,),
        **{f"model.mtp_layers.0.self_attn.{name}_proj.bias": (16,) for name in "kv"},
        **{f"model.mtp_layers.0.mlp.{name}_proj.weight": (40, 32) for name in ("gate", "up")},
        "model.mtp_layers.0.mlp.down_proj.weight": (32, 40),
    }
    assert head.final_norm.variance_epsilon == 1e-4
    assert head.rotary.inv_freq[1].item() == pytest.approx(7e3 ** (-2 / 8))
    assert (head.lm_head, head.reduced, len(head.ids_D)) == (None, False, 50)


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "activation is gelu": ("LlamaForCausalLM", {"hidden_act": "gelu"}),
    "do not divide into heads": ("Qwen3ForCausalLM", {"num_attention_heads": 6, "head_dim": 8}),
    "partial_rotary_factor": (
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    "final_logit_softcapping=30.0": ("Gemma2ForCausalLM", {"head_dim": 8, "final_logit_softcapping": 30.0}),
    "sliding_window=16": ("MistralForCausalLM", {"sliding_window": 16}),
    "num_experts=4": ("MixtralForCausalLM", {"num_local_experts": 4}),
}


@pytest.mark.parametrize("message", REFUSED)
def test_targets_that_no_engine_could_serve_it_over_are_refused(message, tmp_path):
    model, changes = REFUSED[message]
    target = dense(tmp_path, model, **changes)
    with pytest.raises(Refused, match=message):
        MtpConfig.for_target(target, DraftConfig())


def test_the_text_part_of_a_vision_language_model_is_refused_since_vllm_reads_the_whole_configuration(tmp_path):
    dense(tmp_path, "MistralForCausalLM", sliding_window=None)
    config = tmp_path / "target" / "config.json"
    text = json.loads(config.read_text())
    whole = {"model_type": "mistral3", "architectures": ["Mistral3ForConditionalGeneration"], "text_config": text}
    MtpConfig.for_target(described(tmp_path / "target"), DraftConfig())
    config.write_text(json.dumps(whole))
    with pytest.raises(Refused, match="its config is the text part of a larger one"):
        MtpConfig.for_target(described(tmp_path / "target"), DraftConfig())


def test_a_quantised_target_is_refused(tmp_path):
    target = dense(tmp_path)
    target.config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(Refused, match="it is quantised, and vLLM would take the MTP block for quantised too"):
        MtpConfig.for_target(target, DraftConfig())


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "mimo"])
def test_targets_that_are_not_dense_are_refused(family, tmp_path):
    target = described(save_plain(family, tmp_path / "target"))
    with pytest.raises(Refused, match="draft.algorithm=mtp over .*(num_local_experts|num_experts|linear attention)"):
        MtpConfig.for_target(target, DraftConfig())


@pytest.mark.parametrize(
    "option",
    [
        {"intermediate_size": 48},
        {"num_attention_heads": 2},
        {"head_dim": 16},
        {"norm_output": True},
        {"use_aux_hidden_state": False},
        {"vocab_size": 20},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ],
    ids=lambda option: next(iter(option)),
)
def test_a_shape_of_its_own_is_refused_by_name(option, tmp_path):
    target = dense(tmp_path)
    with pytest.raises(Refused, match=f"draft.{next(iter(option))}="):
        MtpConfig.for_target(target, DraftConfig(**option))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_that_the_installed_transformers_lacks_is_named(family, monkeypatch):
    row = FAMILIES[family]
    without = types.SimpleNamespace()
    monkeypatch.setattr(families.importlib, "import_module", lambda path: without)
    with pytest.raises(Refused, match=rf"transformers {transformers.__version__} has no .*{row.package}.{row.stem}"):
        row.classes()


@pytest.fixture
def started(tmp_path):
    """An initialised head over a target with a final norm of its own, and planes in which one channel is huge."""
    target = dense(tmp_path)
    planes_T1H = torch.randn(400, 1, 32) * torch.linspace(0.5, 1.5, 32)
    planes_T1H[:, :, 7] *= 30
    head = MtpHead(MtpConfig.for_target(target, DraftConfig()))
    torch.manual_seed(0)
    initialise(head, target, planes_T1H)
    return target, head, planes_T1H


def test_it_starts_in_the_targets_output_space_without_biases(started):
    target, head, _ = started
    assert torch.equal(head.final_norm.weight, target.load_final_norm())
    assert not any(tensor.any() for name, tensor in head.named_parameters() if name.endswith("bias"))


def test_no_channel_of_the_final_plane_drowns_in_a_huge_one(started):
    _, head, planes_T1H = started
    with torch.no_grad():
        rms_H = head.hidden_norm(planes_T1H[:, 0]).pow(2).mean(0).sqrt()
    torch.testing.assert_close(rms_H, torch.ones(32), rtol=1e-3, atol=1e-3)


def test_a_row_attends_to_itself_and_the_layer_adds_little(started):
    _, head, planes_T1H = started
    rows = torch.arange(40)
    kept: list[torch.Tensor] = []

    def attention(query, key, value, scale=None):
        scores = torch.einsum("rne,tne->rnt", query, key.repeat_interleave(2, 1)) * query.shape[-1] ** -0.5
        weights = scores.masked_fill(torch.ones(40, 40).triu(1).bool()[:, None], float("-inf")).softmax(-1)
        kept.append(weights.diagonal(dim1=0, dim2=2))
        return torch.einsum("rnt,tne->rne", weights, value.repeat_interleave(2, 1))

    embedded = torch.randn(40, 32)
    with torch.no_grad():
        _, hidden = head.advance(embedded, planes_T1H[:40, 0], rows, attention)
        passed = head.final_norm(head._joined(embedded, planes_T1H[:40, 0], rows)[0])
    assert kept[0].median() > 0.5
    assert (hidden - passed).norm() < 0.2 * passed.norm()
