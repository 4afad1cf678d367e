"""`python -m serve_eval.apart experiment=demo eval.part=NAME`: one method on one engine, measured as a job of its own.

It is an evaluation without the reference decoder, in the part's folder; a second call measures what is missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

from models.artefact import fingerprint, read_json, write_json
from models.config import EngineConfig
from models.drafts import kind
from serve_eval.config import EvalConfig
from serve_eval.parts import OF_THE_WHOLE, Part
from serve_eval.report import write_report
from serve_eval.servers import describe_machine
from serve_eval.subject import Subject
from serve_eval.sweep import failures, in_server, lossless_in, run_sweep


def measure(
    part: Part, engine: EngineConfig, settings: EvalConfig, subject: Subject, directory: Path
) -> tuple[Mapping[str, Any], bool]:
    """Measure a part, unless that is done: its summary, and whether there was anything to do.

    Args:
        settings: of this part (`Part.settings`).
        directory: the part's folder.

    Raises:
        Refused: as `run_sweep`.
    """
    contents = {key: value for key, value in asdict(settings).items() if key not in OF_THE_WHOLE}
    contents |= {"prompts": None, "datasets": None}  # what they hold counts, not where they lie
    key = fingerprint([*subject.identity, contents, asdict(engine) | {"python": None}])
    path = directory / "summary.json"
    summary = read_json(path) if path.exists() else {}
    done = summary.get("key") == key and not failures(summary)
    if not done:
        served = run_sweep(
            engine=engine,
            settings=in_server(settings),
            target_path=subject.target.path,
            head=subject.export,
            k=settings.served_k or settings.k,  # parts_of has seen to it that this is no guess
            prompts=subject.prompts,
            directory=directory,
        )
        summary = {
            "key": key,
            "date": date.today().isoformat(),
            "target": part.made_by["target"]["path"],
            "head": str(subject.export),
            "kind": kind(subject.head.config),
            "native": subject.head.config.native,
            "weights": subject.weights,
            "machine": describe_machine(),
            "k": served["k"],
            "reference": None,
            "lossless": lossless_in(engine, served),
            "served": served,
        }
    write_json(path, summary | {"made_by": part.made_by})  # what is done is so for today's configuration, too
    write_report(summary, directory / "report.html")
    return summary, not done


if __name__ == "__main__":
    import conf
    from serve_eval.dry_run import tell
    from serve_eval.parts import folder, part_asked
    from serve_eval.report import render_table
    from serve_eval.subject import read_subject

    def main(run: conf.Run) -> None:
        """Measure the part that is asked for."""
        part = part_asked(conf.resolved(run))
        settings, directory = part.settings(run.eval), folder(run.directory / "eval", part)
        subject = read_subject(run.directory / "export", settings, run.target, run.data.chat_template_kwargs)
        with conf.only_one(run, f"part-{part.name}"):
            summary, worked = measure(part, run.engines[part.engine], settings, subject, directory)
        render_table(summary)
        print(f"part {part.name}: {directory / 'summary.json' if worked else 'nothing to do, it is complete'}")

    def dry_run(run: conf.Run) -> None:
        """Tell what `main` would do."""
        part = part_asked(conf.resolved(run))
        sweep = (run.engines[part.engine], part.settings(run.eval), part.name)
        tell(run.directory, run.eval, [sweep], run.target, run.draft, run.data.chat_template_kwargs)

    conf.stage("part", main, shared=True, dry_run=dry_run)
