"""The feature store: hidden states of whole documents in shards, read by memory map.

    inputs.json                     what went in, by contents; a rerun must agree with it
    tokenised.{safetensors,json}    ids, spans and routes of all documents, in order
    shards/00000.safetensors        tokens [T], aux [T, A, H], final [F, H] of the documents of one shard,
                                    the planes in one of the encodings of encoding.py
    shards/00000.json               the shard's key, size and SHA-256; a shard counts as finished with it
    vocabulary.safetensors          with `featurize.teacher_k` only: ids [D] of the draft vocabulary
    manifest.json                   contract, inputs, totals, size and SHA-256 of every shard; written last

The final plane is kept only where a supervised row needs its teacher: positions s .. e-2 of every span
(s, e); or everywhere (`featurize.final_everywhere`), for heads that read it as well as learn from it. Or it is not kept
at all, but what teacher.py makes of it (`featurize.teacher_k`): teacher.index, .log_p [F, S], .rest and .best [F].
Shards are cut from the tokenised set alone, so which shard holds what is known before anything is
computed. A reader maps a shard and hands out views: planes that are not touched are never read from
disk, and nothing is copied. Checksums are compared when a shard is first used.

Shape suffixes: T tokens of a document or shard, A aux planes, H hidden, F rows of the final plane that are kept.
"""

from __future__ import annotations

import copy
import json
import threading
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from featurize.contract import FeatureContract
from featurize.encoding import Stored, as_planes, decoded, encode, picked, stored
from featurize.teacher import VOCABULARY, TopK
from featurize.tokenised import Document, TokenisedSet, load, require_same
from featurize.vocabulary import vocabulary_fingerprint
from models.artefact import file_sha256, fingerprint, read_json, write_json, write_tensors
from models.errors import Refused
from models.target import Target

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
    """Encode and write one finished shard, then its record."""
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


def link_features(directory: Path, owner: str) -> None:
    """Give a run the features of the run `owner` beside it, by a relative link.

    Raises:
        Refused: it has features of its own or of another run, or is that run.
    """
    features = directory / "features"
    if owner == directory.name:
        raise Refused(f"features_of={owner} is the run itself; leave it out, or choose another name=...")
    features.parent.mkdir(parents=True, exist_ok=True)
    if not features.is_symlink():
        if features.exists():
            raise Refused(f"{features} is a folder of its own, not that of run {owner}; choose another name=...")
        features.symlink_to(Path("..", owner, "features"), target_is_directory=True)
    elif features.resolve() != (directory.parent / owner / "features").resolve():
        whose = features.resolve().parent.name
        raise Refused(f"{features} is that of run {whose}, not of features_of={owner}; choose another name=...")


def require_inputs(directory: Path, inputs: dict[str, Any]) -> None:
    """Check that a features folder is new or belongs to these inputs.

    Raises:
        Refused: it was made with other inputs; naming what differs.
    """
    record = directory / "inputs.json"
    if record.is_file():
        require_same(inputs, read_json(record), directory)


def record_inputs(directory: Path, inputs: dict[str, Any]) -> None:
    """Bind the folder to its inputs: just before the first shard, since until then a mistake can be mended."""
    if not (directory / "inputs.json").is_file():
        write_json(directory / "inputs.json", inputs)


def is_complete(directory: Path, inputs: dict[str, Any]) -> bool:
    """Whether a manifest of these inputs is there and every file it lists has its size. Checksums are for readers."""
    try:
        manifest = json.loads((directory / "manifest.json").read_bytes())
        sizes_agree = all((directory / entry["file"]).stat().st_size == entry["size"] for entry in manifest["files"])
        return manifest["inputs"] == inputs and sizes_agree
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return False


def count_totals(documents: Sequence[Document]) -> dict[str, int]:
    """What a manifest says about documents."""
    return {
        "documents": len(documents),
        "tokens": sum(document.length for document in documents),
        "supervised_tokens": sum(end - start for document in documents for start, end in document.spans),
        "teacher_positions": sum(document.teachers for document in documents),
    }


def write_manifest(
    directory: Path,
    contract: FeatureContract,
    inputs: dict[str, Any],
    tokenised: TokenisedSet,
    units: Sequence[Unit],
    canary: dict[str, Any],
) -> None:
    """Write manifest.json, after which the directory is complete; `canary` is that check's report.

    Args:
        units: the finished units, all of them or, where shards only pass through the folder, none.
    """
    files: list[dict[str, Any]] = []
    for unit in units:
        path = shard_path(directory, unit)
        record = read_json(path.with_suffix(".json"))
        name = str(path.relative_to(directory))
        files.append({"file": name, "size": record["size"], "sha256": record["sha256"]})
        files[-1].update(first=unit.first, last=unit.last)
    whole = ["tokenised.safetensors", "tokenised.json", *([VOCABULARY] if contract.teacher_k else [])]
    for path in (directory / name for name in whole):
        files.append({"file": path.name, "size": path.stat().st_size, "sha256": file_sha256(path)})
    manifest = {
        "contract": contract.to_json(),
        "inputs": inputs,
        "totals": {
            **count_totals(tokenised.documents),
            "bytes": sum(entry["size"] for entry in files),
            "refused_conversations": tokenised.refused,
            "truncated": tokenised.truncated,
        },
        "canary": canary,
        "files": files,
    }
    write_json(directory / "manifest.json", manifest)


@dataclass(frozen=True)
class DocumentFeatures:
    """One document's features, views into its memory-mapped shard; do not write into them.

    Attributes:
        tokens: int32 [T].
        stored_aux: the planes that the head reads, in their order, as the shard holds them.
        stored_final: the plane after the final norm at `final_positions`, as the shard holds it, or what is kept of
            it as a teacher.
        final_positions: int64 [F], ascending: s .. e-2 of every span (s, e).
    """

    tokens: torch.Tensor
    stored_aux: Stored
    stored_final: Stored | TopK
    final_positions: torch.Tensor

    @property
    def aux(self) -> torch.Tensor:
        """Aux planes, bfloat16 [T, A, H]; decoded unless they are stored so."""
        return decoded(self.stored_aux)

    @property
    def final(self) -> torch.Tensor:
        """Final planes, bfloat16 [F, H]; decoded unless they are stored so. Not of a store that keeps none."""
        assert not isinstance(self.stored_final, TopK)
        return decoded(self.stored_final)


def teacher_positions(document: Document) -> torch.Tensor:
    """Positions of a document whose final plane teaches a row, int64 [F]."""
    ranges = [torch.arange(start, end - 1) for start, end in document.spans]
    return torch.cat(ranges) if ranges else torch.empty(0, dtype=torch.int64)


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


def open_manifest(directory: Path) -> tuple[dict[str, Any], TokenisedSet]:
    """The manifest of a features folder, every file of which has its size, and its documents.

    Raises:
        Refused: it is missing, incomplete, or a file is missing or has the wrong size.
    """
    if not directory.is_dir():
        run = f"run {directory.resolve().parent.name}" if directory.is_symlink() else "this run"
        raise Refused(f"no features in {directory}; run `python -m featurize` for {run} first")
    if not (directory / "manifest.json").is_file():
        raise Refused(f"{directory} is incomplete (no manifest.json); run `python -m featurize` again to go on")
    manifest = read_json(directory / "manifest.json")
    if not isinstance(manifest, dict) or not {"contract", "files", "totals"} <= manifest.keys():
        raise Refused(f"{directory / 'manifest.json'} is no manifest of features; run `python -m featurize` again")
    for entry in manifest["files"]:
        path = directory / entry["file"]
        size = path.stat().st_size if path.is_file() else None
        if size != entry["size"]:
            found = "missing" if size is None else f"torn ({size} of {entry['size']} bytes)"
            raise Refused(f"{path} is {found}; run `python -m featurize` again to mend it")
    tokenised = load(directory)
    if tokenised is None or len(tokenised.documents) != manifest["totals"]["documents"]:
        raise Refused(f"{directory}/tokenised.* is torn; delete {directory} and run `python -m featurize` again")
    return manifest, tokenised


class FeatureStore:
    """Features on disk; open with `FeatureStore.open`. Any number of threads may read.

    Attributes:
        directory: the store's folder.
        contract: what these features are.
        documents: id, route, length and spans, in stored order.
        tokens_T: int32, the documents' ids end to end, mapped from the tokenised set: no shard is touched for them.
        starts_N: int64, where each document begins in `tokens_T`, and the total at the end.
        firsts: the first document of every shard.
        manifest: manifest.json as read.
    """

    def __init__(self, directory: Path, manifest: dict[str, Any], tokenised: TokenisedSet) -> None:
        self.directory, self.manifest = directory, manifest
        self.contract = FeatureContract.from_json(manifest["contract"])
        self.documents = tokenised.documents
        self.tokens_T = tokenised.tokens
        self._shards = [entry for entry in manifest["files"] if "first" in entry]
        self.firsts: list[int] = [entry["first"] for entry in self._shards]
        everywhere, self._over_final = self.contract.final_everywhere, False
        sizes = ((document.length, kept_finals(document, everywhere)) for document in self.documents)
        flat = np.fromiter((size for pair in sizes for size in pair), np.int64, 2 * len(self.documents))
        # Where each document begins among all tokens and all kept final rows; a shard's own come off when it is read.
        self._begins_N2 = np.concatenate((np.zeros((1, 2), np.int64), flat.reshape(-1, 2).cumsum(0)))
        self.starts_N = self._begins_N2[:, 0]
        self._mapped: dict[int, dict[str, torch.Tensor]] = {}
        self._locks = [threading.Lock() for _ in self._shards]

    @classmethod
    def open(cls, directory: Path) -> FeatureStore:
        """Open a complete store.

        Raises:
            Refused: it is missing, incomplete, or a file is missing or has the wrong size.
        """
        return cls(directory, *open_manifest(directory))

    @property
    def fingerprint(self) -> str:
        """What these features are made of: contract and inputs, the same wherever they were extracted."""
        return fingerprint([self.contract.to_json(), self.manifest["inputs"]])

    def __len__(self) -> int:
        """Number of documents."""
        return len(self.documents)

    def require(self, target: Target, aux_layers: Sequence[int], *, final: bool = False) -> None:
        """Check that these are features of `target`, of these layers.

        Args:
            final: for a head that reads the final plane, at every position.

        Raises:
            Refused: naming the first difference.
        """
        self.contract.require(target, tuple(aux_layers))
        if final and not self.contract.final_everywhere:
            kept = "no final plane (featurize.teacher_k)" if self.contract.teacher_k else "it only where it teaches"
            raise Refused(
                f"this head reads the final plane everywhere, but {self.directory} keeps {kept}; "
                "extract again with featurize.final_everywhere=true under another run name"
            )

    def require_vocabulary(self, ids_D: torch.Tensor) -> None:
        """Check that a head that proposes these target ids can learn from this store.

        Raises:
            Refused: the teacher was kept on another draft vocabulary.
        """
        contract = self.contract
        if contract.teacher_k and vocabulary_fingerprint(ids_D) != contract.draft_vocabulary:
            raise Refused(
                f"{self.directory} keeps the teacher (featurize.teacher_k={contract.teacher_k}) on another draft "
                f"vocabulary, of {contract.draft_vocab_size} tokens, than this head's of {len(ids_D)}; give both "
                "stages the same draft.vocab_size and data.validation_share, or extract again under another run name"
            )

    def over_final(self) -> FeatureStore:
        """This store for a head that reads the final plane alone: `aux` of a document is that plane, [T, 1, H]."""
        view = copy.copy(self)
        view._over_final = True
        return view

    def in_epoch(self, epoch: int) -> FeatureStore:
        """What to read an epoch's training documents from: this store, unless it is one that shards pass through."""
        return self

    def _map(self, shard: int) -> dict[str, torch.Tensor]:
        with self._locks[shard]:  # threads that want the same shard wait for one checksum
            if shard not in self._mapped:
                entry = self._shards[shard]
                path = self.directory / entry["file"]
                if file_sha256(path) != entry["sha256"]:
                    raise Refused(
                        f"{path} is damaged (its SHA-256 differs); delete it and run `python -m featurize` again"
                    )
                self._mapped[shard] = map_tensors(path)
            return self._mapped[shard]

    def read(self, index: int) -> DocumentFeatures:
        """Features of one document, as views of a memory map.

        Raises:
            Refused: the shard's checksum is wrong (compared when the shard is first used).
        """
        shard = bisect_right(self.firsts, index) - 1
        tensors = self._map(shard)
        edges_22 = self._begins_N2[index : index + 2] - self._begins_N2[self.firsts[shard]]
        (token, kept), (token_end, kept_end) = edges_22.tolist()
        encoding, positions = self.contract.encoding, teacher_positions(self.documents[index])
        if self.contract.teacher_k:
            aux, top = stored(encoding, tensors, "aux", token, token_end), TopK.stored(tensors, kept, kept_end)
            return DocumentFeatures(tensors["tokens"][token:token_end], aux, top, positions)
        final = stored(encoding, tensors, "final", kept, kept_end)
        aux = as_planes(final) if self._over_final else stored(encoding, tensors, "aux", token, token_end)
        if self.contract.final_everywhere:
            final = picked(final, positions)
        return DocumentFeatures(tensors["tokens"][token:token_end], aux, final, positions)
