"""`python -m featurize.verify experiment=demo`: is every byte of a store what its manifest says, and is it this run's?

Training compares a shard's checksum when it first uses it; this reads everything at once: after a copy to another
disk, say, or before a long job. The first fault ends it, with one line and exit code 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from featurize.shards import kept_finals, map_tensors, shard_key, unit_key
from featurize.store import FeatureStore, count_totals
from featurize.teacher import read_vocabulary
from models.artefact import file_sha256, fingerprint
from models.errors import Refused
from models.target import Target, aux_layers, describe_target


def verify(directory: Path, target: Target, layers: Sequence[int]) -> str:
    """Check a whole store; returns the line to print.

    Raises:
        Refused: naming the first fault: a file that is missing, torn, damaged, of another store or in no manifest,
            features of another target, totals or rows that are not the documents'.
    """
    store = FeatureStore.open(directory)
    store.require(target, layers)
    if store.contract.teacher_k:
        store.require_vocabulary(read_vocabulary(directory))
    files, totals = store.manifest["files"], store.manifest["totals"]
    for name, counted in count_totals(store.documents).items():
        if totals[name] != counted:
            raise Refused(f"{directory}/manifest.json says {totals[name]} {name}, its documents have {counted}")
    if totals["bytes"] != (size := sum(entry["size"] for entry in files)):
        raise Refused(f"{directory}/manifest.json says {totals['bytes']} bytes, its files have {size}")
    listed = {entry["file"] for entry in files}
    for path in sorted((directory / "shards").iterdir()):
        if f"shards/{path.stem}.safetensors" not in listed:
            raise Refused(f"{path} is none of the shards of {directory}/manifest.json; take it away")
    next_document, key = 0, fingerprint(store.manifest["inputs"])
    for entry in files:
        path = directory / entry["file"]
        if file_sha256(path) != entry["sha256"]:
            raise Refused(f"{path} is damaged (its SHA-256 differs); delete it and run `python -m featurize` again")
        if "first" not in entry:
            continue
        first, last = entry["first"], entry["last"]
        if first != next_document:
            raise Refused(f"{path} begins with document {first}, document {next_document} was expected")
        if shard_key(path) != unit_key(key, first, last):
            raise Refused(f"{path} is a shard of other features; delete it and run `python -m featurize` again")
        next_document = last
        tensors = map_tensors(path)
        tokens_T = store.tokens_T[store.starts_N[first] : store.starts_N[last]]
        if not torch.equal(tensors["tokens"], tokens_T):
            raise Refused(f"{path} holds other tokens than documents {first} to {last - 1}")
        everywhere = store.contract.final_everywhere
        finals = sum(kept_finals(document, everywhere) for document in store.documents[first:last])
        teacher = "teacher.best" if store.contract.teacher_k else "final"
        for name, wanted in (("aux", len(tokens_T)), (teacher, finals)):
            if (found := len(tensors[name])) != wanted:
                raise Refused(f"{path} has {found} rows of {name}, its documents have {wanted}")
    if next_document != len(store):
        raise Refused(f"{directory} has shards of {next_document} documents, there are {len(store)}")
    return (
        f"verify: {len(files)} files, {totals['bytes'] / 1e9:.2f} GB, {totals['documents']:,} documents, "
        f"{totals['tokens']:,} tokens, encoding {store.contract.encoding}: everything is as its manifest says"
    )


if __name__ == "__main__":
    from conf import Run, stage

    def work(run: Run) -> None:
        """Verify the run's features."""
        target = describe_target(run.target)
        print(verify(run.directory / "features", target, aux_layers(target, run.target.aux_layers)))

    stage("featurize.verify", work, shared=True)
