"""The methods of a sweep, each with its k and its server: started by us, or running at a URL already."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from models.config import EngineConfig
from models.engines import HEADS
from models.errors import Refused
from models.servers import Server, attached, find_interpreter
from serve_eval.config import FOUND_AGAIN, HEAD, EvalConfig, MethodConfig
from serve_eval.servers import check_method, method_of, serving

PLAIN = "none"
"""The server alone."""


@dataclass(frozen=True)
class Method:
    """One way of serving.

    Attributes:
        name: in figures and logs: the method, with its k where the sweep has several k of it.
        k: drafted tokens per step; 0 without speculation.
        model: directory of what drafts (head or draft model), or None.
        lookup: of prompt lookup.
        url: of a server that runs already.
    """

    name: str
    method: str = PLAIN
    k: int = 0
    model: str | None = None
    lookup: tuple[int, int] = FOUND_AGAIN
    url: str | None = None


def methods_of(settings: EvalConfig, head: Path, k: int, of_head: str | None = None) -> list[Method]:
    """The sweep's methods, the server alone first.

    Args:
        head: the exported head. k: drafted tokens of methods that name none.
        of_head: the head's method, for a dry run before its export; None reads it there.

    Raises:
        Refused: a method is named twice with the same k.
    """
    asked = [
        replace(each, method=of_head or method_of(head)) if each.method == HEAD else each
        for each in settings.methods or [MethodConfig()]
    ]
    plain = next((each for each in asked if each.method == PLAIN), None)
    found = [Method(PLAIN, url=plain.url if plain else None)]
    often = Counter(each.method for each in asked)
    for each in (each for each in asked if each.method != PLAIN):
        drafted = each.k or k
        name = each.method if often[each.method] == 1 else f"{each.method}-k{drafted}"
        model = str(head) if each.method in HEADS else each.model
        found.append(Method(name, each.method, drafted, model, (each.lookup_min, each.lookup_max), each.url))
    names = Counter(each.name for each in found)
    if often[PLAIN] > 1 or (twice := [name for name, count in names.items() if count > 1]):
        raise Refused(f"eval.methods names {PLAIN if often[PLAIN] > 1 else twice[0]} twice")
    return found


def the_head(methods: Sequence[Method]) -> Method:
    """The method that the summary's first figures are about: the head, or else the first that speculates."""
    speculating = [each for each in methods if each.method != PLAIN]
    if not speculating:
        raise Refused("eval.methods names nothing but none: there is nothing to compare it with")
    return next((each for each in speculating if each.method in HEADS), speculating[0])


def check_methods(engine: EngineConfig, methods: Sequence[Method], of_head: str | None = None) -> None:
    """Raise Refused where it is known beforehand that a method's server cannot start; `of_head` as in `methods_of`."""
    the_head(methods)
    for each in methods:
        if each.url is not None:
            continue
        find_interpreter(engine)
        check_method(engine, each.method)
        if each.method in HEADS and each.model is not None:
            kind = of_head or method_of(Path(each.model))
            if kind != each.method:
                raise Refused(
                    f"eval.methods: {each.model} is a head of method {kind}, not {each.method}; method=head is either"
                )


@contextlib.contextmanager
def opened(engine: EngineConfig, target_path: str, method: Method, directory: Path) -> Iterator[Server]:
    """The method's server, healthy; what we start is stopped when the context is left.

    Raises:
        Refused: it does not start, or nothing healthy is at its URL.
    """
    if method.url is not None:
        yield attached(method.url, f"eval.methods: {method.name}: url", engine.kind)
        return
    with serving(
        engine,
        target_path,
        method=method.method,
        head=method.model,
        k=method.k,
        directory=directory,
        lookup=method.lookup,
        name=method.name,
    ) as server:
        yield server
