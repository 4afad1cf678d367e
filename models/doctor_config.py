"""What a head's config.json and tensor headers say, against what each engine reads and does about it.

Both engines fill gaps without a word, so a head with a lost key or tensor serves, badly: vLLM leaves a missing
tensor uninitialised, SGLang drops an unknown one too. Every finding says what the engine would do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from models.engines import expected_tensors
from models.heads import IDS, HeadFiles

VLLM, SGLANG = ("vLLM",), ("SGLang",)
BOTH = (*VLLM, *SGLANG)
SGLANG_CLASS = "LlamaForCausalLMEagle3"
VLLM_CLASSES = {
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "Eagle3MiniMaxM2ForCausalLM",
    "Eagle3Qwen2_5vlForCausalLM",
    "Eagle3Qwen3vlForCausalLM",
    "Eagle3Qwen3ForCausalLM",
}
NEEDED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "rms_norm_eps",
    "max_position_embeddings",
)
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "tie_word_embeddings", "attention_bias")


@dataclass(frozen=True)
class Finding:
    """One thing that is not as it should be.

    Attributes:
        about: the key or tensor.
        text: what is there, and what the engine would do.
        engines: those that it concerns.
        wrong: whether it makes them serve wrongly, or not at all; otherwise it is worth knowing.
    """

    about: str
    text: str
    engines: tuple[str, ...] = BOTH
    wrong: bool = True


def judge_config(head: HeadFiles) -> Iterator[Finding]:
    """Keys by themselves."""
    yield from _classes(head)
    given, config = head.given, head.config
    for key in NEEDED:
        if given.get(key) is None:
            yield Finding(key, f"is missing: taken as {getattr(config, key)}")
    for key in FLAGS:
        if not isinstance(given.get(key, False), bool | None):
            yield Finding(key, f"is {given[key]!r}, neither true nor false: taken as {bool(given[key])}")
    if given.get("hidden_act", "silu") != "silu":
        yield Finding("hidden_act", f"is {given['hidden_act']}: only silu is computed, loading fails")
    if given.get("norm_before_residual"):
        yield Finding("norm_before_residual", "is true: ignored, the residual is the feature before its norm", SGLANG)
    if given.get("attention_bias"):
        yield Finding("attention_bias", "is true: biases of q, k and v are dropped", SGLANG)
    for key in ("bias", "mlp_bias", "qkv_bias"):
        if given.get(key):
            yield Finding(key, f"is {given[key]}: adds bias parameters that no EAGLE-3 head has, uninitialised")
    nested = head.eagle.get("norm_before_fc")
    if nested is not None and bool(nested) != bool(given.get("norm_before_fc", nested)):
        yield Finding("norm_before_fc", f"is {given['norm_before_fc']}, but {nested} in eagle_config, which is used")
    if given.get("use_aux_norm") and not given.get("fc_norm"):
        yield Finding("use_aux_norm", "is SGLang's older name of fc_norm: ignored, fc reads planes un-normed", VLLM)
    if given.get("logit_scale") not in (None, 1):
        yield Finding("logit_scale", f"is {given['logit_scale']}: multiplies the logits", VLLM, wrong=False)
    if "sliding_attention" in (given.get("layer_types") or []):
        yield Finding("layer_types", "sliding_attention: the head sees a window only", VLLM, wrong=False)
    if config.num_hidden_layers > 1 and given.get("num_hidden_layers"):
        said = f"is {config.num_hidden_layers}: layers past the first are normed by hidden_norm, not input_layernorm"
        yield Finding("num_hidden_layers", said, SGLANG)
        yield Finding("num_hidden_layers", "layers past the first were not examined", wrong=False)
    if head.layout == "plain":
        yield from _sglang_keys(head)
    yield from _vocabulary_keys(head)


def _classes(head: HeadFiles) -> Iterator[Finding]:
    name = head.architecture
    if head.layout == "speculators":
        yield Finding(
            "config.json", "is in the speculators format: not readable; import the head and export it", SGLANG
        )
    else:
        if name != SGLANG_CLASS:
            yield Finding("architectures", f"{name or 'none'}: the only class there is {SGLANG_CLASS}", SGLANG)
        if not head.given.get("model_type"):
            yield Finding("model_type", "is missing: config.json cannot be parsed, the server does not start")
    if name and not (name.startswith("Eagle3") or name.endswith("Eagle3")):
        name = f"Eagle3{name}"
    if name not in VLLM_CLASSES:
        yield Finding("architectures", f"{name or 'none'}: no EAGLE-3 class has this name", VLLM)


def _sglang_keys(head: HeadFiles) -> Iterator[Finding]:
    given = head.given
    if given.get("tie_word_embeddings"):
        yield Finding("tie_word_embeddings", "is true: the embedding is used as lm_head", SGLANG)
    elif "draft_vocab_size" not in given:
        yield Finding("draft_vocab_size", "is missing: loading fails on it (null is allowed)", SGLANG)
    elif given["draft_vocab_size"] is None and "lm_head.weight" in head.tensors:
        yield Finding("draft_vocab_size", "is null: the target's lm_head is used, not the head's own", SGLANG)
    floats = {stored.dtype for stored in head.tensors.values() if stored.dtype and stored.dtype.is_floating_point}
    said = given.get("dtype", given.get("torch_dtype"))
    dtype = getattr(torch, str(said or "float32").removeprefix("torch."), None)
    if floats != {dtype}:
        told = "is missing, taken as float32" if said is None else f"is {said}"
        held = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in floats))
        yield Finding("torch_dtype", f"{told}, which the head is run in, but its tensors are {held}", SGLANG)


def _vocabulary_keys(head: HeadFiles) -> Iterator[Finding]:
    size, whole = head.draft_vocab_size, head.config.vocab_size
    if size > whole:
        yield Finding("draft_vocab_size", f"{size} is larger than vocab_size={whole}")
    elif size < whole and "d2t" not in head.tensors:
        yield Finding("d2t", f"is missing with {size} of {whole} tokens: draft id i is taken for target id i")
    elif size == whole and "d2t" in head.tensors:
        yield Finding("d2t", "is in a head over the full vocabulary, which has no map: loading fails on it", VLLM)


def judge_tensors(head: HeadFiles) -> Iterator[Finding]:
    """Names, shapes and dtypes, from the headers."""
    config = head.eagle3_config(range(head.num_planes))
    expected = expected_tensors(config)
    if not head.fused:
        expected = {name: shape for name, shape in expected.items() if not name.startswith(("fc", "input_norm."))}
    if head.given.get("attention_bias"):
        for proj in "qkvo":
            shape = expected[f"midlayer.self_attn.{proj}_proj.weight"]
            expected[f"midlayer.self_attn.{proj}_proj.bias"] = shape[:1]
    if "Qwen3" in head.architecture:
        expected |= {f"midlayer.self_attn.{part}_norm.weight": (config.head_dim,) for part in "qk"}
    expected["embed_tokens.weight"] = (config.vocab_size, config.hidden_size)
    expected.pop("t2d", None)  # no engine reads it
    for name, shape in expected.items():
        if name not in head.tensors:
            yield from _missing(head, name)
            continue
        stored = head.tensors[name]
        if stored.shape != shape:
            yield Finding(name, _misshapen(head, name, shape) + ": loading fails")
        if name == "d2t" and stored.dtype not in (torch.int64, torch.int32):
            yield Finding(name, f"is {stored.dtype or 'of another dtype'}, not int64: not read as ids")
        elif name != "d2t" and not (stored.dtype and stored.dtype.is_floating_point):
            yield Finding(name, f"is {stored.dtype or 'of a dtype that no head is kept in'}: not a weight")
    for name in sorted(head.tensors.keys() - expected.keys()):
        yield from _unexpected(name, zero=name.endswith(".bias") and not head.read(name).any())
    for name, stored in sorted(head.tensors.items()):
        if stored.name.startswith("model."):
            engines = BOTH if name == "lm_head.weight" else VLLM  # SGLang looks for the others with the prefix, too
            yield Finding(stored.name, f"should be {name}: loading fails on the prefix, or leaves it out", engines)
        elif stored.name.startswith("aux_norm_"):
            yield Finding(stored.name, f"is SGLang's older name of {name}: loading fails on it", VLLM)


def _misshapen(head: HeadFiles, name: str, wanted: tuple[int, ...]) -> str:
    shape = head.tensors[name].shape
    if len(shape) == 2 and shape == wanted[::-1]:
        return f"is transposed: {shape} where {wanted} belongs"
    if name == "fc.weight" and len(shape) == 2 and shape[1] != wanted[1]:
        planes = shape[1] / head.target_hidden_size
        return f"fuses {planes:g} planes of {head.target_hidden_size}, the configuration says {head.num_planes}"
    return f"has shape {shape}, the configuration says {wanted}"


def _missing(head: HeadFiles, name: str) -> Iterator[Finding]:
    if name in ("embed_tokens.weight", "d2t"):  # the target's is shared; told with the vocabulary
        return
    same = head.draft_vocab_size == head.config.vocab_size and head.target_hidden_size == head.config.hidden_size
    if name == "lm_head.weight" and same:
        yield Finding(name, "is missing: the target's is used", VLLM, wrong=False)
        if head.given.get("draft_vocab_size") is not None:
            yield Finding(name, "is missing though draft_vocab_size is a number: left uninitialised", SGLANG)
        return
    flag = {"input_norm.weight": "norm_before_fc"}.get(name, "fc_norm" if name.startswith("fc_norm.") else None)
    told = f"is missing though {flag} is true" if flag else "is missing"
    yield Finding(name, f"{told}: left uninitialised without a word")


def _unexpected(name: str, zero: bool) -> Iterator[Finding]:
    if name in ("d2t", "t2d") or name.startswith("layers."):
        return  # told elsewhere
    if name == "mask_hidden":
        yield Finding(name, "belongs to a head that drafts in parallel (P-EAGLE): skipped", wrong=False)
    elif name.endswith(".bias"):
        yield Finding(name, "is a bias that the configuration has no place for: dropped", wrong=not zero)
    elif name == "input_norm.weight":
        yield Finding(name, "is there though norm_before_fc is not set: dropped, fc reads planes un-normed")
    elif name == "fc.weight":
        yield Finding(name, "is there though use_aux_hidden_state is false: dropped, only the last layer is read")
    else:
        flag = "fc_norm is not set" if name.startswith("fc_norm.") else "the configuration has no place for it"
        yield Finding(name, f"is there though {flag}: loading fails on it", VLLM)
        yield Finding(name, f"is there though {flag}: dropped", SGLANG)


def judge_planes(head: HeadFiles, depth: int | None, model_type: str | None) -> Iterator[Finding]:
    """Which planes each engine captures, and whether fc was made for as many.

    Args:
        depth, model_type: layers and type of the target, if known.
    """
    if not head.fused:
        return
    if head.num_planes == 1 and head.target_hidden_size == head.config.hidden_size:
        yield Finding("num_aux_hidden_states", "is 1: fc is skipped, as what comes in is as wide as a feature", SGLANG)
    default = None if depth is None else (2, depth // 2, depth - 3)
    taken, by_vllm, by_sglang = {}, head.vllm_planes, head.sglang_planes(model_type)
    for engine, told, beyond in ((VLLM, by_vllm, 0), (SGLANG, by_sglang, 1)):
        planes = told or default
        if planes is None or (engine == SGLANG and head.layout == "speculators"):
            continue
        taken[engine] = planes
        where = IDS if engine == VLLM else f"eagle_config.{IDS}"
        told_as = f"planes {list(planes)}" + ("" if told else ", the default")
        if any(b <= a for a, b in zip(planes, planes[1:], strict=False)):
            yield Finding(where, f"{told_as}: not ascending or not distinct; sorted, other than fc was trained", engine)
        if min(planes) < 0 or (depth is not None and max(planes) > depth - beyond):
            yield Finding(where, f"{told_as}: not all are in the target, and those that are not never captured", engine)
        if len(set(planes)) != head.num_planes:
            yield Finding(where, f"{told_as}: {len(set(planes))} are captured, fc takes {head.num_planes}", engine)
    if len(taken) == 2 and taken[VLLM] != taken[SGLANG]:
        said = f"vLLM captures planes {list(taken[VLLM])}, SGLang {list(taken[SGLANG])}: at least one is not as trained"
        yield Finding(IDS, said + " (SGLang's ids, in eagle_config, are less by one)")
    elif len(taken) == 1 and depth is None and head.layout == "plain":
        (engine,) = taken
        rest = SGLANG if engine == VLLM else VLLM
        yield Finding(IDS, "not told, so the default is captured (2, L/2, L-3); give --target to compare", rest, False)
    if by_vllm is None and by_sglang is not None:
        said = "only in eagle_config: the V1 runner (no Triton, or VLLM_USE_V2_MODEL_RUNNER=0) is off by one"
        yield Finding(IDS, said, VLLM, wrong=False)
