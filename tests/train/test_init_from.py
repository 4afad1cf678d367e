"""Training that starts from a head that is there already."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from models.artefact import write_tensors
from models.config import ExportConfig, TargetConfig
from models.errors import Refused
from models.export import export_head
from models.importer import import_head
from models.target import describe_target
from tests.train.runs import final_head, place, train_here


@pytest.fixture
def trained_head(whole, tmp_path) -> Path:
    """A copy of the last checkpoint of a run, elsewhere."""
    last = json.loads((whole / "manifest.json").read_text())["checkpoints"]["last"]
    return Path(shutil.copytree(whole / last, tmp_path / "head"))


def test_training_from_an_imported_head_starts_with_its_weights_and_its_draft_vocabulary(
    features, trained_head, tiny_target_dir, tmp_path
):
    tensors = load_file(trained_head / "head.safetensors")
    tensors["d2t"] = torch.arange(128)  # ids 0, 2, 4, ...: not what the run itself would choose
    write_tensors(trained_head / "head.safetensors", tensors)
    target = describe_target(TargetConfig(path=str(tiny_target_dir), dtype="float32"))
    export_head(trained_head, tmp_path / "export", target, ExportConfig(dtype="float32"))
    import_head(tmp_path / "export", tmp_path / "imported", target)
    arguments = [*place(features, tmp_path), f"trainer.init_from={tmp_path / 'imported'}", "trainer.epochs=1"]
    frozen = ["optim.lr=1e-12", "optim.muon_lr=1e-12"]
    assert train_here([*arguments, *frozen]) is True
    after = final_head(tmp_path / "run" / "train")
    assert after.keys() == tensors.keys()
    for name, value in tensors.items():
        torch.testing.assert_close(after[name], value, rtol=0, atol=1e-6)
    assert train_here([*arguments, *frozen]) is False
    with pytest.raises(Refused, match=r"other settings or data \(.*trainer\.init_from was .*, is None"):
        train_here([*(argument for argument in arguments if "init_from" not in argument), *frozen])


def test_a_head_of_another_shape_or_target_is_refused_with_the_difference(features, trained_head, tmp_path):
    arguments = [*place(features, tmp_path), f"trainer.init_from={trained_head}"]
    with pytest.raises(Refused, match="head of another shape; give draft.vocab_size=128$"):
        train_here([*arguments, "draft.vocab_size=64"])
    with pytest.raises(Refused, match="give draft.fc_norm=false$"):
        train_here([*arguments, "draft.fc_norm=true"])
    about = json.loads((trained_head / "head.json").read_text())
    about["target"]["weights_hash"] = "0"
    (trained_head / "head.json").write_text(json.dumps(about))
    with pytest.raises(Refused, match="was trained for another target"):
        train_here(arguments)
    with pytest.raises(Refused, match="no complete head"):
        train_here([*arguments[:-1], f"trainer.init_from={tmp_path / 'nowhere'}"])
