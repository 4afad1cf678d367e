"""What is evaluated: an exported head, the target that it was made for, and prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from featurize.tokenised import load_renderer
from models.artefact import file_sha256
from models.checkpoint import describe, differing_target
from models.config import TargetConfig
from models.drafts import DraftHead
from models.errors import Refused
from models.export import load_export, weights_file
from models.target import Target, describe_target
from serve_eval.config import EvalConfig
from serve_eval.prompts import Prompt, contents
from serve_eval.reference import head_key
from serve_eval.workloads import load_workload


@dataclass(frozen=True)
class Subject:
    """What is evaluated.

    Attributes:
        export: the folder of the exported head.
        weights: SHA-256 of its tensors. exported: `serve_eval.reference.head_key` of it.
        prompts: all evaluation prompts.
    """

    target: Target
    export: Path
    head: DraftHead
    weights: str
    exported: str
    prompts: list[Prompt]

    @property
    def identity(self) -> list[Any]:
        """What all of it is made of, for fingerprints."""
        return [describe(self.target), self.exported, contents(self.prompts)]


def read_subject(export: Path, settings: EvalConfig, model: TargetConfig, arguments: Mapping[str, Any]) -> Subject:
    """Read the head, the target's description and the prompts.

    Args:
        arguments: for the chat template (data.chat_template_kwargs).

    Raises:
        Refused: the head is not exported, or was made for another target; no usable prompts.
    """
    target = describe_target(model)
    head, made_for = load_export(export)
    if told := differing_target(made_for, describe(target)):
        raise Refused(f"{export} was made for another target than {model.path} ({told}); export it again")
    weights = file_sha256(weights_file(export))
    prompts = load_workload(settings, load_renderer(target, model), arguments)
    return Subject(target, export, head, weights, head_key(export, weights), prompts)
