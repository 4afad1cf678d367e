"""The reference decoder: speculative decoding in process, on transformers, one target forward at a time.

It is the honest oracle for acceptance: what a head is worth with nothing of a server around it. Each round
drafts k tokens with the head, lets the target look at all of them in one forward, keeps the longest prefix
that the target itself would have produced (greedy) and adds the target's own next token (the bonus). So the
output is the target's, whatever the head proposes. Requests of different lengths share a batch; every row
keeps its own positions, and keys behind a row's position are invisible until they are overwritten.

The accounting is the servers': a round counts once it drafted, with all tokens the target confirmed, even
those behind a stop; AL = 1 + accepted / rounds (design, definition 10).

Legend: B requests, Q new positions per request, C cache capacity, N heads, G key-value heads, E head size,
H hidden, A aux planes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from models.eagle3 import Eagle3Head
from models.planes import captured, decoder_of
from serve_eval.prompts import Prompt


class RaggedCache:
    """Keys and values [B, G, C, E] per layer, written at each request's own positions.

    It stands in for transformers' Cache: attention layers call `update`, nothing else is used because the
    mask is given ready-made.
    """

    def __init__(self) -> None:
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.positions_BQ = torch.empty(0, 0, dtype=torch.int64)
        self.extent = 0

    def place(self, positions_BQ: torch.Tensor) -> torch.Tensor:
        """Say where the next forward writes; returns the mask [B, 1, Q, extent] of keys it may see."""
        self.positions_BQ = positions_BQ
        self.extent = max(self.extent, int(positions_BQ.max()) + 1)
        return torch.arange(self.extent, device=positions_BQ.device) <= positions_BQ[:, None, :, None]

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store keys and values [B, G, Q, E] and return all up to the extent."""
        batch, groups, _queries, size = key.shape
        held = self.layers.get(layer_idx)
        if held is None or held[0].shape[2] < self.extent:
            grown = [part.new_zeros(batch, groups, self.extent + 64, size) for part in (key, value)]
            if held is not None:
                for new, old in zip(grown, held, strict=True):
                    new[:, :, : old.shape[2]] = old
            held = self.layers[layer_idx] = (grown[0], grown[1])
        rows_B1 = torch.arange(batch, device=key.device)[:, None]
        held[0][rows_B1, :, self.positions_BQ] = key.transpose(1, 2)
        held[1][rows_B1, :, self.positions_BQ] = value.transpose(1, 2)
        return held[0][:, :, : self.extent], held[1][:, :, : self.extent]

    def keep(self, rows: torch.Tensor) -> None:
        """Drop all requests but these."""
        self.layers = {index: (key[rows], value[rows]) for index, (key, value) in self.layers.items()}


@dataclass
class Answer:
    """One request's result.

    Attributes:
        ids: generated token ids, the end-of-turn token included.
        accepted: accepted drafts of every drafting round.
    """

    prompt: Prompt
    ids: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)


class TargetRunner:
    """The target with a ragged cache: new tokens in, its greedy choices and planes out."""

    def __init__(self, model: Any, aux_layers: Sequence[int]) -> None:
        self.model, self.aux_layers, self.cache = model, tuple(aux_layers), RaggedCache()
        self.decoder = decoder_of(model, model.config.get_text_config().num_hidden_layers)
        self.lm_head = model.get_output_embeddings()

    def forward(
        self, ids_BQ: torch.Tensor, positions_BQ: torch.Tensor, only_B: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Greedy next tokens [B, Q] (or [B, 1] at query index `only_B`) and aux planes [B, Q, A, H]."""
        mask = self.cache.place(positions_BQ)
        with captured(self.decoder, self.aux_layers) as planes:
            out = self.decoder(
                input_ids=ids_BQ,
                position_ids=positions_BQ,
                attention_mask=mask,
                past_key_values=self.cache,
                use_cache=True,
            ).last_hidden_state
        if only_B is not None:
            out = out[torch.arange(len(only_B)), only_B][:, None]
        aux = torch.stack([planes[layer] for layer in self.aux_layers], 2) if self.aux_layers else out
        return self.lm_head(out).argmax(-1), aux


class HeadRunner:
    """An EAGLE-3 head with a ragged cache: verified features in, k drafted tokens out."""

    def __init__(self, head: Eagle3Head, embedding_VH: torch.Tensor) -> None:
        self.head, self.embedding_VH, self.cache = head, embedding_VH, RaggedCache()

    def _advance(self, ids_BQ: torch.Tensor, feature_BQH: torch.Tensor, positions_BQ: torch.Tensor) -> torch.Tensor:
        """Pre-norm outputs [B, Q, H] of rows at these positions."""
        layer, mask = self.head.midlayer, self.cache.place(positions_BQ)
        wide = layer.wide(nn.functional.embedding(ids_BQ, self.embedding_VH), feature_BQH)
        cos, sin = self.head.rope.table(positions_BQ.flatten(), wide.dtype)
        rope = (cos.unflatten(0, positions_BQ.shape), sin.unflatten(0, positions_BQ.shape))
        key, value = layer.self_attn.key_value(wide, rope)
        query = layer.self_attn.query(wide, rope)
        keys, values = self.cache.update(key.transpose(1, 2), value.transpose(1, 2), 0)
        attended = nn.functional.scaled_dot_product_attention(
            query.transpose(1, 2), keys, values, attn_mask=mask, enable_gqa=True
        )
        return layer.finish(feature_BQH, attended.transpose(1, 2))

    def draft(
        self,
        ids_BQ: torch.Tensor,
        aux_BQAH: torch.Tensor,
        positions_BQ: torch.Tensor,
        last_B: torch.Tensor,
        k: int,
    ) -> torch.Tensor:
        """Drafted target ids [B, k] after the verified rows given.

        Args:
            ids_BQ: for row t, token t + 1. aux_BQAH: the target's planes of t. positions_BQ: t.
            last_B: query index of each request's last verified row; what lies behind it is padding.
        """
        head, rows_B = self.head, torch.arange(len(last_B))
        feature = head.fuse(aux_BQAH.flatten(0, 1)).unflatten(0, ids_BQ.shape)
        hidden_B1H = self._advance(ids_BQ, feature, positions_BQ)[rows_B, last_B][:, None]
        position_B1 = positions_BQ[rows_B, last_B][:, None]
        drafted = []
        for step in range(k):
            token_B1 = head.ids_D[head.lm_head(head.norm(hidden_B1H)).argmax(-1)]
            drafted.append(token_B1)
            if step + 1 < k:
                position_B1 = position_B1 + 1
                hidden_B1H = self._advance(token_B1, head.feedback(hidden_B1H), position_B1)
        return torch.cat(drafted, 1)


def _trim(answer: Answer, stop: set[int], limit: int) -> bool:
    """Cut an answer at its first stop token or its limit; True when it is finished."""
    for index, token in enumerate(answer.ids[:limit]):
        if token in stop:
            del answer.ids[index + 1 :]
            return True
    finished = len(answer.ids) >= limit
    del answer.ids[limit:]
    return finished


@torch.inference_mode()
def decode(
    model: Any,
    prompts: Sequence[Prompt],
    *,
    stop: set[int],
    max_new_tokens: int,
    head: Eagle3Head | None = None,
    k: int = 0,
) -> list[Answer]:
    """Greedy answers to one batch of prompts; with a head, by drafting k tokens and verifying them.

    Args:
        model: a transformers causal language model; head and model share device and dtype.
        stop: ids that end an answer.
    """
    device = model.device
    target = TargetRunner(model, head.config.aux_layers if head is not None else ())
    drafter = HeadRunner(head, model.get_input_embeddings().weight) if head is not None else None
    answers = [Answer(prompt) for prompt in prompts]
    alive = list(range(len(prompts)))

    lengths_B = torch.tensor([len(prompt.ids) for prompt in prompts], device=device)
    width = int(lengths_B.max())
    ids_BQ = torch.zeros(len(prompts), width, dtype=torch.int64, device=device)
    for row, prompt in enumerate(prompts):
        ids_BQ[row, : len(prompt.ids)] = torch.tensor(prompt.ids, device=device)
    positions_BQ = torch.arange(width, device=device).expand(len(prompts), -1)
    last_B = lengths_B - 1
    token_B1, aux = target.forward(ids_BQ, positions_BQ, last_B)
    following_BQ = ids_BQ.roll(-1, 1).scatter(1, last_B[:, None], token_B1)
    accepted_B = torch.zeros_like(last_B)
    emitted = [[int(token)] for token in token_B1]
    position_B = lengths_B  # of each request's newest token, which the target has not read yet

    while True:
        for row, index in enumerate(alive):
            answers[index].ids += emitted[row]
        going = [row for row, index in enumerate(alive) if not _trim(answers[index], stop, max_new_tokens)]
        if not going:
            return answers
        if len(going) < len(alive):
            rows = torch.tensor(going, device=device)
            alive = [alive[row] for row in going]
            target.cache.keep(rows)
            if drafter is not None:
                drafter.cache.keep(rows)
            token_B1, aux, following_BQ, positions_BQ, last_B, position_B = (
                tensor[rows] for tensor in (token_B1, aux, following_BQ, positions_BQ, last_B, position_B)
            )
        if drafter is not None:
            drafts_Bk = drafter.draft(following_BQ, aux, positions_BQ, last_B, k)
            ids_BQ = torch.cat((token_B1, drafts_Bk), 1)
        else:
            ids_BQ = token_B1
        positions_BQ = position_B[:, None] + torch.arange(ids_BQ.shape[1], device=device)
        choice_BQ, aux = target.forward(ids_BQ, positions_BQ)
        # The longest prefix of drafts that the target would have chosen itself, then its own next token.
        agree_Bk = (choice_BQ[:, :-1] == ids_BQ[:, 1:]).long()
        accepted_B = agree_Bk.cumprod(1).sum(1)
        emitted = [row[: n + 1] for row, n in zip(choice_BQ.tolist(), accepted_B.tolist(), strict=True)]
        if drafter is not None:
            for row, index in enumerate(alive):
                answers[index].accepted.append(int(accepted_B[row]))
        token_B1 = choice_BQ.gather(1, accepted_B[:, None])
        following_BQ, last_B, position_B = choice_BQ, accepted_B, position_B + accepted_B + 1


def measure_costs(
    model: Any, head: Eagle3Head, k: int, context: int = 128, repeats: int = 8
) -> tuple[list[float], list[float]]:
    """Milliseconds at batch 1 of a target forward over 1 .. k + 1 tokens, and of drafting 1 .. k tokens.

    Medians over `repeats`, behind a context of `context` tokens.
    """
    device = model.device
    target = TargetRunner(model, head.config.aux_layers)
    drafter = HeadRunner(head, model.get_input_embeddings().weight)
    ids = torch.randint(0, head.config.vocab_size, (1, context), device=device)
    positions = torch.arange(context, device=device)[None]

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

    with torch.inference_mode():
        _, aux = target.forward(ids, positions)
        drafter.draft(ids, aux, positions, torch.tensor([context - 1]), k)
        verify, draft = [], []
        for width in range(1, k + 2):
            new, at = ids[:, :width], positions[:, :width] + context
            verify.append(timed(lambda new=new, at=at: target.forward(new, at)))
        for steps in range(1, k + 1):
            new, at, last = ids[:, : steps + 1], positions[:, : steps + 1] + context, torch.tensor([steps])
            planes = aux[:, : steps + 1]
            draft.append(timed(lambda a=new, b=planes, c=at, d=last, e=steps: drafter.draft(a, b, c, d, e)))
    return verify, draft
