"""slurm.generate: a task of the array asks a server of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import slurm.generate
from featurize.config import GenerateConfig
from models.config import EngineConfig, TargetConfig

TARGET = TargetConfig(path="some/target")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[GenerateConfig, list[str] | None]]:
    """What generation is called with: its settings, and the servers that it starts, if any."""
    calls: list[tuple[GenerateConfig, list[str] | None]] = []

    def fill(config: GenerateConfig, _target: TargetConfig, servers: Any = None) -> bool:
        with contextlib.nullcontext() if servers is None else servers() as urls:
            calls.append((config, urls))
        return True

    monkeypatch.setattr(slurm.generate, "fill_and_pack", fill)
    return calls


def test_it_serves_the_target_without_speculation_in_a_folder_of_its_own(
    asked: list[tuple[GenerateConfig, list[str] | None]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextlib.contextmanager
    def serving(engine: EngineConfig, path: str, **how: Any) -> Iterator[Any]:
        assert (engine.kind, path, how["method"], how["directory"]) == (
            "vllm",
            "some/target",
            "none",
            tmp_path / "server-3",
        )
        yield SimpleNamespace(url="http://127.0.0.1:30001")

    monkeypatch.setattr(slurm.generate, "serving", serving)
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    assert slurm.generate.generate(GenerateConfig(model="another"), TARGET, EngineConfig(kind="vllm"), tmp_path)
    ((config, urls),) = asked
    assert (config.model, urls) == ("target", ["http://127.0.0.1:30001/v1"])


def test_without_an_engine_it_asks_the_servers_that_are_named(
    asked: list[tuple[GenerateConfig, list[str] | None]], tmp_path: Path
) -> None:
    named = GenerateConfig(urls=["http://node7:8000/v1"])
    assert slurm.generate.generate(named, TARGET, EngineConfig(kind="none"), tmp_path)
    assert asked == [(named, None)]
