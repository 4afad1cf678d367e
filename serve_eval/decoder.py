"""The reference decoder: speculative decoding in process, on transformers, one target forward at a time.

It is the honest oracle for acceptance: what drafts are worth with nothing of a server around them. Each round
drafts a chain or a tree, lets the target look at all of it in one forward, walks down as far as the target agrees
and adds the target's own next token (the bonus). So the output is the target's, token for token when greedy and
in distribution when sampling, whatever is proposed. Requests of different lengths share a batch.

The accounting is the servers': a round counts once it drafted, with all tokens the target confirmed, even
those behind a stop; AL = 1 + accepted / rounds (docs/concepts.md).

Legend: B requests, Q new positions per request, M nodes of a draft tree, L tokens emitted by the longest path, A aux
planes, H hidden.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from serve_eval.cache import CachedModel, Places, Text
from serve_eval.drafters import Drafter
from serve_eval.prompts import Prompt
from serve_eval.trees import Verified
from serve_eval.verification import GREEDY, Draft, Sampling, verify


@dataclass(frozen=True)
class Round:
    """One drafting round of one request.

    Attributes:
        path: accepted nodes of the draft, in order; node numbers start at 1.
        straight: how many of them, from the first on, a chain would have had: the first child each time.
    """

    path: tuple[int, ...]
    straight: int


@dataclass
class Answer:
    """One request's result.

    Attributes:
        ids: generated token ids, the end-of-turn token included.
        entropies: of the target's distribution of each, in nats, at temperature 1.
        rounds: every round after the first token; None where nothing was drafted.
    """

    prompt: Prompt
    ids: list[int] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    rounds: list[Round | None] = field(default_factory=list)

    @property
    def accepted(self) -> list[int | None]:
        """Accepted drafts of every round; None where nothing was drafted."""
        return [None if each is None else len(each.path) for each in self.rounds]


def _trim(answer: Answer, stop: set[int], limit: int) -> bool:
    """Cut an answer at its first stop token or its limit; True when it is finished."""
    end = next((index + 1 for index, token in enumerate(answer.ids[:limit]) if token in stop), None)
    finished = end is not None or len(answer.ids) >= limit
    del answer.ids[end or limit :], answer.entropies[end or limit :]
    return finished


@torch.inference_mode()
def decode(
    model: Any,
    prompts: Sequence[Prompt],
    *,
    stop: set[int],
    max_new_tokens: int,
    drafter: Drafter | None = None,
    sampling: Sampling = GREEDY,
    seed: int = 0,
) -> list[Answer]:
    """Answers to one batch of prompts; with a drafter, by drafting and verifying.

    Args:
        model: a transformers causal language model; the drafter shares its device and dtype, and is new.
        stop: ids that end an answer.
        sampling: how the target's tokens are drawn. seed: of all that is drawn; it belongs to the batch as a whole.
    """
    device = model.device
    generator = torch.Generator(device).manual_seed(seed)
    target = CachedModel(model, drafter.aux_layers if drafter is not None else ())
    answers = [Answer(prompt) for prompt in prompts]
    alive = list(range(len(prompts)))

    last_B = torch.tensor([len(prompt.ids) - 1 for prompt in prompts], device=device)
    tokens_BQ = torch.zeros(len(prompts), int(last_B.max()) + 1, dtype=torch.int64, device=device)
    for row, prompt in enumerate(prompts):
        tokens_BQ[row, : len(prompt.ids)] = torch.tensor(prompt.ids, device=device)
    positions_BQ = torch.arange(tokens_BQ.shape[1], device=device).expand(len(prompts), -1)
    logits_B1V, aux = target.read(tokens_BQ, Places.line(positions_BQ), last_B)
    verdict = verify(Draft.nothing(tokens_BQ.gather(1, last_B[:, None])[:, 0]), logits_B1V, sampling, generator)
    following_BQ = tokens_BQ.roll(-1, 1).scatter(1, last_B[:, None], verdict.emitted_BL)
    verified = Verified(tokens_BQ, following_BQ, positions_BQ, aux, last_B)

    while True:
        counts = (verdict.accepted_B + 1).tolist()
        emitted = zip(counts, verdict.emitted_BL.tolist(), verdict.entropy_BL.tolist(), strict=True)
        for index, (count, tokens, entropies) in zip(alive, emitted, strict=True):
            answers[index].ids += tokens[:count]
            answers[index].entropies += entropies[:count]
        going = [row for row, index in enumerate(alive) if not _trim(answers[index], stop, max_new_tokens)]
        if not going:
            return answers
        if len(going) < len(alive):
            rows = torch.tensor(going, device=device)
            alive = [alive[row] for row in going]
            target.cache.keep(rows)
            if drafter is not None:
                drafter.keep(rows)
            verified = verified.keep(rows)

        draft = drafter.draft(verified, generator) if drafter is not None else Draft.nothing(verified.newest_B)
        root_B = verified.root_B
        places = Places.branches(root_B, draft.parents_BM, draft.parents_BM.shape[1])
        logits_BMV, aux = target.read(draft.tokens_BM, places)
        verdict = verify(draft, logits_BMV, sampling, generator)

        # What was accepted continues the text; its keys move to where the text would have them.
        path_BL = verdict.path_BL
        steps_L = torch.arange(path_BL.shape[1], device=device)
        positions_BL = root_B[:, None] + steps_L
        if (path_BL != steps_L).any():
            target.cache.move(root_B[:, None] + path_BL, positions_BL)
        rows_B1 = torch.arange(len(alive), device=device)[:, None]
        verified = Verified(
            draft.tokens_BM[rows_B1, path_BL],
            verdict.emitted_BL,
            positions_BL,
            aux[rows_B1, path_BL],
            verdict.accepted_B,
        )
        if drafter is not None:
            drafted = (draft.parents_BM >= 0).any(1).tolist()
            accepted, straight = verdict.accepted_B.tolist(), verdict.straight_B.tolist()
            for row, (index, path) in enumerate(zip(alive, path_BL.tolist(), strict=True)):
                found = Round(tuple(path[1 : accepted[row] + 1]), straight[row])
                answers[index].rounds.append(found if drafted[row] else None)


def measure_costs(
    model: Any, make_drafter: Callable[[int], Drafter], k: int, context: int = 128, repeats: int = 8
) -> tuple[list[float], list[float]]:
    """Milliseconds at batch 1 of a target forward over 1 .. k + 1 tokens, and of drafting chains of 1 .. k tokens.

    Medians over `repeats`, behind a context of `context` tokens.

    Args:
        make_drafter: a new drafter of chains of so many tokens.
    """
    device = model.device
    ids = torch.randint(0, model.config.get_text_config().vocab_size, (1, context), device=device)
    positions = torch.arange(context, device=device)[None]
    generator = torch.Generator(device).manual_seed(0)

    def timed(call: Any) -> float:
        seconds = []
        for _ in range(repeats):
            if device.type == "cuda":
                torch.cuda.synchronize()
            started = time.perf_counter()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
        return 1000 * sorted(seconds)[repeats // 2]

    def told(aux: torch.Tensor, width: int, start: int) -> Verified:
        part, last_B = slice(width), torch.tensor([width - 1], device=device)
        return Verified(ids[:, part], ids[:, part], positions[:, part] + start, aux[:, part], last_B)

    with torch.inference_mode():
        target = CachedModel(model, make_drafter(k).aux_layers)
        _, aux = target.read(ids, Places.line(positions))
        verify_ms, draft_ms = [], []
        behind = 0 if isinstance(target.cache, Text) else context  # else it would read the context again each time
        for width in range(1, k + 2):
            new, at = ids[:, :width], Places.line(positions[:, :width] + behind)
            verify_ms.append(timed(lambda new=new, at=at: target.read(new, at)))
        for steps in range(1, k + 1):
            drafter, round_told = make_drafter(steps), told(aux, steps + 1, context)
            drafter.draft(told(aux, context, 0), generator)
            draft_ms.append(timed(lambda drafter=drafter, told=round_told: drafter.draft(told, generator)))
    return verify_ms, draft_ms
