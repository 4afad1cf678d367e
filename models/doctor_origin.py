"""What an export of ours says of itself in export.json, against what lies there now.

An engine serves an edited flag or another tensor without a word, and the acceptance length falls. The export knows
what it was when it was written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.artefact import differences, read_json, tensor_sha256
from models.doctor_config import Finding
from models.errors import Refused
from models.heads import HeadFiles, flat, parsed
from models.target import Target

ROPE = ("rope_theta", "rope_scaling", "rope_parameters")
UNREAD = ("bos_token_id", "eos_token_id", "transformers_version", "_name_or_path", "use_cache", "pad_token_id")
"""Keys that no engine reads of a head."""
READ_TOO = ("bias", "qkv_bias", "use_aux_norm", "logit_scale", "layer_types", "sliding_window", "eagle_config", *ROPE)
"""Keys that an engine reads though our exports have none of them."""


@dataclass(frozen=True)
class Record:
    """An export's own account.

    Attributes:
        tensors: sha256 by stored name.
        given, config: as in HeadFiles, of the config.json that was written; empty and None where it was not recorded.
        target: hashes of the target it was made for.
        target_type: its model_type.
    """

    tensors: dict[str, str]
    given: dict[str, Any]
    config: Any
    target: dict[str, str]
    target_type: str | None

    @classmethod
    def of(cls, directory: Path) -> Record | None:
        """Read export.json, if there is one.

        Raises:
            Refused: it is no record of an export.
        """
        path = directory / "export.json"
        if not path.exists():
            return None
        try:
            record = read_json(path)
            given = flat(record["config"], directory)[1] if "config" in record else {}
            return cls(
                tensors={name: told["sha256"] for name, told in record["tensors"].items()},
                given=given,
                config=parsed(given, directory) if given else None,
                target=dict(record["target"]),
                target_type=record.get("target_type"),
            )
        except (AttributeError, KeyError, TypeError, ValueError, Refused):
            raise Refused(f"{path} is no record of an export; export the head again") from None


def altered_tensors(head: HeadFiles, record: Record) -> list[str]:
    """Names of tensors that are no longer those that were exported."""
    told = {name: record.tensors.get(stored.name) for name, stored in sorted(head.tensors.items())}
    return [name for name, was in told.items() if was is not None and was != tensor_sha256(head.read(name))]


def judge_origin(head: HeadFiles, record: Record, altered: Sequence[str], target: Target | None) -> Iterator[Finding]:
    """What has changed since the export (`altered`: its tensors), and whether it is for this target."""
    for name in altered:
        yield Finding(name, "is not the tensor that was exported (export.json): served as it is")
    if record.given:
        yield from _edits(head, record)
    if target is None:
        return
    for key, what, wrong in (("weights_hash", "weights", True), ("config_hash", "configuration", False)):
        made_for, its = record.target.get(key), getattr(target, key)
        if made_for not in (None, its):
            said = f"the head was made for a target with other {what} ({made_for}, this one's {its})"
            yield Finding("export.json", said + (": fewer drafts are accepted" if wrong else ""), wrong=wrong)


def _edits(head: HeadFiles, record: Record) -> Iterator[Finding]:
    """Keys that are no longer as exported; another spelling of the same rotation is no edit."""
    was, now = dict(record.given), dict(head.given)
    if record.config.rope_parameters == head.config.rope_parameters:
        for key in ROPE:
            was.pop(key, None)
            now.pop(key, None)
    for key, before, after in differences(was, now):
        said = f"was {_shown(before)} when it was exported, is {_shown(after)}"
        wrong = not _harmless(key, before, after)
        yield Finding(key, said + (": not served as it was trained" if wrong else ""), wrong=wrong)


def _harmless(key: str, before: Any, after: Any) -> bool:
    """Whether engines do the same under both values."""
    if key in UNREAD or not (before or after):
        return True
    if before is None:
        return key.split(".")[0] not in READ_TOO
    return key == "max_position_embeddings" and isinstance(after, int) and after > before


def _shown(value: Any) -> str:
    return "missing" if value is None else repr(value)
