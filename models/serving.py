"""What an engine needs to be told, or cannot do, for the targets of one family.

A head is the same for all of them; how its target is served is not. The card, the export, the launcher and the doctor
read it here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from models.artefact import read_json


@dataclass(frozen=True)
class Remarks:
    """What is to be known of a family of targets.

    Attributes:
        vllm_arguments: what vLLM must be started with to give a head its planes.
        vllm_extracts: vLLM's method extract_hidden_states runs such a target.
        unserved: by engine ("vLLM", "SGLang"), why it does not serve a head with such a target.
        sglang_shifts_from_1: SGLang takes a head's layer ids for plane numbers, unless the first of them is 1.
    """

    vllm_arguments: tuple[str, ...] = ()
    vllm_extracts: bool = True
    unserved: dict[str, str] = field(default_factory=dict)
    sglang_shifts_from_1: bool = False


GEMMA3 = Remarks(
    vllm_arguments=("--model-impl", "transformers"),
    vllm_extracts=False,
    unserved={
        "SGLang": "its Gemma 3 captures what single layers add, not the residual stream: the planes are not the head's"
    },
)
"""vLLM 0.32: its own Gemma3ForCausalLM is no SupportsEagle3, its Transformers backend is, which
builds no ExtractHiddenStatesModel. SGLang 0.5.23:
Gemma3TextModel.forward captures `hidden_states` while it carries `residual` beside it."""

MIMO = Remarks(unserved={"vLLM": "its own MiMo gives a head the state before the final norm, and no planes"})
"""vLLM 0.32: MiMoModel.forward returns before its norm, which compute_logits applies, and collects no planes."""

DEEPSEEK = Remarks(sglang_shifts_from_1=True)
"""SGLang 0.5.23: DeepseekV2ForCausalLM.set_eagle3_layers_to_capture, of which V3, V3.2 and Kimi K2 are made, too."""

FAMILIES = {
    "gemma3": GEMMA3,
    "gemma3_text": GEMMA3,
    "mimo": MIMO,
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2"), DEEPSEEK),
}
"""By the model_type of the target's config.json, or of the text model in it; others need nothing."""


def remarks_on(model_type: str | None) -> Remarks:
    """What is to be known of targets of this type."""
    return FAMILIES.get(model_type or "", Remarks())


def vllm_arguments(target_path: str) -> tuple[str, ...]:
    """What vLLM must be started with for the target in a local directory; nothing for one that is not there."""
    path = Path(target_path) / "config.json"
    config = read_json(path) if path.is_file() else None
    return remarks_on(config.get("model_type")).vllm_arguments if isinstance(config, dict) else ()
