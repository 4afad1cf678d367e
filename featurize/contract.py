"""What features are: the facts under which a trainer may use them, and how two sets of facts differ.

The contract travels in the manifest of a feature store. Everything in it is taken from contents (hashes
of configuration, weights, tokenizer), nothing from paths, so that a store can be moved and a target can
live elsewhere on another machine.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from featurize.config import FeaturizeConfig
from featurize.encoding import require_encoding
from models.artefact import file_sha256, fingerprint
from models.config import DraftConfig
from models.errors import Refused
from models.target import Target

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
)
"""Everything beside a target's weights that decides over its token ids and where its answers end."""

UNUSUAL = ("final_everywhere", "teacher_k", "draft_vocab_size", "draft_vocabulary")
"""What most stores do not keep."""


def tokenizer_fingerprint(directory: Path) -> str:
    """Fingerprint of the files that decide over token ids, template text and end-of-turn ids."""
    files = {name: file_sha256(directory / name) for name in TOKENIZER_FILES if (directory / name).is_file()}
    return fingerprint(files)


def require_planes(draft: DraftConfig, settings: FeaturizeConfig) -> None:
    """Check that features that are extracted so hold the planes that the run's head reads.

    Raises:
        Refused: it reads the final plane everywhere, which they do not keep.
    """
    if not draft.reads_final or settings.final_everywhere:
        return
    kept, mend = "featurize.final_everywhere=false keeps the final plane only where it teaches", ""
    if settings.teacher_k is not None:
        kept, mend = f"featurize.teacher_k={settings.teacher_k} keeps no final plane", "featurize.teacher_k=null "
    head = f"draft.algorithm={draft.algorithm} draft.use_aux_hidden_state={str(draft.use_aux_hidden_state).lower()}"
    raise Refused(
        f"{kept}, but this head ({head}) reads it at every position; set {mend}featurize.final_everywhere=true"
    )


def dtype_name(dtype: torch.dtype) -> str:
    """ "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, kw_only=True)
class FeatureContract:
    """Facts about the planes of a store.

    Attributes:
        target_config: hash of the target's configuration.
        target_weights: hash of a sample of its weights, which tells fine-tunes of one model apart.
        hidden_size, vocab_size: H and V of the target.
        dtype: the dtype the target ran in.
        aux_layers: planes in stored order; plane i is the residual stream after i decoder layers.
        encoding: how planes are stored; readers decode any of `featurize.encoding`.
        final: "post_norm", the final plane is taken after the target's final norm.
        final_everywhere: it is kept at every position instead of only where it teaches.
        tokenizer: fingerprint of tokenizer, chat template and end-of-turn ids.
        backend, backend_version: what computed the planes.
        quantization: how it ran the target: "none", or the method ("fp8", "awq", ...).
        teacher_k: likeliest draft tokens that are kept instead of the final plane; 0 where the plane is.
        draft_vocab_size, draft_vocabulary: with them, size and fingerprint of the draft vocabulary.
    """

    target_config: str
    target_weights: str
    hidden_size: int
    vocab_size: int
    dtype: str
    aux_layers: tuple[int, ...]
    encoding: str
    final: str
    tokenizer: str
    backend: str
    backend_version: str
    quantization: str = "none"
    final_everywhere: bool = False
    teacher_k: int = 0
    draft_vocab_size: int = 0
    draft_vocabulary: str = ""

    def to_json(self) -> dict[str, Any]:
        """The contract as a JSON object; what a store keeps beyond the usual is in it only where it is kept."""
        value = asdict(self) | {"aux_layers": list(self.aux_layers)}
        return {key: kept for key, kept in value.items() if kept or key not in UNUSUAL}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> FeatureContract:
        """The contract in a manifest.

        Raises:
            Refused: keys are missing or unknown: another version of this program wrote it.
        """
        try:
            return cls(**value | {"aux_layers": tuple(value["aux_layers"])})
        except (TypeError, KeyError) as error:
            raise Refused(
                f"the features were written by another version of this program ({error}); extract again"
            ) from None

    def require(self, target: Target, aux_layers: tuple[int, ...] | list[int]) -> None:
        """Check that these are features of `target`, of these layers.

        Raises:
            Refused: naming the first difference.
        """
        require_encoding(self.encoding, self.hidden_size)
        wanted = {
            "hidden_size": target.hidden_size,
            "vocab_size": target.vocab_size,
            "target_config": target.config_hash,
            "target_weights": target.weights_hash,
            "dtype": dtype_name(target.dtype),
            "aux_layers": tuple(aux_layers),
            "final": "post_norm",
            "tokenizer": tokenizer_fingerprint(Path(target.path)),
        }
        for name, value in wanted.items():
            if (found := getattr(self, name)) != value:
                raise Refused(
                    f"the features do not fit: {name} is {found} in the store and {value} in this run; "
                    "extract them again under another run name"
                )
