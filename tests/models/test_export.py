"""An export holds exactly what the engines read, computes what the trainer computes, and is the same each time."""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors.torch import load_file

from models.artefact import file_sha256, tensor_sha256, write_tensors
from models.checkpoint import describe, load_head, save_head
from models.config import DraftConfig, ExportConfig, TargetConfig
from models.eagle3 import Eagle3Config, Eagle3Head, initialise
from models.engines import eagle3_config_json, planes_of_sglang, sglang_layer_ids, vllm_layer_ids
from models.errors import Refused
from models.export import export_head, load_export
from models.target import aux_layers, describe_target
from tests.conf.shapes import described
from tests.models.heads import save_trained


@pytest.fixture
def trained(tiny_target_dir, tmp_path):
    """A head for the tiny target, saved as a training checkpoint."""

    def make(**options):
        target, head = save_trained(tiny_target_dir, tmp_path / "checkpoint", **options)
        return target, head, tmp_path / "checkpoint"

    return make


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_b28_b29_every_float_tensor_has_the_asked_dtype_and_the_map_holds_offsets(trained, tmp_path, dtype):
    target, head, checkpoint = trained()
    export_head(checkpoint, tmp_path / "export", target, ExportConfig(dtype=dtype))
    tensors = load_file(tmp_path / "export" / "model.safetensors")
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    assert config["torch_dtype"] == dtype and config["tie_word_embeddings"] is False
    assert {str(t.dtype) for n, t in tensors.items() if n not in ("d2t", "t2d")} == {f"torch.{dtype}"}
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool
    for name, tensor in head.state_dict().items():
        assert torch.equal(tensors[name], tensor.to(getattr(torch, dtype)))
    ids = tensors["d2t"] + torch.arange(100)
    assert torch.equal(ids, head.ids_D) and torch.equal(ids, tensors["t2d"].nonzero()[:, 0])
    assert "embed_tokens.weight" not in tensors


def test_b31_b33_a_tied_target_and_its_untied_head_of_its_own_size_survive_saving_and_export(make_target, tmp_path):
    directory = make_target(hidden_size=24, num_attention_heads=4, head_dim=16, tie_word_embeddings=True)
    target = describe_target(TargetConfig(path=str(directory), dtype="float32"))
    embedding = target.load_embedding().clone()
    ids = torch.arange(0, 16, 2)
    head = Eagle3Head(Eagle3Config.for_target(target, (2, 4, 5), DraftConfig(vocab_size=8)), ids)
    initialise(head, target, torch.randn(50, 3, 24))
    assert torch.equal(head.lm_head.weight, embedding[ids])
    with torch.no_grad():
        head.lm_head.weight.add_(1.0)
    assert torch.equal(target.load_embedding(), embedding)
    (tmp_path / "checkpoint").mkdir()
    save_head(tmp_path / "checkpoint", head, describe(target))
    again, _ = load_head(tmp_path / "checkpoint")
    assert again.config == head.config and again.config.head_dim == 16
    assert again.lm_head.weight.shape == (8, 24) and torch.equal(again.lm_head.weight, head.lm_head.weight)
    export_head(tmp_path / "checkpoint", tmp_path / "export", target, ExportConfig(dtype="float32"))
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False and config["head_dim"] == 16
    tensors = load_file(tmp_path / "export" / "model.safetensors")
    shapes = [tuple(tensors[f"midlayer.self_attn.{name}_proj.weight"].shape) for name in "qko"]
    assert shapes == [(64, 48), (32, 48), (24, 64)]
    assert torch.equal(tensors["lm_head.weight"], head.lm_head.weight) and "embed_tokens.weight" not in tensors


def test_b20_a_reduced_vocabulary_without_its_map_is_refused(trained):
    _, head, checkpoint = trained()
    with pytest.raises(Refused, match="a head of 100 draft tokens needs as many ids"):
        Eagle3Head(head.config)
    tensors = load_file(checkpoint / "head.safetensors")
    del tensors["d2t"]
    write_tensors(checkpoint / "head.safetensors", tensors)
    with pytest.raises(Refused, match="a head of 100 draft tokens needs as many ids"):
        load_head(checkpoint)


def test_b29_a_full_vocabulary_has_no_map(trained, tmp_path):
    target, _, checkpoint = trained(vocab=None)
    export_head(checkpoint, tmp_path / "export", target, ExportConfig())
    assert not {"d2t", "t2d"} & load_file(tmp_path / "export" / "model.safetensors").keys()


def test_b36_layer_ids_are_written_for_each_engine_in_its_own_counting(trained):
    assert vllm_layer_ids((2, 4, 5)) == [2, 4, 5] and sglang_layer_ids((2, 4, 5), "llama") == [1, 3, 4]
    _, head, _ = trained(layers=(1, 2, 4, 6), norm_output=True, fc_norm=True)
    config = eagle3_config_json(head.config, torch.bfloat16, {}, "llama")
    assert head.fc.weight.shape == (64, 4 * 64) and config["num_aux_hidden_states"] == 4
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 4, 6]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 3, 5]
    assert config["norm_output"] is True and config["fc_norm"] is True and config["norm_before_residual"] is False


def deepseek_in_sglang(ids: list[int]) -> tuple[int, ...]:
    """The planes that its DeepSeek captures (SGLang 0.5.23, DeepseekV2ForCausalLM.set_eagle3_layers_to_capture)."""
    return tuple(layer + 1 for layer in ids) if ids[0] == 1 else tuple(ids)


@pytest.mark.parametrize("planes", [(2, 30, 58), (3, 30, 58), (4, 5)])
@pytest.mark.parametrize("model_type", ["deepseek_v3", "kimi_k2"])
def test_b36_sglang_captures_the_planes_of_the_head_over_deepseek_too(planes, model_type):
    ids = sglang_layer_ids(planes, model_type)
    assert deepseek_in_sglang(ids) == planes == planes_of_sglang(ids, model_type)


def test_b36_planes_that_sglang_cannot_be_told_over_deepseek_are_refused():
    assert aux_layers(described("deepseek-v3"), [2, 30, 58]) == (2, 30, 58)
    with pytest.raises(Refused, match=r"target\.aux_layers \[1, 30, 58\]: SGLang takes .* deepseek_v3; begin with 2"):
        aux_layers(described("deepseek-v3"), [1, 30, 58])


def test_two_exports_of_a_checkpoint_are_equal_and_a_second_one_does_nothing(trained, tmp_path):
    target, _, checkpoint = trained()
    assert export_head(checkpoint, tmp_path / "a", target, ExportConfig()) is True
    assert export_head(checkpoint, tmp_path / "b", target, ExportConfig()) is True
    for file in ("model.safetensors", "config.json", "export.json"):
        assert file_sha256(tmp_path / "a" / file) == file_sha256(tmp_path / "b" / file)
    assert export_head(checkpoint, tmp_path / "a", target, ExportConfig()) is False


@pytest.mark.parametrize("text", ['{"norm_output": true}', "{"])
def test_a_config_that_was_edited_or_torn_is_written_again(trained, tmp_path, text):
    target, _, checkpoint = trained()
    export_head(checkpoint, tmp_path / "export", target, ExportConfig())
    wanted = (tmp_path / "export" / "config.json").read_bytes()
    (tmp_path / "export" / "config.json").write_text(text)
    assert export_head(checkpoint, tmp_path / "export", target, ExportConfig()) is True
    assert (tmp_path / "export" / "config.json").read_bytes() == wanted


def test_a_head_with_a_missing_or_broken_tensor_is_refused(trained, tmp_path):
    target, head, checkpoint = trained()
    with torch.no_grad():
        head.fc.weight[0, 0] = math.nan
    save_head(checkpoint, head, describe(target))
    with pytest.raises(Refused, match="fc.weight holds values that are not finite"):
        export_head(checkpoint, tmp_path / "export", target, ExportConfig())
    assert not (tmp_path / "export").exists()
    tensors = load_file(checkpoint / "head.safetensors")
    del tensors["fc.weight"]
    write_tensors(checkpoint / "head.safetensors", tensors)
    with pytest.raises(Refused, match="missing"):
        load_head(checkpoint)


def test_b28_a_weight_that_the_dtype_cannot_hold_is_refused(trained, tmp_path):
    target, head, checkpoint = trained()
    with torch.no_grad():
        head.norm.weight[0] = 1e6
    save_head(checkpoint, head, describe(target))
    with pytest.raises(Refused, match="norm.weight holds values that are not finite in torch.float16"):
        export_head(checkpoint, tmp_path / "export", target, ExportConfig(dtype="float16"))
    assert export_head(checkpoint, tmp_path / "export", target, ExportConfig())


def test_a_change_of_any_option_of_the_files_exports_again(trained, tmp_path):
    target, _, checkpoint = trained()
    for settings in (ExportConfig(), ExportConfig(dtype="float32"), ExportConfig(dialect="speculators", k=3)):
        assert export_head(checkpoint, tmp_path / "export", target, settings) is True
        assert export_head(checkpoint, tmp_path / "export", target, settings) is False
    assert export_head(checkpoint, tmp_path / "export", target, ExportConfig(dialect="speculators", k=4)) is True


def test_every_tensors_hash_and_origin_are_recorded(trained, tmp_path):
    target, _, checkpoint = trained()
    export_head(checkpoint, tmp_path / "export", target, ExportConfig())
    record = json.loads((tmp_path / "export" / "export.json").read_text())["tensors"]
    tensors = load_file(tmp_path / "export" / "model.safetensors")
    assert record.keys() == tensors.keys()
    for name, tensor in tensors.items():
        origin = "draft vocabulary" if name in ("d2t", "t2d") else "checkpoint"
        assert record[name] == {"dtype": str(tensor.dtype), "sha256": tensor_sha256(tensor), "origin": origin}


def test_a_head_for_another_target_is_refused(trained, tmp_path, make_target):
    _, _, checkpoint = trained()
    other = describe_target(TargetConfig(path=str(make_target(rms_norm_eps=1e-4)), dtype="float32"))
    with pytest.raises(Refused, match="another target"):
        export_head(checkpoint, tmp_path / "export", other, ExportConfig())


def test_an_export_read_back_is_the_head_that_was_exported(trained, tmp_path):
    target, head, checkpoint = trained(norm_output=True)
    export_head(checkpoint, tmp_path / "export", target, ExportConfig(dtype="float32"))
    again, made_for = load_export(tmp_path / "export")
    assert made_for == describe(target) and again.config == head.config
    assert torch.equal(again.ids_D, head.ids_D)
    for name, tensor in head.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)
