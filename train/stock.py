"""What there is to train on: which documents, how many tokens and rows, and what was left out on the way.

Documents are cut in one place, when they are tokenised (data.max_tokens): what fits of an answer stays supervised,
nothing is put in its stead, and one that is left without a row there is not in the store at all. Nothing is
cut here. The counts of both rooms are told in one line at the start and kept with the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from featurize.store import FeatureStore
from train.plan import Corpus


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
        """Count what `divide` (featurize/vocabulary.py) gave, and take over what the store counted."""
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
