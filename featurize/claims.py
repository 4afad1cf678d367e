"""Who computes which unit: locks on single bytes of one file, so that any number of processes share the work.

The kernel gives a process's locks back when it dies, so a claim is never stale and nobody has to guess from its age.
That holds on one machine, and on many where the file system carries POSIX locks (NFS, Lustre and GPFS do).

Locks belong to a process, not to a thread: a process has one `Claims` on a folder.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
from collections.abc import Iterator
from pathlib import Path

from models.errors import Refused

HELD_ELSEWHERE = (errno.EACCES, errno.EAGAIN)


class Claims:
    """Claims on a features folder; byte 0 of the file is for what belongs to no unit, byte 1 + i for unit i."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._file = (directory / ".claims").open("a+b")

    @contextlib.contextmanager
    def _held(self, byte: int, *, wait: bool) -> Iterator[bool]:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB), 1, byte)
        except OSError as error:
            if error.errno not in HELD_ELSEWHERE:
                raise Refused(f"{self._directory} lies on a file system without locks ({error.strerror})") from None
            yield False
            return
        try:
            yield True
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, byte)

    def common(self) -> contextlib.AbstractContextManager[bool]:
        """Alone with the files that are no unit's, as soon as nobody else is."""
        return self._held(0, wait=True)

    def unit(self, index: int, *, wait: bool) -> contextlib.AbstractContextManager[bool]:
        """Alone with a unit: at once or not at all (the block is given False), or as soon as nobody else is."""
        return self._held(1 + index, wait=wait)
