"""`python -m models.export`: a training checkpoint becomes the directory that vLLM and SGLang load.

Both engines leave a missing tensor uninitialised without a word, so nothing is taken on trust here: every
tensor is checked by name, shape and dtype against the head's configuration, the written file is read again
and compared, and export.json records the hash and origin of each. Two exports of a checkpoint are equal byte
for byte. A model card says what the head is worth and how it is served; a push to the hub happens when asked for.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from models.artefact import (
    file_sha256,
    fingerprint,
    json_bytes,
    read_json,
    replacing_directory,
    tensor_sha256,
    write_json,
    write_tensors,
)
from models.card import Story, write_card
from models.checkpoint import describe, load_head
from models.config import DraftConfig, ExportConfig, TargetConfig
from models.eagle3 import Eagle3Config, Eagle3Head
from models.engines import (
    eagle3_config_from_json,
    eagle3_config_json,
    expected_tensors,
    plain_name,
    speculators_config_json,
    tensor_name,
)
from models.errors import Refused
from models.target import Target, aux_layers, describe_target
from models.vocabulary import ids_from_offsets, maps


def find_checkpoint(train: Path, which: str) -> Path:
    """The checkpoint directory that export.checkpoint asks for ("best", "last" or a path).

    Raises:
        Refused: the run is not trained to its end, or there is no such directory.
    """
    if which not in ("best", "last"):
        if not (Path(which) / "head.json").exists():
            raise Refused(f"export.checkpoint={which} is neither best, last nor a checkpoint directory")
        return Path(which)
    manifest = train / "manifest.json"
    if not manifest.exists():
        raise Refused(f"{train} holds no finished training; run `python -m train` for this run first")
    checkpoint = train / read_json(manifest)["checkpoints"][which]
    if not (checkpoint / "state.json").exists():
        raise Refused(f"{checkpoint} is gone; run `python -m train` for this run again")
    return checkpoint


def export_tensors(head: Eagle3Head, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The tensors of model.safetensors: weights in `dtype`, d2t int64 offsets, t2d bool.

    Raises:
        Refused: a tensor is missing, unexpected, of a wrong shape, or not finite.
    """
    tensors = {name: tensor.detach().to(dtype) for name, tensor in head.state_dict().items()}
    if head.reduced:
        tensors["d2t"], tensors["t2d"] = maps(head.ids_D.cpu(), head.config.vocab_size)
    wanted = expected_tensors(head.config)
    if tensors.keys() != wanted.keys():
        missing, extra = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted.keys())
        raise Refused(f"the head's tensors are not those of an EAGLE-3 export: missing {missing}, unexpected {extra}")
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != wanted[name]:
            raise Refused(f"{name} has shape {tuple(tensor.shape)}, the configuration says {wanted[name]}")
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise Refused(f"{name} holds values that are not finite in {dtype}; the checkpoint cannot be served so")
    return tensors


def export_config(head: Eagle3Head, target: Target, settings: ExportConfig) -> dict[str, Any]:
    """config.json in the dialect that was asked for.

    Raises:
        Refused: the speculators dialect holds k, and none is known.
    """
    special = {
        key: getattr(target.config, key)
        for key in ("bos_token_id", "eos_token_id")
        if getattr(target.config, key, None) is not None
    }
    plain = eagle3_config_json(head.config, getattr(torch, settings.dtype), special)
    if settings.dialect == "plain":
        return plain
    if settings.k is None:
        raise Refused("export.dialect=speculators says how many tokens to draft; set export.k")
    architectures = getattr(target.config, "architectures", None) or []
    verifier = {"name_or_path": settings.base_model or Path(target.path).name, "architectures": architectures}
    return speculators_config_json(plain, settings.k, verifier)


def export_head(checkpoint: Path, directory: Path, target: Target, settings: ExportConfig) -> bool:
    """Write the export; False when it is already there, made from the same checkpoint with the same options.

    Raises:
        Refused: the checkpoint belongs to another target, or is not complete.
    """
    head, trained_for = load_head(checkpoint)
    if trained_for != describe(target):
        raise Refused(f"{checkpoint} was trained for another target than {target.path}; correct target.path")
    config = export_config(head, target, settings)
    identity = fingerprint([file_sha256(checkpoint / "head.safetensors"), config, describe(target)])
    record = directory / "export.json"
    if all((directory / name).exists() for name in ("export.json", "config.json", "model.safetensors")):
        found, size = read_json(record), (directory / "model.safetensors").stat().st_size
        unchanged = (directory / "config.json").read_bytes() == json_bytes(config)
        if found.get("identity") == identity and found.get("size") == size and unchanged:
            return False
    plain = export_tensors(head, getattr(torch, settings.dtype))
    tensors = {tensor_name(name, settings.dialect): tensor for name, tensor in plain.items()}
    with replacing_directory(directory) as temporary:
        write_json(temporary / "config.json", config)
        write_tensors(temporary / "model.safetensors", tensors, {"format": "pt"})
        written = load_file(temporary / "model.safetensors")
        unequal = [name for name in tensors if not torch.equal(tensors[name], written[name])]
        if unequal:
            raise Refused(f"the written file differs from the head in {unequal}; is the disk sound?")
        origin = {True: checkpoint.name, False: "draft vocabulary"}
        provenance = {
            name: {
                "dtype": str(tensor.dtype),
                "sha256": tensor_sha256(tensor),
                "origin": origin[tensor.is_floating_point()],
            }
            for name, tensor in sorted(tensors.items())
        }
        size = (temporary / "model.safetensors").stat().st_size
        write_json(
            temporary / "export.json",
            {"identity": identity, "size": size, "target": describe(target), "tensors": provenance},
        )
    return True


def load_export(directory: Path) -> tuple[Eagle3Head, dict[str, str]]:
    """Read an export of ours back: the head (fp32) and the description of its target.

    Raises:
        Refused: there is no complete export.
    """
    try:
        record, config = read_json(directory / "export.json"), read_json(directory / "config.json")
        tensors = load_file(directory / "model.safetensors")
    except (FileNotFoundError, SafetensorError):
        raise Refused(f"no complete export in {directory}; run `python -m models.export` for this run first") from None
    d2t = tensors.pop("d2t", None)
    tensors.pop("t2d", None)
    head = Eagle3Head(eagle3_config_from_json(config), None if d2t is None else ids_from_offsets(d2t))
    head.load_state_dict({plain_name(name): tensor.float() for name, tensor in tensors.items()})
    return head, record["target"]


def push(directory: Path, repository: str) -> None:
    """Upload an export to the hub.

    Raises:
        Refused: there is no token, no network, or the hub refuses.
    """
    import httpx
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:
        raise Refused(f"export.push_to={repository} needs a network, and HF_HUB_OFFLINE is set")
    token = os.environ.get("HF_TOKEN")
    if not token:
        raise Refused(f"export.push_to={repository} needs a token; set HF_TOKEN in the environment")
    hub = HfApi(token=token)
    try:
        hub.create_repo(repository, private=True, exist_ok=True)
        hub.upload_folder(repo_id=repository, folder_path=directory, commit_message="EAGLE-3 draft head")
    except (OSError, httpx.HTTPError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise Refused(f"export.push_to={repository}: the hub cannot be reached or refuses ({reason})") from None


def named(settings: ExportConfig, story: Story, path: str, target: Target) -> ExportConfig:
    """The settings with what a target at `path` is called, and the k that the speculators dialect must hold."""
    name = path if target.path != path else Path(target.path).name
    filled = replace(settings, base_model=settings.base_model or name)
    if filled.dialect == "speculators":  # config.json names k, and may not wait for an evaluation of itself
        filled.k = filled.k or story.trained_steps
    return filled


def refresh_card(run: Path, settings: ExportConfig, model: TargetConfig, target: Target) -> None:
    """Bring the model card of a run's export up to date with its evaluation, where its checkpoint is still there."""
    with contextlib.suppress(Refused):
        story = Story.of(run, find_checkpoint(run / "train", settings.checkpoint))
        write_card(run / "export", story, named(settings, story, model.path, target), model.dtype)


def tell(run: Path, settings: ExportConfig, model: TargetConfig, draft: DraftConfig) -> None:
    """Print what an export of this run would hold and where it would lie, trained or not; writes nothing."""
    target = describe_target(model, weights=False)
    try:
        checkpoint: Path | None = find_checkpoint(run / "train", settings.checkpoint)
    except Refused as missing:
        checkpoint = None
        print(f"checkpoint: none yet ({missing})")
    if checkpoint is None:
        config = Eagle3Config.for_target(target, aux_layers(target, model.aux_layers), draft)
    else:
        config = Eagle3Config.from_dict(read_json(checkpoint / "head.json")["config"])
        print(f"checkpoint: {checkpoint}")
    shapes = expected_tensors(config)
    width = {"d2t": 8, "t2d": 1}
    size = sum(width.get(name, getattr(torch, settings.dtype).itemsize) * prod(shape) for name, shape in shapes.items())
    print(f"export: {len(shapes)} tensors, {size / 1e9:.3f} GB ({settings.dtype}, {settings.dialect} dialect)")
    print(f"writes: {run / 'export'}" + (f", then uploads to {settings.push_to}" if settings.push_to else ""))


def main() -> None:
    """The command line."""
    from conf import Run, stage

    def work(run: Run) -> bool:
        checkpoint = find_checkpoint(run.directory / "train", run.export.checkpoint)
        directory, target = run.directory / "export", describe_target(run.target)
        story = Story.of(run.directory, checkpoint)
        settings = named(run.export, story, run.target.path, target)
        made = export_head(checkpoint, directory, target, settings)
        told = write_card(directory, story, settings, run.target.dtype)
        if made:
            engines = "vLLM and SGLang load" if settings.dialect == "plain" else "vLLM loads"
            print(f"exported {checkpoint.name} ({settings.dtype}) to {directory}; {engines} it as it is")
        if settings.push_to:
            push(directory, settings.push_to)
            print(f"pushed {directory} to {settings.push_to}")
        return made or told or settings.push_to is not None

    stage("export", work, dry_run=lambda run: tell(run.directory, run.export, run.target, run.draft))


if __name__ == "__main__":
    main()
