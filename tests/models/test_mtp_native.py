"""A target's own MTP module: read by name, written back by name, and everything else of the target left alone."""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from models.checkpoint import save_head
from models.config import DraftConfig
from models.errors import Refused
from models.mtp import MtpConfig
from models.native import load_native, write_native
from tests.models.mtp_targets import FAMILIES, described, save_native, save_plain
from tests.models.mtp_targets import native_names as names_of


def load(directory: Path):
    target = described(directory)
    return target, load_native(target, MtpConfig.for_target(target, DraftConfig(), native=True))


def hashes(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(directory.iterdir())}


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors that a reader of every shard of the index sees; none twice."""
    index = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    found: dict[str, torch.Tensor] = {}
    for file in sorted(set(index.values())):
        for name, tensor in load_file(directory / file).items():
            assert name not in found and index[name] == file
            found[name] = tensor
    assert found.keys() == index.keys()
    return found


@pytest.mark.parametrize("sharded", [False, True], ids=["one file", "shards"])
@pytest.mark.parametrize("family", FAMILIES)
def test_b37_a_zero_step_fine_tune_writes_the_target_that_it_read(family, sharded, tmp_path):
    source = save_native(family, tmp_path / "source", sharded=sharded)
    before, whole = hashes(source), dict[str, torch.Tensor]()
    for path in source.glob("*.safetensors"):
        whole |= load_file(path)
    target, head = load(source)
    out = [tmp_path / "once", tmp_path / "twice"]
    for directory in out:
        directory.mkdir()
        write_native(directory, head, target)
    assert hashes(source) == before
    assert hashes(out[0]) == hashes(out[1])
    written = tensors_of(out[0])
    assert written.keys() == whole.keys()
    for name, tensor in whole.items():
        assert written[name].dtype == tensor.dtype and torch.equal(written[name], tensor), name
    for path in out[0].glob("*.safetensors"):
        with safe_open(path, framework="pt") as handle:
            assert handle.metadata() == {"format": "pt"}, "some readers refuse a shard that does not say so"
    assert load_file(out[0] / "model-mtp.safetensors").keys() == set(names_of(family))
    assert hashes(out[0])["config.json"] == before["config.json"]
    assert not (out[0] / "model.safetensors").exists()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_part_of_the_module_is_where_it_belongs(family, tmp_path):
    """Its layer's tensors are those of the target's last layer here: transformers says what they are."""
    source = save_native(family, tmp_path / "source", layer_of_target=family != "mimo")
    target, head = load(source)
    stored = load_file(source / "model.safetensors")
    norms = {
        "mimo": ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
        "deepseek_v3": ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
        "glm4_moe": ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
    }.get(family, ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"))
    prefix = next(name for name in names_of(family) if name.endswith(norms[0] + ".weight"))
    prefix = prefix.removesuffix(norms[0] + ".weight")
    for part, name in zip(("embedding_norm", "hidden_norm", "input_proj", "final_norm"), norms, strict=True):
        assert torch.equal(head.get_parameter(f"{part}.weight"), stored[f"{prefix}{name}.weight"].float()), name
    own = head.layer.state_dict()
    if family == "mimo":
        wanted = {name: stored[prefix + name] for name in own}
    else:
        model = getattr(transformers, FAMILIES[family].model).from_pretrained(source, dtype=torch.float32)
        wanted = model.model.layers[1].state_dict()
    assert own.keys() == wanted.keys()
    for name, tensor in own.items():
        assert torch.equal(tensor, wanted[name].float()), name


@pytest.mark.parametrize("family", FAMILIES)
def test_trained_values_come_back_rounded_to_the_dtype_of_the_source_and_nothing_else_changes(family, tmp_path):
    source = save_native(family, tmp_path / "source")
    target, head = load(source)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.mul_(1.01)
    (tmp_path / "out").mkdir()
    write_native(tmp_path / "out", head, target)
    old, new = load_file(source / "model.safetensors"), tensors_of(tmp_path / "out")
    for name, tensor in old.items():
        trained = name in names_of(family) and "e_score_correction_bias" not in name  # routers' biases have no gradient
        wanted = (tensor.float() * 1.01).to(tensor.dtype) if trained else tensor
        assert new[name].dtype == tensor.dtype and torch.equal(new[name], wanted), name
    again = load(tmp_path / "out")[1]  # and the copy is a target like any other
    assert all(
        torch.equal(a, b.to(torch.bfloat16).float()) for a, b in zip(again.parameters(), head.parameters(), strict=True)
    )


@pytest.mark.parametrize("sharded", [False, True], ids=["one file", "shards"])
def test_transformers_reads_the_copy_as_the_same_target(sharded, tmp_path):
    source = save_native("deepseek_v3", tmp_path / "source", sharded=sharded)
    (tmp_path / "out").mkdir()
    target, head = load(source)
    write_native(tmp_path / "out", head, target)
    logits = []
    for directory in (source, tmp_path / "out"):
        model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        with torch.no_grad():
            logits.append(model(torch.arange(20)[None]).logits)
    assert torch.equal(*logits)


def test_the_shards_beside_it_are_links_and_what_may_be_edited_is_a_copy(tmp_path):
    source = save_native("qwen3_5", tmp_path / "source", sharded=True)
    (tmp_path / "out").mkdir()
    target, head = load(source)
    write_native(tmp_path / "out", head, target)
    assert (tmp_path / "out" / "model-00001-of-00002.safetensors").samefile(source / "model-00001-of-00002.safetensors")
    assert not (tmp_path / "out" / "config.json").samefile(source / "config.json")


def test_a_copy_of_a_read_only_hub_snapshot_can_be_written_to_and_its_shards_are_linked(tmp_path):
    blobs, snapshot = save_native("qwen3_5", tmp_path / "blobs", sharded=True), tmp_path / "snapshot"
    (snapshot / "extra").mkdir(parents=True)
    (snapshot / "extra" / "note.txt").write_text("kept")
    for blob in blobs.iterdir():
        (snapshot / blob.name).symlink_to(blob)
        blob.chmod(0o444)
    before = hashes(blobs)
    for folder in (snapshot / "extra", snapshot):
        folder.chmod(0o555)
    try:
        target, head = load(snapshot)
        (tmp_path / "out").mkdir()
        write_native(tmp_path / "out", head, target)
    finally:
        snapshot.chmod(0o755)
        (snapshot / "extra").chmod(0o755)
    folders = tmp_path / "out", tmp_path / "out" / "extra"
    assert all(folder.stat().st_mode & 0o200 for folder in folders), "it may be written to, by others than root, too"
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())
    assert (tmp_path / "out" / "model-00001-of-00002.safetensors").samefile(blobs / "model-00001-of-00002.safetensors")
    assert (tmp_path / "out" / "extra" / "note.txt").read_text() == "kept"
    assert hashes(blobs) == before


def test_a_full_disk_is_told_as_one_and_no_further_file_is_copied(tmp_path, monkeypatch):
    target, head = load(save_native("qwen3_5", tmp_path / "source"))
    (tmp_path / "out").mkdir()
    asked: list[Path] = []

    def full(source: Path, destination: Path) -> None:
        asked.append(source)
        raise OSError(errno.ENOSPC, "No space left on device", str(destination))

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(OSError, match="No space left") as told:
        write_native(tmp_path / "out", head, target)
    assert told.value.errno == errno.ENOSPC and len(asked) == 1


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("wrong", ["missing", "unexpected", "quantised"])
def test_b37_missing_and_unexpected_tensors_are_listed_and_refused(family, wrong, tmp_path):
    source = save_native(family, tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    weight = next(name for name in names_of(family) if name.endswith("o_proj.weight"))
    scales = weight.replace("o_proj.weight", "o_proj.weight_scale_inv")
    lost, strange = [weight][: wrong != "unexpected"], [scales][: wrong != "missing"]
    taken = tensors.pop(weight) if lost else tensors[weight].clone()
    tensors |= dict.fromkeys(strange, taken)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(Refused) as refused:
        load(source)
    assert f"missing {lost}, unexpected {strange}" in str(refused.value)


def test_the_thousands_of_scales_of_a_quantised_module_are_counted(tmp_path):
    source = save_native("qwen3_5", tmp_path / "source")
    scales = {f"mtp.layers.0.mlp.experts.{index:03}.scale": torch.ones(1) for index in range(120)}
    save_file(load_file(source / "model.safetensors") | scales, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(Refused, match=r"unexpected \['mtp.layers.0.mlp.experts.000.scale', .*049.scale'\] and 70 more"):
        load(source)


def test_a_module_beside_the_text_part_of_a_vision_language_model(tmp_path):
    source = save_native("qwen3_5", tmp_path / "source")
    text = json.loads((source / "config.json").read_text())
    whole = {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text}
    (source / "config.json").write_text(json.dumps(whole))
    tensors = load_file(source / "model.safetensors")
    nested = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    assert "model.language_model.embed_tokens.weight" in nested and "mtp.fc.weight" in nested
    save_file(nested, source / "model.safetensors", {"format": "pt"})
    target, head = load(source)
    (tmp_path / "out").mkdir()
    write_native(tmp_path / "out", head, target)
    written = tensors_of(tmp_path / "out")
    assert all(torch.equal(written[name], tensor) for name, tensor in nested.items())


def test_what_is_no_parameter_is_kept_in_a_checkpoint_of_gathered_parameters(tmp_path):
    _, head = load(save_native("deepseek_v3", tmp_path / "source"))
    gathered = {name: parameter.detach() for name, parameter in head.named_parameters()}
    save_head(tmp_path, cast(Any, head), {}, gathered)
    saved = load_file(tmp_path / "head.safetensors")
    assert saved.keys() == head.state_dict().keys() != gathered.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in head.state_dict().items())


def test_a_module_of_another_shape_or_dtype_is_refused(tmp_path):
    source = save_native("qwen3_5", tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    whole = tensors["mtp.fc.weight"]
    for wrong in (whole[:, :32], whole.to(torch.float8_e4m3fn)):
        save_file(tensors | {"mtp.fc.weight": wrong.contiguous()}, source / "model.safetensors", {"format": "pt"})
        with pytest.raises(Refused, match="mtp.fc.weight is"):
            load(source)


@pytest.mark.parametrize("name", ["embed_tokens.weight", "shared_head.head.weight"])
def test_a_repeated_embedding_or_head_must_be_the_targets(name, tmp_path):
    source = save_native("deepseek_v3", tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    tensors[f"model.layers.2.{name}"] = tensors[f"model.layers.2.{name}"] + 1
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(Refused, match=f"{name} is not the target's own"):
        load(source)


@pytest.mark.parametrize("family", FAMILIES)
def test_several_modules_are_refused_by_the_key_that_counts_them(family, tmp_path):
    key = "mtp_num_hidden_layers" if family == "qwen3_5" else "num_nextn_predict_layers"
    changes: dict[str, Any] = {key: 2}
    two = described(save_native(family, tmp_path, **changes))
    with pytest.raises(Refused, match=f"has {key}=2; only one module is supported"):
        MtpConfig.for_target(two, DraftConfig(), native=True)


def test_a_target_without_a_module_is_refused(tmp_path):
    none = described(save_plain("glm4_moe", tmp_path))
    with pytest.raises(Refused, match="glm4_moe.* holds no MTP module"):
        MtpConfig.for_target(none, DraftConfig(), native=True)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_rotation_that_depends_on_how_long_the_text_is_is_refused(kind, tmp_path):
    target = described(save_native("qwen3_5", tmp_path))
    target.config.rope_parameters["rope_type"] = kind
    with pytest.raises(Refused, match=f"rope of type {kind}, which is not supported"):
        MtpConfig.for_target(target, DraftConfig(), native=True)


def test_values_that_the_dtype_cannot_hold_are_not_written(tmp_path):
    target, head = load(save_native("mimo", tmp_path / "source"))
    with torch.no_grad():
        head.final_norm.weight[3] = torch.inf
    (tmp_path / "out").mkdir()
    with pytest.raises(Refused, match="final_layernorm.weight holds values that are not finite"):
        write_native(tmp_path / "out", head, target)
