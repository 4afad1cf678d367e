"""Where conversations come from: files, folders, names on the hub, alone or mixed by weight.

Everything is streamed: rows are decoded one at a time, and only the ids seen so far are held. A source that is
missing or is not what its name says stops the run, since it is not what its owner thinks it is; a row that cannot
be used is counted with its place (`conversations.py`). A hub name is fetched as files once, so that a data set has
contents to be hashed and is read like any folder. No code that comes with a data set is run.
"""

from __future__ import annotations

import gzip
import json
import logging
import zlib
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from featurize.config import DataConfig, SourceConfig
from featurize.conversations import Conversation, Refusals, Unusable, parse_row
from models.artefact import file_sha256, fingerprint
from models.errors import Refused

log = logging.getLogger(__name__)

COLUMNAR = (".parquet", ".arrow")
"""Endings of files that pyarrow reads; any other file is taken for JSON lines."""


def local(name: str, key: str = "data.conversations") -> Path | None:
    """The file or folder of a name that setting `key` gives; None for what the hub may have (owner/name).

    Raises:
        Refused: it is not there, and no name on the hub.
    """
    path = Path(name).expanduser()
    if path.exists():
        return path
    if name.startswith(("/", ".", "~")) or name.count("/") != 1 or path.suffix in (".jsonl", ".gz", *COLUMNAR):
        raise Refused(f"no such file: {path} ({key}; relative paths start at the current folder)")
    return None


def locate(name: str, key: str = "data.conversations") -> Path:
    """The file or folder of a name that setting `key` gives; a hub name (owner/name) is fetched first.

    Raises:
        Refused: there is no such thing.
    """
    if (path := local(name, key)) is not None:
        return path
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, repo_type="dataset"))
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise Refused(
            f"no such file or folder: {name}, nor is it a data set reachable on the hub ({reason}); {key} "
            "wants files, folders or hub names (owner/name)"
        ) from None


def sources(data: DataConfig) -> dict[str, SourceConfig]:
    """The sources by name; plain `data.conversations` are one.

    Raises:
        Refused: nothing is named.
    """
    if not data.conversations and not data.mixture:
        raise Refused("data.conversations names no file; choose a data set, for example data=jsonl, and name its files")
    return data.mixture or {"": SourceConfig(list(data.conversations))}


def contents(path: Path) -> str:
    """Hash of a file, or of the names and hashes of a folder's files."""
    if path.is_file():
        return file_sha256(path)
    files = sorted(file for file in path.rglob("*") if file.is_file() and not file.name.startswith("."))
    return fingerprint([[str(file.relative_to(path)), file_sha256(file)] for file in files])


def option(name: str, prompts: bool) -> str:
    """The option that names the files of the source `name` of `sources`."""
    return f"data.mixture.{name}.paths" if name else "generate.prompts" if prompts else "data.conversations"


def describe_sources(data: DataConfig, *, prompts: bool = False) -> Any:
    """What decides which conversations are read and in which order, by contents.

    Args:
        prompts: its conversations are `generate.prompts`.

    Raises:
        Refused: nothing is named, or something is missing.
    """
    if not data.mixture:
        return [contents(locate(path, option("", prompts))) for path in sources(data)[""].paths]
    return [
        asdict(source) | {"paths": [contents(locate(path, option(name, prompts))) for path in source.paths]}
        for name, source in data.mixture.items()
    ]


def without_nulls(value: Any) -> Any:
    """A value of a columnar file without the nulls that stand for absent keys there."""
    if isinstance(value, dict):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


def json_rows(file: Path) -> Iterator[tuple[int, Any]]:
    """Number (from 1) and decoded value of every row of a .jsonl or .jsonl.gz file; blank lines are skipped.

    Raises:
        Refused: the file is damaged, not UTF-8, or a row is not JSON.
    """
    number = 0
    try:
        with gzip.open(file, "rb") if file.suffix == ".gz" else file.open("rb") as handle:
            for number, line in enumerate(handle, 1):
                if line.strip():
                    yield number, json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise Refused(
            f"{file}:{number} is not JSON ({error}); wanted are files of one JSON object a line, or .parquet or .arrow"
        ) from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise Refused(f"{file} is damaged after row {number} ({error}); copy it again") from None


def arrow_rows(file: Path) -> Iterator[tuple[int, Any]]:
    """Number and value of every row of a Parquet or Arrow (stream or file) file.

    Raises:
        Refused: it is neither.
    """
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with file.open("rb") as handle:
            if file.suffix == ".parquet":
                batches = pyarrow.parquet.ParquetFile(handle).iter_batches(256)
            elif handle.read(6) == b"ARROW1":
                reader = pyarrow.ipc.open_file(handle)
                batches = (reader.get_batch(index) for index in range(reader.num_record_batches))
            else:
                handle.seek(0)
                batches = iter(pyarrow.ipc.open_stream(handle))
            for batch in batches:
                for row in batch.to_pylist():
                    number += 1
                    yield number, without_nulls(row)
    except pyarrow.ArrowException as error:
        reason = str(error).splitlines()[0]
        raise Refused(f"{file} is damaged after row {number}, or no {file.suffix} file ({reason})") from None


def folder_rows(folder: Path, source: SourceConfig) -> Iterator[tuple[int, Any]]:
    """Number and value of every row of a folder that the `datasets` library knows: saved by it, or of data files.

    Raises:
        Refused: it does not know it, or there is no such split or subset.
    """
    import datasets

    try:
        if (folder / "dataset_dict.json").is_file():
            rows = datasets.load_from_disk(str(folder))[source.split]
        elif (folder / "state.json").is_file():
            rows = datasets.load_from_disk(str(folder))
        else:
            rows = datasets.load_dataset(str(folder), source.subset, split=source.split, streaming=True)
        for number, row in enumerate(rows, 1):
            yield number, without_nulls(row)
    except (ValueError, KeyError, OSError, datasets.exceptions.DatasetsError) as error:
        reason = " ".join(str(error).split())[:200]
        raise Refused(f"{folder} cannot be read as a data set, split {source.split}: {reason}") from None


def source_rows(source: SourceConfig, key: str) -> Iterator[tuple[str, Iterator[tuple[str, Any]]]]:
    """Name and rows, each with its place, of every file or folder of a source, which option `key` names."""
    for name in source.paths:
        path = locate(name, key)
        if path.is_dir():
            rows = folder_rows(path, source)
        else:
            rows = arrow_rows(path) if path.suffix in COLUMNAR else json_rows(path)
        yield str(path), ((f"{path}:{number}", row) for number, row in rows)


def read_source(source: SourceConfig, key: str, refusals: Refusals, *, prompts: bool = False) -> Iterator[Conversation]:
    """Every usable conversation of one source, whose files option `key` names, in order.

    Raises:
        Refused: something cannot be read, or not one row of a file or folder is usable.
    """
    for name, rows in source_rows(source, key):
        usable, reason = False, "it is empty"
        for place, row in rows:
            try:
                conversation = parse_row(row, prompts=prompts)
            except Unusable as error:
                reason = f"{place}: {error}"
                refusals.add(str(error), place)
                continue
            usable = True
            yield replace(conversation, source=place, route=conversation.route or source.route)
        if not usable:
            raise Refused(f"{name} has no usable conversation ({reason})")


def read_conversations(data: DataConfig, refusals: Refusals, *, prompts: bool = False) -> Iterator[Conversation]:
    """Every usable conversation of `data`, in order; the others are counted in `refusals`.

    A mixture takes the next conversation from the source that is furthest behind its weight, and ends with the
    first source that has none left: any number of conversations from the beginning has the wanted shares.

    Raises:
        Refused: nothing is named, something cannot be read, or nothing in it is usable.
    """
    seen: set[str] = set()
    parts = list(sources(data).items())
    streams = [read_source(source, option(name, prompts), refusals, prompts=prompts) for name, source in parts]
    taken = [0] * len(parts)
    while True:
        turn = min(range(len(parts)), key=lambda i: ((taken[i] + 1) / parts[i][1].weight, i))
        for conversation in streams[turn]:
            if conversation.id not in seen:
                break
            refusals.add("duplicate id", conversation.source)
        else:
            if len(parts) > 1:
                log.info(
                    "the mixture ends with data.mixture.%s, which has no more than %d", parts[turn][0], taken[turn]
                )
            return
        seen.add(conversation.id)
        taken[turn] += 1
        yield replace(conversation, template_arguments={**data.chat_template_kwargs, **conversation.template_arguments})
