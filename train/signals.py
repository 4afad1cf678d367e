"""Preemption: SIGTERM and SIGUSR1 ask the loop to save and leave at the next optimizer step."""

from __future__ import annotations

import signal
from types import FrameType

PREEMPTED = 75
"""Exit code of a run that was asked to stop and saved (EX_TEMPFAIL): start it again to go on."""


class StopRequest:
    """Remembers that a signal came. `asked` is this process's own view; the loop makes all agree."""

    def __init__(self) -> None:
        self.asked = False
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
