"""`python -m models.doctor DIR --target DIR`: would vLLM and SGLang serve this head as it was trained?

For exports of ours and for heads made by others. The engines load nearly anything, so the damage shows as a low
acceptance length only; here it is one line per finding, with what the engine would do. Without --target, what can
only be seen against it is left out. Exit code 0: sound; 1: at least one engine that was asked for would serve the head
wrongly or not at all; 2: there is nothing that could be examined.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from models.config import TargetConfig
from models.doctor_config import BOTH, Finding, judge_config, judge_planes, judge_tensors
from models.doctor_origin import Record, altered_tensors, judge_origin
from models.doctor_target import judge_family, judge_rope, judge_target
from models.doctor_values import judge_values
from models.errors import Refused
from models.heads import HeadFiles
from models.target import Target, describe_target
from models.terminal import printable, tables


def diagnose(directory: Path, target: Target | None = None, engine: str | None = None) -> list[Finding]:
    """Examine the head in a directory.

    Args:
        engine: leaves out what concerns another one only ("vLLM" or "SGLang").

    Raises:
        Refused: there is no head that can be read.
    """
    head, record = HeadFiles.open(directory), Record.of(directory)
    altered = altered_tensors(head, record) if record is not None else []
    trained = record.config.rope_parameters if record is not None and record.config is not None else None
    model_type = target.config.model_type if target is not None else record.target_type if record is not None else None
    found = [
        *judge_config(head),
        *judge_planes(head, target.num_layers if target is not None else None, model_type),
        *judge_tensors(head),
        *(judge_target(head, target) if target is not None else ()),
        *judge_rope(head, trained, target),
        *judge_family(model_type),
        *(judge_origin(head, record, altered, target) if record is not None else ()),
        *judge_values(head, target, as_exported=record is not None and not altered),
    ]
    kept = [finding for finding in found if engine is None or engine in finding.engines]
    return sorted(kept, key=lambda finding: not finding.wrong)


def show(findings: list[Finding], console: Console) -> None:
    """Print findings, as a table on a terminal and as plain lines elsewhere."""
    rows = [
        (
            "wrong" if finding.wrong else "note",
            " and ".join(finding.engines),
            printable(finding.about),
            printable(finding.text),
        )
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

    from conf.help import Parser, described

    transformers_logging.set_verbosity_error()  # its remarks on a configuration are among the findings, or of no use
    parser = Parser("python -m models.doctor", **described("models.doctor"))
    parser.add_argument("directory", type=Path, help="a head: config.json and safetensors")
    parser.add_argument("--target", help="directory of the target model")
    parser.add_argument("--engine", choices=[engine.lower() for engine in BOTH], help="ask for one engine only")
    asked = parser.parse_args()
    engine = next((name for name in BOTH if name.lower() == asked.engine), None)
    console = tables()
    try:
        target = describe_target(TargetConfig(path=asked.target), "--target ") if asked.target else None
        findings = diagnose(asked.directory, target, engine)
    except (Refused, OSError) as error:
        print(f"doctor: {printable(str(error))}", file=sys.stderr)
        sys.exit(2)
    show(findings, console)
    wrong = sum(finding.wrong for finding in findings)
    notes, names = len(findings) - wrong, engine or " and ".join(BOTH)
    noted = f"{notes} note{'s' * (notes != 1)}"
    verdict = f"{wrong} wrong, would not be served as trained" if wrong else "sound"
    unseen = "" if target is not None else "; not compared with its target (--target)"
    console.print(Text(f"{asked.directory} in {names}: {verdict}; {noted}{unseen}"), soft_wrap=True)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
