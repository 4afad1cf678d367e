"""What nvidia-smi says about this machine's GPUs while something runs; nothing where there is no nvidia-smi."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator

COMMAND = ("--query-gpu=index,utilization.gpu,memory.used", "--format=csv,noheader,nounits", "--loop-ms=500")

Seen = dict[str, float]
"""`utilisation`: percent, the mean over samples and GPUs; `memory_mib`: the most, summed over GPUs."""


def parse(text: str) -> Seen | None:
    """The lines of COMMAND, pooled; None of none."""
    samples: dict[str, list[tuple[float, float]]] = {}
    for line in text.splitlines():
        with contextlib.suppress(ValueError):  # [N/A], or a line that was cut by the end
            index, busy, memory = (word.strip() for word in line.split(","))
            samples.setdefault(index, []).append((float(busy), float(memory)))
    if not samples:
        return None
    shares = [busy for seen in samples.values() for busy, _ in seen]
    most = sum(max(memory for _, memory in seen) for seen in samples.values())
    return {"utilisation": round(sum(shares) / len(shares), 1), "memory_mib": most}


@contextlib.contextmanager
def watched_gpus(wanted: bool = True) -> Iterator[list[Seen]]:
    """Sample every half second while the context lasts; the list holds what was seen once it has ended."""
    seen: list[Seen] = []
    program = shutil.which("nvidia-smi") if wanted else None
    if program is None:
        yield seen
        return
    with tempfile.TemporaryFile("w+") as output:  # a pipe that nobody empties would stop it when it is full
        process = subprocess.Popen([program, *COMMAND], stdout=output, stderr=subprocess.DEVNULL)
        try:
            yield seen
        finally:
            process.terminate()
            process.wait()
            output.seek(0)
            if (told := parse(output.read())) is not None:
                seen.append(told)
