"""`python -m serve_eval.compare A B`: is B worse than A, on any route, and how sure is that?

A and B are eval folders of two runs (or a file in them): another head, another k, another version of the engine. For
every method, load and route that both have, three ratios B / A are told, each with its range: the speedup over the same
run's server alone; AL, where the servers told it per request; and output tokens per second. They come from cells.jsonl:
of three repeats on, from the windows of each side (Welch's t, since repeats of two sittings are no pairs), and else, as
AL always, from the prompts that both sides answered, paired (`intervals.py`).

Speedup and AL are judged. Tokens per second are shown only: between two sittings a machine drifts by more than heads
differ, and what it does to the server alone is no fault of a head. Where the server alone changed, that is said.

Many ratios are looked at, so the ranges that are judged hold together: each is as wide as 95 % for all of them asks for
(Bonferroni). A regression is a ratio whose whole range lies below 1; with one, the exit code is 1.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from models.artefact import read_json
from models.errors import Refused
from models.terminal import tables
from serve_eval.config import POOLED
from serve_eval.figures import figures, grouped
from serve_eval.intervals import CONFIDENCE, ENOUGH_REPEATS, by_repeat, speeds, t_quantile
from serve_eval.methods import PLAIN
from serve_eval.policy import read_records, windows_of
from serve_eval.windows import Load, Place, Record, acceptance_of, place_of

Cell = tuple[str, Load, str]
"""Method, load, route."""

Logs = tuple[dict[int, float], dict[tuple[str, str], float]]
"""Logarithms of a figure by repeat, and by (route, prompt)."""


@dataclass(frozen=True)
class Ratio:
    """B over A of one figure of one cell.

    Attributes:
        what: "tokens/s", "speedup" or "AL".
        log, error, degrees: of the mean log ratio; None for an error where there are too few pairs.
        judged: whether it may be a regression.
    """

    what: str
    cell: Cell
    log: float
    error: float | None
    degrees: float
    judged: bool

    def within(self, confidence: float) -> tuple[float, float] | None:
        """The ratio's range."""
        if self.error is None:
            return None
        half = t_quantile(max(1, math.floor(self.degrees)), confidence) * self.error
        return math.exp(self.log - half), math.exp(self.log + half)


def _mean(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean, and its squared standard error; None of one value."""
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, None
    return mean, sum((each - mean) ** 2 for each in values) / (len(values) - 1) / len(values)


def paired(before: Mapping[Any, float], after: Mapping[Any, float]) -> tuple[float, float | None, float] | None:
    """(mean difference, its standard error, degrees of freedom) over what both have; None when that is nothing."""
    both = [after[key] - before[key] for key in before if key in after]
    if not both:
        return None
    mean, squared = _mean(both)
    return mean, None if squared is None else math.sqrt(squared), len(both) - 1


def welch(before: Sequence[float], after: Sequence[float]) -> tuple[float, float, float]:
    """(difference of the means, its standard error, degrees of freedom) of two samples of two values or more."""
    (a, a_squared), (b, b_squared) = _mean(before), _mean(after)
    assert a_squared is not None and b_squared is not None
    total = a_squared + b_squared
    parts = a_squared**2 / (len(before) - 1) + b_squared**2 / (len(after) - 1)
    return b - a, math.sqrt(total), total**2 / parts if parts else len(before) + len(after) - 2


@dataclass(frozen=True)
class Sweep:
    """One side: its summary, and the windows that the summary was made from, by cell."""

    folder: Path
    summary: Mapping[str, Any]
    groups: Mapping[Cell, list[Record]]

    def rates(self, cell: Cell) -> Logs:
        """Tokens per second."""
        return by_repeat(self.groups[cell]), speeds(self.groups[cell])

    def speedups(self, cell: Cell) -> Logs | None:
        """The gain over the server alone; None of the server alone."""
        method, load, route = cell
        if method == PLAIN or (PLAIN, load, route) not in self.groups:
            return None
        base, ours = self.rates((PLAIN, load, route)), self.rates(cell)
        repeats = {key: ours[0][key] - value for key, value in base[0].items() if key in ours[0]}
        return repeats, {key: ours[1][key] - value for key, value in base[1].items() if key in ours[1]}

    def als(self, cell: Cell) -> dict[Any, float]:
        """(route, prompt) -> mean logarithm of its requests' own AL."""
        found: dict[Any, list[float]] = {}
        for window in self.groups[cell]:
            for request in window["outcomes"]:
                if request["failed"] is None and request.get("acceptance") is not None:
                    if (al := acceptance_of(request["acceptance"]).al) is not None:
                        found.setdefault((window["route"], request["id"]), []).append(math.log(al))
        return {key: sum(values) / len(values) for key, values in found.items()}


def read_sweep(path: Path) -> Sweep:
    """The sweep in an eval folder, or in a run's folder, or that a file of it belongs to.

    Raises:
        Refused: there is none, or windows of the summary are missing.
    """
    folder = path.parent if path.is_file() else path
    if not (folder / "summary.json").exists() and (folder / "eval/summary.json").exists():
        folder = folder / "eval"
    if not (folder / "summary.json").exists():
        raise Refused(f"{path} is no evaluation: it has no summary.json; give it runs/<name>/eval")
    summary = read_json(folder / "summary.json")
    served = summary.get("served")
    if not served:
        raise Refused(f"{folder} measured no server, so there is nothing to compare")
    cells = [*served["cells"], *served.get("open_loop", [])]
    durations = {
        (cell["method"], Load(cell.get("concurrency"), cell.get("rate")), cell["route"]): set(
            cell.get("window_seconds", [cell["seconds"]])
        )
        for cell in cells
    }
    windows: dict[Place, Record] = {}
    for record in read_records(windows_of(folder, summary)):
        place = place_of(record)
        if round(record["seconds"], 6) in durations.get(place[:3], ()):
            windows[place] = {"input_length": None} | record
    groups = grouped(windows)
    if missing := [cell for cell in durations if cell not in groups]:
        method, load, route = missing[0]
        raise Refused(f"{folder}/cells.jsonl holds no window of {method} at {load} on {route}; run serve_eval again")
    return Sweep(folder, summary, groups)


def change(before: Logs, after: Logs) -> tuple[float, float | None, float] | None:
    """(mean log ratio, its standard error, degrees of freedom), from repeats where there are enough, else prompts."""
    if min(len(before[0]), len(after[0])) >= ENOUGH_REPEATS:
        return welch(list(before[0].values()), list(after[0].values()))
    return paired(before[1], after[1])


def ratios(a: Sweep, b: Sweep) -> list[Ratio]:
    """Every ratio of the cells that both sides have.

    Raises:
        Refused: they have none in common.
    """
    cells = [cell for cell in a.groups if cell in b.groups]
    if not any(cell[0] != PLAIN for cell in cells):
        raise Refused(f"{a.folder} and {b.folder} have no method, load and route in common")
    found: list[Ratio] = []

    def add(what: str, cell: Cell, told: tuple[float, float | None, float] | None) -> None:
        if told is not None:
            found.append(Ratio(what, cell, *told, judged=what != "tokens/s"))

    for cell in cells:
        before, after = a.speedups(cell), b.speedups(cell)
        if before is not None and after is not None:
            add("speedup", cell, change(before, after))
            add("AL", cell, paired(a.als(cell), b.als(cell)))
        add("tokens/s", cell, change(a.rates(cell), b.rates(cell)))
    return found


def _figure(sweep: Sweep, ratio: Ratio) -> float | None:
    method, load, route = ratio.cell
    told = figures(sweep.groups[ratio.cell])
    if ratio.what == "AL":
        return told["al"]
    rate = told["output_tokens_per_s"]
    if ratio.what == "tokens/s" or rate is None:
        return rate
    base = figures(sweep.groups[PLAIN, load, route])["output_tokens_per_s"]
    return rate / base if base else None


def confidence_of(found: Sequence[Ratio]) -> float:
    """Of each range, so that those that are judged hold together."""
    judged = sum(each.judged and each.error is not None for each in found)
    return 1 - (1 - CONFIDENCE) / max(1, judged)


def verdict_of(ratio: Ratio, confidence: float) -> str:
    """ "worse", "better", or "" where the range holds 1 or is not known."""
    within = ratio.within(confidence)
    return "" if within is None or within[0] <= 1 <= within[1] else "worse" if within[1] < 1 else "better"


def table_of(a: Sweep, b: Sweep, found: Sequence[Ratio]) -> Table:
    """All ratios for a terminal."""
    confidence = confidence_of(found)
    table = Table(title="B against A", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("method", "load", "route", "figure", "A", "B", "B / A", "range", ""):
        left = name in ("method", "load", "route", "figure", "")
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    styles = {"worse": "red", "better": "green", "": ""}
    shown = [each for each in found if each.judged or each.cell[2] == POOLED]
    for each in sorted(shown, key=lambda each: (not each.judged, each.what, each.cell[2] != POOLED)):
        method, load, route = each.cell
        within, said = each.within(confidence), verdict_of(each, confidence) if each.judged else ""
        sides = ["n/a" if value is None else f"{value:.2f}" for value in (_figure(a, each), _figure(b, each))]
        table.add_row(
            *(
                method,
                str(load.concurrency or f"{load.rate:g}/s"),
                route,
                each.what,
                *sides,
                f"{math.exp(each.log):.3f}",
            ),
            "n/a" if within is None else "{:.3f}..{:.3f}".format(*within),
            Text(said, style=styles[said]),
        )
    table.caption = f"ranges of speedup and AL hold together at {CONFIDENCE:.0%} ({confidence:.2%} each)"
    return table


def changes_of_the_server(a: Sweep, b: Sweep, found: Sequence[Ratio]) -> list[str]:
    """What is not the same on both sides, beside what is compared."""
    told = [
        f"another {key}: {a.summary.get(key)} and {b.summary.get(key)}"
        for key in ("machine", "target")
        if a.summary.get(key) != b.summary.get(key)
    ]
    plain = [each for each in found if each.cell[0] == PLAIN and each.cell[2] == POOLED]
    for each in plain:
        if verdict_of(each, 1 - (1 - CONFIDENCE) / len(plain)):
            told.append(f"the server alone makes {math.exp(each.log):.2f} times the tokens/s at {each.cell[1]}")
    return told


def main(arguments: Sequence[str], console: Console | None = None) -> int:
    """Compare two sweeps; 1 when B is worse somewhere.

    Raises:
        Refused: not two of them, or one cannot be read.
    """
    from conf import help

    if help.asks_for_help(arguments):
        help.tell()
    if len(arguments) != 2:
        raise Refused("give it two evaluations: python -m serve_eval.compare runs/a/eval runs/b/eval")
    a, b = (read_sweep(Path(argument)) for argument in arguments)
    found = ratios(a, b)
    worse = [each for each in found if each.judged and verdict_of(each, confidence_of(found)) == "worse"]
    out = console or tables()
    out.print(f"A: {a.folder}\nB: {b.folder}")
    out.print(table_of(a, b, found))
    for line in changes_of_the_server(a, b, found):
        out.print(f"note: {line}", style="yellow")
    if not any(each.judged and each.error is not None for each in found):
        out.print("too few prompts and repeats in common to judge anything", style="yellow")
    elif not worse:
        out.print("no regression")
    for each in worse:
        method, load, route = each.cell
        out.print(f"regression: {each.what} of {method} at {load} on {route}: {math.exp(each.log):.3f}", style="red")
    return 1 if worse else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except Refused as error:
        print(f"compare: {error}", file=sys.stderr)
        sys.exit(2)
