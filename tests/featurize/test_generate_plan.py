"""What generation sets out to make: how many conversations of which kind, and which settings it refuses."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

import conf
from conf.help import COMMANDS
from featurize.config import DataConfig, GenerateConfig, RouteConfig
from featurize.generate import plan_slots
from models.errors import Refused


@pytest.fixture
def config() -> GenerateConfig:
    return GenerateConfig(conversations=12, routes={"chat": RouteConfig([""])})


@pytest.mark.parametrize("conversations", [1, 2, 7, 1000])
def test_as_many_are_planned_as_asked_for_whatever_the_shares(conversations: int, config: GenerateConfig) -> None:
    config.conversations = conversations
    config.routes = {name: RouteConfig(share=share) for name, share in zip("abcd", (1.0, 1.0, 1.4, 1.0), strict=True)}
    slots = plan_slots(config)
    assert len({slot.id for slot in slots}) == conversations
    counts = Counter(slot.route for slot in slots)
    assert all(abs(counts[name] - conversations * route.share / 4.4) < 1 for name, route in config.routes.items())


def test_all_prompts_are_answered_unless_a_number_is_given_which_is_told(
    config: GenerateConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    file = tmp_path / "prompts.jsonl"
    rows = [{"messages": [{"role": "user", "content": f"question {number}"}]} for number in range(40)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config.prompts, config.conversations = [str(file)], GenerateConfig().conversations
    assert len(plan_slots(config)) == 40
    assert not caplog.messages
    config.conversations = 5
    assert len(plan_slots(config)) == 5
    assert caplog.messages == ["generate.conversations=5: no prompt is read after so many; null takes all"]
    config.prompts, config.conversations = [], None
    with pytest.raises(Refused, match=r"generate.conversations is null; say how many generate.routes are to have"):
        plan_slots(config)


@pytest.mark.parametrize("example", COMMANDS["featurize.generate"][1])
def test_the_examples_of_the_help_have_something_to_ask(example: str) -> None:
    settings = conf.load(shlex.split(example)).generate
    assert settings.prompts or (settings.routes and settings.conversations)


def test_the_demo_relies_on_no_default_and_an_answer_is_not_cut_where_it_fits_a_document() -> None:
    given = OmegaConf.load(Path(conf.__file__).parent / "generate/demo.yaml")
    assert asdict(GenerateConfig()).keys() - given.keys() == {"output", "prompts", "chat_template_kwargs"}
    assert GenerateConfig().max_answer_tokens >= DataConfig().max_tokens


@pytest.mark.parametrize(("share", "sampled"), [(0.0, 0), (0.1, 4), (0.25, 10), (0.4, 16), (0.75, 30), (1.0, 40)])
def test_the_share_that_is_sampled_is_that_of_conversations_and_of_each_opening(
    share: float, sampled: int, config: GenerateConfig
) -> None:
    config.sampled_share, config.conversations = share, 80
    config.routes = {"code": RouteConfig(["Write", "Explain"])}
    slots = plan_slots(config)
    for opening in ("Write", "Explain"):
        assert sum(slot.sampled for slot in slots if slot.opening == opening) == sampled


@pytest.mark.parametrize(
    "wrong",
    [
        {"concurrency": 0},
        {"conversations": -1},
        {"sampled_share": 1.5},
        {"temperature": -0.1},
        {"max_answer_tokens": 0},
    ],
)
def test_settings_that_would_make_nothing_or_wait_forever_are_refused_by_name(wrong: dict[str, Any]) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=f"generate.{name}={value}"):
        GenerateConfig(**wrong)
    with pytest.raises(ValueError, match="share=0 of a route must be above 0"):
        RouteConfig(share=0)


def test_b02_answers_are_made_in_the_thinking_mode_of_the_data() -> None:
    run = conf.load(["name=a", "target=qwen3-8b"])
    assert run.generate.chat_template_kwargs == {"enable_thinking": True}
    without = conf.load(["name=a", "target=qwen3-8b", "data.chat_template_kwargs.enable_thinking=false"])
    assert without.generate.chat_template_kwargs == {"enable_thinking": False}
