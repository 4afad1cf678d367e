"""A pack: several documents end to end that never attend to one another, read from the store ahead of its use.

Which rows a pack supervises follows from the spans alone (docs/concepts.md): row t at step k when tokens
t+1 .. t+2+k lie in one span. Reading copies each plane once, from the memory map into the pack; that and the
checksums of shards release the interpreter, so threads are enough to do it beside the training. Compact planes
stay as they are stored until the pack is on its device, and are decoded there. A store that keeps the likeliest tokens
of its teachers instead of final planes (featurize/teacher.py) gives packs with those.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch

from featurize.encoding import Planes, joined
from featurize.store import FeatureStore
from featurize.teacher import TopK

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
        tokens_T: int64. starts_T: int64, for each position where its document begins.
        aux_TAP: bf16 aux planes. final_FP: bf16 final planes of the teacher positions, in order of position.
        teacher_T: int64 index into `final_FP` of each position, -1 where no row needs a teacher.
        spans: half-open, in pack positions.
        documents: their indices in the store.
        encoded: what `aux_TAP` and `final_FP` will be decoded from by `to`; until then those hold no row.
        top: what is known of the teacher positions instead of `final_FP`, which then holds no row.
    """

    tokens_T: torch.Tensor
    starts_T: torch.Tensor
    aux_TAP: torch.Tensor
    final_FP: torch.Tensor
    teacher_T: torch.Tensor
    spans: list[Span]
    documents: list[int]
    encoded: tuple[Planes, Planes | None] | None = None
    top: TopK | None = None

    @property
    def teachers(self) -> torch.Tensor | TopK:
        """What rows learn from, by teacher position."""
        return self.final_FP if self.top is None else self.top

    def _changed(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Pack:
        values: dict[str, Any] = {
            name: change(value) for name, value in vars(self).items() if isinstance(value, torch.Tensor)
        }
        if self.encoded is not None:
            values["encoded"] = tuple(planes and planes.map(change) for planes in self.encoded)
        if self.top is not None:
            values["top"] = self.top.map(change)
        return replace(self, **values)

    def to(self, device: torch.device) -> Pack:
        """The same pack on a device, decoded there; a copy to a GPU from pinned memory does not wait for it."""
        moved = self._changed(lambda tensor: tensor.to(device, non_blocking=device.type == "cuda"))
        if moved.encoded is None:
            return moved
        aux, final = moved.encoded
        final_FP = moved.final_FP if final is None else final.decode()
        return replace(moved, aux_TAP=aux.decode(), final_FP=final_FP, encoded=None)

    def pinned(self) -> Pack:
        """The same pack in page-locked memory."""
        return self._changed(torch.Tensor.pin_memory)


def build_pack(store: FeatureStore, indices: Sequence[int]) -> Pack:
    """Read documents and lay them end to end; compact planes stay encoded until `Pack.to`.

    Raises:
        Refused: a shard is damaged, or not waited for any longer.
    """
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
        aux.append(features.stored_aux)
        final.append(features.stored_final)
        teacher.append(positions)
        # A row before the first token of a pack's later document would be the previous document's last.
        spans += [(max(s, 1) + offset, e + offset) for s, e in store.documents[index].spans]
        offset, teachers = offset + length, teachers + count
    planes = [each for each in final if not isinstance(each, TopK)]
    top = None if planes else TopK.joined([each for each in final if isinstance(each, TopK)])
    aux_TAP, final_FP, encoded = joined(aux), joined(planes) if planes else torch.empty(0), None
    if isinstance(aux_TAP, Planes):
        encoded = aux_TAP, final_FP if isinstance(final_FP, Planes) else None
        aux_TAP, final_FP = torch.empty(0), torch.empty(0)
    assert isinstance(aux_TAP, torch.Tensor) and isinstance(final_FP, torch.Tensor)
    return Pack(
        tokens_T=torch.cat(tokens),
        starts_T=torch.cat(starts),
        aux_TAP=aux_TAP,
        final_FP=final_FP,
        teacher_T=torch.cat(teacher),
        spans=spans,
        documents=list(indices),
        encoded=encoded,
        top=top,
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
