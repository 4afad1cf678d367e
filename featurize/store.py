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
Shards are told of in shards.py. A shard's checksum is compared when it is first used.

Shape suffixes: T tokens of a document or shard, A aux planes, H hidden, F rows of the final plane that are kept.
"""

from __future__ import annotations

import copy
import json
import threading
import uuid
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from featurize.contract import FeatureContract
from featurize.encoding import Stored, as_planes, decoded, picked, stored
from featurize.shards import Unit, kept_finals, map_tensors, shard_path, teacher_positions
from featurize.teacher import VOCABULARY, TopK
from featurize.tokenised import Document, TokenisedSet, load, require_same, save
from featurize.vocabulary import vocabulary_fingerprint
from models.artefact import file_sha256, fingerprint, read_json, write_json
from models.errors import Refused
from models.target import Target


def link_features(directory: Path, owner: str) -> None:
    """Give a run the features of the run `owner` beside it, by a relative link; all processes of a job may at once.

    Raises:
        Refused: it has features of its own or of another run, or is that run.
    """
    features = directory / "features"
    if owner == directory.name:
        raise Refused(f"features_of={owner} is the run itself; leave it out, or choose another name=...")
    if features.exists() and not features.is_symlink():
        raise Refused(f"{features} is a folder of its own, not that of run {owner}; choose another name=...")
    if features.exists() and features.resolve() != (directory.parent / owner / "features").resolve():
        whose = features.resolve().parent.name
        raise Refused(f"{features} is that of run {whose}, not of features_of={owner}; choose another name=...")
    directory.mkdir(parents=True, exist_ok=True)
    temporary = directory / f".features.{uuid.uuid4().hex}.tmp"
    temporary.symlink_to(Path("..", owner, "features"), target_is_directory=True)
    temporary.replace(features)


def require_inputs(directory: Path, inputs: dict[str, Any]) -> None:
    """Check that a features folder is new or belongs to these inputs.

    Raises:
        Refused: it was made with other inputs; naming what differs.
    """
    record = directory / "inputs.json"
    if record.is_file():
        require_same(inputs, read_json(record), directory)


def bind(directory: Path, inputs: dict[str, Any], tokenised: TokenisedSet) -> None:
    """Bind the folder to its inputs: just before the first shard, since until then a mistake can be mended.

    A launch with other inputs may have put its documents there since ours were: whoever binds the folder puts his back.

    Raises:
        Refused: it is bound to other inputs; naming what differs.
    """
    require_inputs(directory, inputs)
    if not (directory / "inputs.json").is_file():
        save(directory, tokenised)
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


def open_manifest(directory: Path) -> tuple[dict[str, Any], TokenisedSet]:
    """The manifest of a features folder, every file of which has its size, and its documents.

    Raises:
        Refused: it is missing, incomplete, or a file is missing or has the wrong size.
    """
    if not directory.is_dir():
        if directory.is_symlink():
            owner = directory.resolve().parent
            raise Refused(
                f"no features in {owner}/features; run `python -m featurize` for run {owner.name} first, or correct "
                "features_of"
            )
        raise Refused(f"no features in {directory}; run `python -m featurize` for this run first")
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
