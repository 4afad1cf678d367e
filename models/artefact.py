"""Files that are either complete or absent, and directories that are complete when their manifest says so.

Every stage writes through here: a temporary name in the same directory, flushed to disk, renamed over
the final name, the directory entry flushed too. The manifest of a directory is written last, so a
reader that finds one may trust everything it lists, and a stage that is killed leaves nothing that
looks finished (what is not complete is never read as if it were).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from models.errors import Refused

log = logging.getLogger(__name__)


def share(path: Path) -> None:
    """Give a file the permissions of any other new one: safetensors writes files that only their owner may read."""
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on a clean exit it becomes `path`, otherwise it is removed.

    The temporary name is unique per writer, so two processes never write into one file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        yield temporary
        share(temporary)
        _flush(temporary)
        os.replace(temporary, path)
        _flush(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def replacing_directory(path: Path) -> Iterator[Path]:
    """Like `replacing`, for a new directory: its files are flushed, then it appears whole under `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    aside = temporary.with_suffix(".old.tmp")
    temporary.mkdir()
    try:
        yield temporary
        for inside in temporary.rglob("*"):
            _flush(inside)
        _flush(temporary)
        if path.exists():  # a directory cannot be renamed over another: the old one steps aside whole
            os.replace(path, aside)
        os.replace(temporary, path)
        _flush(path.parent)
    finally:
        if aside.exists() and not path.exists():
            os.replace(aside, path)
        for left in (temporary, aside):
            shutil.rmtree(left, ignore_errors=True)


def write_bytes(path: Path, data: bytes) -> None:
    """Write `data` to `path` atomically."""
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def json_bytes(value: Any) -> bytes:
    """`value` as indented JSON."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def write_json(path: Path, value: Any) -> None:
    """Write `value` to `path` as indented JSON, atomically."""
    write_bytes(path, json_bytes(value))


def read_json(path: Path) -> Any:
    """The JSON value in `path`.

    Raises:
        Refused: the file is not JSON (a torn copy, say). A missing file raises FileNotFoundError.
    """
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:  # not JSON, or not text
        raise Refused(f"{path} is not valid JSON ({error}); delete it and run its stage again") from None


def read_json_lines(path: Path) -> list[Any]:
    """All complete lines of a file of JSON lines, none without the file.

    A torn last line is left out; others that are no JSON are, with a warning.
    """
    if not path.exists():
        return []
    text, values = path.read_text(errors="replace"), []
    for number, line in enumerate(text.split("\n")[:-1], 1):
        try:
            values.append(json.loads(line))
        except ValueError:
            log.warning("%s: line %d is not JSON and is left out", path, number)
    return values


@contextlib.contextmanager
def telling_disk_errors(path: Path) -> Iterator[None]:
    """Turn safetensors' errors back into the operating system's, which it wraps into text: a full disk, say.

    Raises:
        OSError: safetensors could not write below `path`.
    """
    try:
        yield
    except SafetensorError as error:
        code = re.search(r"os error (\d+)", str(error))
        raise OSError(int(code.group(1)) if code else errno.EIO, str(error), str(path)) from None


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file atomically; equal tensors and metadata give equal bytes.

    Raises:
        OSError: as the operating system told safetensors.
    """
    with replacing(path) as temporary, telling_disk_errors(path):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary, dict(metadata or {}))


def differences(was: Any, now: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Where two JSON values differ: dotted key, value there, value here. A missing key is one that is null."""
    if isinstance(was, dict) and isinstance(now, dict):
        for name in dict.fromkeys([*was, *now]):
            yield from differences(was.get(name), now.get(name), f"{key}.{name}" if key else name)
    elif was != now:
        yield key, was, now


def fingerprint(value: Any) -> str:
    """A short content hash of any JSON value (keys sorted): equal contents, equal fingerprint."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def file_sha256(path: Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as handle:
        while block := handle.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def tensor_sha256(tensor: torch.Tensor) -> str:
    """Hex SHA-256 of a tensor's dtype, shape and bytes."""
    digest = hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
