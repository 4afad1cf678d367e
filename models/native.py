"""A target's own MTP module: read from the target's files for fine-tuning, and put back into a copy of the target.

transformers leaves these tensors aside, so they are read and written here, by name, and nothing is taken on trust:
what is missing or not understood stops the run. The copy holds the module in one new shard, under its own names and
in its own dtypes; a shard that held it is written again without it, since engines read every tensor of every shard
and the last one wins. All other shards are linked, not copied; the target's directory is never written to.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path

import torch
from safetensors import safe_open

from models.artefact import read_json, write_json, write_tensors
from models.errors import Refused
from models.mtp import MtpConfig, MtpHead
from models.target import Target

SHARD = "model-mtp.safetensors"
INDEX = "model.safetensors.index.json"
MOST_TOLD = 50
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@torch.no_grad()
def load_native(target: Target, config: MtpConfig) -> MtpHead:
    """The target's module as a head in fp32.

    Args:
        config: `MtpConfig.for_target` with `native`.

    Raises:
        Refused: tensors are missing, unexpected, of another shape or quantised, or the module has an embedding or an
            output head that is not the target's.
    """
    head = MtpHead(config)
    views = head.stored()
    found = {name for name in target.files if head.family.owns(name, target.num_layers)}
    copies = {head.family.prefix_over(target.num_layers) + name: of for name, of in head.family.copies.items()}
    missing, unexpected = sorted(views.keys() - found), sorted(found - views.keys() - copies.keys())
    if missing or unexpected:
        raise Refused(
            f"draft.algorithm=mtp_native: the MTP module of {target.path} is not one of the family {config.family} as "
            f"its config describes it: missing {_told(missing)}, unexpected {_told(unexpected)}"
        )
    for name, view in views.items():
        tensor = target.read(name)
        if tensor.shape != view.shape or tensor.dtype not in DTYPES:
            raise Refused(
                f"{target.path}: {name} is {tensor.dtype} {tuple(tensor.shape)}, its config says {tuple(view.shape)} "
                f"and only {', '.join(map(str, DTYPES))} are supported"
            )
        view.copy_(tensor)
    for name in sorted(copies.keys() & found):
        whole = target.load_embedding() if copies[name] == "embedding" else target.load_lm_head()
        if not torch.equal(target.read(name), whole):
            raise Refused(f"{target.path}: {name} is not the target's own; such modules are not supported")
    return head


def _told(names: Sequence[str]) -> str:
    """A list for a message of one line; a quantised mixture of experts has thousands of scales."""
    more = f" and {len(names) - MOST_TOLD} more" if len(names) > MOST_TOLD else ""
    return f"{names[:MOST_TOLD]}{more}"


def native_tensors(head: MtpHead, target: Target) -> dict[str, torch.Tensor]:
    """The head's tensors under the names and in the dtypes that the target's files have for them.

    Raises:
        Refused: a value is not finite in that dtype.
    """
    tensors = {}
    for name, view in head.stored().items():
        tensors[name] = tensor = view.detach().to(target.read(name).dtype)
        if not tensor.isfinite().all():
            raise Refused(f"{name} holds values that are not finite in {tensor.dtype}; the checkpoint cannot be served")
    return tensors


def write_native(directory: Path, head: MtpHead, target: Target) -> dict[str, torch.Tensor]:
    """Fill an existing empty directory with the target, its module being the head; returns the module's tensors.

    Equal heads give equal bytes.

    Raises:
        Refused: as `native_tensors`, or another shard of the target has the new one's name.
    """
    tensors, source = native_tensors(head, target), Path(target.path)
    touched = {target.files[name] for name in tensors}
    _place_all(source, directory, {*touched, source / INDEX})
    shards = {name: path.name for name, path in target.files.items()}
    for path in touched:
        kept = sorted(name for name, file in target.files.items() if file == path and name not in tensors)
        if kept:
            # A lone model.safetensors would be read before an index is looked for.
            shard = path.name if path.name != "model.safetensors" else "model-00001-of-00001.safetensors"
            _rewrite(path, directory / shard, kept)
            shards |= dict.fromkeys(kept, shard)
    if (directory / SHARD).exists():
        raise Refused(f"{source / SHARD} holds more than the MTP module; give this shard of the target another name")
    write_tensors(directory / SHARD, tensors, {"format": "pt"})
    index = read_json(source / INDEX) if (source / INDEX).exists() else {"metadata": {}}
    shards |= dict.fromkeys(tensors, SHARD)
    write_json(directory / INDEX, index | {"weight_map": dict(sorted(shards.items()))})
    return tensors


def _place_all(source: Path, directory: Path, left_out: Collection[Path]) -> None:
    """Place the target's files but these and hidden ones; `shutil.copytree` would hide which error it met, such as a
    full disk, and give the copy the permissions of a directory that may be read-only."""
    for folder, folders, names in os.walk(source, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        into = directory / Path(folder).relative_to(source)
        into.mkdir(exist_ok=True)
        for path in (Path(folder, name) for name in names if not name.startswith(".")):
            if path not in left_out:
                _place(path, into / path.name)


def _place(source: Path, destination: Path) -> None:
    """Link a shard, or copy it where the file system cannot; copy all else, since it may be edited."""
    if source.suffix == ".safetensors":
        with contextlib.suppress(OSError):
            os.link(source.resolve(), destination)
            return
    shutil.copyfile(source, destination)


def _rewrite(path: Path, destination: Path, names: Sequence[str]) -> None:
    """Write some tensors of a shard to another, with its metadata."""
    with safe_open(path, framework="pt") as handle:
        write_tensors(destination, {name: handle.get_tensor(name) for name in names}, handle.metadata())
