"""Which documents are trained on, which tokens they supervise, and the draft vocabulary that follows from both.

Training chooses the draft vocabulary here; extraction does, too, where it keeps the teacher on that vocabulary alone
(`featurize.teacher_k`), from the same documents in the same way.

Legend: T positions of all documents end to end, V target vocabulary, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from featurize.tokenised import Document, held_out
from models.artefact import fingerprint
from models.errors import Refused
from models.vocabulary import choose_draft_vocabulary

DOCUMENTS_AT_ONCE = 4096
"""Documents whose tokens are counted in one go."""


def divide(documents: Sequence[Document], validation_share: float) -> tuple[list[int], list[int]]:
    """Indices of the documents to train on and of those held out; a document without a row is in neither.

    Raises:
        Refused: nothing is left to train on.
    """
    with_rows = [index for index, document in enumerate(documents) if document.rows]
    training: list[int] = []
    validation: list[int] = []
    for index in with_rows:
        (validation if held_out(documents[index].conversation, validation_share) else training).append(index)
    if not with_rows:
        raise Refused(f"none of {len(documents)} documents supervises a row; look at the conversations' answers")
    if not training:
        raise Refused(f"all {len(with_rows)} documents are held out; lower data.validation_share")
    return training, validation


def count_supervised(
    documents: Sequence[Document], tokens_T: torch.Tensor, indices: Sequence[int], vocab_size: int
) -> torch.Tensor:
    """How often each target id is a supervised token of these documents, int64 [V]; each of them has a span."""
    counts_V = np.zeros(vocab_size, dtype=np.int64)
    everything_T = tokens_T.numpy()
    starts_N = np.cumsum([0, *(document.length for document in documents)])
    for at in range(0, len(indices), DOCUMENTS_AT_ONCE):
        chosen = sorted(indices[at : at + DOCUMENTS_AT_ONCE])
        begins = starts_N[chosen].tolist()
        spans = ((begin, span) for begin, index in zip(begins, chosen, strict=True) for span in documents[index].spans)
        edges = np.array([begin + edge for begin, span in spans for edge in span])
        supervised = np.repeat(np.arange(len(edges) - 1) % 2 == 0, np.diff(edges))
        counts_V += np.bincount(everything_T[edges[0] : edges[-1]][supervised], minlength=vocab_size)
    return torch.from_numpy(counts_V)


def draft_vocabulary(
    documents: Sequence[Document], tokens_T: torch.Tensor, validation_share: float, vocab_size: int, size: int | None
) -> torch.Tensor:
    """Target ids, ascending, int64 [D], of the vocabulary that training on these documents chooses.

    Args:
        size: draft.vocab_size; None takes the target's whole vocabulary.

    Raises:
        Refused: nothing is left to train on, or `size` is larger than the vocabulary.
    """
    training, _ = divide(documents, validation_share)
    chosen = choose_draft_vocabulary(count_supervised(documents, tokens_T, training, vocab_size), size)
    return torch.arange(vocab_size) if chosen is None else chosen


def vocabulary_fingerprint(ids_D: torch.Tensor) -> str:
    """Of a draft vocabulary's target ids."""
    return fingerprint(ids_D.tolist())
