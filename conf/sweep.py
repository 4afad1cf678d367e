"""--multirun: one command line with lists of values becomes runs of single values, each with a name of its own.

A sweep varies how a head is trained, so all its runs share the features of the run that is named on the command line;
what decides the features cannot be swept. A run is called after that one and its own values, so that a sweep that is
started again, with more values say, goes on with the runs that it has.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

import conf
from conf import mistakes
from models.errors import Refused

SWEPT = ("draft", "objective", "optim", "trainer")
"""Sections, and groups, that training alone reads."""


@dataclass(frozen=True)
class Job:
    """One run of a sweep: its name, and the overrides that describe it (its name is among them)."""

    name: str
    overrides: list[str]


@dataclass(frozen=True)
class Sweep:
    """A sweep.

    Attributes:
        base: the run that is named on the command line, which has the features.
        fixed: its overrides, those without several values.
        jobs: the runs of the sweep.
    """

    base: conf.Run
    fixed: list[str]
    jobs: list[Job]


def expand(overrides: list[str]) -> Sweep:
    """The sweep that a command line with lists of values asks for.

    Raises:
        Refused: nothing is swept, something is that decides the features, two runs would have the same name, or a
            combination is no valid configuration.
    """
    try:
        parsed = OverridesParser.create().parse_overrides(overrides)
    except HydraException as error:
        raise Refused(f"configuration: {mistakes.told(error, [])}") from None
    swept = [override for override in parsed if override.is_sweep_override()]
    fixed = [text for text, override in zip(overrides, parsed, strict=True) if not override.is_sweep_override()]
    if not swept:
        raise Refused("--multirun wants at least one key with several values: optim.lr=1e-3,3e-4")
    choices = []
    for override in swept:
        key = override.get_key_element()
        if key.split(".")[0] not in SWEPT:
            raise Refused(f"--multirun over {key}: the runs of a sweep share features and differ in {', '.join(SWEPT)}")
        if not override.is_discrete_sweep():
            raise Refused(f"--multirun over {key}: list the values, {key}=1e-3,3e-4")
        choices.append([(key, value) for value in override.sweep_string_iterator()])
    base = conf.load(fixed)
    jobs = []
    for combination in itertools.product(*choices):
        told = "".join(f"-{key.split('.')[-1]}-{value}" for key, value in combination)
        name = base.name + re.sub(r"[^\w.+-]", "_", told)
        values = [f"{key}={value}" for key, value in combination]
        jobs.append(Job(name, [*fixed, *values, f"name={name}"]))
        conf.load(jobs[-1].overrides)
    if len({job.name for job in jobs}) < len(jobs):
        raise Refused(f"--multirun: two runs would be called alike: {', '.join(sorted(job.name for job in jobs))}")
    return Sweep(base, fixed, jobs)
