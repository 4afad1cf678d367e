"""The teacher in a few hundred bytes: its likeliest draft tokens instead of the final plane.

A row learns from the target's distribution on the draft vocabulary, softmax(lm_head(final plane)). Nearly all of that
lies on a few tokens, and a plane of an 8B target takes 8 KB (bf16) or 4 KB (int8) where 64 tokens take 264 bytes.
Kept per teacher position: the likeliest tokens of the draft vocabulary with their log-probabilities under the target's
full softmax, what is left of the draft vocabulary as one probability, and the target's argmax over its whole
vocabulary. That is the target's distribution on a partition of the draft vocabulary, {token, ..., token, all others};
what the losses make of it is told in train/losses.py.

Measured on SmolLM2-135M (3,000 positions of the demo, 8,192 draft tokens): 16, 64 and 256 tokens have 94.6, 98.0 and
99.5 % of the probability on the draft vocabulary (`python -m featurize.bench` tells it of any target). Kept in fp16,
the probabilities of 64 are off by 0.0002 in sum, in bf16 by 0.0015. The rest is kept as it is, not as a difference from
a total, which the rounding of the others would swallow.

Logits are computed as the target itself does, lm_head times plane in the target's dtype; all else in fp32, for so many
positions at a time that no more than CHUNK logits are held. What comes out depends on the draft vocabulary, so that
extraction has to choose it (featurize/vocabulary.py), and training to stay with it.

Legend: F teacher positions, S kept tokens, C positions of a chunk, H hidden, D draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from featurize.tokenised import TokenisedSet
from featurize.vocabulary import draft_vocabulary, vocabulary_fingerprint
from models.artefact import write_tensors
from models.config import DraftConfig
from models.errors import Refused
from models.target import Target

CHUNK = 1 << 25
"""Logits that are held at a time, 128 MB in fp32."""

LOG_P = torch.float16
"""Of the log-probabilities."""

VOCABULARY = "vocabulary.safetensors"
"""File of a store with the target ids of its draft vocabulary, `ids`, int32 [D]."""


def index_dtype(drafted: int) -> torch.dtype:
    """The smallest that counts so many draft tokens."""
    return torch.int16 if drafted <= 1 << 15 else torch.int32


def teacher_bytes(kept: int, drafted: int) -> int:
    """Bytes of one teacher position."""
    return kept * (index_dtype(drafted).itemsize + LOG_P.itemsize) + 8


@dataclass(frozen=True)
class TopK:
    """Teachers of some positions.

    Attributes:
        index_FS: places in the draft vocabulary, int16 or int32, likeliest first; equals by lowest place.
        log_p_FS: log-probabilities under the softmax over the whole vocabulary, fp16.
        rest_F: probability of all other draft tokens, fp32.
        best_F: the target's argmax, an id of its own vocabulary, int32.
    """

    index_FS: torch.Tensor
    log_p_FS: torch.Tensor
    rest_F: torch.Tensor
    best_F: torch.Tensor

    def __len__(self) -> int:
        """F."""
        return len(self.best_F)

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> TopK:
        """The same with every tensor changed: moved, say."""
        return TopK(*map(change, vars(self).values()))

    def __getitem__(self, chosen: slice | torch.Tensor) -> TopK:
        """Some positions."""
        return self.map(lambda tensor: tensor[chosen])

    def tensors(self) -> dict[str, torch.Tensor]:
        """As a shard names them."""
        return {f"teacher.{name.rpartition('_')[0]}": tensor for name, tensor in vars(self).items()}

    @classmethod
    def stored(cls, tensors: dict[str, torch.Tensor], first: int, last: int) -> TopK:
        """Positions [first, last) among a shard's tensors; views."""
        return cls(*(tensors[f"teacher.{name}"][first:last] for name in ("index", "log_p", "rest", "best")))

    @classmethod
    def joined(cls, pieces: Sequence[TopK]) -> TopK:
        """Pieces end to end."""
        return cls(*(torch.cat(parts) for parts in zip(*(vars(piece).values() for piece in pieces), strict=True)))


@dataclass(frozen=True)
class Teaching:
    """How planes become teachers.

    Attributes:
        lm_head_VH: of the target, in the dtype it runs in, on the device that computes.
        ids_D: target ids of the draft vocabulary, int64.
        kept: S.
    """

    lm_head_VH: torch.Tensor
    ids_D: torch.Tensor
    kept: int

    @torch.inference_mode()
    def __call__(self, final_FH: torch.Tensor) -> TopK:
        """Teachers of final planes [F, H].

        Raises:
            Refused: a log-probability is not finite.
        """
        rows = max(1, CHUNK // len(self.lm_head_VH))
        parts = [self._chunk(final_CH) for final_CH in final_FH.split(rows)]  # of no plane at all, one empty part
        top = TopK.joined(parts)
        if not (top.log_p_FS.isfinite().all() and top.rest_F.isfinite().all()):
            raise Refused("lm_head of the final plane gives logits that are not finite (try target.dtype=bfloat16)")
        return top

    def _chunk(self, final_CH: torch.Tensor) -> TopK:
        logits_CV = (final_CH.to(self.lm_head_VH) @ self.lm_head_VH.T).float()
        best_C = logits_CV.argmax(-1)
        everything_C1 = logits_CV.logsumexp(-1, keepdim=True)
        log_p_CD = logits_CV.index_select(-1, self.ids_D).sub_(everything_C1)
        # Equals in order of their places: topk promises none.
        index_CS = log_p_CD.topk(self.kept).indices.sort(-1).values
        order_CS = log_p_CD.gather(-1, index_CS).sort(dim=-1, descending=True, stable=True).indices
        index_CS = index_CS.gather(-1, order_CS)
        log_p_CS = log_p_CD.gather(-1, index_CS)
        rest_C = log_p_CD.scatter_(-1, index_CS, -torch.inf).exp_().sum(-1)
        return TopK(
            index_CS.to(index_dtype(len(self.ids_D))),
            log_p_CS.clamp_(min=torch.finfo(LOG_P).min).to(LOG_P),
            rest_C,
            best_C.int(),
        )


@dataclass(frozen=True)
class Drafted:
    """What a store keeps teachers on: the draft vocabulary that training on its documents chooses.

    Attributes:
        ids_D: its target ids, ascending, int64.
        kept: S.
    """

    ids_D: torch.Tensor
    kept: int

    @staticmethod
    def inputs(kept: int | None, target: Target, draft: DraftConfig, validation_share: float) -> dict[str, Any]:
        """What decides it beside the documents, under the names of the options; nothing where final planes are kept.

        Raises:
            Refused: the target's logits are not lm_head of its final plane.
        """
        if kept is None:
            return {}
        target.check_logits()
        size = draft.vocab_size or target.vocab_size
        return {"featurize.teacher_k": kept, "draft.vocab_size": size, "data.validation_share": validation_share}

    @classmethod
    def of(
        cls, tokenised: TokenisedSet, kept: int, target: Target, draft: DraftConfig, validation_share: float
    ) -> Drafted:
        """Choose it as training does.

        Raises:
            Refused: nothing is left to train on, the vocabulary is larger than the target's, or smaller than S.
        """
        documents, tokens_T = tokenised.documents, tokenised.tokens
        ids_D = draft_vocabulary(documents, tokens_T, validation_share, target.vocab_size, draft.vocab_size)
        if kept > len(ids_D):
            raise Refused(
                f"featurize.teacher_k={kept} is more than the {len(ids_D)} tokens of draft.vocab_size; lower it, or "
                "keep the final plane (featurize.teacher_k=null)"
            )
        return cls(ids_D, kept)

    @property
    def bytes(self) -> int:
        """Of one teacher position."""
        return teacher_bytes(self.kept, len(self.ids_D))

    def facts(self) -> dict[str, Any]:
        """For the contract."""
        vocabulary = vocabulary_fingerprint(self.ids_D)
        return {"teacher_k": self.kept, "draft_vocab_size": len(self.ids_D), "draft_vocabulary": vocabulary}

    def save(self, directory: Path) -> None:
        """Write the vocabulary into a store, unless it is there."""
        if not (directory / VOCABULARY).is_file():
            write_tensors(directory / VOCABULARY, {"ids": self.ids_D.int()})

    def teaching(self, target: Target, device: torch.device) -> Teaching:
        """What makes teachers of final planes on a device."""
        return Teaching(target.load_lm_head().to(device, target.dtype), self.ids_D.to(device), self.kept)


def read_vocabulary(directory: Path) -> torch.Tensor:
    """A store's draft vocabulary, int64 [D]."""
    return load_file(directory / VOCABULARY)["ids"].long()
