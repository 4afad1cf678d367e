"""What drafts: an EAGLE-3 or MTP head, a small language model, or the text itself (prompt lookup).

A drafter is given what the target has verified since the last time and returns a draft. A head and a model go
through a shape (trees.py), so each only says how it takes in verified tokens and how it reads drafted ones; both
write over the drafted keys of the last round when they take in the verified tokens of the next. Another kind of
head is another stepper.

Legend: B requests, Q new positions per request, M nodes read since the last verified token, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn

from models.drafts import DraftHead
from models.errors import Refused
from serve_eval.cache import CachedModel, Places, RaggedCache
from serve_eval.config import DraftingConfig
from serve_eval.trees import DynamicTree, Shape, StaticTree, Stepper, Verified
from serve_eval.verification import Draft, Sampling


class Drafter(Protocol):
    """Proposes tokens for one batch. `aux_layers` are the planes of the target that it wants to see."""

    aux_layers: tuple[int, ...]

    def draft(self, verified: Verified, generator: torch.Generator) -> Draft:
        """Trees after the newest tokens, given all that was verified since the last call."""

    def keep(self, rows: torch.Tensor) -> None:
        """Drop all requests but these."""


class HeadStepper:
    """A draft head with a ragged cache. Row t lies at slot t; the last verified row is the root's."""

    def __init__(self, head: DraftHead, embedding_VH: torch.Tensor, lm_head_VH: torch.Tensor) -> None:
        self.head, self.embedding_VH, self.cache = head, embedding_VH, RaggedCache()
        self.draft_DH = lm_head_VH if head.lm_head is None else head.lm_head.weight
        self.ids_D, self.aux_layers = head.ids_D, head.config.planes
        self.root_B = self.parents_BM = torch.empty(0, dtype=torch.int64)
        self.fed_BMH = torch.empty(0)

    def _advance(
        self, ids_BQ: torch.Tensor, feature_BQH: torch.Tensor, places: Places
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows at these places: what is fed to their children, and what the output head reads, [B, Q, H] both."""
        mask = self.cache.place(places)

        def attention(
            query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None = None
        ) -> torch.Tensor:
            keys, values = self.cache.update(key.transpose(1, 2), value.transpose(1, 2), 0)
            return nn.functional.scaled_dot_product_attention(
                query.transpose(1, 2), keys, values, attn_mask=mask, scale=scale, enable_gqa=True
            ).transpose(1, 2)

        embedded_BQH = nn.functional.embedding(ids_BQ, self.embedding_VH)
        return self.head.advance(embedded_BQH, feature_BQH, places.positions_BQ, attention)

    def absorb(self, verified: Verified) -> torch.Tensor:
        """See `Stepper`: row t is token t + 1 and the target's planes of t."""
        ids_BQ = verified.following_BQ
        feature = self.head.fuse(verified.aux_BQAH.flatten(0, 1)).unflatten(0, ids_BQ.shape)
        fed_BQH, hidden_BQH = self._advance(ids_BQ, feature, Places.line(verified.positions_BQ))
        rows_B = torch.arange(len(ids_BQ), device=ids_BQ.device)
        self.fed_BMH = fed_BQH[rows_B, verified.last_B][:, None]
        self.root_B = verified.root_B - 1
        self.parents_BM = torch.full_like(ids_BQ[:, :1], -1)
        return nn.functional.linear(hidden_BQH[rows_B, verified.last_B], self.draft_DH)

    def extend(self, tokens_BQ: torch.Tensor, parents_BQ: torch.Tensor) -> torch.Tensor:
        """See `Stepper`: a drafted row is fed its parent's output."""
        of_BQH = parents_BQ[:, :, None].expand(-1, -1, self.fed_BMH.shape[2])
        self.parents_BM = torch.cat((self.parents_BM, parents_BQ), 1)
        places = Places.branches(self.root_B, self.parents_BM, tokens_BQ.shape[1])
        fed_BQH, hidden_BQH = self._advance(tokens_BQ, self.fed_BMH.gather(1, of_BQH), places)
        self.fed_BMH = torch.cat((self.fed_BMH, fed_BQH), 1)
        return nn.functional.linear(hidden_BQH, self.draft_DH)

    def keep(self, rows: torch.Tensor) -> None:
        """See `Stepper`."""
        self.cache.keep(rows)


class ModelStepper:
    """A smaller language model with the target's tokenizer. `vocab_size` is the target's; ids beyond it are cut."""

    def __init__(self, model: Any, vocab_size: int) -> None:
        self.model = CachedModel(model)
        size = min(vocab_size, model.get_output_embeddings().weight.shape[0])
        self.ids_D = torch.arange(size, device=model.device)
        self.aux_layers: tuple[int, ...] = ()
        self.root_B = self.parents_BM = torch.empty(0, dtype=torch.int64)

    def absorb(self, verified: Verified) -> torch.Tensor:
        """See `Stepper`: reads the tokens that follow, the newest among them; at first the whole prompt."""
        ids_BQ, positions_BQ, last_B = verified.following_BQ, verified.positions_BQ + 1, verified.last_B
        if self.model.cache.empty:
            ids_BQ = torch.cat((verified.tokens_BQ[:, :1], ids_BQ), 1)
            positions_BQ, last_B = torch.cat((verified.positions_BQ[:, :1], positions_BQ), 1), last_B + 1
        self.root_B = verified.root_B
        self.parents_BM = torch.full_like(ids_BQ[:, :1], -1)
        return self.model.read(ids_BQ, Places.line(positions_BQ), last_B)[0][:, 0, : len(self.ids_D)]

    def extend(self, tokens_BQ: torch.Tensor, parents_BQ: torch.Tensor) -> torch.Tensor:
        """See `Stepper`."""
        self.parents_BM = torch.cat((self.parents_BM, parents_BQ), 1)
        places = Places.branches(self.root_B, self.parents_BM, tokens_BQ.shape[1])
        return self.model.read(tokens_BQ, places)[0][:, :, : len(self.ids_D)]

    def keep(self, rows: torch.Tensor) -> None:
        """See `Stepper`."""
        self.model.cache.keep(rows)


class TreeDrafter:
    """A stepper's drafts in a shape, drawn as `sampling` says, or its best tokens when that is None.

    Raises:
        Refused: a node is to have more children than there are draft tokens.
    """

    def __init__(self, stepper: Stepper, shape: Shape, sampling: Sampling | None = None) -> None:
        self.stepper, self.shape, self.sampling, self.aux_layers = stepper, shape, sampling, stepper.aux_layers
        if shape.widest > len(stepper.ids_D):
            raise Refused(f"eval.drafting: {shape.widest} children per node, but {len(stepper.ids_D)} draft tokens")

    def draft(self, verified: Verified, generator: torch.Generator) -> Draft:
        """See `Drafter`."""
        return self.shape.grow(self.stepper, verified, self.sampling, generator)

    def keep(self, rows: torch.Tensor) -> None:
        """See `Drafter`."""
        self.stepper.keep(rows)


def looked_up(text: Sequence[int], k: int, shortest: int, longest: int) -> list[int]:
    """At most k tokens that followed the end of the text where it occurred before, as vLLM's n-gram drafting does.

    Of the endings of `shortest` to `longest` tokens the longest that occurred before counts, at its first place.
    """
    for size in range(min(longest, len(text) - 1), shortest - 1, -1):
        ending = text[-size:]
        for start in range(len(text) - size):
            if text[start : start + size] == ending:
                return list(text[start + size : start + size + k])
    return []


class LookupDrafter:
    """Prompt lookup: what followed the last few tokens when they occurred before. No model is needed."""

    aux_layers: tuple[int, ...] = ()

    def __init__(self, k: int, shortest: int, longest: int) -> None:
        self.k, self.shortest, self.longest = k, shortest, longest
        self.texts: list[list[int]] = []

    def draft(self, verified: Verified, generator: torch.Generator) -> Draft:
        """See `Drafter`."""
        ends = verified.last_B.tolist()
        if not self.texts:
            self.texts = [[first] for first in verified.tokens_BQ[:, 0].tolist()]
        for text, following, end in zip(self.texts, verified.following_BQ.tolist(), ends, strict=True):
            text += following[: end + 1]
        tokens_BM = verified.newest_B[:, None].repeat(1, 1 + self.k)
        parents_BM = torch.full_like(tokens_BM, -1)
        for row, text in enumerate(self.texts):
            found = looked_up(text, self.k, self.shortest, self.longest)
            tokens_BM[row, 1 : 1 + len(found)] = torch.tensor(found, dtype=torch.int64, device=tokens_BM.device)
            parents_BM[row, 1 : 1 + len(found)] = torch.arange(len(found), device=tokens_BM.device)
        return Draft(tokens_BM, parents_BM)

    def keep(self, rows: torch.Tensor) -> None:
        """See `Drafter`."""
        self.texts = [self.texts[row] for row in rows.tolist()]


def shape_of(settings: DraftingConfig, k: int) -> Shape:
    """The shape that the settings ask for."""
    if settings.tree == "dynamic":
        assert settings.width is not None and settings.nodes is not None
        return DynamicTree(k, settings.width, settings.nodes)
    return StaticTree.of_paths(settings.paths) if settings.tree == "static" else StaticTree.chain(k)


def sampling_of(settings: DraftingConfig) -> Sampling:
    """How the settings draw the target's tokens."""
    return Sampling(settings.temperature, settings.top_p, settings.top_k)


def make_drafter(
    settings: DraftingConfig, k: int, *, model: Any, head: DraftHead | None = None, draft_model: Any = None
) -> Drafter:
    """A new drafter, for one batch.

    Args:
        model: the target. head, draft_model: what the method drafts with; on the target's device, in its dtype.

    Raises:
        Refused: the shape asks for more children than there are draft tokens.
    """
    if settings.method == "ngram":
        return LookupDrafter(k, settings.lookup_min, settings.lookup_max)
    stepper: Stepper
    if settings.method == "draft_model":
        stepper = ModelStepper(draft_model, model.get_output_embeddings().weight.shape[0])
    else:
        assert head is not None
        stepper = HeadStepper(head, model.get_input_embeddings().weight, model.get_output_embeddings().weight)
    drawn = settings.draft_sample_method == "probabilistic"
    return TreeDrafter(stepper, shape_of(settings, k), sampling_of(settings) if drawn else None)
