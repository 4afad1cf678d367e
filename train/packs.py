"""A pack: several documents end to end that never attend to one another, read from the store ahead of its use.

Which rows a pack supervises follows from the spans alone (design, definition 4): row t at step k when tokens
t+1 .. t+2+k lie in one span. Reading copies each plane once, from the memory map into the pack; that and the
checksums of shards release the interpreter, so threads are enough to do it beside the training.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch

from featurize.store import FeatureStore

Span = tuple[int, int]


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

    def _tensors(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}

    def to(self, device: torch.device) -> Pack:
        """The same pack on a device; a copy to a GPU from pinned memory does not wait for it."""
        waits = device.type != "cuda"
        return replace(self, **{name: t.to(device, non_blocking=not waits) for name, t in self._tensors().items()})

    def pinned(self) -> Pack:
        """The same pack in page-locked memory."""
        return replace(self, **{name: t.pin_memory() for name, t in self._tensors().items()})


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


def read_ahead(
    store: FeatureStore, packs: Iterable[Sequence[int] | None], ahead: int = 1, *, pin: bool = False
) -> Generator[Pack | None, None, None]:
    """Build packs in order, up to `ahead` of them in threads while the one before is used; None passes through.

    An error in any of them is raised at the next pack that is asked for, not when its turn comes. Closing the
    generator drops what has not begun and waits for what has.

    Args:
        packs: document indices of each pack; taken from the iterable as room comes up, in the caller's thread.
        pin: build them in page-locked memory, for a GPU.
    """

    def build(indices: Sequence[int]) -> Pack:
        pack = build_pack(store, indices)
        return pack.pinned() if pin else pack

    pending: deque[Future[Pack] | None] = deque()
    upcoming = iter(packs)
    pool = ThreadPoolExecutor(ahead, thread_name_prefix="read-ahead")

    def fill(count: int) -> None:
        while len(pending) < count:
            try:
                indices = next(upcoming)
            except StopIteration:
                return
            pending.append(None if indices is None else pool.submit(build, indices))

    try:
        fill(1)
        while pending:
            current = pending.popleft()
            fill(ahead)
            pack = current.result() if current is not None else None
            for future in pending:
                if future is not None and future.done():
                    future.result()
            yield pack
    finally:
        pool.shutdown(cancel_futures=True)
