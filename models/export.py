"""`python -m models.export`: a training checkpoint becomes the directory that vLLM and SGLang load.

Both engines leave a missing tensor uninitialised without a word, so nothing is taken on trust here: every
tensor is checked by name, shape and dtype against the head's configuration, the written file is read again
and compared, and export.json records the hash and origin of each. Two exports of a checkpoint are equal byte
for byte. A target's own MTP module goes back into a copy of the target. A model card says what the head is
worth and how it is served; a push to the hub happens when asked for.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from models.artefact import (
    differences,
    file_sha256,
    fingerprint,
    json_bytes,
    read_json,
    replacing_directory,
    tensor_sha256,
    write_json,
    write_tensors,
)
from models.card import Story, holds_target, public_name, write_card
from models.checkpoint import describe, differing_target, load_head, read_config
from models.config import DraftConfig, ExportConfig, TargetConfig
from models.drafts import DraftHead, HeadConfig, head_config
from models.eagle3 import Eagle3Head
from models.engines import (
    check_mtp_path,
    eagle3_config_from_json,
    eagle3_config_json,
    expected_mtp_tensors,
    expected_tensors,
    mtp_config_json,
    plain_name,
    speculators_config_json,
    tensor_name,
)
from models.errors import Refused
from models.mtp import MtpConfig, MtpHead
from models.native import SHARD, write_native
from models.serving import remarks_on
from models.target import Target, aux_layers, describe_target
from models.vocabulary import ids_from_offsets, maps

WEIGHTS = "model.safetensors"


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


def export_tensors(head: DraftHead, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The tensors of model.safetensors: weights in `dtype`, d2t int64 offsets, t2d bool.

    Raises:
        Refused: a tensor is missing, unexpected, of a wrong shape, or not finite.
    """
    own = head.state_dict() if isinstance(head, Eagle3Head) else head.stored()
    tensors = {name: tensor.detach().to(dtype) for name, tensor in own.items()}
    if isinstance(head, Eagle3Head):
        wanted = expected_tensors(head.config)
        if head.reduced:
            tensors["d2t"], tensors["t2d"] = maps(head.ids_D.cpu(), head.config.vocab_size)
    else:
        wanted = expected_mtp_tensors(head.config)
    if tensors.keys() != wanted.keys():
        missing, extra = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted.keys())
        raise Refused(f"the head's tensors are not those of its export: missing {missing}, unexpected {extra}")
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != wanted[name]:
            raise Refused(f"{name} has shape {tuple(tensor.shape)}, the configuration says {wanted[name]}")
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise Refused(f"{name} holds values that are not finite in {dtype}; the checkpoint cannot be served so")
    return tensors


def check_exportable(config: HeadConfig, directory: Path, settings: ExportConfig) -> None:
    """Check that a head of this shape can be exported as it is asked for.

    Raises:
        Refused: the dialect has no such heads, or vLLM would not take an MTP head at these places for one.
    """
    if isinstance(config, MtpConfig):
        if settings.dialect != "plain":
            raise Refused(f"export.dialect={settings.dialect} has no MTP heads that an engine reads; use plain")
        for path, key in ((str(directory.absolute()), "name or root"), (settings.push_to or "", "export.push_to")):
            check_mtp_path(path, key)
    elif settings.dialect == "speculators" and not config.use_aux_hidden_state:
        raise Refused("export.dialect=speculators has no word for a head without fc; use export.dialect=plain")


def export_config(head: DraftHead, target: Target, settings: ExportConfig) -> dict[str, Any]:
    """config.json in the dialect that was asked for.

    Raises:
        Refused: the speculators dialect holds k, and none is known.
    """
    special = {
        key: getattr(target.config, key)
        for key in ("bos_token_id", "eos_token_id")
        if getattr(target.config, key, None) is not None
    }
    if isinstance(head, MtpHead):
        return mtp_config_json(head.config, getattr(torch, settings.dtype), special)
    plain = eagle3_config_json(head.config, getattr(torch, settings.dtype), special, target.config.model_type)
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
        Refused: the checkpoint belongs to another target, or is not complete; or vLLM would not take an MTP head in
            this directory for one.
    """
    head, trained_for = load_head(checkpoint)
    if told := differing_target(trained_for, describe(target)):
        raise Refused(f"{checkpoint} was trained for another target than {target.path} ({told}); correct target.path")
    check_exportable(head.config, directory, settings)
    native, about = head.config.native, {}
    its_own = Path(target.path) / "config.json"
    config = read_json(its_own) if native else export_config(head, target, settings)
    config_bytes = its_own.read_bytes() if native else json_bytes(config)
    file = SHARD if native else WEIGHTS
    if isinstance(head, MtpHead):
        about = {"file": file, "head": head.config.to_dict()}
    identity = fingerprint([file_sha256(checkpoint / "head.safetensors"), config, describe(target)])
    record = directory / "export.json"
    if all((directory / name).exists() for name in ("export.json", "config.json", file)):
        found, size = read_json(record), (directory / file).stat().st_size
        unchanged = (directory / "config.json").read_bytes() == config_bytes and found.get("config") == config
        if found.get("identity") == identity and found.get("size") == size and unchanged:
            return False
    with replacing_directory(directory) as temporary:
        if native:
            assert isinstance(head, MtpHead)
            tensors = write_native(temporary, head, target)
        else:
            plain = export_tensors(head, getattr(torch, settings.dtype))
            tensors = {tensor_name(name, settings.dialect): tensor for name, tensor in plain.items()}
            write_json(temporary / "config.json", config)
            write_tensors(temporary / file, tensors, {"format": "pt"})
        written = load_file(temporary / file)
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
        size = (temporary / file).stat().st_size
        made_for = {"target": describe(target), "target_type": target.config.model_type}
        write_json(
            temporary / "export.json",
            {"identity": identity, "size": size, **made_for, **about, "config": config, "tensors": provenance},
        )
    return True


def load_export(directory: Path) -> tuple[DraftHead, dict[str, str]]:
    """Read an export of ours back: the head (fp32) and the description of its target.

    Raises:
        Refused: there is no complete export, or it is no longer what was exported.
    """
    try:
        record, config = read_json(directory / "export.json"), read_json(directory / "config.json")
        tensors = load_file(directory / record.get("file", WEIGHTS))
    except (FileNotFoundError, SafetensorError):
        raise Refused(f"no complete export in {directory}; run `python -m models.export` for this run first") from None
    for key, was, now in differences(record.get("config") or config, config):
        raise Refused(
            f"{directory}/config.json was edited: {key} was {was!r} when it was exported, is {now!r}; "
            "run `python -m models.export` for this run again"
        )
    for name, told in record["tensors"].items():
        if name not in tensors or tensor_sha256(tensors[name]) != told["sha256"]:
            raise Refused(
                f"{directory}: {name} is not the tensor that was exported; run `python -m models.export` again"
            )
    if "head" in record:
        return _load_mtp(MtpConfig.from_dict(record["head"]), tensors), record["target"]
    d2t = tensors.pop("d2t", None)
    tensors.pop("t2d", None)
    head = Eagle3Head(eagle3_config_from_json(config), None if d2t is None else ids_from_offsets(d2t))
    head.load_state_dict({plain_name(name): tensor.float() for name, tensor in tensors.items()})
    return head, record["target"]


def _load_mtp(config: MtpConfig, tensors: dict[str, torch.Tensor]) -> MtpHead:
    head = MtpHead(config)
    views = head.stored()
    if views.keys() != tensors.keys():
        raise Refused(f"the export's tensors {sorted(tensors)} are not those of its head, {sorted(views)}")
    for name, view in views.items():
        view.copy_(tensors[name])
    return head


def weights_file(directory: Path) -> Path:
    """The file with an export's trained tensors."""
    return directory / read_json(directory / "export.json").get("file", WEIGHTS)


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
        hub.upload_folder(repo_id=repository, folder_path=directory, commit_message="Draft head")
    except (OSError, httpx.HTTPError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise Refused(f"export.push_to={repository}: the hub cannot be reached or refuses ({reason})") from None


def named(settings: ExportConfig, story: Story, path: str) -> ExportConfig:
    """The settings with what the target that a run calls `path` is called, and the k of the speculators dialect."""
    filled = replace(settings, base_model=settings.base_model or public_name(path))
    if filled.dialect == "speculators":  # config.json names k, and may not wait for an evaluation of itself
        filled.k = filled.k or story.trained_steps
    return filled


def refresh_card(run: Path, settings: ExportConfig, model: TargetConfig) -> None:
    """Bring the model card of a run's export up to date with its evaluation, where its checkpoint is still there."""
    with contextlib.suppress(Refused):
        story = Story.of(run, find_checkpoint(run / "train", settings.checkpoint))
        write_card(run / "export", story, named(settings, story, model.path), model.dtype)


def tell(run: Path, settings: ExportConfig, model: TargetConfig, draft: DraftConfig) -> None:
    """Print what an export of this run would hold and where it would lie, trained or not; writes nothing.

    Raises:
        Refused: the head cannot stand over the target, or not be exported so.
    """
    target = describe_target(model, weights=False)
    try:
        checkpoint: Path | None = find_checkpoint(run / "train", settings.checkpoint)
    except Refused as missing:
        checkpoint = None
        print(f"checkpoint: none yet ({missing})")
    if checkpoint is None:
        config = head_config(target, aux_layers(target, model.aux_layers), draft)
    else:
        config, _ = read_config(checkpoint)
        print(f"checkpoint: {checkpoint}")
    check_exportable(config, run / "export", settings)
    if config.native:
        print(
            f"export: a copy of {model.path} with the head in {SHARD} and in the dtypes that the target has; its other "
            "shards are linked"
        )
    else:
        shapes = expected_mtp_tensors(config) if isinstance(config, MtpConfig) else expected_tensors(config)
        width = {"d2t": 8, "t2d": 1}
        item = getattr(torch, settings.dtype).itemsize
        size = sum(width.get(name, item) * prod(shape) for name, shape in shapes.items())
        print(f"export: {len(shapes)} tensors, {size / 1e9:.3f} GB ({settings.dtype}, {settings.dialect} dialect)")
    print(f"writes: {run / 'export'}" + (f", then uploads to {settings.push_to}" if settings.push_to else ""))


def engines_that_load(dialect: str, model_type: str) -> str:
    """The engines that load an export in this dialect over such a target, with their verb."""
    unserved = remarks_on(model_type).unserved
    engines = [each for each in ("vLLM", "SGLang") if each not in unserved and (each == "vLLM" or dialect == "plain")]
    return f"{' and '.join(engines) or 'no engine'} load{'' if len(engines) == 2 else 's'}"


def main() -> None:
    """The command line."""
    from conf import Run, stage

    def work(run: Run) -> bool:
        checkpoint = find_checkpoint(run.directory / "train", run.export.checkpoint)
        directory, target = run.directory / "export", describe_target(run.target)
        story = Story.of(run.directory, checkpoint)
        for left in run.directory.glob(".export.*.tmp"):  # by a launch that was killed; there is one at a time
            shutil.rmtree(left)
        settings = named(run.export, story, run.target.path)
        made = export_head(checkpoint, directory, target, settings)
        told = write_card(directory, story, settings, run.target.dtype)
        if made:
            dtype = "in the target's dtypes" if holds_target(directory) else settings.dtype
            told_of = engines_that_load(settings.dialect, target.config.model_type)
            print(f"exported {checkpoint.name} ({dtype}) to {directory}; {told_of} it as it is")
        if settings.push_to:
            push(directory, settings.push_to)
            print(f"pushed {directory} to {settings.push_to}")
        return made or told or settings.push_to is not None

    stage("export", work, dry_run=lambda run: tell(run.directory, run.export, run.target, run.draft))


if __name__ == "__main__":
    main()
