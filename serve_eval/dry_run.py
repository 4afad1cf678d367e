"""What `python -m serve_eval` would measure of a run: told without loading weights and without starting a server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from featurize.tokenised import load_renderer
from models.card import holds_target
from models.config import DraftConfig, EngineConfig, TargetConfig
from models.engines import HEADS
from models.servers import command, local, own_environment, show
from models.target import describe_target
from serve_eval.config import EvalConfig, MethodConfig
from serve_eval.methods import Method, methods_of
from serve_eval.prompts import Prompt, by_route
from serve_eval.reference import check_tree, fp32_bytes, spoken
from serve_eval.servers import describe_machine, speculation
from serve_eval.sweep import check_possible, check_served_k, choose, in_server
from serve_eval.workloads import load_workload

PORT = 8000
"""In the place of the port that is found when a server starts."""


def tell(
    run: Path,
    settings: EvalConfig,
    sweeps: Sequence[tuple[EngineConfig, EvalConfig, str]],
    model: TargetConfig,
    draft: DraftConfig,
    arguments: Mapping[str, Any],
) -> None:
    """Print prompts, the reference decoder's work, the grid of the sweep, and the servers' commands.

    Common sets and the target's tokenizer are read, so what lies on the hub only is fetched.

    Args:
        run: the run's folder.
        sweeps: engine, settings and, where it is one of several, name of each part that is served.
        draft: says what the head will be, where it is not exported yet.
        arguments: for the chat template (data.chat_template_kwargs).

    Raises:
        Refused: no usable prompts, or a sweep that is not possible with them.
    """
    target = describe_target(model, weights=False)
    check_tree(settings.drafting, target)
    prompts = load_workload(settings, load_renderer(target, model), arguments)
    routes = {route: len(group) for route, group in by_route(prompts).items()}
    export = run / "export"
    exported = (export / "export.json").exists()
    print(f"head: {export}" + ("" if exported else " (not there yet)"))
    print(f"prompts: {len(prompts)}, " + ", ".join(f"{route} {count}" for route, count in routes.items()))
    if settings.reference:
        drafter = "the head, " if settings.drafting.method == "eagle3" else ""
        tokens, held = len(prompts) * settings.max_new_tokens, fp32_bytes(target) / 1e9
        print(
            f"reference decoder: {drafter}{spoken(settings.drafting, settings.k)}, up to {tokens:,} tokens in batches "
            f"of {settings.batch_size} on {settings.device}; target in fp32: {held:.1f} GB"
        )
    else:
        print("reference decoder: none (eval.reference=false); acceptance by the server's counters")
    if settings.compare_with:
        print(f"beside it: {', '.join(settings.compare_with)}, which must be evaluated before")
    of_head = None if exported else "eagle3" if draft.algorithm == "eagle3" else "mtp"
    inside = holds_target(export) if exported else draft.algorithm == "mtp_native"
    for engine, asked, part in sweeps:
        if engine.kind == "none":
            continue
        if part:
            print(f"part {part}:")
        else:
            check_served_k(asked)
        sweep = in_server(asked)
        check_possible(engine, sweep, prompts, export, of_head)
        methods = methods_of(sweep, export, sweep.served_k or sweep.k, of_head)
        _tell_grid(sweep, methods, prompts)
        for method in methods:
            print(f"server {method.name}: {_server(engine, target.path, method, export if inside else None)}")
        if (
            settings.reference
            and asked.served_k is None
            and any(each.k is None for each in asked.methods or [MethodConfig()])
        ):
            print(f"k of methods that name none: what the reference decoder finds best, {asked.k} in these lines")
    print(f"machine: {describe_machine()}")
    print(f"writes: {run / 'eval'}")


def _tell_grid(settings: EvalConfig, methods: Sequence[Method], prompts: list[Prompt]) -> None:
    chosen = choose(prompts, settings)
    windows = sum(map(len, chosen.values())) * settings.repeats
    requests = sum(len(group) for groups in chosen.values() for group in groups.values()) * settings.repeats
    together = settings.side_by_side or all(method.url for method in methods)
    routes = next(iter(chosen.values()))
    print(
        f"sweep: {len(methods)} servers, {'all at once' if together else 'one after the other'}; of each {windows} "
        f"windows ({'; '.join(map(str, chosen))}; on {', '.join(routes)}; repeats: {settings.repeats}), {requests:,} "
        f"requests, up to {requests * settings.max_new_tokens:,} tokens"
    )


def _server(engine: EngineConfig, target: str, method: Method, copy: Path | None) -> str:
    """Where a method's server is, or how it is started.

    Args:
        copy: the copy of the target that a head of this run is, or will be, exported in.
    """
    if method.url is not None:
        return method.url
    inside = copy is not None and method.method in HEADS
    model = None if inside or method.model is None else local(method.model)
    words = speculation(method.method, model, method.k, engine=engine.kind, lookup=method.lookup)
    return show(command(engine, str(copy) if inside else target, PORT, words), own_environment(engine))
