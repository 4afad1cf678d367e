"""What a target is without running it: its shape from config.json, a few tensors from its safetensors files.

The trainer and the exporter never load the target. They need its embedding (frozen, looked up by the
head), its output head (the teacher) and its final norm (an initial value), and read just the shards
that hold them: one file or an index, tied or untied, plain or nested in a vision-language model.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from models.artefact import fingerprint, read_json
from models.config import TargetConfig
from models.errors import Refused
from models.serving import remarks_on

LOGIT_KEYS = (
    "final_logit_softcapping",
    "logits_soft_cap",
    "logits_scaling",
    "logit_scale",
    "lm_head_multiplier",
    "output_multiplier",
    "logits_mup_width_multiplier",
)
"""What a target's configuration may do to `lm_head(final plane)` before it is its logits."""

CENTRED_AT_ONE = (
    "gemma",
    "gemma2",
    "gemma3",
    "gemma3_text",
    "minimax_m3_vl_text",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "step3p5",
)
"""Model types whose norms multiply by 1 + weight."""

VOLATILE_KEYS = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "id2label", "label2id")


def stretch(rope: Mapping[str, Any] | None) -> float:
    """By what both engines multiply max_position_embeddings to get a model's context, from its rope parameters.

    With linear (and dynamic) scaling they take it for the length before scaling. With llama3 and yarn it is the length
    after scaling, as it is for transformers (vLLM 0.32 `_get_and_verify_max_len`, SGLang `get_context_length`).
    """
    values = rope or {}
    by_layer = [each for each in values.values() if isinstance(each, Mapping)]
    if by_layer:
        return max(map(stretch, by_layer))
    scaled = values.get("rope_type") in ("linear", "dynamic")
    return float(values.get("factor") or 1.0) if scaled else 1.0


@dataclass(frozen=True)
class Target:
    """A frozen transformers checkpoint.

    Attributes:
        path: its local directory.
        config: its (text) configuration, as transformers reads it.
        tied: whether its output head is its embedding.
        dtype: the dtype it is run in.
        trust_remote_code: whether its configuration was written to run the checkpoint's own code.
        nested: whether `config` is the text part of a larger one, of a vision-language model say.
    """

    path: str
    config: Any
    tied: bool
    dtype: torch.dtype
    trust_remote_code: bool = False
    nested: bool = False

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return self.config.hidden_size

    @property
    def num_layers(self) -> int:
        """Number of decoder layers, L."""
        return self.config.num_hidden_layers

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding (the padded vocabulary of config.json), V."""
        return self.config.vocab_size

    @property
    def mlp_width(self) -> int:
        """Width of the MLP that a token passes through: of a mixture of experts, of all that it is sent to.

        Raises:
            Refused: the configuration names no width.
        """
        config = self.config
        experts = getattr(config, "num_experts_per_tok", None) or 1
        width = (
            experts > 1 and getattr(config, "moe_intermediate_size", None) or getattr(config, "intermediate_size", None)
        )
        if not width:
            raise Refused(f"{self.path}: its config has no intermediate_size; set draft.intermediate_size")
        return experts * width

    @property
    def context_length(self) -> int:
        """Longest context that an engine derives from the configuration.

        Both take what Gemma 3 says as it is, though its layers with full attention are scaled.
        """
        rope = None if "gemma3" in self.config.model_type else getattr(self.config, "rope_parameters", None)
        return int(self.config.max_position_embeddings * stretch(rope))

    def positions_for(self, rope: Mapping[str, Any]) -> int:
        """max_position_embeddings of a head with this rope: the target's, or what gives the head no less context."""
        return max(self.config.max_position_embeddings, math.ceil(self.context_length / stretch(rope)))

    def check_logits(self) -> None:
        """Stop unless the target's logits are `lm_head(final plane)`, as training and evaluation take them.

        Embeddings may be scaled (Gemma): the head norms what it looks up, and engines give it the plain rows.

        Raises:
            Refused: they are capped, scaled or shifted.
        """
        for key in LOGIT_KEYS:
            if (value := getattr(self.config, key, None)) not in (None, 1, 1.0):
                raise Refused(f"{self.path}: {key}={value} changes its logits; such targets are not supported")
        if self.has_weights and (names := self._text_names("lm_head.bias")):
            raise Refused(f"{self.path}: {names[0]} is added to its logits; such targets are not supported")

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        """Ids that end what the target says: those of config.json and of generation_config.json."""
        path = Path(self.path) / "generation_config.json"
        values = [self.config.eos_token_id, read_json(path).get("eos_token_id") if path.exists() else None]
        found: set[int] = set()
        for value in values:
            found.update(value if isinstance(value, list) else [value] if value is not None else [])
        return frozenset(found)

    @cached_property
    def config_hash(self) -> str:
        """Fingerprint of everything in the configuration that changes what the model computes."""
        values = {key: value for key, value in self.config.to_dict().items() if key not in VOLATILE_KEYS}
        return fingerprint(values | {"tied": self.tied})

    @property
    def has_weights(self) -> bool:
        """Whether its tensors, or the index of them, lie there; a dry run does without."""
        return any((Path(self.path) / f"model.safetensors{end}").exists() for end in ("", ".index.json"))

    @cached_property
    def files(self) -> dict[str, Path]:
        """The file of every tensor, of those that transformers leaves aside too.

        Raises:
            Refused: there is no safetensors file and no index of shards, or it cannot be read.
        """
        directory = Path(self.path)
        index = directory / "model.safetensors.index.json"
        if index.exists():
            named = read_json(index)
            named = named.get("weight_map") if isinstance(named, dict) else None
            if not isinstance(named, dict):
                raise Refused(f"{index} is no index of shards; copy the target again")
            return {name: directory / file for name, file in named.items()}
        single = directory / "model.safetensors"
        if not single.exists():
            pickles = any(directory.glob("*.bin"))
            hint = "; it holds pickles, which are never loaded: save it as safetensors" if pickles else ""
            raise Refused(f"{directory} has neither model.safetensors nor an index of shards{hint}")
        with self._open(single) as handle:
            return dict.fromkeys(handle.keys(), single)

    @staticmethod
    def _open(path: Path) -> Any:
        try:
            return safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise Refused(f"{path} cannot be read as safetensors ({error}); copy the target again") from None

    def read(self, name: str) -> torch.Tensor:
        """One tensor by its full name, in the dtype of the file.

        Raises:
            Refused: its file is gone or torn.
        """
        with self._open(self.files[name]) as handle:
            return handle.get_tensor(name)

    def _text_names(self, ending: str) -> list[str]:
        """Tensors with this ending that belong to the language model itself, not to another module beside it."""
        others = ("mtp", "visual", "vision", ".layers.")
        return [name for name in self.files if name.endswith(ending) and not any(other in name for other in others)]

    @cached_property
    def _embedding_name(self) -> str:
        names = self._text_names("embed_tokens.weight")
        if len(names) != 1:
            raise Refused(f"{self.path}: expected one embed_tokens.weight, found {names or 'none'}")
        return names[0]

    def load_embedding(self) -> torch.Tensor:
        """The input embedding [V, H], in the dtype of the file.

        Raises:
            Refused: there is none, or several.
        """
        return self.read(self._embedding_name)

    def load_lm_head(self) -> torch.Tensor:
        """The output head [V, H], in the dtype of the file: its own tensor, or the embedding where they are tied.

        Raises:
            Refused: the target is untied and has no head tensor, or it has several.
        """
        names = self._text_names("lm_head.weight")
        if len(names) > 1:
            raise Refused(f"{self.path}: expected one lm_head.weight, found {names}")
        if names:
            return self.read(names[0])
        if self.tied:
            return self.load_embedding()
        raise Refused(f"{self.path} does not tie its embeddings and has no lm_head.weight; it is incomplete")

    def skeleton(self) -> Any:
        """The causal language model that transformers builds of the configuration, without weights (device meta)."""
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(self.config, trust_remote_code=self.trust_remote_code)

    def load_final_norm_weight(self) -> torch.Tensor:
        """The weight of the norm before the output head as it is stored, [H], in the dtype of the file.

        Raises:
            Refused: there is no such norm beside the embedding.
        """
        name = self._embedding_name.removesuffix("embed_tokens.weight") + "norm.weight"
        if name not in self.files:
            raise Refused(f"{self.path} has no {name}")
        return self.read(name)

    def load_final_norm(self) -> torch.Tensor:
        """What the norm before the output head multiplies by, fp32 [H]: its weight, of some families added to 1.

        Raises:
            Refused: as `load_final_norm_weight`.
        """
        weight = self.load_final_norm_weight().float()
        return weight + 1 if self.config.model_type in CENTRED_AT_ONE else weight

    @cached_property
    def weights_hash(self) -> str:
        """Fingerprint of the first row of every tensor: tells fine-tunes apart, merged adapters among them."""
        by_file: dict[Path, list[str]] = {}
        for name, path in self.files.items():
            by_file.setdefault(path, []).append(name)
        digest = hashlib.sha256()
        for path, names in sorted(by_file.items()):
            with self._open(path) as handle:
                for name in sorted(names):
                    part = handle.get_slice(name)
                    row = part[:1] if part.get_shape() else handle.get_tensor(name)
                    digest.update(name.encode() + row.reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:16]


def describe_target(settings: TargetConfig, option: str = "target.path=", *, weights: bool = True) -> Target:
    """Read a target's configuration.

    Args:
        option: how the path was given, for messages.
        weights: of a name on the hub, fetch the weights as well.

    Raises:
        Refused: there is no such directory or it holds no transformers configuration.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    directory = Path(settings.path).expanduser()
    if not directory.is_dir():
        directory = _from_hub(settings, option, weights)
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=settings.trust_remote_code)
    except (OSError, ValueError, TypeError, StrictDataclassError) as error:
        reason = " ".join(str(error).splitlines()[:2])
        raise Refused(f"{option}{settings.path} holds no usable config.json ({reason})") from None
    text = config.get_text_config()
    tied = bool(getattr(config, "tie_word_embeddings", False) or getattr(text, "tie_word_embeddings", False))
    nested = text is not config
    return Target(str(directory), text, tied, getattr(torch, settings.dtype), settings.trust_remote_code, nested)


def _from_hub(settings: TargetConfig, option: str, weights: bool) -> Path:
    from huggingface_hub import snapshot_download

    name = settings.path
    if name.startswith(("/", ".", "~")) or name.count("/") != 1:
        raise Refused(f"{option}{name} is not a directory; prepare the target first or correct the path")
    try:
        patterns = ["*.json", "*.jinja", "*.txt", "*.model"]
        patterns += ["*.safetensors"] * weights + ["*.py"] * settings.trust_remote_code
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise Refused(f"{option}{name} is neither a directory nor reachable on the hub ({reason})") from None


def aux_layers(target: Target, requested: Sequence[int] | None) -> tuple[int, ...]:
    """Planes that the head fuses, ascending; the engines' default (2, L // 2, L - 3) when none are requested.

    Raises:
        Refused: the layers are fewer than two, or not distinct, ascending and inside 1 .. L - 1; or they begin with 1
            over a target for which SGLang cannot be told so.
    """
    depth = target.num_layers
    layers = tuple(requested) if requested is not None else (2, depth // 2, depth - 3)
    ascending = all(a < b for a, b in zip(layers, layers[1:], strict=False))
    if not layers or not ascending or layers[0] < 1 or layers[-1] > depth - 1:
        origin = "target.aux_layers" if requested is not None else f"the default for {depth} layers,"
        raise Refused(
            f"{origin} {list(layers)} must be distinct, ascending and inside 1..{depth - 1}; "
            "set target.aux_layers, for example target.aux_layers=[1,2]"
        )
    if len(layers) == 1:  # SGLang applies fc by the width of what comes in, and one plane is as wide as a feature
        raise Refused(
            f"target.aux_layers {list(layers)} must be two or more: SGLang skips the fusion of a single plane"
        )
    if layers[0] == 1 and remarks_on(target.config.model_type).sglang_shifts_from_1:
        raise Refused(
            f"target.aux_layers {list(layers)}: SGLang takes planes that begin with 1 for the next ones over "
            f"{target.config.model_type}; begin with 2 or later"
        )
    return layers
