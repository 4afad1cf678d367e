"""How commands print: tables of which no log cuts anything, and what stands in files of others without escapes."""

from __future__ import annotations

import sys

from rich.console import Console

LOG_WIDTH = 120


def escaped(text: str) -> str:
    """A text whose control characters are written out, line ends too."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def printable(text: str) -> str:
    """A text in one line and without control characters: names and values come from files that anybody made."""
    return escaped(" ".join(text.split()))


def tables() -> Console:
    """A console on standard output, as wide as the terminal; in a log or a pipe as wide as LOG_WIDTH.

    Names of runs, routes and servers are no markup, whatever brackets they have.
    """
    width = None if sys.stdout.isatty() else LOG_WIDTH
    return Console(width=width, markup=False, emoji=False, highlight=False)
