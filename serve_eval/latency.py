"""A model of a server's step, fitted to the sweep, that predicts throughput for k and concurrencies not measured.

A step verifies k + 1 tokens of each of L requests in flight, whose context the attention reads, after k drafts:

    step = v0 + v1 L (k + 1) + v2 L context + k (d0 + d1 L)

v0 is what a step costs however small it is (reading the weights, launching kernels), v1 the cost of a token in the
batch, v2 of a token of context; each kind of drafter has its own d0 and d1. The coefficients are not negative, and fit
relative errors. From a cell the step is AL x time per token after the first, and L what Little's law says
(request-seconds over seconds). An answer takes t0 + t1 prompt + t2 L for its first token and (tokens - 1) / AL steps.
AL of k drafts is 1 + a_1 + .. + a_k from the longest k that was measured; beyond it, acceptance falls as it last did.

The model is straight lines where a machine bends (a batch that fills it, a cache that overflows), so it is judged by
what it says of cells that it has not seen: each concurrency, and each k where a method has several, is left out once.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from serve_eval.config import POOLED
from serve_eval.figures import figures, grouped
from serve_eval.methods import PLAIN, Method
from serve_eval.windows import Place, Record

LARGEST_K = 8
"""Up to which throughput is predicted."""
FEWEST = 3
"""Concurrencies without which there is nothing to be left out."""


@dataclass(frozen=True)
class Point:
    """A measured cell in the model's terms; seconds, tokens, requests."""

    method: str
    kind: str
    k: int
    concurrency: int
    flight: float
    prompt: float
    answer: float
    al: float
    positions: tuple[float, ...]
    step: float
    first: float
    rate: float


def point_of(group: Sequence[Record], method: Method, concurrency: int, prompts: Mapping[str, int]) -> Point | None:
    """A cell in the model's terms; None where its times, tokens or acceptance are not known.

    Args:
        prompts: id -> number of tokens.
    """
    told = figures(group)
    al = 1.0 if method.method == PLAIN else told["al"]
    good = [each for window in group for each in window["outcomes"] if each["failed"] is None]
    if al is None or told["output_tokens_per_s"] is None or any(each["e2e_ms"] is None for each in good):
        return None
    decoding = sum(each["e2e_ms"] - each["ttft_ms"] for each in good) / 1e3
    later = sum(each["tokens"] - 1 for each in good)
    if later < 1 or decoding <= 0:
        return None
    return Point(
        method=method.name,
        kind=method.method,
        k=method.k,
        concurrency=concurrency,
        flight=sum(each["e2e_ms"] for each in good) / 1e3 / told["seconds"],
        prompt=sum(prompts[each["id"]] for each in good) / len(good),
        answer=sum(each["tokens"] for each in good) / len(good),
        al=al,
        positions=tuple(told["per_position"] or ()),
        step=al * decoding / later,
        first=sum(each["ttft_ms"] for each in good) / 1e3 / len(good),
        rate=told["output_tokens_per_s"],
    )


def nonnegative(terms: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Least squares with coefficients of 0 or more: the plain solution on the best set of terms that has none below."""
    best, found = np.inf, np.zeros(terms.shape[1])
    columns = range(terms.shape[1])
    sets = (itertools.combinations(columns, size) for size in range(1, len(columns) + 1))
    for chosen in itertools.chain.from_iterable(sets):
        part = terms[:, chosen]
        solution = np.linalg.lstsq(part, values, rcond=None)[0]
        error = float(((part @ solution - values) ** 2).sum())
        if solution.min() >= 0 and error < best - 1e-12:
            best, found = error, np.zeros(terms.shape[1])
            found[list(chosen)] = solution
    return found


@dataclass(frozen=True)
class Model:
    """The fitted coefficients (see the module), and the share of the clients that are in flight on average."""

    kinds: tuple[str, ...]
    step: tuple[float, ...]
    first: tuple[float, ...]
    share: float

    def rate(self, kind: str, k: int, al: float, concurrency: float, prompt: float, answer: float) -> float:
        """Output tokens per second of so many clients."""
        flight = self.share * concurrency
        step = float(np.dot(_step_terms(self.kinds, kind, k, flight, prompt + answer / 2), self.step))
        first = float(np.dot(_first_terms(prompt, flight), self.first))
        return flight * answer / (first + (answer - 1) * step / al)


def _step_terms(kinds: Sequence[str], kind: str, k: int, flight: float, context: float) -> list[float]:
    drafting = [value * (kind == each) for each in kinds for value in (k, k * flight)]
    return [1.0, flight * (k + 1), flight * context, *drafting]


def _first_terms(prompt: float, flight: float) -> list[float]:
    return [1.0, prompt, flight]


def fit(points: Sequence[Point]) -> Model:
    """The model of some cells."""
    kinds = tuple(sorted({point.kind for point in points if point.k}))
    steps = [_step_terms(kinds, p.kind, p.k, p.flight, p.prompt + p.answer / 2) for p in points]
    firsts = [_first_terms(p.prompt, p.flight) for p in points]

    def relative(rows: list[list[float]], values: list[float]) -> tuple[float, ...]:
        seen = np.array(values)
        return tuple(float(each) for each in nonnegative(np.array(rows) / seen[:, None], np.ones(len(seen))))

    share = sum(point.flight / point.concurrency for point in points) / len(points)
    return Model(kinds, relative(steps, [p.step for p in points]), relative(firsts, [p.first for p in points]), share)


def al_of(k: int, positions: Sequence[float]) -> float:
    """AL of k drafts from acceptance by position; beyond the last, acceptance falls on by its last ratio."""
    shares = list(positions[:k])
    ratio = shares[-1] / shares[-2] if len(shares) > 1 and shares[-2] > 0 else (shares[-1] if shares else 0.0)
    while len(shares) < k:
        shares.append(shares[-1] * ratio if shares else 0.0)
    return 1 + sum(shares)


def positions_of(pooled: Sequence[Point]) -> dict[str, list[float]]:
    """Kind of drafter -> acceptance by position, of its longest k, the mean over concurrencies."""
    found = {}
    for kind in sorted({point.kind for point in pooled if point.positions}):
        longest = max(len(point.positions) for point in pooled if point.kind == kind)
        rows = [p.positions for p in pooled if p.kind == kind and len(p.positions) == longest]
        found[kind] = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
    return found


def _held_out(cells: Sequence[Point], pooled: Sequence[Point]) -> list[dict[str, Any]]:
    """What models of the other cells say of each concurrency's, and of each k's where a method has several.

    Nothing of the cells that are left out is used, their AL neither.
    """
    told = []
    ways: list[Any] = [("concurrency", each) for each in sorted({point.concurrency for point in pooled})]
    several = {p.kind for p in pooled if len({q.k for q in pooled if q.kind == p.kind}) > 1}
    ways += [("method", each) for each in dict.fromkeys(p.method for p in pooled if p.kind in several)]
    for key, value in ways:
        kept = [point for point in cells if getattr(point, key) != value]
        if not kept or {p.kind for p in kept} != {p.kind for p in cells}:
            continue
        model, shares = fit(kept), positions_of([point for point in pooled if getattr(point, key) != value])
        for point in (each for each in pooled if getattr(each, key) == value):
            al = al_of(point.k, shares.get(point.kind, ()))
            said = model.rate(point.kind, point.k, al, point.concurrency, point.prompt, point.answer)
            told.append(
                {
                    "left_out": f"{key} {value}",
                    "method": point.method,
                    "concurrency": point.concurrency,
                    "measured": round(point.rate, 3),
                    "predicted": round(said, 3),
                    "error": round(said / point.rate - 1, 4),
                }
            )
    return told


def model_of(
    windows: Mapping[Place, Record], methods: Sequence[Method], prompts: Mapping[str, int]
) -> dict[str, Any] | None:
    """The model, its errors and its predictions, as they stand in summary.json; None of too few concurrencies.

    Args:
        prompts: id -> number of tokens.
    """
    groups = grouped(windows)
    by_name = {each.name: each for each in methods}
    cells: list[Point] = []
    pooled: list[Point] = []
    for (name, load, route), group in groups.items():
        if load.concurrency is None:
            continue
        point = point_of(group, by_name[name], load.concurrency, prompts)
        if point is not None:
            (pooled if route == POOLED else cells).append(point)
    if len({point.concurrency for point in pooled}) < FEWEST or not any(point.k for point in pooled):
        return None
    model = fit(cells)
    held_out = _held_out(cells, pooled)
    errors = sorted(abs(each["error"]) for each in held_out)
    prompt, answer = (sum(getattr(p, key) for p in pooled) / len(pooled) for key in ("prompt", "answer"))
    clients = sorted({point.concurrency for point in pooled})
    predictions = []
    for c in [*clients, 2 * clients[-1]]:
        alone = model.rate(PLAIN, 0, 1.0, c, prompt, answer)
        for kind, shares in positions_of(pooled).items():
            for k in range(1, LARGEST_K + 1):
                al = al_of(k, shares)
                rate = model.rate(kind, k, al, c, prompt, answer)
                predictions.append(
                    {
                        "method": kind,
                        "k": k,
                        "concurrency": c,
                        "al": round(al, 4),
                        "output_tokens_per_s": round(rate, 3),
                        "speedup": round(rate / alone, 4),
                        "measured": any(p.kind == kind and p.k == k and p.concurrency == c for p in pooled),
                    }
                )
    names = ("v0", "v1", "v2", *(f"{name} {kind}" for kind in model.kinds for name in ("d0", "d1")))
    return {
        "step_ms": {name: round(1e3 * value, 6) for name, value in zip(names, model.step, strict=True)},
        "first_ms": {n: round(1e3 * value, 6) for n, value in zip(("t0", "t1", "t2"), model.first, strict=True)},
        "in_flight_share": round(model.share, 4),
        "held_out": held_out,
        "median_error": round(float(np.median(errors)), 4) if errors else None,
        "largest_error": errors[-1] if errors else None,
        "predictions": predictions,
    }
