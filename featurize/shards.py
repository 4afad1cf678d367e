"""Shards: whole documents with their planes in one file. Which documents, how many bytes, written, found, mapped.

A shard is the unit of work and of resumption. Shards are cut from the tokenised set alone, so which one holds what, and
how large it is, is known before anything is computed. One counts as finished when the record beside it is there, which
is written last; a reader maps it and hands out views, so that planes that are not touched are never read from disk.

Shape suffixes: T tokens of a shard, A aux planes, H hidden, F rows of the final plane that are kept.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from featurize.contract import FeatureContract
from featurize.encoding import encode, row_bytes, table_bytes
from featurize.teacher import TopK, teacher_bytes
from featurize.tokenised import Document, TokenisedSet
from models.artefact import file_sha256, fingerprint, write_json, write_tensors
from models.errors import Refused

DTYPES = {
    **{"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32},
    **{"I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8},
}
"""Dtypes that a shard holds, by their safetensors names."""


@dataclass(frozen=True)
class Unit:
    """The work of one shard: a run of whole documents.

    Attributes:
        index: of the shard.
        first, last: half-open range of document indices.
        tokens, finals: T and F of the shard.
        everywhere: whether the final plane is kept at every position.
        key: fingerprint of everything that decides its contents.
    """

    index: int
    first: int
    last: int
    tokens: int
    finals: int
    everywhere: bool
    key: str

    @property
    def name(self) -> str:
        """Stem of its files."""
        return f"{self.index:05d}"


def unit_key(tokenised: str, first: int, last: int) -> str:
    """Fingerprint of everything that decides the contents of a shard of these documents."""
    return fingerprint([tokenised, first, last])


def kept_finals(document: Document, everywhere: bool) -> int:
    """At how many positions of a document the final plane is kept."""
    return document.length if everywhere else document.teachers


def teacher_positions(document: Document) -> torch.Tensor:
    """Positions of a document whose final plane teaches a row, int64 [F]."""
    ranges = [torch.arange(start, end - 1) for start, end in document.spans]
    return torch.cat(ranges) if ranges else torch.empty(0, dtype=torch.int64)


def shard_ends(lengths: Sequence[int], shard_tokens: int) -> list[int]:
    """Behind which document each shard ends: documents in order, closed as soon as there are `shard_tokens` tokens."""
    ends, tokens = [], 0
    for end, length in enumerate(lengths, 1):
        tokens += length
        if tokens >= shard_tokens or end == len(lengths):
            ends.append(end)
            tokens = 0
    return ends


def cut_units(tokenised: TokenisedSet, shard_tokens: int, everywhere: bool = False) -> list[Unit]:
    """The unit of each shard.

    Args:
        shard_tokens: a shard is closed as soon as it has so many.
        everywhere: keep the final plane at every position.
    """
    units, first = [], 0
    for index, end in enumerate(shard_ends([document.length for document in tokenised.documents], shard_tokens)):
        documents = tokenised.documents[first:end]
        tokens = sum(document.length for document in documents)
        finals = sum(kept_finals(document, everywhere) for document in documents)
        units.append(Unit(index, first, end, tokens, finals, everywhere, unit_key(tokenised.fingerprint, first, end)))
        first = end
    return units


@dataclass(frozen=True)
class Widths:
    """What the size of a shard follows from, beside its unit: H, A and the encoding.

    Attributes:
        teacher_bytes: of a teacher position that is kept as its likeliest tokens; None where it is a plane.
    """

    hidden_size: int
    aux_planes: int
    encoding: str
    teacher_bytes: int | None = None

    @classmethod
    def of(cls, contract: FeatureContract) -> Widths:
        """Of the shards of a store."""
        kept = teacher_bytes(contract.teacher_k, contract.draft_vocab_size) if contract.teacher_k else None
        return cls(contract.hidden_size, len(contract.aux_layers), contract.encoding, kept)

    def bytes(self, units: Sequence[Unit]) -> int:
        """Size of these units' tensors."""
        row, table = row_bytes(self.encoding, self.hidden_size), table_bytes(self.encoding, self.hidden_size)
        tokens, finals = sum(unit.tokens for unit in units), sum(unit.finals for unit in units)
        final, tables = (row, 1) if self.teacher_bytes is None else (self.teacher_bytes, 0)
        aux = self.aux_planes
        return tokens * (4 + aux * row) + finals * final + len(units) * (aux + tables) * table


def free_bytes(directory: Path) -> int:
    """Free bytes of the disk that a folder is on, or will be on."""
    return shutil.disk_usage(next(each for each in (directory, *directory.parents) if each.exists())).free


def check_space(
    directory: Path, tokenised: TokenisedSet, units: Sequence[Unit], todo: Sequence[Unit], widths: Widths
) -> None:
    """Print what will be written against what is free.

    Raises:
        Refused: what is still to be written does not fit.
    """
    tokens, total, needed = len(tokenised.tokens), widths.bytes(units), widths.bytes(todo)
    free = free_bytes(directory)
    print(
        f"features: {len(tokenised.documents):,} documents, {tokens:,} tokens, {total / tokens:,.0f} bytes per token "
        f"({widths.encoding}), {total / 1e9:.2f} GB in {len(units)} shards; {len(todo)} shards ({needed / 1e9:.2f} GB) "
        f"to compute, {free / 1e9:.1f} GB free",
        flush=True,
    )
    if needed * 1.01 > free:
        raise Refused(
            f"{directory} has {free / 1e9:.1f} GB free and {needed / 1e9:.1f} GB are needed; free some, put root=... "
            "on a larger disk, choose a smaller featurize.encoding, or lower data.limit or data.max_tokens"
        )


def shard_path(directory: Path, unit: Unit) -> Path:
    """Where a unit's shard lies."""
    return directory / "shards" / f"{unit.name}.safetensors"


def write_shard(
    directory: Path,
    unit: Unit,
    encoding: str,
    tokens_T: torch.Tensor,
    aux_TAH: torch.Tensor,
    final_FH: torch.Tensor | TopK,
) -> None:
    """Encode and write one finished shard, then its record.

    Args:
        encoding: of the planes, a name of `featurize.encoding`.
        tokens_T: int32. aux_TAH, final_FH: bf16, on the device that encodes; or teachers in place of final planes.
    """
    path = shard_path(directory, unit)
    tensors = {"tokens": tokens_T} | {"aux" + part: tensor for part, tensor in encode(encoding, aux_TAH).items()}
    if isinstance(final_FH, TopK):
        tensors |= final_FH.tensors()
    else:
        tensors |= {"final" + part: tensor for part, tensor in encode(encoding, final_FH).items()}
    write_tensors(path, {name: tensor.cpu() for name, tensor in tensors.items()}, {"key": unit.key})
    record = {"key": unit.key, "size": path.stat().st_size, "sha256": file_sha256(path)}
    write_json(path.with_suffix(".json"), record)


def is_finished(directory: Path, unit: Unit) -> bool:
    """Whether a unit's shard is there, of this key and of its recorded size; otherwise it must be computed.

    The record is written after the shard has reached the disk. Contents are for readers and `featurize.verify`:
    every process of a large job asks this of every shard.
    """
    path = shard_path(directory, unit)
    try:
        record = json.loads(path.with_suffix(".json").read_bytes())
        return record["key"] == unit.key and record["size"] == path.stat().st_size
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return False


def remove_leftovers(directory: Path, unit: Unit | None = None) -> None:
    """Remove what killed writers left half written: of one unit, or of everything when all units are finished."""
    for pattern in (".*.tmp", "shards/.*.tmp") if unit is None else (f"shards/.{unit.name}.*.tmp",):
        for leftover in directory.glob(pattern):
            leftover.unlink()


def _header(path: Path) -> tuple[int, dict[str, Any]]:
    with path.open("rb") as handle:
        size = int.from_bytes(handle.read(8), "little")
        return size, json.loads(handle.read(size))


def shard_key(path: Path) -> str:
    """The key of the unit whose shard a file says it is."""
    return _header(path)[1]["__metadata__"]["key"]


def map_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a safetensors file as a view of one private memory map."""
    header_size, header = _header(path)
    mapped = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
    data = mapped[8 + header_size :]
    header.pop("__metadata__", None)
    return {
        name: data[entry["data_offsets"][0] : entry["data_offsets"][1]]
        .view(DTYPES[entry["dtype"]])
        .view(entry["shape"])
        for name, entry in header.items()
    }
