"""The unroll of a draft head over a pack (training-time test, arXiv 2503.01840), the same for every kind of head.

Row t pairs what the target made of position t with the embedding of token t+1 at position t and predicts token
t+2. Each further step k feeds token t+1+k, what the head itself made of the row, and position t+k
(docs/concepts.md). Step 0 computes keys and values for every position of the pack and all else only for its rows.

A head says how it fuses planes, what keys and values a row has, and what becomes of a row; whoever steps it does
the attention: here over the pack, in the reference decoder over a cache. So a head is written once for both.

Legend: T positions of a pack, R rows, H head hidden, P target hidden, A planes, V target vocabulary, N heads,
G key-value heads, E head size, S own steps so far.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn.functional import embedding
from torch.utils.checkpoint import checkpoint

from models.attention import attend, laid_out

POSITIONS, ROWS = 4096, 16384
"""Positions of step 0, and rows of an unroll step, that are worked on at once."""

KeyValue = tuple[torch.Tensor, torch.Tensor]


class RowAttention(Protocol):
    """What a head asks for the attention of some rows."""

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None = None
    ) -> torch.Tensor:
        """Output [..., N, Ev] of rotated queries [..., N, E] over all keys that the rows see, their own among them.

        Args:
            key, value: the rows' own, rotated, [..., G, E] and [..., G, Ev].
            scale: of the scores; None is E ** -0.5.
        """


class Drafting(Protocol):
    """A head, as it is stepped. Rows are [..., H] with any leading dimensions, positions int64 of the same.

    Embeddings are those of the fed tokens, in the dtype of the features; `ids_D` are the target ids of the drafts.
    """

    ids_D: torch.Tensor

    def fuse(self, planes_TAP: torch.Tensor) -> torch.Tensor:
        """Features [T, H] of the target's planes."""

    def key_value(self, embedded: torch.Tensor, feature: torch.Tensor, positions: torch.Tensor) -> KeyValue:
        """Rotated keys [..., G, E] and values [..., G, Ev] of rows."""

    def advance(
        self, embedded: torch.Tensor, feature: torch.Tensor, positions: torch.Tensor, attention: RowAttention
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the next step takes as the rows' features, and what is multiplied with the lm_head, both [..., H]."""


@dataclass(frozen=True)
class Step:
    """One unroll step: the rows it supervises, and what the head makes of them.

    Attributes:
        rows_R: pack positions, int64, ascending.
        hidden_RH: post-norm outputs; `lm_head` of them are the draft logits.
    """

    rows_R: torch.Tensor
    hidden_RH: torch.Tensor


def unroll(
    head: Drafting,
    tokens_T: torch.Tensor,
    planes_TAP: torch.Tensor,
    starts_T: torch.Tensor,
    rows: Sequence[torch.Tensor],
    embedding_VH: torch.Tensor,
) -> list[Step]:
    """Draft a step for each of `rows` that is not empty, with the true tokens fed in.

    Rows of step k + 1 must be a subset of those of step k.

    Args:
        tokens_T: int64 token ids of the pack, documents end to end.
        planes_TAP: the target's planes that the head reads, cast to the parameters' or the autocast dtype.
        starts_T: for each position where its document begins; positions restart there.
        rows: per step int64 pack positions, ascending.
        embedding_VH: the target's frozen embedding; looked-up rows take the dtype of the features.
    """
    rows = [rows_R for rows_R in rows if rows_R.numel()]
    if not rows:
        return []
    following_T = tokens_T.roll(-1)  # a document's last position sees a stranger; no row attends to it
    places_T = torch.arange(tokens_T.numel(), device=tokens_T.device) - starts_T
    feature_TH, *prefix = _in_chunks(POSITIONS, _prefix, (head, embedding_VH), (following_T, planes_TAP, places_T))
    shared = [laid_out(each) for each in prefix]
    rows_R, feature_RH = rows[0], feature_TH[rows[0]]
    own_k, own_v = (each.new_empty(rows_R.numel(), 0, *each.shape[1:]) for each in prefix)
    steps = []
    for step, now_R in enumerate(rows):
        if now_R.numel() != rows_R.numel():
            kept = torch.searchsorted(rows_R, now_R)
            rows_R, feature_RH, own_k, own_v = now_R, feature_RH[kept], own_k[kept], own_v[kept]
        each_row = (rows_R, starts_T[rows_R], tokens_T[rows_R + 1 + step], feature_RH, own_k, own_v)
        feature_RH, hidden_RH, own_k, own_v = _in_chunks(ROWS, _step, (head, step, embedding_VH, *shared), each_row)
        steps.append(Step(rows_R, hidden_RH))
    return steps


def _prefix(
    head: Drafting,
    embedding_VH: torch.Tensor,
    following_T: torch.Tensor,
    planes_TAP: torch.Tensor,
    places_T: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Features [T, H], step-0 keys and values [T, G, E] of some positions, `places_T` within their documents."""
    feature_TH = head.fuse(planes_TAP)
    embedded_TH = embedding(following_T, embedding_VH).to(feature_TH.dtype)
    return feature_TH, *head.key_value(embedded_TH, feature_TH, places_T)


def _step(
    head: Drafting,
    step: int,
    embedding_VH: torch.Tensor,
    k_TGE: torch.Tensor,
    v_TGE: torch.Tensor,
    rows_R: torch.Tensor,
    starts_R: torch.Tensor,
    fed_R: torch.Tensor,
    feature_RH: torch.Tensor,
    own_k: torch.Tensor,
    own_v: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Some rows at a step: their next features, post-norm outputs [R, H], and own keys and values so far."""

    def attention(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None = None
    ) -> torch.Tensor:
        nonlocal own_k, own_v
        if step > 0:  # at step 0 they are among those of all positions
            own_k, own_v = torch.cat((own_k, key[:, None]), 1), torch.cat((own_v, value[:, None]), 1)
        return attend(query, k_TGE, v_TGE, own_k, own_v, rows_R, starts_R, scale=scale)

    embedded_RH = embedding(fed_R, embedding_VH).to(feature_RH.dtype)
    fed_RH, hidden_RH = head.advance(embedded_RH, feature_RH, rows_R - starts_R + step, attention)
    return fed_RH, hidden_RH, own_k, own_v


def _in_chunks(
    most: int,
    function: Callable[..., tuple[torch.Tensor, ...]],
    shared: tuple[Any, ...],
    each_row: tuple[torch.Tensor, ...],
) -> tuple[torch.Tensor, ...]:
    """`function(*shared, *each_row)`, whose rows do not depend on one another, at most so many rows at a time.

    One chunk is stored for backward as usual. Of several, each is computed again when backward comes to it, so
    that a pack far longer than usual takes more time instead of memory that is not there.
    """
    chunks = list(zip(*(tensor.split(most) for tensor in each_row), strict=True))
    if len(chunks) == 1:
        return function(*shared, *each_row)
    done = [checkpoint(function, *shared, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
    return tuple(torch.cat(parts) for parts in zip(*done, strict=True))
