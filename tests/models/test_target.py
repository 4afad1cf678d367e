"""A target is read from its files, whatever their layout, and a wrong or odd one is refused in one line."""

from __future__ import annotations

import json

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from models.artefact import write_json
from models.config import DraftConfig, TargetConfig
from models.eagle3 import Eagle3Config, Eagle3Head
from models.errors import Refused
from models.rope import REQUIRED, Rope, standardised
from models.target import aux_layers, describe_target
from models.vocabulary import choose_draft_vocabulary, ids_from_offsets, maps


def describe(directory):
    return describe_target(TargetConfig(path=str(directory), dtype="float32"))


def shard(directory) -> None:
    """Cut model.safetensors into two files with an index."""
    tensors = load_file(directory / "model.safetensors")
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, chosen in parts.items():
        save_file({name: tensors[name] for name in chosen}, directory / file)
    weight_map = {name: file for file, chosen in parts.items() for name in chosen}
    write_json(directory / "model.safetensors.index.json", {"weight_map": weight_map})
    (directory / "model.safetensors").unlink()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("sharded", [False, True])
def test_b30_head_and_embedding_are_found_in_every_layout(make_target, tied, sharded):
    directory = make_target(tie_word_embeddings=tied)
    tensors = load_file(directory / "model.safetensors")
    if sharded:
        shard(directory)
    target = describe(directory)
    assert torch.equal(target.load_embedding(), tensors["model.embed_tokens.weight"])
    assert torch.equal(target.load_lm_head(), tensors["model.embed_tokens.weight" if tied else "lm_head.weight"])
    assert torch.equal(target.load_final_norm(), tensors["model.norm.weight"])


def test_b30_nested_prefixes_work_and_a_missing_head_is_refused(make_target):
    directory = make_target()
    tensors = load_file(directory / "model.safetensors")
    moved = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    save_file(moved, directory / "model.safetensors")
    assert torch.equal(describe(directory).load_final_norm(), tensors["model.norm.weight"])
    save_file({n: t for n, t in moved.items() if "lm_head" not in n}, directory / "model.safetensors")
    with pytest.raises(Refused, match="has no lm_head"):
        describe(directory).load_lm_head()


def test_b30_only_the_files_with_the_wanted_tensors_are_read(make_target):
    directory = make_target()
    tensors = load_file(directory / "model.safetensors")
    wanted = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
    save_file({name: tensors[name] for name in wanted}, directory / "few.safetensors")
    weight_map = {name: "few.safetensors" if name in wanted else "gone.safetensors" for name in tensors}
    write_json(directory / "model.safetensors.index.json", {"weight_map": weight_map})
    (directory / "model.safetensors").unlink()
    target = describe(directory)
    for name, found in zip(
        wanted, (target.load_embedding(), target.load_final_norm(), target.load_lm_head()), strict=True
    ):
        assert torch.equal(found, tensors[name])


@pytest.mark.parametrize("tied", [False, True])
def test_b30_the_head_of_another_module_is_not_taken_for_the_targets(make_target, tied):
    directory = make_target(tie_word_embeddings=tied)
    tensors = load_file(directory / "model.safetensors")
    others = {"mtp.lm_head.weight": torch.zeros(8, 64), "model.visual.lm_head.weight": torch.zeros(8, 64)}
    save_file(tensors | others, directory / "model.safetensors")
    own = tensors["model.embed_tokens.weight" if tied else "lm_head.weight"]
    assert torch.equal(describe(directory).load_lm_head(), own)
    if not tied:
        save_file(
            {n: t for n, t in (tensors | others).items() if n != "lm_head.weight"}, directory / "model.safetensors"
        )
        with pytest.raises(Refused, match="has no lm_head"):
            describe(directory).load_lm_head()


def test_fingerprints_tell_configurations_and_fine_tunes_apart(make_target):
    directory = make_target()
    before = describe(directory)
    hashes = before.config_hash, before.weights_hash
    assert hashes == (describe(make_target()).config_hash, describe(make_target()).weights_hash)
    tensors = load_file(directory / "model.safetensors")
    tensors["model.layers.3.self_attn.q_proj.weight"] += 0.01  # what a merged adapter does
    save_file(tensors, directory / "model.safetensors")
    assert describe(directory).weights_hash != hashes[1]
    assert describe(make_target(rms_norm_eps=1e-4)).config_hash != hashes[0]


def test_b13_default_layers_that_collide_name_the_option_and_explicit_ones_set_the_width(make_target):
    for depth, collided in ((5, r"\[2, 2, 2\]"), (6, r"\[2, 3, 3\]")):
        target = describe(make_target(num_hidden_layers=depth))
        with pytest.raises(Refused, match=rf"default for {depth} layers, {collided} must .* set target\.aux_layers"):
            aux_layers(target, None)
    target = describe(make_target(num_hidden_layers=5))
    for layers in ([1, 2, 4], [2, 3]):
        config = Eagle3Config.for_target(target, aux_layers(target, layers), DraftConfig())
        assert Eagle3Head(config).fc.weight.shape == (64, len(layers) * 64)
    for wrong in ([0, 1, 2], [1, 2, 5], [2, 1], [2, 2], []):
        with pytest.raises(Refused, match="distinct, ascending and inside 1..4"):
            aux_layers(target, wrong)
    assert aux_layers(describe(make_target(num_hidden_layers=32)), None) == (2, 16, 29)


def test_b31_b33_head_dimensions_follow_the_target_not_arithmetic(make_target):
    target = describe(make_target(hidden_size=24, num_attention_heads=4, head_dim=16, tie_word_embeddings=True))
    head = Eagle3Head(Eagle3Config.for_target(target, (2, 4, 5), DraftConfig(vocab_size=8)), torch.arange(8))
    attention = head.midlayer.self_attn
    shapes = [tuple(p.weight.shape) for p in (attention.q_proj, attention.k_proj, attention.o_proj, head.lm_head)]
    assert shapes == [(64, 48), (32, 48), (24, 64), (8, 24)]


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "default", "rope_theta": 500_000.0},
        {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
        {
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
        {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 256},
    ],
    ids=lambda parameters: parameters["rope_type"],
)
def test_b34_the_heads_frequencies_are_the_targets_in_both_layouts(make_target, parameters):
    directory = make_target(rope_parameters=parameters)
    target = describe(directory)
    wanted = LlamaRotaryEmbedding(target.config).inv_freq
    config = Eagle3Config.for_target(target, (2, 4, 5), DraftConfig())
    assert torch.equal(Rope(config.rope_parameters, 16, 1024).rotary.inv_freq, wanted)
    legacy = json.loads((directory / "config.json").read_text())
    scaling = dict(legacy.pop("rope_parameters"))
    legacy |= {"rope_theta": scaling.pop("rope_theta")}
    if parameters["rope_type"] != "default":
        legacy["rope_scaling"] = scaling
    write_json(directory / "config.json", legacy)
    again = Eagle3Config.for_target(describe(directory), (2, 4, 5), DraftConfig())
    assert torch.equal(Rope(again.rope_parameters, 16, 1024).rotary.inv_freq, wanted)
    if "rope_scaling" in legacy:  # as older files spell it
        legacy["rope_scaling"]["type"] = legacy["rope_scaling"].pop("rope_type")
        write_json(directory / "config.json", legacy)
        oldest = Eagle3Config.for_target(describe(directory), (2, 4, 5), DraftConfig())
        assert torch.equal(Rope(oldest.rope_parameters, 16, 1024).rotary.inv_freq, wanted)
    positions = torch.tensor([0, 1, 700, 5000])
    cos, sin = Rope(config.rope_parameters, 16, 1024).table(positions, torch.float32)
    for ours, theirs in zip(
        (cos, sin), LlamaRotaryEmbedding(target.config)(torch.empty(0), positions[None]), strict=True
    ):
        assert torch.equal(ours[:, 0], theirs[0])


def test_b34_the_heads_rope_can_be_set_apart_from_the_targets(make_target):
    target = describe(make_target())
    own = {"rope_type": "default", "rope_theta": 777.0}
    config = Eagle3Config.for_target(target, (2, 4, 5), DraftConfig(rope_parameters=own))
    wanted = 777.0 ** (-torch.arange(0, 16, 2) / 16)
    torch.testing.assert_close(Rope(config.rope_parameters, 16, 1024).rotary.inv_freq, wanted)


@pytest.mark.parametrize(
    "layout", [{"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, {"rope_scaling": {"type": "spiral"}}]
)
def test_b34_a_made_up_rope_type_in_a_targets_config_is_refused(make_target, layout):
    directory = make_target()
    config = json.loads((directory / "config.json").read_text())
    config.pop("rope_parameters")
    write_json(directory / "config.json", config | {"rope_theta": 1e4} | layout)
    with pytest.raises(Refused, match="spiral"):
        Eagle3Config.for_target(describe(directory), (2, 4, 5), DraftConfig())


def test_b34_an_unknown_rope_type_is_refused():
    with pytest.raises(Refused, match="not of a supported type"):
        standardised({"rope_type": "spiral", "rope_theta": 1e4})
    with pytest.raises(Refused, match="partial_rotary_factor"):
        standardised({"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5})


@pytest.mark.parametrize("kind", REQUIRED)
def test_b34_what_a_rope_type_reads_and_is_not_given_is_refused_rather_than_assumed(kind):
    whole = {"rope_type": kind, **dict.fromkeys(REQUIRED[kind], 4.0)}
    assert standardised(whole) == whole
    for key in REQUIRED[kind]:
        with pytest.raises(Refused, match=f"have no {key}; set draft.rope_parameters"):
            standardised({name: value for name, value in whole.items() if name != key})


def test_b20_the_draft_vocabulary_is_exact_ascending_and_padded_by_lowest_id():
    counts = torch.zeros(20, dtype=torch.int64)
    counts[[3, 7, 11, 12, 19]] = torch.tensor([5, 1, 9, 5, 1])
    ids = choose_draft_vocabulary(counts, 8)
    assert ids is not None and ids.tolist() == [0, 1, 2, 3, 7, 11, 12, 19]
    three = choose_draft_vocabulary(counts, 4)  # 7 and 19 tie for the last place
    assert three is not None and three.tolist() == [3, 7, 11, 12]
    d2t, t2d = maps(ids, 20)
    assert d2t.dtype == torch.int64 and torch.equal(ids_from_offsets(d2t), ids)
    assert torch.equal(t2d.nonzero()[:, 0], ids)
    assert choose_draft_vocabulary(counts, 20) is None and choose_draft_vocabulary(counts, None) is None
    with pytest.raises(Refused, match="draft.vocab_size=21"):
        choose_draft_vocabulary(counts, 21)
    assert maps(torch.tensor([1, 4, 7]), 10)[0].tolist() == [1, 3, 5]


@pytest.mark.parametrize(
    "text",
    ["3", "[]", "{}", "{", '{"model_type": "llama", "hidden_size": "x"}', '{"model_type": "llama", "rope_scaling": 3}'],
)
def test_a_target_whose_configuration_is_none_is_refused_in_one_line(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(Refused, match=rf"target\.path={tmp_path} holds no usable config\.json") as caught:
        describe(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["[]", '{"weight_map": 3}', "{}"])
def test_b30_an_index_of_a_target_that_is_none_is_refused(make_target, text):
    directory = make_target()
    (directory / "model.safetensors.index.json").write_text(text)
    with pytest.raises(Refused, match=r"model\.safetensors\.index\.json is no index of shards"):
        describe(directory).load_embedding()


@pytest.mark.parametrize("trusted", [False, True])
def test_of_a_name_on_the_hub_code_is_fetched_only_if_it_may_be_run(make_target, monkeypatch, trusted):
    asked: list[str] = []

    def snapshot_download(name: str, allow_patterns: list[str]) -> str:
        asked.extend(allow_patterns)
        return str(make_target())

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    describe_target(TargetConfig(path="owner/name", trust_remote_code=trusted))
    assert ("*.py" in asked) == trusted and "*.safetensors" in asked


def test_a_missing_target_is_refused_in_one_line(tmp_path):
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(Refused, match="target.path="):
            describe(path)
