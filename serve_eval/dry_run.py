"""What `python -m serve_eval` would measure of a run: told without loading weights and without starting a server."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from featurize.tokenised import load_renderer
from models.config import EngineConfig, TargetConfig
from models.servers import command, own_environment, show
from models.target import describe_target
from serve_eval.config import EvalConfig
from serve_eval.prompts import by_route, load_prompts
from serve_eval.servers import describe_machine, speculation
from serve_eval.sweep import METHODS, check_possible, choose_prompts

PORT = 8000
"""In the place of the port that is found when a server starts."""


def tell(run: Path, settings: EvalConfig, engine: EngineConfig, model: TargetConfig) -> None:
    """Print prompts, the reference decoder's work, the grid of the sweep, and the servers' commands.

    Args:
        run: the run's folder.

    Raises:
        Refused: no usable prompts, or a sweep that is not possible with them.
    """
    target = describe_target(model, weights=False)
    prompts = load_prompts(settings.prompts, load_renderer(target, model))
    routes = {route: len(group) for route, group in by_route(prompts).items()}
    export = run / "export"
    print(f"head: {export}" + ("" if (export / "export.json").exists() else " (not there yet)"))
    print(f"prompts: {len(prompts)}, " + ", ".join(f"{route} {count}" for route, count in routes.items()))
    print(
        f"reference decoder: {settings.drafting.method}, k = {settings.k}, up to "
        f"{len(prompts) * settings.max_new_tokens:,} tokens in batches of {settings.batch_size} on {settings.device}"
    )
    if engine.kind != "none":
        sweep = replace(settings, max_new_tokens=settings.served_new_tokens or settings.max_new_tokens)
        check_possible(engine, sweep, prompts)
        requests = sum(len(group) for c in sweep.concurrencies for group in choose_prompts(prompts, sweep, c).values())
        cells = len(sweep.concurrencies) * len(routes)
        print(
            f"sweep: {len(METHODS)} servers, one after the other; of each {cells} cells (concurrencies "
            f"{', '.join(map(str, sweep.concurrencies))}), {requests:,} requests, up to "
            f"{requests * sweep.max_new_tokens:,} tokens"
        )
        k = settings.served_k or settings.k  # without served_k, the reference decoder's figures choose it
        for method in METHODS:
            words = command(engine, target.path, PORT, speculation(method, export, k))
            print(f"server {method}: {show(words, own_environment(engine))}")
    print(f"machine: {describe_machine()}")
    print(f"writes: {run / 'eval'}")
