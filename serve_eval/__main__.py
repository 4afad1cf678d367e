"""`python -m serve_eval`: what a head is worth: acceptance in process, then throughput against the same server."""

from __future__ import annotations

from dataclasses import asdict, replace
from datetime import date
from typing import Any

from conf import Run, stage


def main(run: Run) -> bool:
    """Measure in process, then on a server; leave summary.json, report.html and a table on the terminal."""
    from featurize.tokenised import load_renderer
    from models.artefact import file_sha256, fingerprint, read_json, write_json
    from models.card import method_of_head
    from models.checkpoint import describe, differing_target
    from models.drafts import kind
    from models.errors import Refused
    from models.export import load_export, refresh_card, weights_file
    from models.target import describe_target
    from serve_eval.beside import read_others
    from serve_eval.reference import Measurement, describe_draft_model, disagreements, head_key
    from serve_eval.report import render_table, write_report
    from serve_eval.servers import describe_machine
    from serve_eval.sweep import check_possible, check_served_k, failures, run_sweep
    from serve_eval.workloads import load_workload

    target = describe_target(run.target)
    export, directory = run.directory / "export", run.directory / "eval"
    head, made_for = load_export(export)
    if told := differing_target(made_for, describe(target)):
        raise Refused(f"{export} was made for another target than {run.target.path} ({told}); export it again")
    prompts = load_workload(run.eval, load_renderer(target, run.target))
    weights = file_sha256(weights_file(export))
    exported = head_key(export, weights)
    drafter = describe_draft_model(run.eval.drafting, target)
    others = read_others(run.directory.parent, target, run.eval, drafter, prompts)
    settings = asdict(run.eval)  # contents count, not where they lie
    settings |= {"prompts": None, "datasets": None, "compare_with": others}
    settings["drafting"]["model"] = describe(drafter) if drafter is not None else None
    asked = [settings, asdict(run.engine) | {"python": None}, describe_machine()]
    key = fingerprint([describe(target), exported, [[p.id, p.route, list(p.ids)] for p in prompts], asked])
    path = directory / "summary.json"
    found = read_json(path) if path.exists() else {}
    if isinstance(found, dict) and found.get("key") == key and not failures(found):
        if not (directory / "report.html").exists():
            write_report(found, directory / "report.html")
        render_table(found)
        return False
    sweep = replace(run.eval, max_new_tokens=run.eval.served_new_tokens or run.eval.max_new_tokens)
    if run.engine.kind != "none":
        check_served_k(run.eval)
        check_possible(run.engine, sweep, prompts, export)

    measurement = Measurement(target, head, exported, prompts, run.eval, directory)
    measured = measurement.run()
    k = run.eval.served_k or measured["best_k"]
    summary: dict[str, Any] = {
        "key": key,
        "date": date.today().isoformat(),
        "target": run.target.path,
        "head": str(export),
        "kind": kind(head.config),
        "native": head.config.native,
        "weights": weights,
        "machine": describe_machine(),
        "k": run.eval.k,
        "reference": measured["reference"],
        "compared": others,
        "costs_ms": measured["costs_ms"],
        "best_k": measured["best_k"],
        "served": None,
        "lossless": {"reference": measured["lossless"]},
    }
    if run.engine.kind != "none":
        served = run_sweep(
            engine=run.engine,
            settings=sweep,
            target_path=target.path,
            head=export,
            k=k,
            prompts=prompts,
            directory=directory,
        )
        # The reference decoder answers greedily and to the natural stop; only the head's AL is to be held to its.
        alike = method_of_head(served) is not None and not sweep.sampling and not sweep.ignore_eos
        served["agreement"] = measurement.agreement(served, served["k"], sweep.max_new_tokens) if alike else {}
        served["warnings"] += disagreements(served["agreement"])
        told = served.pop("lossless")
        where = f"{run.engine.kind}_{'fp32' if run.engine.dtype == 'float32' else run.engine.dtype}"
        summary["lossless"][where] = told if told["prompts"] else None  # samples are not compared token by token
        summary["served"] = served
    write_json(path, summary)
    write_report(summary, directory / "report.html")
    refresh_card(run.directory, run.export, run.target)
    render_table(summary)
    print(f"summary: {path}\nreport: {directory / 'report.html'}")
    return True


def dry_run(run: Run) -> None:
    """Tell what `main` would do."""
    from serve_eval.dry_run import tell

    tell(run.directory, run.eval, run.engine, run.target, run.draft)


if __name__ == "__main__":
    stage("serve_eval", main, dry_run=dry_run)
