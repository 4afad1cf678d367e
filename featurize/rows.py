"""JSON lines that any number of processes append to, on any machines that see the folder.

Whoever appends holds the file's lock, opens it anew and flushes it to disk, which is what network file systems ask for;
so lines are whole, except for the last one of a process that was killed, which the next one drops.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from featurize.claims import Claims
from models.artefact import write_bytes


def mend(path: Path) -> None:
    """Drop a torn last line; the caller holds the file's lock."""
    if not path.exists():
        return
    with path.open("rb") as handle:
        end = handle.seek(0, os.SEEK_END)
        handle.seek(max(0, end - 1))
        if handle.read(1) in (b"\n", b""):
            return
    text = path.read_bytes()
    write_bytes(path, text[: text.rfind(b"\n") + 1])


def append(path: Path, row: dict[str, Any], claims: Claims) -> None:
    """Add one row."""
    with claims.common():
        mend(path)
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            os.write(descriptor, json.dumps(row, ensure_ascii=False).encode() + b"\n")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class Rows:
    """The rows of a file as they come, its own and others'."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read = 0

    def new(self) -> list[dict[str, Any]]:
        """Those since the last call; a line that is not whole is left for later."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as handle:
            handle.seek(self._read)
            text = handle.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        return [json.loads(line) for line in whole.split(b"\n") if line]
