"""A checkpoint that is damaged, or of another target, is refused in one line that says what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from models.artefact import write_tensors
from models.checkpoint import describe, differing_target, load_head
from models.config import ExportConfig, TargetConfig
from models.errors import Refused
from models.export import export_head
from models.target import describe_target
from tests.models.heads import save_trained


@pytest.fixture
def checkpoint(make_target, tmp_path) -> Path:
    save_trained(make_target(), tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def head_json(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        path = directory / "head.json"
        meta = json.loads(path.read_text())
        instead = change(meta)
        path.write_text(json.dumps(instead if isinstance(instead, list) else meta))

    return damage


def misshapen(directory: Path) -> None:
    tensors = load_file(directory / "head.safetensors")
    write_tensors(directory / "head.safetensors", tensors | {"fc.weight": tensors["fc.weight"].T})


def map_beyond(directory: Path) -> None:
    tensors = load_file(directory / "head.safetensors")
    write_tensors(directory / "head.safetensors", tensors | {"d2t": tensors["d2t"] + 1000})


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "shape": (misshapen, r"fc\.weight has shape \(192, 64\), head\.json says \(64, 192\)"),
    "map": (map_beyond, r"d2t is no ascending map into 0\.\.399"),
    "unknown key": (head_json(lambda m: m["config"].update(norm="x")), r"head\.json describes no .*'norm'"),
    "no key": (head_json(lambda m: m["config"].pop("head_dim")), r"head\.json describes no .*'head_dim'"),
    "text for a size": (head_json(lambda m: m["config"].update(hidden_size="x")), r"head\.json describes no"),
    "no target": (head_json(lambda m: m.pop("target")), r"head\.json describes no .*target"),
    "a list": (head_json(lambda m: [m]), r"head\.json describes no"),
    "rope": (head_json(lambda m: m["config"].update(rope_parameters=3)), r"head\.json describes no"),
    "torn": (lambda directory: (directory / "head.json").write_text("{"), r"head\.json is not valid JSON"),
    "gone": (lambda directory: (directory / "head.safetensors").unlink(), "holds no complete head"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_checkpoint_is_refused_in_one_line(checkpoint, name):
    damage, told = DAMAGE[name]
    damage(checkpoint)
    with pytest.raises(Refused, match=told) as caught:
        load_head(checkpoint)
    assert "\n" not in str(caught.value)


def test_the_refusal_of_another_target_names_the_hash_that_differs_and_shows_both(checkpoint, make_target, tmp_path):
    mine = load_head(checkpoint)[1]
    other = describe_target(TargetConfig(path=str(make_target(rms_norm_eps=1e-4)), dtype="float32"))
    told = f"configuration {mine['config_hash']}, here {other.config_hash}"
    assert differing_target(mine, describe(other)) == told and mine["weights_hash"] == other.weights_hash
    with pytest.raises(Refused, match=rf"was trained for another target than {other.path} \({told}\)"):
        export_head(checkpoint, tmp_path / "export", other, ExportConfig())
    tuned = mine | {"weights_hash": "0" * 16}
    assert differing_target(mine, tuned) == f"weights {mine['weights_hash']}, here {'0' * 16}"
    assert differing_target({}, tuned).count("None, here") == 2 and differing_target(mine, dict(mine)) == ""


def test_a_checkpoint_holds_the_head_in_full_precision(checkpoint):
    head, _ = load_head(checkpoint)
    assert {parameter.dtype for parameter in head.parameters()} == {torch.float32}
