"""Rows, packs and the order of an epoch.

A pack is several documents end to end that never attend to one another. Which rows it supervises follows
from the spans alone (design, definition 4): row t at step k when tokens t+1 .. t+2+k lie in one span. The
plan of an epoch is a function of (seed, epoch) for the whole job; processes take their packs out of each
optimizer step, so the number of processes changes who computes a pack and nothing else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch

from featurize.store import FeatureStore
from featurize.tokenised import Document

Span = tuple[int, int]


def held_out(document_id: str, share: float) -> bool:
    """Whether a document belongs to the validation set: decided by its id alone, whatever else there is."""
    return int.from_bytes(hashlib.sha256(document_id.encode()).digest()[:4], "big") < share * 2**32


def row_count(spans: Sequence[Span], step: int) -> int:
    """How many rows these spans supervise at an unroll step."""
    return sum(max(0, end - max(start, 1) - 1 - step) for start, end in spans)


def supervised_rows(spans: Sequence[Span], step: int) -> torch.Tensor:
    """Positions of the rows supervised at an unroll step, int64 ascending."""
    edges = [(max(start, 1) - 1, end - 2 - step) for start, end in spans]
    ranges = [torch.arange(first, stop) for first, stop in edges if first < stop]
    return torch.cat(ranges) if ranges else torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True)
class Pack:
    """Documents end to end, with what a head needs to be trained on them.

    Attributes:
        tokens_T: int64. starts_T: for each position where its document begins.
        aux_TAP: aux planes. final_FP: final planes of the teacher positions, in order of position.
        teacher_T: index into `final_FP` of each position, -1 where no row needs a teacher.
        spans: half-open, in pack positions.
        documents: their indices in the store.
    """

    tokens_T: torch.Tensor
    starts_T: torch.Tensor
    aux_TAP: torch.Tensor
    final_FP: torch.Tensor
    teacher_T: torch.Tensor
    spans: list[Span]
    documents: list[int]

    def to(self, device: torch.device) -> Pack:
        """The same pack on a device."""
        tensors: dict[str, Any] = {
            name: value.to(device) for name, value in vars(self).items() if isinstance(value, torch.Tensor)
        }
        return replace(self, **tensors)


def build_pack(store: FeatureStore, indices: Sequence[int]) -> Pack:
    """Read documents and lay them end to end."""
    tokens, starts, aux, final, teacher, spans = [], [], [], [], [], []
    offset = teachers = 0
    for index in indices:
        features = store.read(index)
        length = features.tokens.numel()
        positions = torch.full((length,), -1, dtype=torch.int64)
        count = features.final_positions.numel()
        positions[features.final_positions] = torch.arange(teachers, teachers + count)
        tokens.append(features.tokens.long())
        starts.append(torch.full((length,), offset, dtype=torch.int64))
        aux.append(features.aux)
        final.append(features.final)
        teacher.append(positions)
        # A row before the first token of a pack's later document would be the previous document's last.
        spans += [(max(s, 1) + offset, e + offset) for s, e in store.documents[index].spans]
        offset, teachers = offset + length, teachers + count
    return Pack(
        tokens_T=torch.cat(tokens),
        starts_T=torch.cat(starts),
        aux_TAP=torch.cat(aux),
        final_FP=torch.cat(final),
        teacher_T=torch.cat(teacher),
        spans=spans,
        documents=list(indices),
    )


def plan_packs(documents: Sequence[Document], indices: Sequence[int], budget: int) -> list[list[int]]:
    """Deal documents, in the given order, into packs of at most `budget` tokens (a longer one is alone)."""
    packs: list[list[int]] = []
    room = 0
    for index in indices:
        length = documents[index].length
        if length > room:
            packs.append([])
            room = budget
        packs[-1].append(index)
        room -= length
    return packs


def plan_epoch(
    documents: Sequence[Document], indices: Sequence[int], *, budget: int, packs_per_step: int, seed: int, epoch: int
) -> list[list[list[int]]]:
    """Optimizer steps of an epoch: each a list of packs, each a list of document indices."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = [indices[i] for i in torch.randperm(len(indices), generator=generator).tolist()]
    packs = plan_packs(documents, order, budget)
    return [packs[i : i + packs_per_step] for i in range(0, len(packs), packs_per_step)]


def read_ahead(store: FeatureStore, packs: Sequence[Sequence[int] | None]) -> Iterator[Pack | None]:
    """Build packs in order, the next one in a thread while this one is used; None passes through."""
    with ThreadPoolExecutor(1) as pool:
        pending = None
        for index, pack in enumerate(packs):
            current = pending or (pool.submit(build_pack, store, pack) if pack is not None else None)
            following = packs[index + 1] if index + 1 < len(packs) else None
            pending = pool.submit(build_pack, store, following) if following is not None else None
            yield current.result() if current is not None else None
