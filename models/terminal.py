"""Where commands print their tables: on a terminal as wide as it is, in a log or a pipe so wide that nothing is cut."""

from __future__ import annotations

import sys

from rich.console import Console

LOG_WIDTH = 120


def tables() -> Console:
    """A console on standard output. Names of runs, routes and servers are no markup, whatever brackets they have."""
    width = None if sys.stdout.isatty() else LOG_WIDTH
    return Console(width=width, markup=False, emoji=False, highlight=False)
