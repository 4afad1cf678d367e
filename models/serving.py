"""What an engine needs to be told, or cannot do, for the targets of one family.

A head is the same for all of them; how its target is served is not. The card, the launcher and the doctor read it here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from models.artefact import read_json


@dataclass(frozen=True)
class Family:
    """A family of targets.

    Attributes:
        vllm_arguments: what vLLM must be started with to give a head its planes.
        unserved: by engine ("vLLM", "SGLang"), why it does not serve a head with such a target.
    """

    vllm_arguments: tuple[str, ...] = ()
    unserved: dict[str, str] = field(default_factory=dict)


GEMMA3 = Family(
    vllm_arguments=("--model-impl", "transformers"),
    unserved={
        "SGLang": "its Gemma 3 captures what single layers add, not the residual stream: the planes are not the head's"
    },
)
"""vLLM 0.32: its own Gemma3ForCausalLM is no SupportsEagle3, its Transformers backend is. SGLang 0.5.23:
Gemma3TextModel.forward captures `hidden_states` while it carries `residual` beside it."""

MIMO = Family(unserved={"vLLM": "its own MiMo gives a head the state before the final norm, and no planes"})
"""vLLM 0.32: MiMoModel.forward returns before its norm, which compute_logits applies, and collects no planes."""

FAMILIES = {"gemma3": GEMMA3, "gemma3_text": GEMMA3, "mimo": MIMO}
"""By the model_type of the target's config.json, or of the text model in it; others need nothing."""


def family(model_type: str | None) -> Family:
    """What is to be known of targets of this type."""
    return FAMILIES.get(model_type or "", Family())


def vllm_arguments(target_path: str) -> tuple[str, ...]:
    """What vLLM must be started with for the target in a local directory; nothing for one that is not there."""
    path = Path(target_path) / "config.json"
    config = read_json(path) if path.is_file() else None
    return family(config.get("model_type")).vllm_arguments if isinstance(config, dict) else ()
