"""Evaluations of several jobs that Slurm has put on one node at the same moment."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from models.config import EngineConfig
from models.servers import get

EVALUATION = """
import sys
from pathlib import Path
from models.config import EngineConfig
from models import ports
from models.servers import running

ports.os.getpid = lambda: 0  # all try the same port first

sys.stdin.readline()
for method in ("none", "eagle3"):
    engine = EngineConfig(python=sys.argv[1], environment={"STUB_BEHAVIOUR": "{}"}, startup_timeout_s=60)
    with running(engine, "t", name=method, directory=Path(sys.argv[2])) as server:
        print(server.url, flush=True)
        sys.stdin.readline()
"""


def test_b45_servers_of_evaluations_that_share_a_node_do_not_share_a_port(
    fake_engine: Callable[..., EngineConfig], tmp_path: Path
) -> None:
    engine = fake_engine().python
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", EVALUATION, engine, str(tmp_path / f"job-{index}")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2],
        )
        for index in range(3)
    ]  # fmt: skip

    def next_servers() -> list[str]:
        """Let all go on at once; where their next servers are."""
        for job in jobs:
            assert job.stdin is not None
            job.stdin.write("\n")
            job.stdin.flush()
        return [job.stdout.readline().strip() for job in jobs if job.stdout is not None]

    for _method in ("none", "eagle3"):
        urls = next_servers()
        assert len(set(urls)) == 3
        for url in urls:
            assert get(f"{url}/health", timeout_s=5).status_code == 200
    next_servers()
    assert [job.wait(timeout=60) for job in jobs] == [0, 0, 0]
