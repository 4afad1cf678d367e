"""Features of the tiny target and a run over them that was never interrupted."""

from __future__ import annotations

from pathlib import Path

import pytest

import conf
import featurize.__main__ as featurize_stage
from tests.train.runs import overrides, place, train_here


@pytest.fixture(scope="session")
def features(tiny_target_dir, tiny_conversations, tmp_path_factory) -> tuple[Path, list[str]]:
    root = tmp_path_factory.mktemp("runs")
    arguments = overrides(tiny_target_dir, tiny_conversations, root)
    featurize_stage.work(conf.load(arguments))
    return root / "run" / "features", arguments


@pytest.fixture(scope="session")
def whole(features, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("whole")
    assert train_here(place(features, root)) is True
    return root / "run" / "train"
