"""Targets of every family: described from their files, given a head of the right shape, and exported."""

from __future__ import annotations

import copy
import importlib
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from models.config import DraftConfig, ExportConfig, TargetConfig
from models.eagle3 import Eagle3Config
from models.errors import Refused
from models.export import export_head
from models.planes import captured, decoder_of
from models.rope import Rope, standardised
from models.target import CENTRED_AT_ONE, describe_target
from tests.models.heads import save_trained
from tests.models.independent import ENGINES
from tests.models.test_export_engines import check_reading

DEFAULT = {"rope_type": "default", "rope_theta": 50_000.0}
SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GEMMA_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 150_000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 16,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
# module, classes' prefix, changes of the shape; MLP, head size, context and rope type of the head
FAMILIES: dict[str, tuple[str, str, dict[str, Any], tuple[int, int, int, str]]] = {
    "llama": ("llama", "Llama", {"rope_parameters": DEFAULT, "tie_word_embeddings": True}, (48, 8, 512, "default")),
    "qwen2": ("qwen2", "Qwen2", {"rope_parameters": DEFAULT}, (48, 8, 512, "default")),
    "qwen3": ("qwen3", "Qwen3", {"rope_parameters": DEFAULT, "head_dim": 16}, (48, 16, 512, "default")),
    "qwen3 moe": (
        "qwen3_moe",
        "Qwen3Moe",
        {"rope_parameters": DEFAULT, "head_dim": 16, "intermediate_size": 30} | EXPERTS,
        (40, 16, 512, "default"),
    ),
    "mistral": ("mistral", "Mistral", {"rope_parameters": DEFAULT, "head_dim": 16}, (48, 16, 512, "default")),
    "phi3": ("phi3", "Phi3", {"rope_parameters": DEFAULT}, (48, 8, 512, "default")),
    "gemma3": (
        "gemma3",
        "Gemma3",
        {"rope_parameters": GEMMA_ROPE, "head_dim": 16, "tie_word_embeddings": True},
        (48, 16, 512, "linear"),
    ),
    "gpt-oss": (
        "gpt_oss",
        "GptOss",
        {"rope_parameters": GPT_OSS_ROPE, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
        (96, 16, 512, "yarn"),
    ),
}


def family(name, directory):
    """A tiny random target of a family, saved: the model itself."""
    module, prefix, changes, _ = FAMILIES[name]
    configurations = importlib.import_module(f"transformers.models.{module}.configuration_{module}")
    models = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    kind = getattr(configurations, f"{prefix}TextConfig", None) or getattr(configurations, f"{prefix}Config")
    torch.manual_seed(0)
    model = getattr(models, f"{prefix}ForCausalLM")(kind(**copy.deepcopy(SHAPE | changes))).float().eval()
    with torch.no_grad():
        model.model.norm.weight.uniform_(-0.3, 0.3).add_(0 if module == "gemma3" else 1)
    model.save_pretrained(directory)
    return model


@pytest.mark.parametrize("name", FAMILIES)
def test_b33_b34_every_family_gets_a_head_of_its_shape_that_every_engine_reads(tmp_path, name):
    model = family(name, tmp_path / "target")
    width, size, context, kind = FAMILIES[name][3]
    target, head = save_trained(tmp_path / "target", tmp_path / "checkpoint", vocab=30)
    assert head.config.rope_parameters["rope_type"] == kind
    rotary = model.model.rotary_emb
    frequencies = rotary.full_attention_inv_freq if name == "gemma3" else rotary.inv_freq
    torch.testing.assert_close(Rope(head.config.rope_parameters, size, context).rotary.inv_freq, frequencies)
    export_head(tmp_path / "checkpoint", tmp_path / "export", target, ExportConfig(dtype="float32"))
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    wanted = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": 96,
        "draft_vocab_size": 30,
        "hidden_size": 32,
        "target_hidden_size": 32,
        "intermediate_size": width,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": size,
        "hidden_act": "silu",
        "max_position_embeddings": context,
        "tie_word_embeddings": False,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    assert {key: config[key] for key in wanted} == wanted
    for engine in ENGINES:
        check_reading(tmp_path / "export", engine, target, head)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_final_plane_is_the_final_norm_of_the_last_and_the_lm_head_of_it_is_the_targets_logits(tmp_path, name):
    model = family(name, tmp_path / "target")
    target = describe_target(TargetConfig(path=str(tmp_path / "target"), dtype="float32"))
    with torch.no_grad(), captured(decoder_of(model, 8), [8]) as planes:
        ids = torch.arange(3, 20)[None]
        final = model.model(ids).last_hidden_state
        logits = model(ids).logits
    torch.testing.assert_close(final @ target.load_lm_head().T, logits)
    normed = planes[8] * (planes[8].pow(2).mean(-1, keepdim=True) + target.config.rms_norm_eps).rsqrt()
    torch.testing.assert_close(normed * target.load_final_norm(), final)


def test_the_targets_whose_last_norm_is_centred_at_1_are_those_of_transformers():
    encoders_and_capped = {"t5gemma", "t5gemma2", "vaultgemma"}
    found: dict[str, list[str]] = {}
    for path in Path(transformers.models.__file__).parent.glob("*/modeling_*.py"):
        text = path.read_text()
        norms = [c.partition("(")[0] for c in text.split("\nclass ") if "(1.0 + self.weight" in c and "RMSNorm(" in c]
        last = re.search(rf"self\.norm = (?:{'|'.join(norms)})\(config\.hidden_size", text)
        if norms and last and path.parent.name not in encoders_and_capped:
            configuration = path.with_name(path.name.replace("modeling", "configuration")).read_text()
            found[path.parent.name] = re.findall(r'model_type = "(\w+)"', configuration)
    assert [name for name, types in found.items() if not set(types) & set(CENTRED_AT_ONE)] == []
    assert set(CENTRED_AT_ONE) <= {each for types in found.values() for each in types}


def test_what_a_norm_centred_at_1_multiplies_by_is_not_rounded_to_the_files_dtype(tmp_path):
    model = family("gemma3", tmp_path / "target").bfloat16()
    model.save_pretrained(tmp_path / "target")
    target = describe_target(TargetConfig(path=str(tmp_path / "target")))
    weight = target.load_final_norm_weight()
    assert weight.dtype == torch.bfloat16 and torch.equal(weight, model.model.norm.weight)
    assert torch.equal(target.load_final_norm(), 1 + weight.float())


def test_b30_a_gemma_inside_a_multimodal_target_gets_the_head_of_its_text_model(tmp_path):
    from transformers.models.gemma3.configuration_gemma3 import Gemma3Config
    from transformers.models.gemma3.modeling_gemma3 import Gemma3ForConditionalGeneration

    text: dict[str, Any] = {key: value for key, value in SHAPE.items() if key != "tie_word_embeddings"}
    text |= {"rope_parameters": GEMMA_ROPE, "head_dim": 16}
    model = Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=VISION, mm_tokens_per_image=4))
    model.float().save_pretrained(tmp_path / "target")
    target, head = save_trained(tmp_path / "target", tmp_path / "checkpoint", vocab=30)
    assert target.tied and torch.equal(target.load_lm_head(), model.get_input_embeddings().weight)
    export_head(tmp_path / "checkpoint", tmp_path / "export", target, ExportConfig(dtype="float32"))
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    assert config["head_dim"] == 16 and config["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    assert config["tie_word_embeddings"] is False
    check_reading(tmp_path / "export", "vllm-v2", target, head)


def test_everything_about_the_head_can_be_set_apart_from_the_target(make_target):
    own = {"rope_type": "default", "rope_theta": 777.0}
    target = describe_target(TargetConfig(path=str(make_target())))
    draft = DraftConfig(
        vocab_size=50,
        intermediate_size=10,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=8,
        norm_output=True,
        norm_before_fc=True,
        fc_norm=True,
        rope_parameters=own,
    )
    config = Eagle3Config.for_target(target, (2, 4, 5), draft)
    asked = {key: value for key, value in vars(draft).items() if key not in ("algorithm", "vocab_size")}
    assert {key: getattr(config, key) for key in asked} == asked
    assert config.draft_vocab_size == 50 and config.vocab_size == target.vocab_size


def changed(directory, **changes):
    """The target in `directory`, its config.json changed."""
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return describe_target(TargetConfig(path=str(directory)))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0 changes its logits"),
        ({"logit_scale": 0.0625}, "logit_scale=0.0625 changes its logits"),
        ({"logits_scaling": 8.0}, "logits_scaling=8.0 changes its logits"),
        ({"logits_soft_cap": 30.0}, "logits_soft_cap=30.0 changes its logits"),
        ({"output_multiplier": 0.2}, "output_multiplier=0.2 changes its logits"),
        ({"logits_mup_width_multiplier": 24.0}, "logits_mup_width_multiplier=24.0 changes its logits"),
        ({"rms_norm_eps": None}, "has no rms_norm_eps"),
        ({"intermediate_size": None}, r"set draft\.intermediate_size"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_b09_a_target_that_a_head_cannot_follow_is_refused_in_one_line(make_target, changes, told):
    target = describe_target(TargetConfig(path=str(make_target())))
    settings = target.config.to_dict() | changes
    object.__setattr__(target, "config", SimpleNamespace(**settings))
    with pytest.raises(Refused, match=told):
        Eagle3Config.for_target(target, (2, 4, 5), DraftConfig())


def test_a_target_whose_logits_are_shifted_by_a_bias_is_refused(make_target):
    directory = make_target()
    tensors = load_file(directory / "model.safetensors")
    save_file(tensors | {"lm_head.bias": torch.zeros(len(tensors["lm_head.weight"]))}, directory / "model.safetensors")
    with pytest.raises(Refused, match=r"lm_head\.bias is added to its logits"):
        Eagle3Config.for_target(describe_target(TargetConfig(path=str(directory))), (2, 4, 5), DraftConfig())


@pytest.mark.parametrize(
    ("draft", "told"),
    [
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "4 attention heads do not divide into 3"),
        ({"head_dim": 15}, r"draft\.head_dim"),
        ({"vocab_size": 100_000}, r"draft\.vocab_size=100000"),
        ({"rope_parameters": {"rope_type": "default"}}, r"no rope_theta; set draft\.rope_parameters"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factr": 2.0, "factor": 2.0}}, "factr"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_head_that_cannot_be_is_refused_in_one_line(tiny_target_dir, draft, told):
    target = describe_target(TargetConfig(path=str(tiny_target_dir)))
    with pytest.raises(Refused, match=told):
        Eagle3Config.for_target(target, (2, 4, 5), DraftConfig(**draft))


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("parameters", "told"),
    [
        (LONGROPE, "longrope.*set draft.rope_parameters"),
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, "not of a supported type"),
        ({"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}, "partial_rotary_factor"),
        ({"rope_type": "yarn", "rope_theta": 1e4, "factor": None, "original_max_position_embeddings": 8}, "no factor"),
        ({"full_attention": {"rope_type": "proportional", "rope_theta": 1e6}}, "not of a supported type"),
        ({"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}, "not of a supported type"),
        (None, "not of a supported type"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_b34_a_rotation_that_an_engines_head_does_not_compute_is_refused(parameters, told):
    with pytest.raises(Refused, match=told):
        standardised(parameters)


def test_b34_a_long_phi3_gets_a_head_with_a_rotation_of_its_own(tmp_path):
    name = "phi3"
    model = family(name, tmp_path / "target")
    assert model.config.rope_parameters["rope_type"] == "default"
    target = changed(
        tmp_path / "target", original_max_position_embeddings=64, rope_parameters=LONGROPE, max_position_embeddings=512
    )
    with pytest.raises(Refused, match="longrope"):
        Eagle3Config.for_target(target, (2, 4, 5), DraftConfig())
    config = Eagle3Config.for_target(target, (2, 4, 5), DraftConfig(rope_parameters=DEFAULT))
    assert config.rope_parameters == DEFAULT and config.max_position_embeddings == 512
