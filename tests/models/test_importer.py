"""A head made by others becomes the checkpoint that it would have been, or is refused by name."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from models import importer
from models.checkpoint import load_head
from models.config import ExportConfig, TargetConfig
from models.doctor import diagnose
from models.errors import Refused
from models.export import export_head, load_export
from models.importer import import_head
from models.target import Target, describe_target
from tests.models.layouts import (
    Edit,
    as_layers,
    as_legacy,
    as_specforge,
    as_speculators,
    changed,
    exported,
    sharded,
)


def with_the_targets_embedding(target: Target, edit: Edit) -> Edit:
    def both(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        edit(config, tensors)
        tensors["embed_tokens.weight"] = target.load_embedding()

    return both


def test_a_head_without_fc_is_imported_and_exported_again_as_it_was(target, tmp_path):
    head = exported(target, tmp_path / "export", use_aux_hidden_state=False)
    foreign = changed(tmp_path / "export", tmp_path / "foreign", as_layers)
    assert import_head(foreign, tmp_path / "imported", target).config == head.config
    export_head(tmp_path / "imported", tmp_path / "again", target, ExportConfig())
    assert diagnose(tmp_path / "again", target) == []
    assert load_export(tmp_path / "again")[0].config == head.config
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "export" / name).read_bytes()


@pytest.mark.parametrize("layout", [as_legacy, as_specforge, as_speculators])
@pytest.mark.parametrize(
    "shape", [{}, {"vocab": None, "norm_output": True, "fc_norm": True, "layers": (1, 3, 6)}], ids=["3.0", "3.1"]
)
def test_a_head_in_a_foreign_layout_is_imported_as_it_was(target, tmp_path, layout, shape):
    if layout is as_legacy and shape:
        shape = {**shape, "layers": (2, 4, 5)}  # it cannot tell others
    head = exported(target, tmp_path / "export", dtype="float32", **shape)
    foreign = changed(tmp_path / "export", tmp_path / "foreign", with_the_targets_embedding(target, layout))
    if layout is as_speculators:
        sharded(foreign)
    import_head(foreign, tmp_path / "imported", target)
    again, _ = load_head(tmp_path / "imported")
    assert again.config == head.config and torch.equal(again.ids_D, head.ids_D)
    for name, value in head.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)

    tokens, aux = torch.randint(3, 300, (14,)), torch.randn(14, 3, 64)
    rows = [torch.arange(12), torch.arange(11)]
    with torch.no_grad():
        given = (tokens, aux, torch.zeros(14, dtype=torch.int64), rows, target.load_embedding())
        for ours, theirs in zip(head.unroll(*given), again.unroll(*given), strict=True):
            assert torch.equal(head.lm_head(ours.hidden_RH), again.lm_head(theirs.hidden_RH))


def test_an_imported_head_is_exported_for_both_engines(target, tmp_path):
    head = exported(target, tmp_path / "export", norm_before_fc=True)
    foreign = changed(tmp_path / "export", tmp_path / "foreign", as_specforge)
    import_head(foreign, tmp_path / "imported", target)
    export_head(tmp_path / "imported", tmp_path / "again", target, ExportConfig())
    assert diagnose(tmp_path / "again", target) == []
    assert load_export(tmp_path / "again")[0].config == head.config
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "export" / name).read_bytes()


def test_a_head_with_a_rope_of_its_own_keeps_it(target, tmp_path):
    exported(target, tmp_path / "export")
    edit = {"rope_theta": 10_000.0, "rope_scaling": {"type": "linear", "factor": 2.0}, "max_position_embeddings": 64}
    foreign = changed(tmp_path / "export", tmp_path / "foreign", lambda config, _: config.update(edit))
    config = import_head(foreign, tmp_path / "imported", target).config
    assert config.rope_parameters == {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0}
    assert config.max_position_embeddings == target.config.max_position_embeddings


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "factor": 8.0,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 128,
}
PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}


@pytest.mark.parametrize("rope", [LONGROPE, PARTIAL], ids=["longrope", "partial"])
def test_b34_a_head_keeps_its_rope_when_the_targets_is_of_a_kind_that_none_may_have(
    make_target, tmp_path, monkeypatch, capsys, rope
):
    target = describe_target(TargetConfig(path=str(make_target(rope_parameters=rope)), dtype="float32"))
    own = {"rope_type": "default", "rope_theta": 20_000.0}
    head = exported(target, tmp_path / "export", dtype="float32", rope_parameters=own)
    foreign = changed(tmp_path / "export", tmp_path / "foreign", as_specforge)
    arguments = [foreign, "--target", target.path, "--out", tmp_path / "imported"]
    monkeypatch.setattr(sys, "argv", ["importer", *map(str, arguments)])
    importer.main()
    again, _ = load_head(tmp_path / "imported")
    assert again.config == head.config and again.config.rope_parameters == own
    assert "draft.rope_parameters={rope_theta:20000.0,rope_type:default}" in capsys.readouterr().out
    export_head(tmp_path / "imported", tmp_path / "again", target, ExportConfig())
    assert not [finding for finding in diagnose(tmp_path / "again", target) if finding.wrong]
    unknown = changed(tmp_path / "export", tmp_path / "unknown", key(rope_scaling={"rope_type": "made-up"}))
    with pytest.raises(Refused, match="cannot be imported: its own rope parameters"):
        import_head(unknown, tmp_path / "refused", target)


def test_b34_a_yarn_that_ends_before_the_context_is_imported_when_the_targets_does_too(make_target, tmp_path):
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
    target = describe_target(TargetConfig(path=str(make_target(rope_parameters=dict(yarn))), dtype="float32"))
    head = exported(target, tmp_path / "export")
    import_head(tmp_path / "export", tmp_path / "imported", target)
    assert load_head(tmp_path / "imported")[0].config == head.config


@pytest.mark.parametrize("factor", [None, 1.5])
@pytest.mark.parametrize("attn", [None, 1.1])
def test_b34_a_head_whose_attention_factor_the_engines_read_otherwise_is_refused(make_target, tmp_path, factor, attn):
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 128}
    own = yarn if factor is None else yarn | {"attention_factor": factor}
    target = describe_target(TargetConfig(path=str(make_target(rope_parameters=dict(own))), dtype="float32"))
    exported(target, tmp_path / "export")
    import_head(tmp_path / "export", tmp_path / "right", target)
    assert load_head(tmp_path / "right")[0].config.to_dict()["rope_parameters"] == own

    def edit(config: dict[str, Any], _: Any) -> None:
        config["rope_scaling"].pop("attn_factor", None)
        if attn is not None:
            config["rope_scaling"]["attn_factor"] = attn

    foreign = changed(tmp_path / "export", tmp_path / "foreign", edit)
    if factor is None and attn is None:
        import_head(foreign, tmp_path / "imported", target)
        return
    with pytest.raises(Refused, match=r"vLLM multiply cosines and sines by .* SGLang by .* \(attn_factor\)"):
        import_head(foreign, tmp_path / "imported", target)


def test_what_the_command_cannot_read_or_write_is_one_line_that_names_its_option(target, tmp_path, monkeypatch, capsys):
    exported(target, tmp_path / "export")
    (tmp_path / "file").touch()
    for place, out, told in (
        (tmp_path / "nowhere", tmp_path / "out", f"--target {tmp_path / 'nowhere'} is not a directory"),
        (target.path, tmp_path / "file" / "out", "file"),
    ):
        arguments = [tmp_path / "export", "--target", place, "--out", out]
        monkeypatch.setattr(sys, "argv", ["importer", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            importer.main()
        (line,) = capsys.readouterr().err.splitlines()
        assert left.value.code == 2 and told in line and "target.path" not in line


def test_names_from_a_file_cannot_steer_the_terminal(target, tmp_path, monkeypatch, capsys):
    exported(target, tmp_path / "export")
    foreign = changed(tmp_path / "export", tmp_path / "foreign", added("\x1b[2J.bias", torch.ones(3)))
    monkeypatch.setattr(sys, "argv", ["x", str(foreign), "--target", target.path, "--out", str(tmp_path / "imported")])
    with pytest.raises(SystemExit):
        importer.main()
    told = capsys.readouterr().err
    assert r"no bias (\x1b[2J.bias)" in told and "\x1b" not in told


def test_the_command_says_how_to_go_on(target, tmp_path, monkeypatch, capsys):
    exported(target, tmp_path / "export", fc_norm=True)
    arguments = [tmp_path / "export", "--target", target.path, "--out", tmp_path / "imported"]
    monkeypatch.setattr(sys, "argv", ["importer", *map(str, arguments)])
    importer.main()
    wanted = (
        f"trainer.init_from={tmp_path / 'imported'} target.aux_layers=[2,4,5] draft.vocab_size=100 draft.fc_norm=true"
    )
    how, last = capsys.readouterr().out.splitlines()
    first = f"`python -m models.export` and export.checkpoint={tmp_path / 'imported'}, then `python -m serve_eval`"
    assert first in how and last == wanted
    assert json.loads((tmp_path / "imported" / "origin.json").read_text())["layout"] == "plain"
    with pytest.raises(SystemExit) as left:
        importer.main()
    assert left.value.code == 2 and "exists; delete it" in capsys.readouterr().err


def key(**values: Any) -> Edit:
    return lambda config, _: config.update(values)


def added(name: str, value: torch.Tensor) -> Edit:
    return lambda _, tensors: tensors.update({name: value})


BEYOND: dict[str, tuple[Edit, str]] = {
    "layers": (key(num_hidden_layers=2), "ours has no 2 layers"),
    "residual": (key(norm_before_residual=True), "ours has no norm_before_residual"),
    "q/k norm": (added("midlayer.self_attn.q_norm.weight", torch.ones(16)), r"no q/k norm \(midlayer.self_attn.q_norm"),
    "bias": (added("midlayer.self_attn.v_proj.bias", torch.ones(32)), r"no bias \(midlayer.self_attn.v_proj.bias\)"),
    "fc that is not read": (key(eagle_config={"use_aux_hidden_state": False}), r"without a place .* \['fc.weight'\]"),
    "activation": (key(hidden_act="gelu"), "no hidden_act=gelu"),
    "parallel": (added("mask_hidden", torch.ones(1, 192)), "no parallel drafting"),
    "embedding": (
        lambda config, tensors: tensors.update({"embed_tokens.weight": torch.ones(config["vocab_size"], 64)}),
        "an embedding of its own",
    ),
    "no map": (lambda _, tensors: tensors.pop("d2t"), "has no d2t"),
    "absolute map": (lambda _, tensors: tensors["d2t"].add_(torch.arange(100)), "d2t holds target ids"),
    "another vocabulary": (key(vocab_size=999), "has vocab_size=999, the target"),
    "missing tensor": (lambda _, tensors: tensors.pop("norm.weight"), r"missing \['norm.weight'\]"),
    "extra tensor": (added("extra.weight", torch.ones(3)), r"without a place in an EAGLE-3 head \['extra.weight'\]"),
    "shape": (key(intermediate_size=48), r"gate_proj.weight is \(96, 64\), its config.json says \(48, 64\)|down_proj"),
    "not finite": (lambda _, tensors: tensors["norm.weight"].fill_(torch.inf), "values that are not finite"),
    "planes": (key(eagle_aux_hidden_state_layer_ids=[1, 2, 3]), "tells vLLM to capture planes"),
    "rope": (key(rope_scaling={"rope_type": "made-up"}), "rope parameters"),
}


@pytest.mark.parametrize("case", BEYOND)
def test_what_ours_cannot_be_is_refused_by_name(target, tmp_path, case):
    edit, expected = BEYOND[case]
    exported(target, tmp_path / "export")
    foreign = changed(tmp_path / "export", tmp_path / "foreign", edit)
    with pytest.raises(Refused, match=expected):
        import_head(foreign, tmp_path / "imported", target)
    assert not (tmp_path / "imported").exists()


def test_speculators_residual_is_normed_where_the_file_does_not_say(target, tmp_path):
    def edit(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        as_speculators(config, tensors)
        del config["norm_before_residual"]

    exported(target, tmp_path / "export")
    with pytest.raises(Refused, match="ours has no norm_before_residual"):
        import_head(changed(tmp_path / "export", tmp_path / "foreign", edit), tmp_path / "imported", target)


def test_what_has_no_effect_is_left_out(target, tmp_path):
    def edit(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        as_layers(config, tensors)
        tensors["layers.0.self_attn.q_proj.bias"] = torch.zeros(64)
        tensors["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)

    head: Path = tmp_path / "imported"
    exported(target, tmp_path / "export")
    import_head(changed(tmp_path / "export", tmp_path / "foreign", edit), head, target)
    assert not any("bias" in name or "rotary" in name for name in load_head(head)[0].state_dict())
