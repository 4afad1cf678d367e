"""What the reference decoder measures: acceptance by route, the lossless check, and the best k for one user.

Written to reference.json when it is whole, and found there by the next call with the same inputs.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from featurize.extract import choose_device
from models.artefact import file_sha256, fingerprint, read_json, write_json
from models.checkpoint import describe
from models.config import TargetConfig
from models.drafts import DraftHead
from models.errors import Refused
from models.target import Target, describe_target
from serve_eval.acceptance import acceptance, best_k, figures, rounds_within
from serve_eval.cache import keeps_states
from serve_eval.config import POOLED, DraftingConfig, EvalConfig
from serve_eval.decoder import Answer, decode, measure_costs
from serve_eval.drafters import Drafter, make_drafter, sampling_of, shape_of
from serve_eval.prompts import Prompt, contents
from serve_eval.servers import describe_machine

log = logging.getLogger(__name__)

TELL_S = 30.0
"""Between two lines on how far the decoder is."""
TOLERANCE = 0.03
"""Largest difference of AL between a server and the reference decoder that passes without a warning."""


def disagreements(agreement: dict[str, dict[str, float | None]]) -> list[str]:
    """A warning for every concurrency at which server and reference decoder differ by more than TOLERANCE."""
    return [
        f"AL at concurrency {concurrency} is {each['served']:.3f} in the server and {each['reference']:.3f} in the "
        f"reference decoder on the same prompts ({100 * each['difference']:+.1f} %): is the head served as trained?"
        for concurrency, each in agreement.items()
        if each["difference"] is not None and abs(each["difference"]) > TOLERANCE
    ]


def spoken(settings: DraftingConfig, k: int) -> str:
    """The settings in words, for a heading: what drafts where it is no head, how, and last the shape of the draft."""
    tree = {
        "chain": f"k = {k}",
        "static": f"a tree of {len(settings.paths)} drafts",
        "dynamic": f"a tree of {settings.nodes} drafts by confidence",
    }
    words = ["greedy" if settings.temperature == 0 else f"temperature {settings.temperature:g}"]
    words += [f"top-p {settings.top_p:g}"] * (settings.top_p < 1) + [f"top-k {settings.top_k}"] * (settings.top_k > 0)
    words += ["drafts drawn"] * (settings.draft_sample_method == "probabilistic")
    methods = {"ngram": ["prompt lookup"], "draft_model": ["a draft model"]}
    return ", ".join([*methods.get(settings.method, []), *words, tree[settings.tree]])


def describe_draft_model(settings: DraftingConfig, target: Target) -> Target | None:
    """The draft model, where the settings name one.

    Raises:
        Refused: it cannot be read, or its tokenizer is not the target's.
    """
    from transformers import AutoTokenizer

    if settings.model is None:
        return None
    try:
        found = describe_target(TargetConfig(path=settings.model))
        vocabularies = [AutoTokenizer.from_pretrained(each.path).get_vocab() for each in (target, found)]
    except (Refused, OSError, ValueError) as error:
        raise Refused(f"eval.drafting.model={settings.model} cannot be used: {str(error).splitlines()[0]}") from None
    if vocabularies[0] != vocabularies[1]:
        raise Refused(f"eval.drafting.model={settings.model} has another tokenizer than {target.path}")
    return found


def check_tree(drafting: DraftingConfig, *models: Target | None) -> None:
    """Raise Refused where a tree is asked for of a target or draft model that reads one text at a time."""
    for model in models:
        if drafting.tree != "chain" and model is not None and keeps_states(model.config):
            raise Refused(
                f"eval.drafting.tree={drafting.tree}: {model.path} has layers, such as linear attention, that cannot "
                "take back what they have read; set eval.drafting.tree=chain"
            )


def head_key(export: Path, weights: str) -> str:
    """What was exported; `weights` is the SHA-256 of its file."""
    return fingerprint([weights, file_sha256(export / "config.json")])


def measured_key(
    target: Target,
    head: str,
    machine: str,
    max_new_tokens: int,
    drafting: DraftingConfig,
    draft_model: Target | None,
    k: int,
    prompts: Sequence[Prompt],
) -> str:
    """All that a measurement depends on.

    Args:
        head: as `head_key` tells it. machine: it is in it for the costs; all else would be the same anywhere.
    """
    asked = asdict(drafting) | {"model": describe(draft_model) if draft_model and drafting.model else None}
    return fingerprint([describe(target), head, max_new_tokens, machine, asked, k, contents(prompts)])


@dataclass(frozen=True)
class Reference:
    """The reference decoder over one target and what drafts for it, all in fp32."""

    model: Any
    head: DraftHead
    stop: set[int]
    batch_size: int
    draft_model: Any = None

    def drafter(self, settings: DraftingConfig, k: int) -> Drafter:
        """A new drafter."""
        return make_drafter(settings, k, model=self.model, head=self.head, draft_model=self.draft_model)

    def answers(self, prompts: Sequence[Prompt], max_new_tokens: int, settings: DraftingConfig, k: int) -> list[Answer]:
        """Answers, in batches of prompts of like length; k = 0 is the target alone."""
        order = sorted(prompts, key=lambda prompt: len(prompt.ids))
        found: dict[str, Answer] = {}
        told = time.monotonic()
        for first in range(0, len(order), self.batch_size):
            batch = decode(
                self.model,
                order[first : first + self.batch_size],
                stop=self.stop,
                max_new_tokens=max_new_tokens,
                drafter=self.drafter(settings, k) if k else None,
                sampling=sampling_of(settings),
                seed=settings.seed + first,
            )
            found |= {answer.prompt.id: answer for answer in batch}
            if time.monotonic() - told > TELL_S:
                told = time.monotonic()
                log.info("reference decoder: %d of %d prompts", len(found), len(prompts))
        return [found[prompt.id] for prompt in prompts]


def fp32_bytes(target: Target) -> int:
    """What the target's weights take in fp32, by its configuration alone."""
    return 4 * sum(weight.numel() for weight in target.skeleton().parameters())


def check_memory(target: Target, device: torch.device) -> None:
    """Check that the target fits in fp32 where the reference decoder runs.

    Raises:
        Refused: it does not.
    """
    needed = fp32_bytes(target)
    if device.type == "cuda":
        there = torch.cuda.get_device_properties(device).total_memory
    else:
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > there:
        raise Refused(
            f"the reference decoder holds {target.path} in fp32: {needed / 1e9:.0f} GB, and {device} has "
            f"{there / 1e9:.0f} GB; with eval.reference=false acceptance is what the server's counters say"
        )


def load_reference(target: Target, head: DraftHead, settings: EvalConfig, draft_model: Target | None) -> Reference:
    """Load the target, and the draft model where there is one, in fp32 beside the head.

    Raises:
        Refused: the target names no eos_token_id, so no answer would ever end; or a model cannot be loaded or held.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    if not target.eos_ids:
        raise Refused(f"{target.path} names no eos_token_id in config.json or generation_config.json")
    transformers_logging.disable_progress_bar()
    device = choose_device(settings.device, "eval.device")
    check_memory(target, device)

    def load(model: Target) -> Any:
        try:
            loaded = AutoModelForCausalLM.from_pretrained(
                model.path, dtype=torch.float32, trust_remote_code=model.trust_remote_code
            )
        except (OSError, ValueError, ImportError) as error:
            raise Refused(f"{model.path} cannot be loaded ({str(error).splitlines()[0]})") from None
        return loaded.eval().to(device)

    drafting = load(draft_model) if draft_model is not None else None
    head = head.float().eval().to(device)
    return Reference(load(target), head, set(target.eos_ids), settings.batch_size, drafting)


NOT_MEASURED: dict[str, Any] = {"reference": None, "lossless": None, "costs_ms": None, "best_k": None}
"""What `Measurement.run` returns of an evaluation without it."""


class Measurement:
    """Everything that the reference decoder says about a head; finished parts are read from `directory`.

    Args:
        exported: the head's `head_key`. prompts: all evaluation prompts.
    """

    def __init__(
        self,
        target: Target,
        head: DraftHead,
        exported: str,
        prompts: Sequence[Prompt],
        settings: EvalConfig,
        directory: Path,
    ) -> None:
        self.target, self.head, self.prompts, self.settings = target, head, prompts, settings
        self.exported, self.directory = exported, directory
        self.draft_model = describe_draft_model(settings.drafting, target)
        check_tree(settings.drafting, target, self.draft_model)

    @cached_property
    def reference(self) -> Reference:
        """The decoder, loaded when something has to be computed."""
        return load_reference(self.target, self.head, self.settings, self.draft_model)

    def _kept(
        self,
        name: str,
        prompts: Sequence[Prompt],
        most: int,
        drafting: DraftingConfig,
        k: int,
        compute: Callable[[], dict[str, Any]],
    ) -> Any:
        machine = describe_machine()
        key = measured_key(self.target, self.exported, machine, most, drafting, self.draft_model, k, prompts)
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
            `reference` (what `acceptance.figures` tells, and `how` it was drafted), `lossless` (prompts, identical,
            differing; None when sampling), `costs_ms` (verify, draft: of chains), `best_k`, `rounds` ({prompt id:
            accepted drafts of each round}).
        """
        of, most = self.settings, self.settings.max_new_tokens
        return self._kept("reference.json", self.prompts, most, of.drafting, of.k, self._run)

    def _run(self) -> dict[str, Any]:
        k, most, drafting = self.settings.k, self.settings.max_new_tokens, self.settings.drafting
        lossless = None
        started = time.monotonic()
        drafted = self.reference.answers(self.prompts, most, drafting, k)
        log.info("reference decoder: %d prompts in %.0f s", len(self.prompts), time.monotonic() - started)
        if drafting.temperature == 0:
            started = time.monotonic()
            plain = self.reference.answers(self.prompts, most, drafting, 0)
            log.info("reference decoder: %d prompts, target alone, %.0f s", len(plain), time.monotonic() - started)
            differing = [a.prompt.id for a, b in zip(plain, drafted, strict=True) if a.ids != b.ids]
            same = len(self.prompts) - len(differing)
            lossless = {"prompts": len(self.prompts), "identical": same, "differing": differing}
        shape = None if drafting.tree == "chain" else shape_of(drafting, k)
        told = figures(drafted, k, shape)
        chain = replace(drafting, tree="chain", paths=[], width=None, nodes=None, draft_sample_method="greedy")
        verify, draft = measure_costs(self.reference.model, lambda length: self.reference.drafter(chain, length), k)
        straight = acceptance((each.straight for a in drafted for each in a.rounds if each), k)["per_position"]
        return {
            "reference": told | {"how": spoken(drafting, k)},
            "lossless": lossless,
            "costs_ms": {"verify": verify, "draft": draft},
            "best_k": best_k(straight, verify, draft),
            "rounds": {answer.prompt.id: answer.accepted for answer in drafted},
        }

    def agreement(self, served: dict[str, Any], k: int, max_new_tokens: int) -> dict[str, Any]:
        """AL of the server beside the reference decoder's: same prompts, same k, same length; per concurrency.

        Returns:
            {concurrency: {"served", "reference", "difference"}}, the difference as a share of the reference.
        """
        wanted = {name for names in served["prompts"].values() for name in names}
        prompts = [prompt for prompt in self.prompts if prompt.id in wanted]

        greedy = DraftingConfig()  # what the server is asked for

        def compute() -> dict[str, Any]:
            answers = self.reference.answers(prompts, max_new_tokens, greedy, k)
            return {"rounds": {answer.prompt.id: answer.accepted for answer in answers}}

        own = self.settings
        if k == own.k and own.drafting == greedy and max_new_tokens <= own.max_new_tokens:
            # A shorter answer begins the longer one.
            rounds = {name: rounds_within(each, max_new_tokens) for name, each in self.run()["rounds"].items()}
        else:
            name = f"reference-k{k}-{max_new_tokens}.json"
            rounds = self._kept(name, prompts, max_new_tokens, greedy, k, compute)["rounds"]
        als = {
            cell["concurrency"]: cell["al"]
            for cell in served["cells"]
            if cell["method"] == served["head"] and cell["route"] == POOLED
        }
        table = {}
        for concurrency, names in served["prompts"].items():
            ours = acceptance((n for name in names for n in rounds[name]), k)["al"]
            theirs = als[int(concurrency)]
            difference = theirs / ours - 1 if ours and theirs else None
            table[concurrency] = {"served": theirs, "reference": ours, "difference": difference}
        return table
