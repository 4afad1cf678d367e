"""The target whose heads are looked at, exported and imported in several modules."""

from __future__ import annotations

import pytest

from models.config import TargetConfig
from models.target import Target, describe_target
from tests.models.layouts import TARGET


@pytest.fixture(scope="module")
def target(make_target) -> Target:
    return describe_target(TargetConfig(path=str(make_target(**TARGET)), dtype="float32"))
