"""The served half of the pipeline with a real vLLM: it loads our export, counts its drafts, and loses nothing.

The target is tiny and random (its heads are 64 wide, which vLLM's CPU attention wants), so the head is worth
nothing; that is the hard case for losslessness, since nearly every draft is rejected. Where `make demo` has
run, its own figures are held to what the reference decoder says.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
VLLM = ROOT / ".venv-vllm/bin/python"
DEMO = ROOT / "runs/demo/eval/summary.json"
STAGES = ["featurize", "train", "models.export", "serve_eval"]

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def summary(
    make_target: Callable[..., Path],
    tiny_conversations: Path,
    tiny_prompts: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:
    """summary.json of a tiny run in real servers: the head with k=3 and prompt lookup, side by side."""
    cwd = tmp_path_factory.mktemp("user")
    target = make_target(hidden_size=128, num_attention_heads=2, num_key_value_heads=1, head_dim=64)
    overrides = [
        "name=tiny",
        f"target.path={target}",
        "target.dtype=float32",
        f"data.conversations=[{tiny_conversations}]",
        "data.validation_share=0.2",
        "draft.vocab_size=128",
        "objective.unroll_steps=3",
        "trainer.precision=fp32",
        "trainer.pack_tokens=256",
        "export.dtype=float32",
        "engine=vllm-cpu",
        f"engine.python={VLLM}",
        "engine.max_model_len=512",
        f"eval.prompts=[{tiny_prompts}]",
        "eval.k=3",
        "eval.served_k=3",
        "eval.max_new_tokens=24",
        "eval.concurrencies=[1,2,3]",
        "eval.requests_per_route=3",
        "eval.methods=[{method: eagle3}, {method: ngram, k: 2}]",
        "eval.side_by_side=true",
        "eval.repeats=3",
        "eval.rates=[4]",
        "eval.input_lengths=[128]",
        'engine.environment={VLLM_CPU_KVCACHE_SPACE: "1"}',
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    for stage in STAGES:
        result = subprocess.run(
            [sys.executable, "-m", stage, *overrides],
            cwd=cwd,
            env=environment,
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert result.returncode == 0, f"{stage} failed:\n{result.stdout}\n{result.stderr}"
    return json.loads((cwd / "runs/tiny/eval/summary.json").read_text())


def test_vllm_answers_every_request_with_and_without_the_head(summary: dict[str, Any]) -> None:
    cells = summary["served"]["cells"]
    assert {(cell["method"], cell["concurrency"]) for cell in cells} == {
        (method, concurrency) for method in ("none", "eagle3", "ngram") for concurrency in (1, 2, 3)
    }
    for cell in cells:
        assert cell["failed"] == 0
        assert cell["requests"] > 0
        assert cell["output_tokens_per_s"] > 0


def test_the_servers_counters_tell_the_acceptance_of_the_head_and_of_nothing_else(summary: dict[str, Any]) -> None:
    for cell in summary["served"]["cells"]:
        if cell["method"] == "none":
            assert cell["al"] in (None, "n/a")
        elif cell["method"] == "eagle3":
            assert 1 <= cell["al"] <= 4
            assert len(cell["per_position"]) == 3
            assert cell["al_by_request"]["min"] >= 1 and cell["al_by_request"]["max"] <= 4
        else:  # prompt lookup drafts only where it finds something
            assert cell["al"] is None or (1 <= cell["al"] <= 3 and len(cell["per_position"]) == 2)


def test_greedy_output_in_vllm_is_the_targets_own_token_for_token(summary: dict[str, Any]) -> None:
    told = summary["lossless"]["vllm_fp32"]
    assert told["prompts"] > 0
    assert told["identical"] == told["prompts"]


def test_methods_side_by_side_have_ranges_lengths_and_rates(summary: dict[str, Any]) -> None:
    served = summary["served"]
    assert served["side_by_side"] and "3 repeats" in served["interval_from"]
    for each in served["methods"].values():
        for c, (low, high) in each["interval"].items():
            assert 0 < low <= high
            assert each["speedup"][c] > 0
        assert each["lossless"]["identical"] == each["lossless"]["prompts"] > 0
    assert '"method":"ngram"' in served["commands"]["ngram"]
    lengths = [cell for cell in served["cells"] if cell["input_length"] == 128]
    assert lengths and all(cell["output_tokens_per_s"] > 0 for cell in lengths)
    assert {(cell["method"], cell["rate"]) for cell in served["open_loop"]} == {
        (method, 4.0) for method in ("none", "eagle3", "ngram")
    }
    assert all(cell["queue_ms"] is not None and cell["e2e_ms"]["p50"] > 0 for cell in served["cells"])
    assert all(value is not None for value in served["overlap"].values())
    assert not [warning for warning in served["warnings"] if "somebody else" in warning or "unknown" in warning]


@pytest.mark.skipif(not DEMO.exists(), reason="make demo has not run here")
def test_the_demos_head_is_worth_in_vllm_what_the_reference_decoder_measured() -> None:
    demo = json.loads(DEMO.read_text())
    assert demo["lossless"]["vllm_fp32"]["identical"] == demo["lossless"]["vllm_fp32"]["prompts"] > 0
    assert demo["lossless"]["reference"]["identical"] == demo["lossless"]["reference"]["prompts"] >= 96
    assert demo["reference"]["al"] >= 1.7
    assert max(route["al"] for route in demo["reference"]["routes"].values()) >= 2.2
    for each in demo["served"]["agreement"].values():
        assert abs(each["difference"]) <= 0.03
