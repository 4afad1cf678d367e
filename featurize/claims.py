"""Who computes which unit: locks on single bytes of one file, so that any number of processes share the work.

The kernel gives a process's locks back when it dies, so a claim is never stale and nobody has to guess from its age.
That holds on one machine, and on many where the file system carries POSIX locks (NFS, Lustre and GPFS do). For the
same reason a lock that a process holds for as long as it lives tells the others that it is there.

Locks belong to a process, not to a thread: a process has one `Claims` on a folder.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
from collections.abc import Iterator
from pathlib import Path

from models.errors import Refused

HELD_ELSEWHERE = (errno.EACCES, errno.EAGAIN)

GATE = 1 << 40
"""The byte of a folder's gate, far behind those of units."""
PLACES = 1 << 20
"""Bytes for the processes of one side; each takes the first that is free."""
EXTRACTING, TRAINING = GATE + PLACES, GATE + 2 * PLACES
"""Where the places of the two sides of a spool begin."""
ASKING = GATE + 1
"""The byte of the one process that asks."""


class Claims:
    """Claims on a features folder; byte 0 of the file is for what belongs to no unit, byte 1 + i for unit i."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._file = (directory / ".claims").open("a+b")

    @contextlib.contextmanager
    def _held(self, byte: int, *, wait: bool, shared: bool = False, length: int = 1) -> Iterator[bool]:
        if not self._take(byte, wait=wait, shared=shared, length=length):
            yield False
            return
        try:
            yield True
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, length, byte)

    def _take(self, byte: int, *, wait: bool, shared: bool = False, length: int = 1) -> bool:
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        try:
            fcntl.lockf(self._file, kind | (0 if wait else fcntl.LOCK_NB), length, byte)
        except OSError as error:
            if error.errno not in HELD_ELSEWHERE:
                raise Refused(f"{self._directory} lies on a file system without locks ({error.strerror})") from None
            return False
        return True

    def common(self) -> contextlib.AbstractContextManager[bool]:
        """Alone with the files that are no unit's, as soon as nobody else is."""
        return self._held(0, wait=True)

    def unit(self, index: int, *, wait: bool) -> contextlib.AbstractContextManager[bool]:
        """Alone with a unit: at once or not at all (the block is given False), or as soon as nobody else is."""
        return self._held(1 + index, wait=wait)

    def gate(self, *, alone: bool) -> contextlib.AbstractContextManager[bool]:
        """Inside with any number of others, or alone, as soon as that is possible."""
        return self._held(GATE, wait=True, shared=not alone)

    def attend(self, side: int) -> None:
        """Be there, on one side (EXTRACTING or TRAINING), for as long as these claims exist."""
        next(place for place in itertools.count(side) if self._take(place, wait=False))

    def sole(self) -> bool:
        """Be the one process that asks, for as long as these claims exist; False while another is."""
        return self._take(ASKING, wait=False)

    def anyone(self, side: int) -> bool:
        """Whether another process attends on that side; this one must not."""
        with self._held(side, wait=False, shared=True, length=PLACES) as nobody:
            return not nobody
