"""Ctrl-C while a command is still being imported, which takes seconds: one line and exit code 130, as later on."""

from __future__ import annotations

import sys
from types import TracebackType

from conf.help import running

SAID = "interrupted; run it again to go on"


def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """An exception hook: Ctrl-C in a line, all else as ever."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    print(f"{running()}: {SAID}", file=sys.stderr)
    sys.exit(130)


sys.excepthook = tell
