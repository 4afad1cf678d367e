"""What there is to train on: which documents, how many tokens and rows, and what was left out on the way.

Documents are cut in one place, when they are tokenised (data.max_tokens): what fits of an answer stays supervised,
nothing is put in its stead, and one that is left without a row there is not in the store at all. Nothing is
cut here. The counts of both rooms are told in one line at the start and kept with the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from featurize.store import FeatureStore
from featurize.tokenised import Document, held_out
from models.errors import Refused
from train.plan import Corpus

DOCUMENTS_AT_ONCE = 4096
"""Documents whose tokens are counted in one go."""


def divide(documents: Sequence[Document], corpus: Corpus, validation_share: float) -> tuple[list[int], list[int]]:
    """Indices of the documents to train on and of those held out; a document without a row is in neither.

    Raises:
        Refused: nothing is left to train on.
    """
    with_rows = corpus.rows_NK[:, 0].nonzero()[0].tolist()
    training: list[int] = []
    validation: list[int] = []
    for index in with_rows:
        (validation if held_out(documents[index].conversation, validation_share) else training).append(index)
    if not with_rows:
        raise Refused(f"none of {len(documents)} documents supervises a row; look at the conversations' answers")
    if not training:
        raise Refused(f"all {len(with_rows)} documents are held out; lower data.validation_share")
    return training, validation


@dataclass(frozen=True)
class Stock:
    """The material of a run, in numbers.

    Attributes:
        training, validation: documents. without_row: those that are in neither, since they supervise nothing.
        tokens, rows: of the training documents; rows are those of the first unroll step.
        max_tokens, truncated, truncated_tokens: where documents were cut, how many lost supervised tokens
            there, and how many tokens they lost.
        refused: conversations that never became documents.
    """

    training: int
    validation: int
    without_row: int
    tokens: int
    rows: int
    max_tokens: int
    truncated: int
    truncated_tokens: int
    refused: int

    @classmethod
    def take(cls, store: FeatureStore, corpus: Corpus, training: Sequence[int], validation: Sequence[int]) -> Stock:
        """Count what `divide` gave, and take over what the store counted."""
        totals = store.manifest["totals"]
        return cls(
            training=len(training),
            validation=len(validation),
            without_row=len(store) - len(training) - len(validation),
            tokens=int(corpus.tokens_N[training].sum()),
            rows=int(corpus.rows_NK[training, 0].sum()),
            max_tokens=store.manifest["inputs"]["data.max_tokens"],
            truncated=totals["truncated"]["documents"],
            truncated_tokens=totals["truncated"]["supervised_tokens"],
            refused=sum(totals["refused_conversations"].values()),
        )

    def line(self) -> str:
        """All of it for the log."""
        return (
            f"data: {self.training:,} documents to train on ({self.validation:,} held out, {self.without_row:,} "
            f"without a supervised row), {self.tokens:,} tokens, {self.rows:,} supervised rows; "
            f"data.max_tokens={self.max_tokens} cut {self.truncated:,} documents "
            f"({self.truncated_tokens:,} supervised tokens); {self.refused:,} conversations had been left out"
        )


def count_supervised(store: FeatureStore, indices: Sequence[int], vocab_size: int) -> torch.Tensor:
    """How often each target id is a supervised token of these documents, int64 [V]; each of them has a span."""
    documents = store.documents
    counts_V = np.zeros(vocab_size, dtype=np.int64)
    everything_T = store.tokens_T.numpy()
    for at in range(0, len(indices), DOCUMENTS_AT_ONCE):
        chosen = sorted(indices[at : at + DOCUMENTS_AT_ONCE])
        begins = store.starts_N[chosen].tolist()
        spans = ((begin, span) for begin, index in zip(begins, chosen, strict=True) for span in documents[index].spans)
        edges = np.array([begin + edge for begin, span in spans for edge in span])
        supervised = np.repeat(np.arange(len(edges) - 1) % 2 == 0, np.diff(edges))
        counts_V += np.bincount(everything_T[edges[0] : edges[-1]][supervised], minlength=vocab_size)
    return torch.from_numpy(counts_V)
