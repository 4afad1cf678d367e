"""A head whose feature is the final plane, through all stages: refused, trained, resumed, exported, drafting."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import conf
import featurize.__main__ as featurize_stage
from models.checkpoint import load_head
from models.config import ExportConfig
from models.errors import Refused
from models.export import export_head, find_checkpoint, load_export
from models.target import describe_target
from tests.train.runs import final_head, losses, overrides, place, train_here

NO_FC = ["draft.use_aux_hidden_state=false", "draft.fc_norm=false"]


@pytest.fixture(scope="module")
def everywhere(tiny_target_dir, tiny_conversations, tmp_path_factory) -> tuple[Path, list[str]]:
    """Features of the tiny target with the final plane at every position."""
    root = tmp_path_factory.mktemp("everywhere")
    arguments = [*overrides(tiny_target_dir, tiny_conversations, root), "featurize.final_everywhere=true"]
    featurize_stage.work(conf.load(arguments))
    return root / "run" / "features", arguments


def test_it_is_refused_a_store_that_keeps_the_plane_only_where_it_teaches(features, tmp_path):
    with pytest.raises(Refused, match=r"extract again with featurize\.final_everywhere=true"):
        train_here([*place(features, tmp_path), *NO_FC])


def test_an_eagle3_head_learns_the_same_from_a_store_that_keeps_the_final_plane_everywhere(everywhere, whole, tmp_path):
    assert train_here(place(everywhere, tmp_path)) is True
    ours, usual = final_head(tmp_path / "run" / "train"), final_head(whole)
    assert all(torch.equal(ours[name], usual[name]) for name in usual)


def test_it_is_trained_stopped_resumed_and_exported(everywhere, tmp_path, tiny_target_dir):
    arguments = [*place(everywhere, tmp_path), *NO_FC]
    assert train_here(arguments) is True
    train = tmp_path / "run" / "train"
    first, straight = losses(train), final_head(train)
    assert first[max(first)] < first[1] and "fc.weight" not in straight and "d2t" in straight
    (train / "manifest.json").unlink()
    shutil.rmtree(sorted((train / "checkpoints").glob("step-*"))[-1])
    assert train_here(arguments) is True
    assert all(torch.equal(value, straight[name]) for name, value in final_head(train).items())

    run = conf.load(arguments)
    checkpoint = find_checkpoint(train, "last")
    export_head(checkpoint, tmp_path / "export", describe_target(run.target), ExportConfig(dtype="float32"))
    head, _ = load_export(tmp_path / "export")
    assert head.config == load_head(checkpoint)[0].config and head.config.aux_layers == ()
    with pytest.raises(Refused, match=r"give draft\.use_aux_hidden_state=false$"):
        train_here([*place(everywhere, tmp_path / "b"), f"trainer.init_from={checkpoint}"])
