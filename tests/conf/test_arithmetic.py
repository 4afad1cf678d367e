"""What conf/target and conf/experiment state in comments is what the code computes for them."""

from __future__ import annotations

from pathlib import Path

import pytest

import conf
from models.eagle3 import Eagle3Config
from models.target import aux_layers
from serve_eval.reference import fp32_bytes
from tests.conf.arithmetic import of_experiment, of_target
from tests.conf.shapes import SHAPES, described

CONF = Path(conf.__file__).parent
EXPERIMENTS: dict[str, tuple[str, int, int, float, int, float]] = {
    "one_gpu": ("llama-3.1-8b", 50_000, 1000, 0.5, 1, 8),
    "eight_gpus": ("llama-3.3-70b", 100_000, 1000, 0.5, 8, 70),
    "nodes": ("qwen3-32b", 500_000, 1000, 0.5, 32, 32),
    "streaming": ("llama-3.1-8b", 1_000_000, 1000, 0.5, 4, 8),
    "long_context": ("llama-3.1-8b", 5_000, 65_536, 0.1, 8, 8),
}
"""Target, conversations, tokens of each, share of answers, GPUs, and 1e9 parameters that a token passes through."""


def test_every_target_and_every_experiment_is_accounted_for() -> None:
    assert {path.stem for path in (CONF / "target").glob("*.yaml")} - {"smollm2-135m"} == SHAPES.keys()
    ours = {"demo", "demo_mtp"}
    assert {path.stem for path in (CONF / "experiment").glob("*.yaml")} - ours == EXPERIMENTS.keys()


@pytest.mark.parametrize("name", SHAPES)
def test_the_arithmetic_of_a_target_is_what_the_code_computes(name: str) -> None:
    text = (CONF / f"target/{name}.yaml").read_text()
    assert [line for line in of_target(name) if line not in text.splitlines()] == []


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_arithmetic_of_an_experiment_is_what_the_code_computes(name: str) -> None:
    text = (CONF / f"experiment/{name}.yaml").read_text()
    assert [line for line in of_experiment(name, *EXPERIMENTS[name]) if line not in text.splitlines()] == []


@pytest.mark.parametrize("name", SHAPES)
def test_every_target_gets_a_head_whose_attention_divides(name: str) -> None:
    run = conf.load(["name=a", f"target={name}", "data=jsonl", "engine=vllm"])
    target = described(name)
    head = Eagle3Config.for_target(target, aux_layers(target, run.target.aux_layers), run.draft)
    assert head.aux_layers == (2, target.num_layers // 2, target.num_layers - 3)
    assert head.num_attention_heads % head.num_key_value_heads == 0
    assert head.num_key_value_heads % run.engine.tensor_parallel_size == 0
    assert head.draft_vocab_size == 32_000


@pytest.mark.parametrize("name", [name for name in SHAPES if "qwen" in name or "gpt-oss" in name])
def test_a_target_that_thinks_keeps_its_settings_whatever_groups_are_chosen(name: str) -> None:
    run = conf.load(["name=a", f"target={name}", "data=jsonl", "engine=vllm", "featurize=vllm"])
    assert run.data.turns == "split"
    assert run.data.chat_template_kwargs


@pytest.mark.parametrize("name", ["gpt-oss-20b", "gpt-oss-120b", "deepseek-v3"])
def test_a_quantised_target_is_extracted_as_it_is_served(name: str) -> None:
    run = conf.load(["name=a", f"target={name}", "data=jsonl", "engine=vllm", "featurize=vllm"])
    assert (run.featurize.backend, run.featurize.canary_against, run.engine.kind) == ("vllm", "engine", "vllm")


@pytest.mark.parametrize("name", SHAPES)
def test_the_reference_decoder_is_for_targets_that_one_device_holds_in_fp32(name: str) -> None:
    fits = fp32_bytes(described(name)) < 80e9
    assert conf.load(["name=a", f"target={name}"]).eval.reference is fits


@pytest.mark.parametrize("name", SHAPES)
def test_a_target_leaves_the_arguments_of_an_engine_to_the_engine(name: str) -> None:
    for engine in ("vllm", "sglang"):
        own = conf.load(["name=a", "target.path=b", f"engine={engine}"]).engine.arguments
        assert conf.load(["name=a", f"target={name}", f"engine={engine}"]).engine.arguments == own


def test_the_command_line_has_the_last_word_over_a_target() -> None:
    given = ["name=a", "target=gpt-oss-20b", "featurize.backend=transformers", "featurize.canary_against=transformers"]
    assert conf.load(given).featurize.backend == "transformers"
