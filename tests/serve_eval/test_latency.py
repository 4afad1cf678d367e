"""The model gives back the machine that made its measurements, and says how far it is off where it does not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from serve_eval.latency import al_of, model_of, nonnegative
from serve_eval.methods import Method
from serve_eval.windows import Load, Place

POSITIONS = [0.8, 0.5, 0.3, 0.15]
V0, V1, V2, D0, D1 = 0.020, 0.0005, 1e-6, 0.002, 0.0001
T0, T1 = 0.010, 0.0002
PROMPTS = {f"{route}-{index}": length for route, length in (("short", 50), ("long", 800)) for index in range(16)}


def step(k: int, c: int, context: float, bend: float = 0.0) -> float:
    """Seconds of a step of a machine that the model describes, but for `bend` (quadratic in the batch)."""
    batch = c * (k + 1)
    return V0 + V1 * batch + V2 * c * context + k * (D0 + D1 * c) + bend * batch**2


def machine(methods: list[Method], concurrencies: list[int], bend: float = 0.0) -> dict[Place, dict[str, Any]]:
    """Windows of 16 requests of 101 tokens each, at exactly the machine's times."""
    windows = {}
    for method in methods:
        al = 1 + sum(POSITIONS[: method.k])
        for c in concurrencies:
            for route, prompt in (("short", 50), ("long", 800)):
                first = T0 + T1 * prompt
                whole = first + 100 * step(method.k, c, prompt + 50.5, bend) / al
                times = {"ttft_ms": 1e3 * first, "itl_ms": [1e3 * (whole - first)], "e2e_ms": 1e3 * whole}
                own = {
                    "failed": None,
                    "tokens": 101,
                    "tpot_ms": None,
                    "acceptance": None,
                    "text": "",
                    "token_ids": None,
                }
                accepted = [round(1000 * share) for share in POSITIONS[: method.k]]
                counts = {"drafts": 1000, "draft_tokens": 1000 * method.k, "accepted": sum(accepted)}
                windows[Place(method.name, Load(c), route)] = {
                    **{"method": method.name, "concurrency": c, "rate": None, "route": route, "repeat": 0},
                    **{"input_length": None, "queue": None, "gpu": None, "seconds": 16 / c * whole},
                    "outcomes": [{"id": f"{route}-{index}"} | times | own for index in range(16)],
                    "acceptance": counts | {"per_position": accepted} if method.k else None,
                }
    return windows


METHODS = [Method("none"), Method("eagle3-k2", "eagle3", 2), Method("eagle3-k4", "eagle3", 4)]


def predicted(model: dict[str, Any], k: int, c: int) -> Any:
    return next(row for row in model["predictions"] if (row["k"], row["concurrency"]) == (k, c))


def test_the_machines_own_costs_are_found_and_what_was_left_out_is_predicted_exactly() -> None:
    model = model_of(machine(METHODS, [1, 4, 16]), METHODS, PROMPTS)
    assert model is not None
    found = [model["step_ms"][name] / 1e3 for name in ("v0", "v1", "v2", "d0 eagle3", "d1 eagle3")]
    assert found == pytest.approx([V0, V1, V2, D0, D1], rel=1e-3)
    assert model["in_flight_share"] == pytest.approx(1.0)
    left_out = {(each["left_out"], each["method"]) for each in model["held_out"]}
    assert {("concurrency 4", "none"), ("concurrency 16", "eagle3-k4"), ("method eagle3-k2", "eagle3-k2")} <= left_out
    # of pooled routes the model sees the mean prompt only, so a pooled cell is not exact
    assert model["median_error"] < 0.02
    k4 = next(each for each in model["held_out"] if each["left_out"] == "method eagle3-k4")
    assert k4["error"] != pytest.approx(0, abs=1e-4), "its third and fourth position had to be guessed"


def test_k_and_concurrency_that_were_not_measured_are_predicted() -> None:
    model = model_of(machine(METHODS, [1, 4, 16]), METHODS, PROMPTS)
    truth = machine([Method("none"), Method("eagle3", "eagle3", 3)], [32])
    rates = {}
    for name in ("none", "eagle3"):
        windows = [window for place, window in truth.items() if place.method == name]
        rates[name] = 2 * 16 * 101 / sum(window["seconds"] for window in windows)
    told = predicted(model or {}, 3, 32)
    assert told["measured"] is False
    assert told["al"] == pytest.approx(1 + sum(POSITIONS[:3]))
    assert told["output_tokens_per_s"] == pytest.approx(rates["eagle3"], rel=0.03)
    assert told["speedup"] == pytest.approx(rates["eagle3"] / rates["none"], rel=0.03)
    assert predicted(model or {}, 2, 4)["measured"] is True


def test_the_best_k_falls_with_concurrency() -> None:
    model = model_of(machine(METHODS, [1, 4, 16]), METHODS, PROMPTS) or {}
    best = {
        c: max((row for row in model["predictions"] if row["concurrency"] == c), key=lambda row: row["speedup"])["k"]
        for c in (1, 32)
    }
    assert best[1] > best[32]


def test_a_machine_that_bends_shows_in_the_error_of_what_was_left_out() -> None:
    straight = model_of(machine(METHODS, [1, 4, 16]), METHODS, PROMPTS)
    bent = model_of(machine(METHODS, [1, 4, 16], bend=2e-5), METHODS, PROMPTS)
    assert straight is not None and bent is not None
    assert bent["largest_error"] > 0.1 > straight["largest_error"]


def test_two_concurrencies_or_unknown_acceptance_are_no_model() -> None:
    assert model_of(machine(METHODS, [1, 4]), METHODS, PROMPTS) is None
    windows = machine(METHODS, [1, 4, 16])
    for window in windows.values():
        window["acceptance"] = None
    assert model_of(windows, METHODS, PROMPTS) is None


def test_acceptance_beyond_the_measured_positions_falls_on_by_its_last_ratio() -> None:
    assert al_of(2, [0.8, 0.4, 0.1]) == pytest.approx(2.2)
    assert al_of(4, [0.8, 0.4]) == pytest.approx(1 + 0.8 + 0.4 + 0.2 + 0.1)
    assert al_of(2, [0.5]) == pytest.approx(1 + 0.5 + 0.25)
    assert (al_of(3, []), al_of(3, [0.5, 0.0])) == (1.0, 1.5)


def test_coefficients_are_never_negative_and_are_plain_least_squares_where_none_would_be() -> None:
    generator = np.random.default_rng(0)
    terms = generator.uniform(1, 2, (20, 3))
    wanted = np.array([0.5, 2.0, 0.0])
    assert nonnegative(terms, terms @ wanted) == pytest.approx(wanted, abs=1e-9)
    found = nonnegative(terms, terms @ np.array([1.0, -1.0, 2.0]))
    assert (found >= 0).all() and found[1] == 0
    for index in range(3):  # no step into the allowed region lowers the error
        nudged = found + np.eye(3)[index] * 1e-4
        value = terms @ np.array([1.0, -1.0, 2.0])
        assert ((terms @ nudged - value) ** 2).sum() >= ((terms @ found - value) ** 2).sum()


def test_what_is_left_out_is_not_seen_by_the_model_that_is_judged() -> None:
    windows = machine(METHODS, [1, 4, 16])
    for place, window in windows.items():
        if place.load.concurrency == 16:  # three times as slow as the others say
            window["seconds"] *= 3
            for request in window["outcomes"]:
                request |= {"ttft_ms": 3 * request["ttft_ms"], "e2e_ms": 3 * request["e2e_ms"]}
    model = model_of(windows, METHODS, PROMPTS) or {}
    errors = [each["error"] for each in model["held_out"] if each["left_out"] == "concurrency 16"]
    assert errors == pytest.approx([2.0] * 3, abs=0.1)


def test_clients_that_are_partly_idle_are_in_flight_for_their_share_only() -> None:
    windows = machine(METHODS, [1, 4, 16])
    idle = {place: record | {"seconds": 2 * record["seconds"]} for place, record in windows.items()}
    model = model_of(idle, METHODS, PROMPTS)
    assert model is not None
    assert model["in_flight_share"] == pytest.approx(0.5)
