"""A head's configuration against the target it shall draft for: sizes, context, rotation, and what its family needs.

A head of ours may rotate otherwise than its target on purpose, and its export says so; others are held to the target.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from models.doctor_config import BOTH, SGLANG, VLLM, Finding
from models.errors import Refused
from models.heads import HeadFiles, same_rotation
from models.rope import attention_scales, reach, standardised
from models.serving import remarks_on
from models.target import Target, stretch

RAISED = ("default", "linear", "llama3", "ntk", "proportional")
"""Rope types for which vLLM raises a draft's context to the target's; for others it lowers the target's."""


def judge_target(head: HeadFiles, target: Target) -> Iterator[Finding]:
    """Sizes, context and family; what a rotation does is `judge_rope`'s."""
    config = head.config
    for key, mine, its in (
        ("vocab_size", config.vocab_size, target.vocab_size),
        ("target_hidden_size", head.target_hidden_size, target.hidden_size),
    ):
        if mine != its:
            yield Finding(key, f"is {mine}, the target's is {its}: shapes do not fit")
    if config.hidden_size != target.hidden_size and "embed_tokens.weight" not in head.tensors:
        yield Finding("hidden_size", f"is {config.hidden_size}, and the target's embedding has {target.hidden_size}")
    context = int(config.max_position_embeddings * stretch(config.rope_parameters))
    if context < target.context_length:
        stretched = f" (times {stretch(config.rope_parameters):g})" if context != config.max_position_embeddings else ""
        said = f"is {config.max_position_embeddings}{stretched}, the target's context is {target.context_length}"
        yield Finding("max_position_embeddings", f"{said}: not started", SGLANG)
        if (kind := config.rope_parameters.get("rope_type")) not in RAISED:
            cut = f"with rope type {kind}, the server's context is cut to it"
            yield Finding("max_position_embeddings", f"{said}: {cut}", VLLM)


def judge_family(model_type: str | None) -> Iterator[Finding]:
    """What the engines need, or cannot do, for targets of this type."""
    remarks = remarks_on(model_type)
    for engine in BOTH:
        if reason := remarks.unserved.get(engine):
            yield Finding("target", f"is of a family that {engine} does not serve with a head: {reason}", (engine,))
    if remarks.vllm_arguments:
        said = f"needs vLLM to be started with {' '.join(remarks.vllm_arguments)}, or it serves no head"
        yield Finding("target", said, VLLM, wrong=False)


def judge_rope(head: HeadFiles, trained: Mapping[str, Any] | None, target: Target | None) -> Iterator[Finding]:
    """How the head rotates in each engine.

    Args:
        trained: rope parameters it was trained with, if an export of ours says so; else it should be as its target.
    """
    mine, context = head.config.rope_parameters, head.config.max_position_embeddings

    def alike(other: Mapping[str, Any]) -> bool:
        return same_rotation((mine, context), (other, context), head.config.head_dim)

    try:
        alike(mine)
        served = attention_scales(mine)
    except (Refused, TypeError, ValueError, ArithmeticError) as error:
        yield Finding("rope", f"is not computed alike by both engines, or not at all: {error}")
        return
    its = None
    if target is not None:
        try:
            its = standardised(target.config.rope_parameters)
        except Refused as error:
            yield Finding("rope", f"was not compared: the target's {error}", wrong=False)
    if trained is not None:
        if not alike(trained):
            yield Finding("rope", f"{mine}, trained with {dict(trained)}: positions are not rotated as in training")
        elif its is not None and not alike(its):
            yield Finding("rope", f"{mine}, the target's {its}: as it was trained (export.json)", wrong=False)
    elif its is not None and not alike(its):
        said = f"{mine}, the target's {its}: positions are not rotated as in the target"
        yield Finding("rope", f"{said}; right only if the head was trained so")
    wanted = trained if trained is not None else its
    yield from _attention(served, None if wanted is None else attention_scales(wanted)[0])
    if target is not None and reach(mine) < target.context_length and not (its is not None and alike(its)):
        said = f"has a table of {reach(mine):g} positions (original_max_position_embeddings * factor)"
        yield Finding("rope", f"{said}, the target's context is {target.context_length}: engines read past its end")


def _attention(served: tuple[float, float], wanted: float | None) -> Iterator[Finding]:
    """Yarn's factor on cosines and sines, which SGLang takes from another key; vLLM's is part of the rotation."""
    vllm, sglang = served
    if not math.isclose(sglang, vllm if wanted is None else wanted, rel_tol=1e-5):
        said = f"makes SGLang multiply cosines and sines by {sglang:g}"
        if wanted is None:
            yield Finding("attn_factor", f"{said}, vLLM by {vllm:g} (attention_factor): one is not as it was trained")
        else:
            yield Finding("attn_factor", f"{said} instead of {wanted:g} (it does not read attention_factor)", SGLANG)
