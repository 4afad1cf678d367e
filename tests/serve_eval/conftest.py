"""Fixtures of the served part: an engine that is a script, a head that is a config, prompts that are numbers."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from models.config import EngineConfig
from serve_eval.prompts import Prompt
from tests.serve_eval.stub import Behaviour

STUB = Path(__file__).with_name("stub.py")


@pytest.fixture
def fake_engine(tmp_path: Path) -> Callable[..., EngineConfig]:
    """Makes an EngineConfig whose interpreter is the stub; its starts are recorded in tmp_path/starts.jsonl."""

    def make(behaviour: Behaviour | None = None, **settings: Any) -> EngineConfig:
        script = tmp_path / "engine-env" / "bin" / "python"
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text(f'#!/bin/sh\nexec {sys.executable} {STUB} "$@"\n')
        script.chmod(0o755)
        environment = {
            "STUB_BEHAVIOUR": json.dumps(asdict(behaviour or Behaviour())),
            "STUB_STARTS": str(tmp_path / "starts.jsonl"),
        }
        base: dict[str, Any] = {"python": str(script), "dtype": "float32", "environment": environment}
        return EngineConfig(**(base | {"startup_timeout_s": 20} | settings))

    return make


@pytest.fixture
def starts(tmp_path: Path) -> Callable[[], list[dict[str, Any]]]:
    """The starts of the fake engine so far: arguments, cwd and pid of each."""

    def read() -> list[dict[str, Any]]:
        file = tmp_path / "starts.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    return read


@pytest.fixture
def head_dir(tmp_path: Path) -> Path:
    """A directory that looks like an exported EAGLE-3 head."""
    directory = tmp_path / "head"
    directory.mkdir()
    (directory / "config.json").write_text('{"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}')
    return directory


@pytest.fixture
def numbered_prompts() -> list[Prompt]:
    """Four prompts in each of two routes; first ids 0..3 and 100..103."""
    return [
        Prompt(f"{route}-{index}", route, (base + index, 7, 7))
        for route, base in (("chat", 0), ("code", 100))
        for index in range(4)
    ]
