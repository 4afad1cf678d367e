"""What rounds say: acceptance length, what a smaller draft would have given, and which settings are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import conf
from models.config import DraftConfig, TargetConfig
from models.eagle3 import Eagle3Config, Eagle3Head
from models.errors import Refused
from models.target import aux_layers, describe_target
from serve_eval.acceptance import acceptance, best_k, figures, growing, rounds_within
from serve_eval.config import DraftingConfig, EvalConfig
from serve_eval.decoder import Answer, Round, decode
from serve_eval.drafters import make_drafter
from serve_eval.prompts import Prompt
from serve_eval.reference import Measurement
from serve_eval.trees import DynamicTree, StaticTree
from tests.serve_eval.small import small_parts, small_prompts

PATHS = [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]  # nodes 1 .. 6


def test_acceptance_pools_rounds_and_is_absent_without_any() -> None:
    assert acceptance([2, 0, None, 1, 3], 3) == {"al": 2.5, "per_position": [0.75, 0.5, 0.25], "rounds": 4}
    assert acceptance([], 3)["al"] is None
    assert acceptance([None], 3)["al"] is None


def test_best_k_weighs_acceptance_against_cost() -> None:
    verify = [10.0, 10.5, 11.0, 11.5]
    assert best_k([0.5, 0.05, 0.01], verify, [2.0, 4.0, 6.0]) == 1
    assert best_k([0.9, 0.85, 0.8], verify, [1.0, 2.0, 3.0]) == 3


@pytest.mark.parametrize("method", ["eagle3", "ngram"])
def test_the_rounds_of_a_shorter_answer_are_the_first_of_a_longer_ones(method: str) -> None:
    parts, prompts, settings = small_parts(), small_prompts([4, 8]), DraftingConfig(method=method, lookup_min=1)

    def rounds(limit: int) -> list[list[int | None]]:
        drafter = make_drafter(settings, 3, **vars(parts))
        return [a.accepted for a in decode(parts.model, prompts, stop=set(), max_new_tokens=limit, drafter=drafter)]

    long = rounds(14)
    for limit in (1, 2, 7, 11, 13):
        assert [rounds_within(accepted, limit) for accepted in long] == rounds(limit)


def answer(route: str, paths: list[tuple[int, ...] | None], straight: list[int], entropy: float) -> Answer:
    rounds = [None if path is None else Round(path, n) for path, n in zip(paths, straight, strict=True)]
    return Answer(Prompt(route, route, (1,)), [7, 7], [entropy, entropy], rounds)


def test_a_pass_with_a_tree_tells_what_every_smaller_tree_and_chain_is_worth() -> None:
    tree = StaticTree.of_paths(PATHS)
    assert [tree.path(node) for node in range(1, 7)] == [tuple(path) for path in PATHS]
    answers = [
        answer("chat", [(1, 3, 6), (2,), (), (1, 4)], [3, 0, 0, 1], 1.0),
        answer("code", [(1, 3), None, (2, 5)], [2, 0, 0], 2.0),
    ]
    told = figures(answers, 3, tree)
    rounds = 6
    assert told["al"] == pytest.approx(1 + 10 / rounds)
    assert told["al_by_k"] == pytest.approx([1 + 3 / rounds, 1 + 5 / rounds, 1 + 6 / rounds])
    assert told["tree"] == [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]
    assert told["al_by_nodes"] == pytest.approx([1 + n / rounds for n in (3, 5, 7, 8, 9, 10)])
    assert told["entropy"] == 1.5
    assert told["routes"]["code"]["entropy"] == 2.0
    assert told["routes"]["chat"]["al"] == pytest.approx(1 + 6 / 4)
    assert told["al_by_request"] == {"min": 2.5, "p10": 2.5, "p50": 2.5, "p90": 3.0, "max": 3.0}


def test_a_smaller_tree_has_the_parents_and_elder_siblings_of_its_nodes() -> None:
    tree = StaticTree.of_paths(PATHS)
    assert growing([0.1, 0.5, 0.1, 0.0, 0.4, 0.0], tree) == [1, 2, 5, 3, 4, 6]
    assert growing([0.1, 0.5, 0.1], DynamicTree(3, 2, 3)) == [1, 2, 3]  # numbered by likelihood


def test_smaller_drafts_are_estimated_close_to_what_they_are_measured_to_be() -> None:
    parts, prompts = small_parts(), small_prompts([3, 5, 7, 4, 6, 2, 8, 3])

    def measured(k: int, tree: StaticTree | DynamicTree | None, settings: DraftingConfig) -> dict:
        drafter = make_drafter(replace(settings, method="draft_model", model="-"), k, **vars(parts))
        answers = decode(parts.model, prompts, stop=set(), max_new_tokens=60, drafter=drafter)
        return figures(answers, k, tree)

    whole = measured(3, StaticTree.of_paths(PATHS), DraftingConfig(tree="static", paths=PATHS))
    assert whole["al_by_nodes"][-1] == pytest.approx(whole["al"])
    chain = measured(2, None, DraftingConfig())
    assert whole["al_by_k"][1] == pytest.approx(chain["al"], rel=0.1)
    smaller = whole["tree"][:3]
    depth = max(map(len, smaller))
    part = measured(depth, StaticTree.of_paths(smaller), DraftingConfig(tree="static", paths=smaller))
    assert whole["al_by_nodes"][2] == pytest.approx(part["al"], rel=0.1)
    large = measured(3, DynamicTree(3, 2, 8), DraftingConfig(tree="dynamic", width=2, nodes=8))
    small = measured(3, DynamicTree(3, 2, 4), DraftingConfig(tree="dynamic", width=2, nodes=4))
    assert large["al_by_nodes"][3] == pytest.approx(small["al"], rel=0.1)


D = "eval.drafting"
MISTAKES = {
    "unknown method": ([f"{D}.method=eagle"], "method=eagle"),
    "draft model without a model": ([f"{D}.method=draft_model"], "drafting.model"),
    "model for another method": ([f"{D}.model=somewhere"], "drafting.model"),
    "tree without nodes": ([f"{D}.tree=static"], "drafting.paths"),
    "a child without its parent": ([f"{D}.tree=static", f"{D}.paths=[[0],[1,0]]", "eval.k=2"], r"\[1, 0\]"),
    "a rank left out": ([f"{D}.tree=static", f"{D}.paths=[[0],[2]]", "eval.k=1"], r"\[2\]"),
    "a node twice": ([f"{D}.tree=static", f"{D}.paths=[[0],[0]]", "eval.k=1"], r"\[0\]"),
    "k is not the tree's depth": ([f"{D}.tree=static", f"{D}.paths=[[0],[1]]", "eval.k=2"], "eval.k=2"),
    "width for a chain": ([f"{D}.width=2"], "drafting.width"),
    "more nodes than candidates": ([f"{D}.tree=dynamic", f"{D}.width=2", f"{D}.nodes=7", "eval.k=2"], "nodes=7"),
    "a tree from the text": (
        [f"{D}.method=ngram", f"{D}.tree=dynamic", f"{D}.width=2", f"{D}.nodes=4"], "method=ngram",
    ),
    "drawn and then chosen": (
        [f"{D}.tree=dynamic", f"{D}.width=2", f"{D}.nodes=4", f"{D}.draft_sample_method=probabilistic",
         f"{D}.temperature=1"],
        "tree=dynamic",
    ),
    "drawn when greedy": ([f"{D}.draft_sample_method=probabilistic"], "probabilistic"),
    "top_p of nothing": ([f"{D}.top_p=0"], "top_p=0"),
    "negative temperature": ([f"{D}.temperature=-1"], "temperature=-1"),
    "a shortest ending longer than the longest": ([f"{D}.lookup_min=5"], "lookup_max"),
}  # fmt: skip


@pytest.mark.parametrize(("overrides", "key"), MISTAKES.values(), ids=MISTAKES.keys())
def test_b43_a_drafting_that_cannot_be_is_refused_with_its_key(overrides: list[str], key: str) -> None:
    with pytest.raises(Refused, match=key):
        conf.load(["name=test", "target.path=somewhere", *overrides])


def test_the_default_is_what_a_server_does_without_options() -> None:
    run = conf.load(["name=test", "target.path=somewhere", "eval=demo"])
    assert run.eval.drafting == DraftingConfig()
    assert (run.eval.k, DraftingConfig().temperature, DraftingConfig().tree) == (4, 0, "chain")


@pytest.fixture(scope="module")
def measurement(tiny_target_dir: Path, make_target, tmp_path_factory):
    """A function that measures random drafts for the tiny target with some settings."""
    target = describe_target(TargetConfig(path=str(tiny_target_dir), dtype="float32"))
    torch.manual_seed(0)
    head = Eagle3Head(Eagle3Config.for_target(target, aux_layers(target, [2, 4, 5]), DraftConfig(vocab_size=100)),
                      torch.arange(0, 300, 3))  # fmt: skip
    prompts = [Prompt(f"p{i}", ("chat", "code")[i % 2], tuple(range(5 + i, 12))) for i in range(4)]

    def make(k: int, drafting: DraftingConfig) -> Measurement:
        settings = EvalConfig(k=k, drafting=drafting, max_new_tokens=6, batch_size=3)
        return Measurement(target, head, "weights", prompts, settings, tmp_path_factory.mktemp("eval"))

    return make


def test_a_measurement_tells_all_of_a_tree_and_that_it_lost_nothing(measurement) -> None:
    told = measurement(3, DraftingConfig(tree="static", paths=PATHS)).run()
    assert told["lossless"] == {"prompts": 4, "identical": 4, "differing": []}
    assert {"al", "per_position", "rounds", "routes", "entropy", "al_by_request", "al_by_k", "al_by_nodes"} <= set(
        told["reference"]
    )
    assert told["reference"]["how"] == "greedy, a tree of 6 drafts"
    assert len(told["reference"]["al_by_nodes"]) == 6
    assert (len(told["costs_ms"]["verify"]), len(told["costs_ms"]["draft"])) == (4, 3)
    assert 1 <= told["best_k"] <= 3


def test_a_measurement_of_samples_claims_no_identity(measurement) -> None:
    sampled = DraftingConfig(temperature=0.7, top_p=0.9, draft_sample_method="probabilistic")
    told = measurement(2, sampled).run()
    assert told["lossless"] is None
    assert told["reference"]["how"] == "temperature 0.7, top-p 0.9, drafts drawn, k = 2"
    assert told["reference"]["rounds"] > 0


def test_a_served_head_is_compared_with_greedy_chains_whatever_else_was_measured(measurement) -> None:
    served = {
        "head": "eagle3",
        "prompts": {"1": ["p0", "p1"]},
        "cells": [{"concurrency": 1, "method": "eagle3", "route": "all", "al": 1.0}],
    }
    plain = measurement(2, DraftingConfig())
    wanted = plain.agreement(served, 2, 5)["1"]["reference"]
    assert wanted is not None
    assert not list(plain.directory.glob("reference-k*"))
    other = measurement(2, DraftingConfig(method="ngram"))
    assert other.agreement(served, 2, 5)["1"]["reference"] == pytest.approx(wanted)


def test_longer_answers_of_a_server_are_compared_with_answers_as_long(measurement) -> None:
    served: dict[str, Any] = {"head": "eagle3", "prompts": {"1": ["p0", "p1"]}}
    served["cells"] = [{"concurrency": 1, "method": "eagle3", "route": "all", "al": 1.0}]
    short = measurement(2, DraftingConfig())  # answers of 6 tokens
    short.agreement(served, 2, 12)
    rounds = json.loads((short.directory / "reference-k2-12.json").read_text())["rounds"]
    assert sum(1 + accepted for accepted in rounds["p0"]) >= 11


def test_a_model_that_cannot_be_loaded_is_named(measurement, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise ValueError("it does not support sdpa\nand more")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", load)
    with pytest.raises(Refused, match=r"cannot be loaded .it does not support sdpa.$"):
        measurement(2, DraftingConfig()).run()


def test_a_draft_model_drafts_when_it_reads_the_same_tokens(measurement, tiny_target_dir, make_target) -> None:
    twin = measurement(2, DraftingConfig(method="draft_model", model=str(tiny_target_dir))).run()
    assert twin["reference"]["al"] == pytest.approx(3.0)  # the target itself is never wrong
    other = make_target()
    (other / "tokenizer.json").write_text((other / "tokenizer.json").read_text().replace('"<|im_end|>"', '"<|end|>"'))
    with pytest.raises(Refused, match="eval.drafting.model=.* has another tokenizer"):
        measurement(2, DraftingConfig(method="draft_model", model=str(other)))
    with pytest.raises(Refused, match="eval.drafting.model=nowhere cannot be used"):
        measurement(2, DraftingConfig(method="draft_model", model="nowhere"))
