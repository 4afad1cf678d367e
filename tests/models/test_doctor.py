"""The doctor finds every planted fault, says what the engine would do about it, and finds none in a good head."""

from __future__ import annotations

import contextlib
import itertools
import json
import pickle
import shutil
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from models import doctor, importer
from models.doctor import diagnose
from models.doctor_values import looks_random
from models.errors import Refused
from models.heads import IDS
from tests.models.layouts import (
    Edit,
    as_layers,
    as_specforge,
    as_speculators,
    changed,
    exported,
    rope_of_transformers_5,
    sharded,
)

FC, NORM, LM_HEAD = "fc.weight", "norm.weight", "lm_head.weight"


@pytest.fixture(scope="module")
def good(target, tmp_path_factory) -> Path:
    """An export of a head with a reduced vocabulary, one norm over all planes, and planes of its own."""
    directory = tmp_path_factory.mktemp("good") / "export"
    exported(target, directory, norm_before_fc=True)
    return directory


@pytest.fixture(scope="module")
def good_full(target, tmp_path_factory) -> Path:
    """An export with the full vocabulary and a norm per plane."""
    directory = tmp_path_factory.mktemp("full") / "export"
    exported(target, directory, vocab=None, fc_norm=True)
    return directory


def run(monkeypatch, *arguments: object) -> int:
    """The command, in this process; returns its exit code."""
    monkeypatch.setattr(sys, "argv", ["doctor", *map(str, arguments)])
    with pytest.raises(SystemExit) as left:
        doctor.main()
    assert isinstance(left.value.code, int)
    return left.value.code


def key(**values: Any) -> Edit:
    return lambda config, _: config.update(values)


def without(name: str) -> Edit:
    return lambda config, tensors: (config if name in config else tensors).pop(name)


def tensor(name: str, change: Any) -> Edit:
    def edit(_: Any, tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = change(tensors[name])

    return edit


def added(name: str, value: torch.Tensor) -> Edit:
    return lambda _, tensors: tensors.update({name: value})


def planes(vllm: list[int] | None, sglang: list[int] | None, **values: Any) -> Edit:
    def edit(config: dict[str, Any], _: Any) -> None:
        config.update({IDS: vllm, "eagle_config": {IDS: sglang}, **values})

    return edit


def both(*edits: Edit) -> Edit:
    def edit(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        for each in edits:
            each(config, tensors)

    return edit


def fresh(value: torch.Tensor) -> torch.Tensor:
    return (torch.randn(value.shape, generator=torch.Generator().manual_seed(5)) * 0.02).to(value.dtype)


def all_fresh(_: Any, tensors: dict[str, torch.Tensor]) -> None:
    tensors.update({name: fresh(value) for name, value in tensors.items() if value.dim() == 2})


def norms_of_ones(_: Any, tensors: dict[str, torch.Tensor]) -> None:
    tensors.update({name: torch.ones_like(value) for name, value in tensors.items() if "norm.weight" in name})


def absolute(value: torch.Tensor) -> torch.Tensor:
    return value + torch.arange(value.numel())


def swap_two(value: torch.Tensor) -> torch.Tensor:
    ids = absolute(value)
    ids[[3, 9]] = ids[[9, 3]]
    return ids - torch.arange(ids.numel())


def nan(value: torch.Tensor) -> torch.Tensor:
    value[1] = torch.nan
    return value


def prefixed(_: Any, tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = tensors.pop(NORM)


VLLM, SGLANG, BOTH = "vLLM", "SGLang", "vLLM and SGLang"
FAULTS: dict[str, tuple[Edit, str]] = {
    "ids swapped between the engines": (planes([1, 3, 4], [2, 4, 5]), f"{BOTH}: {IDS}: vLLM captures planes [1"),
    "ids raw for SGLang": (planes([2, 4, 5], [2, 4, 5]), f"{BOTH}: {IDS}: vLLM captures planes [2, 4, 5], S"),
    "ids for vLLM only": (planes([2, 4, 6], None), f"{BOTH}: {IDS}: vLLM captures planes [2, 4, 6], SGLang [2, 4, 5]"),
    "ids not ascending": (planes([4, 2, 5], [3, 1, 4]), f"{VLLM}: {IDS}: planes [4, 2, 5]: not ascending"),
    "ids twice": (planes([2, 2, 5], [1, 1, 4]), f"{VLLM}: {IDS}: planes [2, 2, 5]: 2 are captured, fc takes 3"),
    "ids beyond the target": (planes([2, 4, 9], [1, 3, 8]), f"{SGLANG}: eagle_config.{IDS}: planes [2, 4, 9]: n"),
    "ids and fc's width": (
        key(num_aux_hidden_states=4),
        f"{BOTH}: {FC}: fuses 3 planes of 64, the config",
    ),
    "no d2t": (without("d2t"), f"{BOTH}: d2t: is missing with 100 of"),
    "d2t absolute": (tensor("d2t", absolute), f"{BOTH}: d2t: holds target ids where offsets belong"),
    "d2t absolute, no t2d": (
        both(tensor("d2t", absolute), without("t2d")),
        f"{BOTH}: d2t: holds target ids where offsets belong",
    ),
    "d2t out of range": (tensor("d2t", lambda d2t: d2t + 200), f"{BOTH}: d2t: points to ids"),
    "d2t with two ids exchanged": (tensor("d2t", swap_two), f"{BOTH}: d2t: is not ascending: draft ids 3 and 4"),
    "d2t of floats": (tensor("d2t", torch.Tensor.float), f"{BOTH}: d2t: is torch.float32, not int64"),
    "t2d disagrees": (tensor("t2d", lambda t2d: t2d.roll(1)), f"{BOTH}: d2t: and t2d mark different tokens"),
    "no norm": (without(NORM), f"{BOTH}: {NORM}: is missing: left uninitialised"),
    "no fc": (without(FC), f"{BOTH}: {FC}: is missing: left uninitialised"),
    "no lm_head": (without(LM_HEAD), f"{BOTH}: {LM_HEAD}: is missing: left uninitialised"),
    "fc transposed": (tensor(FC, lambda fc: fc.T), f"{BOTH}: {FC}: is transposed"),
    "dtype field": (key(torch_dtype="float32"), f"{SGLANG}: torch_dtype: is float32, which the head is run in"),
    "no dtype field": (without("torch_dtype"), f"{SGLANG}: torch_dtype: is missing, taken as float32"),
    "tied": (key(tie_word_embeddings=True), f"{SGLANG}: tie_word_embeddings: is true: the embedding is used"),
    "small context": (key(max_position_embeddings=512), f"{SGLANG}: max_position_embeddings: is 512, the target's con"),
    "rope scaling lost": (key(rope_scaling=None), f"{BOTH}: rope: {{'rope_theta': 50000.0, 'rope_type': 'default'}}"),
    "rope theta lost": (without("rope_theta"), "'rope_theta': 10000.0}, the target's {"),
    "rope of an unknown type": (
        key(rope_scaling={"rope_type": "made-up"}),
        f"{BOTH}: rope: is not computed alike by both",
    ),
    "a single plane": (
        both(planes([3], [2], num_aux_hidden_states=1), tensor(FC, lambda fc: fc[:, :64])),
        f"{SGLANG}: num_aux_hidden_states: is 1: fc is skipped",
    ),
    "embedding random": (
        lambda config, tensors: tensors.update({"embed_tokens.weight": fresh(torch.empty(config["vocab_size"], 64))}),
        f"{VLLM}: embed_tokens.weight: looks freshly initialised",
    ),
    "embedding another": (
        lambda config, tensors: tensors.update(
            {"embed_tokens.weight": torch.outer(torch.arange(config["vocab_size"]) + 1.0, torch.ones(64))}
        ),
        f"{SGLANG}: embed_tokens.weight: differs from the target's, which is used instead",
    ),
    "bias tensor": (
        added("midlayer.self_attn.q_proj.bias", torch.ones(64)),
        f"{BOTH}: midlayer.self_attn.q_proj.bias: is a bias that the configuration has no place for: dropped",
    ),
    "bias key": (key(bias=True), f"{BOTH}: bias: is True: adds bias parameters"),
    "attention_bias": (key(attention_bias=True), f"{SGLANG}: attention_bias: is true"),
    "vocab_size": (key(vocab_size=1000), f"{BOTH}: vocab_size: is 1000, the target's is"),
    "no vocab_size": (without("vocab_size"), f"{BOTH}: vocab_size: is missing: taken as 32000"),
    "head count": (key(num_attention_heads=2), f"{BOTH}: midlayer.self_attn.q_proj.weight: has shape (64, 128)"),
    "head_dim": (key(head_dim=32), f"{BOTH}: midlayer.self_attn.k_proj.weight: has shape (32, 128)"),
    "no layer count": (without("num_hidden_layers"), f"{BOTH}: num_hidden_layers: is missing: taken as 32"),
    "two layers": (key(num_hidden_layers=2), f"{SGLANG}: num_hidden_layers: is 2"),
    "norm_before_fc without its tensor": (
        without("input_norm.weight"),
        f"{BOTH}: input_norm.weight: is missing though norm_before_fc is true",
    ),
    "input_norm without its flag": (
        key(norm_before_fc=False),
        f"{BOTH}: input_norm.weight: is there though norm_before_fc is not set: dropped",
    ),
    "norm_before_fc nested otherwise": (
        lambda config, _: config["eagle_config"].update(norm_before_fc=False),
        f"{BOTH}: norm_before_fc: is True, but False in eagle_config",
    ),
    "fc_norm without its tensors": (
        key(fc_norm=True),
        f"{BOTH}: fc_norm.2.weight: is missing though fc_norm is true",
    ),
    "fc_norm without its flag": (
        added("fc_norm.0.weight", torch.full((64,), 2.0)),
        f"{VLLM}: fc_norm.0.weight: is there though fc_norm is not set: loading fails",
    ),
    "flag as text": (key(norm_output="false"), f"{BOTH}: norm_output: is 'false', neither true nor false"),
    "one norm at 1": (tensor(NORM, torch.ones_like), f"{BOTH}: {NORM}: is exactly 1 everywhere"),
    "all norms at 1": (norms_of_ones, f"{BOTH}: norms: are all exactly 1"),
    "a norm at 0": (tensor(NORM, torch.zeros_like), f"{BOTH}: {NORM}: is 0 everywhere"),
    "matrix of zeros": (tensor(LM_HEAD, torch.zeros_like), f"{BOTH}: {LM_HEAD}: is 0 everywhere"),
    "fc fresh": (tensor(FC, fresh), f"{BOTH}: {FC}: looks freshly initialised"),
    "nothing trained": (all_fresh, f"{BOTH}: weights: all matrices look freshly initialised"),
    "not finite": (tensor(FC, nan), f"{BOTH}: {FC}: holds values that are not finite"),
    "architecture for vLLM": (key(architectures=["LlamaForCausalLM"]), f"{SGLANG}: architectures: LlamaForCausalLM:"),
    "architecture for none": (
        key(architectures=["MyEagle"]),
        f"{VLLM}: architectures: Eagle3MyEagle: no",
    ),
    "no model_type": (without("model_type"), f"{BOTH}: model_type: is missing"),
    "no draft_vocab_size": (without("draft_vocab_size"), f"{SGLANG}: draft_vocab_size: is missing"),
    "norm_before_residual": (key(norm_before_residual=True), f"{SGLANG}: norm_before_residual: is true: ignored"),
    "activation": (key(hidden_act="gelu"), f"{BOTH}: hidden_act: is gelu"),
    "prefix of lm_head": (
        lambda _, tensors: tensors.update({"model.lm_head.weight": tensors.pop("lm_head.weight")}),
        f"{BOTH}: model.lm_head.weight: should be lm_head.weight",
    ),
    "prefix": (prefixed, f"{VLLM}: model.norm.weight: should be {NORM}"),
    "tensor too many": (added("extra.weight", torch.ones(3)), f"{VLLM}: extra.weight: is there though"),
    "q/k norm": (
        added("midlayer.self_attn.q_norm.weight", torch.full((16,), 2.0)),
        f"{SGLANG}: midlayer.self_attn.q_norm.weight: is there though the configuration has no place for it: dropped",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_b29_b31_b33_b34_b36_a_planted_fault_is_found(good, target, tmp_path, monkeypatch, capsys, fault):
    edit, expected = FAULTS[fault]
    directory = changed(good, tmp_path / "head", edit)
    assert run(monkeypatch, directory, "--target", target.path) == 1
    told = capsys.readouterr().out.splitlines()
    assert any(line.startswith("wrong: ") and expected in line for line in told), "\n".join(told)


@pytest.mark.parametrize("text", ["[]", '{"tensors": {"fc.weight": "x"}}'])
def test_an_export_json_that_is_no_record_is_one_line(good, tmp_path, monkeypatch, capsys, text):
    directory = shutil.copytree(good, tmp_path / "head")
    (directory / "export.json").write_text(text)
    assert run(monkeypatch, directory) == 2
    assert "is no record of an export" in capsys.readouterr().err


FULL_FAULTS: dict[str, tuple[Edit, str]] = {
    "d2t in a full vocabulary": (
        lambda config, tensors: tensors.update(d2t=torch.zeros(config["vocab_size"], dtype=torch.int64)),
        f"{VLLM}: d2t: is in a head over the full vocabulary",
    ),
    "draft_vocab_size null": (key(draft_vocab_size=None), f"{SGLANG}: draft_vocab_size: is null: the target's lm_head"),
    "fc_norm off": (key(fc_norm=False), f"{SGLANG}: fc_norm.1.weight: is there though fc_norm is not set: dropped"),
}


@pytest.mark.parametrize("fault", FULL_FAULTS)
def test_a_fault_of_a_full_vocabulary_is_found(good_full, target, tmp_path, monkeypatch, capsys, fault):
    edit, expected = FULL_FAULTS[fault]
    directory = changed(good_full, tmp_path / "head", edit)
    assert run(monkeypatch, directory, "--target", target.path) == 1
    assert any("wrong: " + expected in line for line in capsys.readouterr().out.splitlines())


SHAPES: list[dict[str, Any]] = [
    {"vocab": None},
    {"norm_output": True, "fc_norm": True, "dtype": "float32"},
    {"norm_before_fc": True, "layers": (1, 2, 4, 6), "dtype": "float16"},
    {"head_dim": 24, "layers": (3, 5)},
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_an_export_of_ours_is_sound(target, tmp_path, shape):
    exported(target, tmp_path / "export", **shape)
    assert diagnose(tmp_path / "export", target) == [] == diagnose(tmp_path / "export")


@pytest.mark.parametrize("edit", [as_layers, rope_of_transformers_5])
def test_b34_another_spelling_of_the_same_head_is_sound(good, target, tmp_path, edit):
    assert diagnose(sharded(changed(good, tmp_path / "head", edit)), target) == []


def test_heads_of_others_are_sound_in_the_engine_that_they_are_made_for(good, target, tmp_path, monkeypatch):
    speculators = changed(good, tmp_path / "speculators", as_speculators)
    assert run(monkeypatch, speculators, "--target", target.path, "--engine", "vllm") == 0
    assert run(monkeypatch, speculators, "--target", target.path) == 1
    specforge = changed(good, tmp_path / "specforge", as_specforge)
    assert run(monkeypatch, specforge, "--target", target.path, "--engine", "sglang") == 0
    assert [finding.about for finding in diagnose(specforge, target)] == [IDS]  # vLLM's V1 runner, a note


def test_the_targets_own_embedding_and_a_bias_of_zeros_do_no_harm(good, target, tmp_path):
    def edit(_: Any, tensors: dict[str, torch.Tensor]) -> None:
        tensors["embed_tokens.weight"] = target.load_embedding().bfloat16()
        tensors["midlayer.self_attn.q_proj.bias"] = torch.zeros(64, dtype=torch.bfloat16)

    found = diagnose(changed(good, tmp_path / "head", edit), target)
    assert {finding.about for finding in found} == {"embed_tokens.weight", "midlayer.self_attn.q_proj.bias"}
    assert not any(finding.wrong for finding in found)


def test_a_head_without_planes_is_sound(target, tmp_path):
    def edit(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        config["eagle_config"] = {"use_aux_hidden_state": False}
        del config[IDS], config["num_aux_hidden_states"], tensors["fc.weight"]

    exported(target, tmp_path / "export")
    assert diagnose(changed(tmp_path / "export", tmp_path / "head", edit), target) == []


def test_a_table_on_a_terminal_says_the_same(good, tmp_path):
    findings = diagnose(changed(good, tmp_path / "head", key(tie_word_embeddings=True)))
    terminal = Console(file=StringIO(), force_terminal=True, width=200)
    doctor.show(findings, terminal)
    assert isinstance(terminal.file, StringIO)
    (row,) = [line for line in terminal.file.getvalue().splitlines() if "tie_word_embeddings" in line]
    assert "wrong" in row and "SGLang" in row and findings[0].text in row


ODD = [None, "x", -1, 0, 3.5, True, [], ["x"], {"x": 1}, 10**9]


def test_whatever_a_key_holds_there_is_a_verdict_or_a_refusal(good, target, tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "judge_values", lambda *_, **__: [])  # they take long, and depend on two keys only
    keys = [*json.loads((good / "config.json").read_text()), "rope_parameters", "layer_types", "speculators_model_type"]
    head = changed(good, tmp_path / "head", lambda *_: None)
    whole = json.loads((good / "config.json").read_text())
    for name, value in itertools.product(keys, ODD):
        (head / "config.json").write_text(json.dumps(whole | {name: value}))
        with contextlib.suppress(Refused):
            assert all(finding.text for finding in diagnose(head, target)), f"{name}={value}"


def test_an_export_for_a_target_with_other_weights_is_found(good, target, tmp_path):
    head = changed(good, tmp_path / "head", lambda *_: None, own=True)
    record = json.loads((head / "export.json").read_text())
    record["target"]["weights_hash"] = "0"
    (head / "export.json").write_text(json.dumps(record))
    (found,) = diagnose(head, target)
    assert found.wrong and found.about == "export.json"


@pytest.mark.parametrize("command", [doctor, importer])
def test_a_mistake_on_the_command_line_is_one_line_and_help_tells_the_usage(monkeypatch, capsys, command):
    monkeypatch.setattr(sys, "argv", ["x"])
    with pytest.raises(SystemExit) as left:
        command.main()
    (line,) = capsys.readouterr().err.splitlines()
    name = command.__name__.removeprefix("models.")
    assert left.value.code == 2 and line.startswith(f"{name}: the following arguments are required: directory")
    monkeypatch.setattr(sys, "argv", ["x", "--help"])
    with pytest.raises(SystemExit) as left:
        command.main()
    assert left.value.code == 0 and f"usage: python -m models.{name} " in capsys.readouterr().out


def test_names_from_a_file_cannot_steer_the_terminal(good, tmp_path, monkeypatch, capsys):
    head = changed(good, tmp_path / "head", added("\x1b[2Jextra.weight", torch.ones(3)))
    assert run(monkeypatch, head) == 1
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.parametrize("shape", [(64, 192), (96, 64), (300, 1000), (9000, 50)])
def test_a_matrix_looks_random_until_a_direction_or_a_row_stands_out(shape):
    generator = torch.Generator().manual_seed(1)
    normal, uniform = torch.randn(shape, generator=generator), torch.rand(shape, generator=generator) - 0.5
    for fresh_MN in (normal * 0.02, uniform * 0.1, (normal * 0.02).bfloat16()):
        assert looks_random(fresh_MN)
    signs_M, signs_N = (torch.randn(size, generator=generator).sign() for size in shape)
    assert not looks_random(normal + 0.5 * torch.outer(signs_M, signs_N))  # all rows and columns as even as before
    assert not looks_random(normal * torch.linspace(0.5, 1.5, shape[0])[:, None])
    assert not looks_random(normal * torch.linspace(0.5, 1.5, shape[1]))


class Bomb:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_a_pickle_is_refused_and_never_read(good, target, tmp_path, monkeypatch, capsys, name):
    head = changed(good, tmp_path / "head", lambda *_: None)
    (head / "model.safetensors").unlink()
    (head / name).write_bytes(pickle.dumps(Bomb(tmp_path / "exploded")))
    assert run(monkeypatch, head, "--target", target.path) == 2
    assert f"keeps its weights in {name}, a pickle" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["x", str(head), "--target", target.path, "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as left:
        importer.main()
    assert left.value.code == 2 and "a pickle" in capsys.readouterr().err
    assert not (tmp_path / "exploded").exists() and not (tmp_path / "out").exists()
    pickle.loads((head / name).read_bytes())
    assert (tmp_path / "exploded").exists(), "the pickle would not have told"


def test_what_is_no_head_is_refused_in_one_line(good, target, tmp_path, monkeypatch, capsys):
    def outside(head: Path) -> None:
        sharded(head)
        index = head / "model.safetensors.index.json"
        index.write_text(index.read_text().replace("model-00001", "../model-00001"))

    def lost_shard(head: Path) -> None:
        (sharded(head) / "model-00002-of-00002.safetensors").unlink()

    def torn(head: Path) -> None:
        (head / "model.safetensors").write_bytes((head / "model.safetensors").read_bytes()[:1000])

    def no_factor(head: Path) -> None:
        config = json.loads((head / "config.json").read_text())
        del config["rope_scaling"]["factor"]
        (head / "config.json").write_text(json.dumps(config))

    for number, (damage, expected) in enumerate(
        {
            lambda head: (head / "config.json").unlink(): "no config.json",
            lambda head: (head / "config.json").write_text("{"): "not valid JSON",
            lambda head: (head / "config.json").write_text('{"eagle_config": 3}'): "eagle_config is not an object",
            lambda head: (head / "config.json").write_text('{"vocab_size": "x"}'): "can read",
            lambda head: (head / "model.safetensors").unlink(): "holds no *.safetensors",
            no_factor: 'can read ("Missing required keys',
            torn: "cannot be read as safetensors",
            outside: "names files that are not beside it",
            lost_shard: "cannot be read as safetensors",
        }.items()
    ):
        head = changed(good, tmp_path / str(number), lambda *_: None)
        damage(head)
        assert run(monkeypatch, head) == 2
        (told,) = capsys.readouterr().err.splitlines()
        assert expected in told
    assert run(monkeypatch, target.path) == 2 and "holds no EAGLE-3 head" in capsys.readouterr().err
