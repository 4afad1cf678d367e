"""What the reference decoder measures: acceptance by route, the lossless check, and the best k for one user.

Written to reference.json when it is whole, and found there by the next call with the same inputs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from models.artefact import file_sha256, fingerprint, read_json, write_json
from models.checkpoint import describe
from models.eagle3 import Eagle3Head
from models.errors import Refused
from models.target import Target
from serve_eval.config import EvalConfig
from serve_eval.decoder import Answer, decode, measure_costs
from serve_eval.prompts import Prompt, by_route

log = logging.getLogger(__name__)


def acceptance(rounds: Iterable[int], k: int) -> dict[str, Any]:
    """AL and unconditional per-position acceptance of drafting rounds, given the accepted drafts of each.

    AL is None without a round: nothing was measured.
    """
    counts = list(rounds)
    if not counts:
        return {"al": None, "per_position": [], "rounds": 0}
    per_position = [sum(accepted > i for accepted in counts) / len(counts) for i in range(k)]
    return {"al": 1 + sum(counts) / len(counts), "per_position": per_position, "rounds": len(counts)}


def best_k(per_position: Sequence[float], verify_ms: Sequence[float], draft_ms: Sequence[float]) -> int:
    """The k with most tokens per second for one user: (1 + sum of acceptances) / (verification + drafting).

    Args:
        per_position: a_1 .. a_K. verify_ms: of 1 .. K + 1 tokens. draft_ms: of 1 .. K tokens.
    """
    rates = [
        (1 + sum(per_position[:k])) / (verify_ms[k] + draft_ms[k - 1]) for k in range(1, len(per_position) + 1)
    ]
    return 1 + rates.index(max(rates))


def stop_ids(target: Target) -> set[int]:
    """Ids that end an answer: those of generation_config.json, else of config.json.

    Raises:
        Refused: the target names none, so no answer would ever end.
    """
    path = Path(target.path) / "generation_config.json"
    named = read_json(path).get("eos_token_id") if path.exists() else None
    named = target.config.eos_token_id if named is None else named
    if named is None:
        raise Refused(f"{target.path} names no eos_token_id in generation_config.json or config.json")
    return set(named) if isinstance(named, list) else {named}


@dataclass(frozen=True)
class Reference:
    """The reference decoder over one target and one head, both in fp32."""

    model: Any
    head: Eagle3Head
    stop: set[int]
    settings: EvalConfig

    def answers(self, prompts: Sequence[Prompt], k: int) -> list[Answer]:
        """Greedy answers, in batches of prompts of like length; k = 0 is the target alone."""
        order = sorted(prompts, key=lambda prompt: len(prompt.ids))
        found: dict[str, Answer] = {}
        size = self.settings.batch_size
        for first in range(0, len(order), size):
            batch = decode(
                self.model,
                order[first : first + size],
                stop=self.stop,
                max_new_tokens=self.settings.max_new_tokens,
                head=self.head if k else None,
                k=k,
            )
            found |= {answer.prompt.id: answer for answer in batch}
        return [found[prompt.id] for prompt in prompts]

    def acceptance(self, answers: Sequence[Answer], k: int) -> dict[str, Any]:
        """AL and per-position acceptance, pooled and by route, with the tokens behind them."""
        routes = {
            route: acceptance((n for a in answers if a.prompt.route == route for n in a.accepted), k)
            | {"tokens": sum(len(a.ids) for a in answers if a.prompt.route == route)}
            for route in by_route([answer.prompt for answer in answers])
        }
        return acceptance((n for a in answers for n in a.accepted), k) | {"routes": routes}


def load_reference(target: Target, head: Eagle3Head, settings: EvalConfig) -> Reference:
    """Load the target in fp32 beside the head."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    auto = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(auto if settings.device == "auto" else settings.device)
    model = AutoModelForCausalLM.from_pretrained(target.path, dtype=torch.float32, attn_implementation="sdpa")
    return Reference(model.eval().to(device), head.float().eval().to(device), stop_ids(target), settings)


def measure(
    target: Target, head_directory: Path, head: Eagle3Head, prompts: Sequence[Prompt], settings: EvalConfig, path: Path
) -> dict[str, Any]:
    """Everything that the reference decoder says about a head, from `path` if it is there already.

    Returns:
        `k`, `reference` (al, per_position, routes), `lossless` (prompts, identical), `costs_ms` (verify, draft),
        `best_k`, `answers` ({prompt id: token ids}).
    """
    key = fingerprint(
        [
            describe(target),
            file_sha256(head_directory / "model.safetensors"),
            [[p.id, p.route, list(p.ids)] for p in prompts],
            [settings.k, settings.max_new_tokens],
        ]
    )
    if path.exists() and (found := read_json(path))["key"] == key:
        return found
    runner = load_reference(target, head, settings)
    started = time.monotonic()
    plain = runner.answers(prompts, 0)
    middle = time.monotonic()
    drafted = runner.answers(prompts, settings.k)
    log.info(
        "reference decoder: %d prompts, target alone %.0f s, with %d drafts %.0f s",
        len(prompts), middle - started, settings.k, time.monotonic() - middle,
    )  # fmt: skip
    figures = runner.acceptance(drafted, settings.k)
    differing = [a.prompt.id for a, b in zip(plain, drafted, strict=True) if a.ids != b.ids]
    verify, draft = measure_costs(runner.model, runner.head, settings.k)
    result = {
        "key": key,
        "k": settings.k,
        "reference": figures,
        "lossless": {
            "prompts": len(prompts),
            "identical": len(prompts) - len(differing),
            "differing": differing,
        },
        "costs_ms": {"verify": verify, "draft": draft},
        "best_k": best_k(figures["per_position"], verify, draft),
        "answers": {answer.prompt.id: answer.ids for answer in plain},
    }
    write_json(path, result)
    return result
