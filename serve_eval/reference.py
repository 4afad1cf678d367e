"""What the reference decoder measures: acceptance by route, the lossless check, and the best k for one user.

Written to reference.json when it is whole, and found there by the next call with the same inputs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from featurize.extract import choose_device
from models.artefact import fingerprint, read_json, write_json
from models.checkpoint import describe
from models.eagle3 import Eagle3Head
from models.errors import Refused
from models.target import Target
from serve_eval.config import EvalConfig
from serve_eval.decoder import Answer, decode, measure_costs
from serve_eval.prompts import Prompt, by_route
from serve_eval.servers import describe_machine

log = logging.getLogger(__name__)

TOLERANCE = 0.03
"""Largest difference of AL between a server and the reference decoder that passes without a warning."""


def acceptance(rounds: Iterable[int], k: int) -> dict[str, Any]:
    """AL and unconditional per-position acceptance of drafting rounds, given the accepted drafts of each.

    AL is None without a round: nothing was measured.
    """
    counts = list(rounds)
    if not counts:
        return {"al": None, "per_position": [], "rounds": 0}
    per_position = [sum(accepted > i for accepted in counts) / len(counts) for i in range(k)]
    return {"al": 1 + sum(counts) / len(counts), "per_position": per_position, "rounds": len(counts)}


def rounds_within(accepted: Sequence[int], max_new_tokens: int) -> list[int]:
    """The drafting rounds of an answer cut at `max_new_tokens`, given those of a longer one."""
    tokens, kept = 1, []  # the first token comes from reading the prompt
    for count in accepted:
        if tokens >= max_new_tokens:
            break
        kept.append(count)
        tokens += count + 1
    return kept


def disagreements(agreement: dict[str, dict[str, float | None]]) -> list[str]:
    """A warning for every concurrency at which server and reference decoder differ by more than TOLERANCE."""
    return [
        f"AL at concurrency {concurrency} is {each['served']:.3f} in the server and {each['reference']:.3f} in the "
        f"reference decoder on the same prompts ({100 * each['difference']:+.1f} %): is the head served as trained?"
        for concurrency, each in agreement.items()
        if each["difference"] is not None and abs(each["difference"]) > TOLERANCE
    ]


def best_k(per_position: Sequence[float], verify_ms: Sequence[float], draft_ms: Sequence[float]) -> int:
    """The k with most tokens per second for one user: (1 + sum of acceptances) / (verification + drafting).

    Args:
        per_position: a_1 .. a_K. verify_ms: of 1 .. K + 1 tokens. draft_ms: of 1 .. K tokens.
    """
    if not per_position:
        return 1
    rates = [(1 + sum(per_position[:k])) / (verify_ms[k] + draft_ms[k - 1]) for k in range(1, len(per_position) + 1)]
    return 1 + rates.index(max(rates))


@dataclass(frozen=True)
class Reference:
    """The reference decoder over one target and one head, both in fp32."""

    model: Any
    head: Eagle3Head
    stop: set[int]
    settings: EvalConfig

    def answers(self, prompts: Sequence[Prompt], k: int, max_new_tokens: int) -> list[Answer]:
        """Greedy answers, in batches of prompts of like length; k = 0 is the target alone."""
        order = sorted(prompts, key=lambda prompt: len(prompt.ids))
        found: dict[str, Answer] = {}
        size = self.settings.batch_size
        for first in range(0, len(order), size):
            batch = decode(
                self.model,
                order[first : first + size],
                stop=self.stop,
                max_new_tokens=max_new_tokens,
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
    """Load the target in fp32 beside the head.

    Raises:
        Refused: the target names no eos_token_id, so no answer would ever end.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    if not target.eos_ids:
        raise Refused(f"{target.path} names no eos_token_id in config.json or generation_config.json")
    transformers_logging.disable_progress_bar()
    device = choose_device(settings.device, "eval.device")
    model = AutoModelForCausalLM.from_pretrained(
        target.path, dtype=torch.float32, attn_implementation="sdpa", trust_remote_code=target.trust_remote_code
    )
    return Reference(model.eval().to(device), head.float().eval().to(device), set(target.eos_ids), settings)


class Measurement:
    """Everything that the reference decoder says about a head; finished parts are read from `directory`.

    Args:
        weights: SHA-256 of the head's file. prompts: all evaluation prompts.
    """

    def __init__(
        self,
        target: Target,
        head: Eagle3Head,
        weights: str,
        prompts: Sequence[Prompt],
        settings: EvalConfig,
        directory: Path,
    ) -> None:
        self.target, self.head, self.prompts, self.settings = target, head, prompts, settings
        self.directory = directory
        # The machine is in it for the costs; everything else would be the same anywhere.
        self.inputs = [describe(target), weights, settings.max_new_tokens, describe_machine()]

    @cached_property
    def reference(self) -> Reference:
        """The decoder, loaded when something has to be computed."""
        return load_reference(self.target, self.head, self.settings)

    def _kept(self, name: str, prompts: Sequence[Prompt], k: int, compute: Callable[[], dict[str, Any]]) -> Any:
        key = fingerprint([*self.inputs, k, [[p.id, p.route, list(p.ids)] for p in prompts]])
        path = self.directory / name
        found = read_json(path) if path.exists() else {}
        if found.get("key") == key:
            return found
        result = {"key": key} | compute()
        write_json(path, result)
        return result

    def run(self) -> dict[str, Any]:
        """Acceptance over all prompts and the lossless check.

        Returns:
            `reference` (al, per_position, routes), `lossless` (prompts, identical, differing), `costs_ms`
            (verify, draft), `best_k`, `rounds` ({prompt id: accepted drafts of each round}).
        """
        return self._kept("reference.json", self.prompts, self.settings.k, self._run)

    def _run(self) -> dict[str, Any]:
        k = self.settings.k
        started = time.monotonic()
        plain = self.reference.answers(self.prompts, 0, self.settings.max_new_tokens)
        middle = time.monotonic()
        drafted = self.reference.answers(self.prompts, k, self.settings.max_new_tokens)
        log.info(
            "reference decoder: %d prompts, target alone %.0f s, with %d drafts %.0f s",
            len(self.prompts), middle - started, k, time.monotonic() - middle,
        )  # fmt: skip
        figures = self.reference.acceptance(drafted, k)
        differing = [a.prompt.id for a, b in zip(plain, drafted, strict=True) if a.ids != b.ids]
        verify, draft = measure_costs(self.reference.model, self.reference.head, k)
        same = len(self.prompts) - len(differing)
        return {
            "reference": figures,
            "lossless": {"prompts": len(self.prompts), "identical": same, "differing": differing},
            "costs_ms": {"verify": verify, "draft": draft},
            "best_k": best_k(figures["per_position"], verify, draft),
            "rounds": {answer.prompt.id: answer.accepted for answer in drafted},
        }

    def agreement(self, served: dict[str, Any], k: int, max_new_tokens: int) -> dict[str, Any]:
        """AL of the server beside the reference decoder's: same prompts, same k, same length; per concurrency.

        Returns:
            {concurrency: {"served", "reference", "difference"}}, the difference as a share of the reference.
        """
        wanted = {name for names in served["prompts"].values() for name in names}
        prompts = [prompt for prompt in self.prompts if prompt.id in wanted]

        def compute() -> dict[str, Any]:
            return {"rounds": {a.prompt.id: a.accepted for a in self.reference.answers(prompts, k, max_new_tokens)}}

        if k == self.settings.k:  # a shorter answer is the beginning of the longer one
            rounds = {name: rounds_within(each, max_new_tokens) for name, each in self.run()["rounds"].items()}
        else:
            name = f"reference-k{k}-{max_new_tokens}.json"
            rounds = self._kept(name, prompts, k, compute)["rounds"]
        als = {
            cell["concurrency"]: cell["al"]
            for cell in served["cells"]
            if cell["method"] == "eagle3" and cell["route"] == "all"
        }
        table = {}
        for concurrency, names in served["prompts"].items():
            ours = acceptance((n for name in names for n in rounds[name]), k)["al"]
            theirs = als[int(concurrency)]
            difference = theirs / ours - 1 if ours and theirs else None
            table[concurrency] = {"served": theirs, "reference": ours, "difference": difference}
        return table
