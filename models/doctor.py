"""`python -m models.doctor DIR --target DIR`: would vLLM and SGLang serve this head as it was trained?

For exports of ours and for heads made by others. The engines load nearly anything, so the damage shows as a low
acceptance length only; here it is one line per finding, with what the engine would do. Without --target, what can
only be seen against it is left out. Exit code 0: sound; 1: at least one engine that was asked for would serve the head
wrongly or not at all; 2: there is nothing that could be examined.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from models.artefact import read_json, tensor_sha256
from models.config import TargetConfig
from models.doctor_config import BOTH, Finding, judge_config, judge_planes, judge_target, judge_tensors
from models.doctor_values import judge_values
from models.errors import Refused
from models.heads import HeadFiles
from models.target import Target, describe_target


def diagnose(directory: Path, target: Target | None = None, engine: str | None = None) -> list[Finding]:
    """Examine the head in a directory.

    Args:
        engine: leaves out what concerns another one only ("vLLM" or "SGLang").

    Raises:
        Refused: there is no head that can be read.
    """
    head = HeadFiles.open(directory)
    found = [
        *judge_config(head),
        *judge_planes(head, target.num_layers if target is not None else None),
        *judge_tensors(head),
        *(judge_target(head, target) if target is not None else ()),
        *_judge_origin(head, target),
        *judge_values(head, target),
    ]
    kept = [finding for finding in found if engine is None or engine in finding.engines]
    return sorted(kept, key=lambda finding: not finding.wrong)


def _judge_origin(head: HeadFiles, target: Target | None) -> Iterator[Finding]:
    """What an export of ours says of its tensors and of its target: weights, which no version of a library changes."""
    path = head.directory / "export.json"
    record = read_json(path) if path.exists() else {}
    tensors = record.get("tensors", {}) if isinstance(record, dict) else None
    if not isinstance(tensors, dict) or not all(isinstance(told, dict) for told in tensors.values()):
        raise Refused(f"{path} is no record of an export; export the head again")
    for name, stored in sorted(head.tensors.items()):
        told = tensors.get(stored.name)
        if told is not None and told.get("sha256") != tensor_sha256(head.read(name)):
            yield Finding(name, "is not the tensor that was exported (export.json): served as it is")
    made_for = record.get("target", {}).get("weights_hash")
    if target is not None and made_for not in (None, target.weights_hash):
        yield Finding("export.json", "the head was made for a target with other weights: fewer drafts are accepted")


def _line(text: str) -> str:
    """Without control characters: names and values come from files that anybody made."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def show(findings: list[Finding], console: Console) -> None:
    """Print findings, as a table on a terminal and as plain lines elsewhere."""
    rows = [
        ("wrong" if finding.wrong else "note", " and ".join(finding.engines), _line(finding.about), _line(finding.text))
        for finding in findings
    ]
    if not console.is_terminal:
        for row in rows:
            console.print(Text(": ".join(row)), soft_wrap=True)
        return
    table = Table("", "engine", "what", "finding")
    for severity, *rest in rows:
        table.add_row(Text(severity, "red" if severity == "wrong" else "dim"), *(Text(part) for part in rest))
    if rows:
        console.print(table)


def main() -> None:
    """The command line."""
    from transformers.utils import logging as transformers_logging

    from conf.help import described

    transformers_logging.set_verbosity_error()  # its remarks on a configuration are among the findings, or of no use
    parser = argparse.ArgumentParser("python -m models.doctor", **described("models.doctor"))
    parser.add_argument("directory", type=Path, help="a head: config.json and safetensors")
    parser.add_argument("--target", help="directory of the target model")
    parser.add_argument("--engine", choices=[engine.lower() for engine in BOTH], help="ask for one engine only")
    asked = parser.parse_args()
    engine = next((name for name in BOTH if name.lower() == asked.engine), None)
    console = Console(highlight=False)
    try:
        target = describe_target(TargetConfig(path=asked.target)) if asked.target else None
        findings = diagnose(asked.directory, target, engine)
    except Refused as error:
        print(f"doctor: {_line(' '.join(str(error).split()))}", file=sys.stderr)
        sys.exit(2)
    show(findings, console)
    wrong = sum(finding.wrong for finding in findings)
    notes, names = len(findings) - wrong, engine or " and ".join(BOTH)
    verdict = f"{wrong} wrong, would not be served as trained" if wrong else "sound"
    unseen = "" if target is not None else "; not compared with its target (--target)"
    console.print(Text(f"{asked.directory} in {names}: {verdict}; {notes} notes{unseen}"), soft_wrap=True)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
