"""`python -m serve_eval`: what a head is worth: acceptance in process, then throughput against the same server."""

from __future__ import annotations

from dataclasses import asdict
from datetime import date
from typing import Any

from conf import Run, resolved, stage


def main(run: Run) -> bool:
    """Measure in process, then on a server; leave summary.json, report.html and a table on the terminal.

    Of a run with several engines the servers are measured already, each in a part of its own, and are joined here.
    """
    from models.artefact import fingerprint, read_json, write_json
    from models.card import method_of_head
    from models.checkpoint import describe
    from models.drafts import kind
    from models.errors import Refused
    from models.export import refresh_card
    from serve_eval.beside import read_others
    from serve_eval.joined import join, read_parts
    from serve_eval.parts import parts_of
    from serve_eval.reference import NOT_MEASURED, Measurement, describe_draft_model, disagreements
    from serve_eval.report import render_table, write_report
    from serve_eval.servers import describe_machine
    from serve_eval.subject import read_subject
    from serve_eval.sweep import check_possible, check_served_k, failures, in_server, lossless_in, run_sweep

    directory = run.directory / "eval"
    subject = read_subject(run.directory / "export", run.eval, run.target, run.data.chat_template_kwargs)
    target, head, prompts = subject.target, subject.head, subject.prompts
    drafter = describe_draft_model(run.eval.drafting, target)
    others = read_others(run.directory.parent, target, run.eval, drafter, prompts)
    parts = read_parts(directory, parts_of(resolved(run)), subject.weights)
    settings = asdict(run.eval)  # contents count, not where they lie
    settings |= {"prompts": None, "datasets": None, "compare_with": others}
    settings["drafting"]["model"] = describe(drafter) if drafter is not None else None
    del settings["part"]
    engine = parts or asdict(run.engine) | {"python": None}
    key = fingerprint([*subject.identity, [settings, engine, describe_machine()]])
    path = directory / "summary.json"
    found = read_json(path) if path.exists() else {}
    if isinstance(found, dict) and found.get("key") == key and not failures(found):
        if not (directory / "report.html").exists():
            write_report(found, directory / "report.html")
        render_table(found)
        return False
    sweep = in_server(run.eval)
    if not parts and run.engine.kind == "none" and not run.eval.reference:
        raise Refused(
            "eval.reference=false engine.kind=none: nothing is left to measure; name a server, engine=vllm say"
        )
    if not parts and run.engine.kind != "none":
        check_served_k(run.eval)
        check_possible(run.engine, sweep, prompts, subject.export)

    measured, measurement = NOT_MEASURED, None
    if run.eval.reference:
        measurement = Measurement(target, head, subject.exported, prompts, run.eval, directory)
        measured = measurement.run()

    def agree(served: dict[str, Any]) -> None:
        """Hold a server's AL to the reference decoder's, which answers greedily and to the natural stop."""
        served["agreement"] = {}
        if measurement is None or method_of_head(served) is None or sweep.sampling or sweep.ignore_eos:
            return
        served["agreement"] = measurement.agreement(served, served["k"], sweep.max_new_tokens)
        served["warnings"] += disagreements(served["agreement"])

    summary: dict[str, Any] = {
        "key": key,
        "date": date.today().isoformat(),
        "target": run.target.path,
        "head": str(subject.export),
        "kind": kind(head.config),
        "native": head.config.native,
        "weights": subject.weights,
        "machine": describe_machine(),
        "k": run.eval.k,
        "reference": measured["reference"],
        "compared": others,
        "costs_ms": measured["costs_ms"],
        "best_k": measured["best_k"],
        "served": None,
        "lossless": {"reference": measured["lossless"]},
    }
    if parts:
        for part in parts.values():
            agree(part["served"])
        joined = join(parts)
        summary |= joined | {"lossless": summary["lossless"] | joined["lossless"]}
    elif run.engine.kind != "none":
        served = run_sweep(
            engine=run.engine,
            settings=sweep,
            target_path=target.path,
            head=subject.export,
            k=run.eval.served_k or measured["best_k"] or run.eval.k,
            prompts=prompts,
            directory=directory,
        )
        agree(served)
        summary["lossless"] |= lossless_in(run.engine, served)
        summary |= {"served": served} if run.eval.reference else {"served": served, "k": served["k"]}
    write_json(path, summary)
    write_report(summary, directory / "report.html")
    refresh_card(run.directory, run.export, run.target)
    render_table(summary)
    if summary["served"] is None and isinstance(found, dict) and found.get("served"):
        print("engine.kind=none: the summary has lost its served figures; the command that made them puts them back")
    print(f"summary: {path}\nreport: {directory / 'report.html'}")
    return True


def dry_run(run: Run) -> None:
    """Tell what `main` would do."""
    from serve_eval.dry_run import tell
    from serve_eval.parts import parts_of

    parts = parts_of(resolved(run)).values()
    sweeps = [(run.engines[part.engine], part.settings(run.eval), part.name) for part in parts]
    asked = sweeps or [(run.engine, run.eval, "")]
    tell(run.directory, run.eval, asked, run.target, run.draft, run.data.chat_template_kwargs)


if __name__ == "__main__":
    stage("serve_eval", main, dry_run=dry_run)
