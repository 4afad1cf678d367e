"""Sampled output has the target's distribution, whatever drafts and however: measured against all continuations.

Three tokens after one prompt, many times over, in one batch; the oracle asks the target for every prefix and
multiplies. Seeds are fixed, so the tests either hold or do not.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

import serve_eval.verification
from serve_eval.config import DraftingConfig
from serve_eval.decoder import decode
from serve_eval.drafters import make_drafter, sampling_of
from serve_eval.trees import draw
from serve_eval.verification import Sampling
from tests.serve_eval.small import VOCABULARY, small_parts, small_prompts

SAMPLES, LENGTH = 4000, 3
PATHS = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]]


def shaped(logits: torch.Tensor, temperature: float, top_p: float, top_k: int) -> torch.Tensor:
    """The distribution that the settings mean, for one row of logits, token by token."""
    p = (logits.double() / temperature).softmax(-1)
    ordered = sorted(range(len(p)), key=lambda token: -float(p[token]))
    kept, mass = [], 0.0
    total = sum(float(p[token]) for token in ordered[: top_k or len(p)])
    for token in ordered[: top_k or len(p)]:
        if mass < top_p:
            kept.append(token)
        mass += float(p[token]) / total
    mask = torch.zeros_like(p)
    mask[kept] = 1
    return p * mask / (p * mask).sum()


def exact(ids: tuple[int, ...], settings: DraftingConfig) -> torch.Tensor:
    """Probability of every continuation of LENGTH tokens, [V, V, V]."""
    prefixes = [list(ids) + list(tail) for tail in itertools.product(range(VOCABULARY), repeat=LENGTH - 1)]
    logits = small_parts().model(torch.tensor(prefixes)).logits[:, len(ids) - 1 :].double()
    logits = logits.view(*[VOCABULARY] * (LENGTH - 1), LENGTH, VOCABULARY)
    joint = torch.ones([VOCABULARY] * LENGTH, dtype=torch.float64)
    for step in range(LENGTH):
        for tail in itertools.product(range(VOCABULARY), repeat=step):
            at = (*tail, *[0] * (LENGTH - 1 - step), step)
            shape = (VOCABULARY, *[1] * (LENGTH - 1 - step))
            joint[tail] *= shaped(logits[at], settings.temperature, settings.top_p, settings.top_k).view(shape)
    return joint


def deviation(found: torch.Tensor, expected: torch.Tensor) -> float:
    """How many standard deviations chi-square lies above its mean (Wilson and Hilferty); cells below 5 are pooled."""
    assert not found[expected == 0].any(), "something was emitted that the target never says"
    large = expected >= 5
    found = torch.cat((found[large], found[~large].sum()[None])).double()
    expected = torch.cat((expected[large], expected[~large].sum()[None]))
    found, expected = found[expected > 0], expected[expected > 0]
    chi, freedom = float(((found - expected) ** 2 / expected).sum()), len(found) - 1
    assert freedom >= 10, "too few cells to tell anything"
    return ((chi / freedom) ** (1 / 3) - 1 + 2 / (9 * freedom)) / (2 / (9 * freedom)) ** 0.5


def emitted(settings: DraftingConfig, k: int, seed: int = 0) -> tuple[torch.Tensor, float]:
    """Counts of all continuations [V, V, V], and the mean number of accepted drafts per round."""
    parts, (prompt,) = small_parts(), small_prompts([3])
    answers = decode(
        parts.model,
        [prompt] * SAMPLES,
        stop=set(),
        max_new_tokens=LENGTH,
        drafter=make_drafter(settings, k, **vars(parts)) if k else None,
        sampling=sampling_of(settings),
        seed=seed,
    )
    counts = torch.zeros([VOCABULARY] * LENGTH, dtype=torch.int64)
    where = tuple(torch.tensor([answer.ids for answer in answers]).T)
    counts.index_put_(where, torch.ones(SAMPLES, dtype=torch.int64), accumulate=True)
    rounds = [n for answer in answers for n in answer.accepted if n is not None]
    return counts, sum(rounds) / max(1, len(rounds))


def distance(settings: DraftingConfig, k: int) -> float:
    (prompt,) = small_prompts([3])
    counts, accepted = emitted(settings, k)
    assert accepted > 0.05, "next to nothing was accepted, so nothing was tested"
    return deviation(counts, SAMPLES * exact(prompt.ids, settings))


DRAWN = {"draft_sample_method": "probabilistic"}
HOWS: dict[str, dict[str, Any]] = {
    "temperature 1": {"temperature": 1.0},
    "temperature 0.5": {"temperature": 0.5},
    "top-p": {"temperature": 1.0, "top_p": 0.8},
}
SHAPES: dict[str, tuple[int, dict[str, Any]]] = {
    "chain, drafts drawn": (2, DRAWN),
    "tree, drafts drawn": (3, DRAWN | {"tree": "static", "paths": PATHS}),
    "chain, best drafts": (2, {}),
    "tree, best drafts": (3, {"tree": "static", "paths": PATHS}),
    "tree by confidence": (3, {"tree": "dynamic", "width": 3, "nodes": 9}),
}


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("shape", SHAPES)
def test_sampled_continuations_have_the_targets_distribution(shape: str, how: str) -> None:
    k, settings = SHAPES[shape]
    assert distance(DraftingConfig(**settings, **HOWS[how]), k) < 3.5


OTHERS: dict[str, dict[str, Any]] = {
    "draft model, chain drawn": DRAWN | {"method": "draft_model", "model": "-", "temperature": 1.0},
    "draft model, tree drawn, top-k": DRAWN
    | {"method": "draft_model", "model": "-", "tree": "static", "paths": PATHS, "temperature": 1.0, "top_k": 5},
    "prompt lookup": {"method": "ngram", "lookup_min": 1, "temperature": 1.0},
}


@pytest.mark.parametrize("other", OTHERS)
def test_so_have_those_of_every_other_method(other: str) -> None:
    assert distance(DraftingConfig(**OTHERS[other]), 3) < 3.5


def test_the_target_alone_samples_its_own_distribution() -> None:
    (prompt,), settings = small_prompts([3]), DraftingConfig(temperature=1.0, top_k=7, top_p=0.9)
    assert deviation(emitted(settings, 0)[0], SAMPLES * exact(prompt.ids, settings)) < 3.5


def always(p: torch.Tensor, q: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    return p > 0


def by_p_alone(p: torch.Tensor, q: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    return uniform < p


def by_another_q(p: torch.Tensor, q: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    return uniform * q**0.5 < p


def all_of_p(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return p


BREAKS: dict[str, tuple[str, Any]] = {
    "what the target can say is accepted": ("accepts", always),
    "drawn drafts are tested as if they were certain": ("accepts", by_p_alone),
    "q is not what was drawn from": ("accepts", by_another_q),
    "after a rejection p is drawn from again": ("rest", all_of_p),
}


@pytest.mark.parametrize("broken", BREAKS)
@pytest.mark.parametrize("shape", ["chain, drafts drawn", "tree, drafts drawn"])
def test_a_broken_rule_of_acceptance_is_found_out(shape: str, broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    k, settings = SHAPES[shape]
    monkeypatch.setattr(serve_eval.verification, *BREAKS[broken])
    assert distance(DraftingConfig(**settings, temperature=1.0), k) > 5


def test_drawing_again_what_was_drawn_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second child is drawn without the first; testing it against all of q is another rule."""
    monkeypatch.setattr(serve_eval.verification, "normalised", lambda weights: weights)
    k, settings = SHAPES["tree, drafts drawn"]
    assert distance(DraftingConfig(**settings, temperature=1.0), k) > 5


def test_children_are_drawn_one_after_another_without_replacement() -> None:
    q = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0])
    generator = torch.Generator().manual_seed(0)
    ids, exists, told = draw(q.log().expand(1, 20_000, 5), 5, Sampling(temperature=1.0), generator)
    assert told is not None
    assert torch.allclose(told[0, 0], q)
    assert exists[0, :, :4].all()
    assert not exists[0, :, 4].any()  # the fifth token has no probability
    for first, second in itertools.permutations(range(4), 2):
        share = float(((ids[0, :, 0] == first) & (ids[0, :, 1] == second)).double().mean())
        wanted = float(q[first] * q[second] / (1 - q[first]))
        assert abs(share - wanted) < 4 * (wanted / 20_000) ** 0.5


def test_a_seed_repeats_its_samples_and_another_does_not() -> None:
    settings = DraftingConfig(temperature=1.0, draft_sample_method="probabilistic")
    first, again, other = (emitted(replace(settings), 2, seed)[0] for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
