"""`python -m models.importer DIR --target DIR --out DIR`: a head made by others becomes a training checkpoint of ours.

From there it can be evaluated (models.export with `export.checkpoint=OUT`, then serve_eval) or trained on
(`trainer.init_from=OUT`).
Legacy EAGLE-3, SpecForge and speculators heads are read. Ours has one layer without biases and q/k norms, the
feature itself as residual, and the target's embedding: what another head has beyond that is refused by name, since
leaving it out would make another head of it. The tensors are the file's, in fp32.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from models.artefact import replacing_directory, write_json
from models.checkpoint import describe, differing_options, save_head
from models.config import DraftConfig, TargetConfig
from models.doctor_values import map_faults
from models.eagle3 import Eagle3Config, Eagle3Head
from models.engines import expected_tensors
from models.errors import Refused
from models.heads import HeadFiles, same_rotation, same_values
from models.rope import attention_scales, standardised
from models.target import Target, aux_layers, describe_target
from models.terminal import printable
from models.vocabulary import ids_from_offsets


def import_head(directory: Path, out: Path, target: Target) -> Eagle3Head:
    """Read a head in any layout and write it as a checkpoint, which appears whole or not at all.

    Raises:
        Refused: it cannot be read, does not fit the target, or is of a kind that ours cannot be.
    """
    if out.exists():
        raise Refused(f"--out {out} exists; delete it or choose another")
    files = HeadFiles.open(directory)
    if beyond := list(_beyond_ours(files)):
        raise Refused(f"{directory} cannot be imported, since ours has no {', no '.join(beyond)}")
    config = _config(files, target)
    ids_D = _draft_vocabulary(files)
    head = Eagle3Head(config, ids_D)
    head.load_state_dict(_weights(files, config, target))
    with replacing_directory(out) as temporary:
        save_head(temporary, head, describe(target))
        write_json(temporary / "origin.json", {"head": str(directory), "layout": files.layout, "config": files.given})
    return head


def _beyond_ours(files: HeadFiles) -> Iterator[str]:
    """What the head computes that ours cannot."""
    given = files.given
    if given.get("num_hidden_layers", 1) != 1:
        yield f"{given['num_hidden_layers']} layers"
    if given.get("norm_before_residual"):
        yield "norm_before_residual"
    if given.get("hidden_act", "silu") != "silu":
        yield f"hidden_act={given['hidden_act']}"
    if given.get("logit_scale") not in (None, 1):
        yield f"logit_scale={given['logit_scale']}"
    if "sliding_attention" in (given.get("layer_types") or []):
        yield "sliding attention"
    for name in sorted(files.tensors):
        if name.endswith((".q_norm.weight", ".k_norm.weight")):
            yield f"q/k norm ({name})"
        elif name.endswith(".bias") and files.read(name).any():
            yield f"bias ({name})"
    if "mask_hidden" in files.tensors:
        yield "parallel drafting (mask_hidden)"


def _planes(files: HeadFiles, target: Target) -> tuple[int, ...]:
    """The planes that fc fuses: what the configuration tells either engine, else the engines' default."""
    if not files.fused:
        return ()
    vllm, sglang = files.vllm_planes, files.sglang_planes(target.config.model_type)
    if vllm is not None and sglang is not None and vllm != sglang:
        raise Refused(
            f"{files.directory} tells vLLM to capture planes {list(vllm)} and SGLang {list(sglang)}; correct its "
            "config.json to what it was trained on"
        )
    return aux_layers(target, vllm or sglang)


def _config(files: HeadFiles, target: Target) -> Eagle3Config:
    """Our configuration of the head, with the target's rope and context where they are the same in effect."""
    config, rope = files.eagle3_config(_planes(files, target)), _rope(files)
    draft = DraftConfig(rope_parameters={} if _as_in(target, rope, config) else rope)
    its = Eagle3Config.for_target(target, config.aux_layers, draft)
    for key in ("vocab_size", "target_hidden_size", "hidden_size"):
        if getattr(config, key) != getattr(its, key):
            raise Refused(
                f"{files.directory} has {key}={getattr(config, key)}, the target {target.path} {getattr(its, key)}"
            )
    shared = ("rope_parameters", "max_position_embeddings")
    return replace(config, **{key: getattr(its, key) for key in shared})


def _as_in(target: Target, rope: dict[str, Any], config: Eagle3Config) -> bool:
    """Whether a head's rotation is the target's, which may be of a kind that no head has."""
    try:
        theirs = standardised(target.config.rope_parameters)
    except Refused:
        return False
    context = target.context_length
    return same_rotation((rope, context), (theirs, context), config.head_dim)


def _rope(files: HeadFiles) -> dict[str, Any]:
    """The head's own rotation, if both engines know it and read the same."""
    given = files.config.rope_parameters
    try:
        rope = standardised(given)
        vllm, sglang = attention_scales(given)
    except (Refused, TypeError, ValueError, ArithmeticError) as error:
        raise Refused(f"{files.directory} cannot be imported: its own {error}") from None
    if not math.isclose(vllm, sglang, rel_tol=1e-5):
        raise Refused(
            f"{files.directory}: its rope makes vLLM multiply cosines and sines by {vllm:g} (attention_factor), "
            f"SGLang by {sglang:g} (attn_factor); correct its config.json to what it was trained with"
        )
    return rope


def _draft_vocabulary(files: HeadFiles) -> torch.Tensor | None:
    """Target ids [D]; None for the full vocabulary."""
    size, whole = files.draft_vocab_size, files.config.vocab_size
    if "d2t" not in files.tensors:
        if size != whole:
            raise Refused(f"{files.directory} drafts {size} of {whole} tokens and has no d2t that tells which")
        return None
    d2t_D = files.read("d2t")
    if d2t_D.shape != (size,) or d2t_D.is_floating_point():
        raise Refused(f"{files.directory}: d2t is {d2t_D.dtype} {tuple(d2t_D.shape)}, not int64 ({size},)")
    t2d_V = files.read("t2d") if "t2d" in files.tensors else None
    for fault in map_faults(d2t_D, t2d_V, whole):
        raise Refused(f"{files.directory}: d2t {fault}")
    return ids_from_offsets(d2t_D.to(torch.int64)) if size != whole else None


def _weights(files: HeadFiles, config: Eagle3Config, target: Target) -> dict[str, torch.Tensor]:
    """Weights by parameter name, fp32, all there and none left over."""
    wanted = {name: shape for name, shape in expected_tensors(config).items() if name not in ("d2t", "t2d")}
    unread = {name for name in files.tensors if name in ("d2t", "t2d") or name.endswith(".bias")}
    found = files.tensors.keys() - unread
    if "embed_tokens.weight" in found:
        found.remove("embed_tokens.weight")
        its_VH = target.load_embedding()
        if files.tensors["embed_tokens.weight"].shape != its_VH.shape or not same_values(
            files.read("embed_tokens.weight"), its_VH
        ):
            raise Refused(f"{files.directory} has an embedding of its own; ours uses the target's, which differs")
    weights = {}
    if "lm_head.weight" not in found and config.draft_vocab_size == config.vocab_size:
        weights["lm_head.weight"] = target.load_lm_head().float()  # as vLLM does
    missing, left_over = sorted(wanted.keys() - found - weights.keys()), sorted(found - wanted.keys())
    if missing or left_over:
        raise Refused(f"{files.directory}: missing {missing}, without a place in an EAGLE-3 head {left_over}")
    for name in sorted(found):
        value = files.read(name)
        if value.shape != wanted[name]:
            raise Refused(f"{files.directory}: {name} is {tuple(value.shape)}, its config.json says {wanted[name]}")
        if not value.isfinite().all():
            raise Refused(f"{files.directory}: {name} holds values that are not finite")
        weights[name] = value.float()
    return weights


def _asked_for_nothing(target: Target, config: Eagle3Config) -> Eagle3Config:
    """The head that a run without options asks for, but of a plane that none has, so that planes are always named.

    Without a rotation, too, where the target's is of a kind that a head may not have.
    """
    try:
        return Eagle3Config.for_target(target, (0,), DraftConfig())
    except Refused:
        draft = DraftConfig(rope_parameters=config.rope_parameters)
        return replace(Eagle3Config.for_target(target, (0,), draft), rope_parameters={})


def main() -> None:
    """The command line."""
    from transformers.utils import logging as transformers_logging

    from conf.help import Parser, described

    transformers_logging.set_verbosity_error()
    parser = Parser("python -m models.importer", **described("models.importer"))
    parser.add_argument("directory", type=Path, help="a head: config.json and safetensors")
    parser.add_argument("--target", required=True, help="directory of the target model")
    parser.add_argument("--out", required=True, type=Path, help="directory of the checkpoint; it must not exist")
    asked = parser.parse_args()
    try:
        target = describe_target(TargetConfig(path=asked.target), "--target ")
        head = import_head(asked.directory, asked.out, target)
    except (Refused, OSError) as error:
        print(f"importer: {printable(str(error))}", file=sys.stderr)
        sys.exit(2)
    unlike = _asked_for_nothing(target, head.config)
    print(
        f"imported to {asked.out}; evaluate it with `python -m models.export` and export.checkpoint={asked.out}, then "
        "`python -m serve_eval`, or train it on with"
    )
    print(" ".join([f"trainer.init_from={asked.out}", *differing_options(unlike, head.config)]))


if __name__ == "__main__":
    main()
