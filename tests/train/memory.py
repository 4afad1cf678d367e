"""A feature store in memory, with random planes, for tests of what is built on stores."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from featurize.shards import teacher_positions
from featurize.store import DocumentFeatures
from featurize.tokenised import Document

Spans = tuple[tuple[int, int], ...]


def documents_of(shapes: Sequence[tuple[int, Spans]]) -> list[Document]:
    """Documents d0, d1, ... of these lengths and spans."""
    return [Document(f"d{index}", "chat", length, spans) for index, (length, spans) in enumerate(shapes)]


class MemoryStore:
    """Stands in for FeatureStore; remembers which documents were read, and can fail or wait at one."""

    def __init__(self, documents: list[Document], *, hidden: int = 12, vocab: int = 20, dtype: Any = torch.float64):
        self.documents = documents
        self.reads: list[int] = []
        self.fails_at: int | None = None
        self.waits_at: dict[int, threading.Event] = {}
        self.starts_N = np.cumsum([0, *(document.length for document in documents)])
        self.tokens_T = torch.randint(0, vocab, (int(self.starts_N[-1]),), dtype=torch.int32)
        self._features = [
            DocumentFeatures(
                self.tokens_T[start : start + document.length],
                torch.randn(document.length, 3, hidden, dtype=dtype),
                torch.randn(document.teachers, hidden, dtype=dtype),
                teacher_positions(document),
            )
            for start, document in zip(self.starts_N.tolist(), documents, strict=False)
        ]

    def __len__(self) -> int:
        return len(self.documents)

    def read(self, index: int) -> DocumentFeatures:
        self.reads.append(index)
        if index in self.waits_at:
            assert self.waits_at[index].wait(30)
        if index == self.fails_at:
            raise OSError(f"cannot read document {index}")
        return self._features[index]
