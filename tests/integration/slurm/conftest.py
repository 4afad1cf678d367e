"""A real Slurm on this machine: munge, controller and two nodes, all ours, all stopped at the end.

Everything (key, sockets, state, logs) is in a temporary folder and every port is free when it starts, so a
Slurm that the machine may already have is not touched. The daemons stay in the foreground as our children.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket,cred_expire=20
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmUser=root
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd-%n.log
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
ReturnToService=2
MpiDefault=none
MailProg=/bin/true
JobRequeue=1
MinJobAge=3600
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1
KillWait=5
SlurmdParameters=config_overrides
NodeName={host} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[0]} CPUs=8 RealMemory=1000 State=UNKNOWN
NodeName=localhost NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=8 RealMemory=1000 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
HOST = socket.gethostname().split(".")[0]
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"}


@dataclass(frozen=True)
class Cluster:
    """A running Slurm; `environment` makes Slurm's commands talk to it."""

    environment: dict[str, str]
    directory: Path

    def command(self, *words: str) -> str:
        result = subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=60)
        assert result.returncode == 0, f"{words}: {result.stderr}\n{self.logs()}"
        return result.stdout

    def logs(self) -> str:
        return "\n".join(
            f"== {path.name}\n{path.read_text(errors='replace')[-2000:]}" for path in self.directory.glob("*.log")
        )

    def states(self, job: str) -> set[str]:
        """Of the tasks of an array, or of a job."""
        return set(re.findall(r"JobState=(\w+)", self.command("scontrol", "show", "job", job)))

    def wait(self, job: str, timeout_s: float = 1800) -> str:
        """The state in which a job, or every task of an array, ends."""
        deadline = time.monotonic() + timeout_s
        while not (states := self.states(job)) <= ENDED:
            assert time.monotonic() < deadline, f"job {job} is {states} after {timeout_s:.0f} s\n{self.logs()}"
            self.stir()
            time.sleep(0.5)
        return "+".join(sorted(states))

    def stir(self) -> None:
        """Let something change: backfill, which alone starts heterogeneous jobs, rests until something has.

        On a cluster with other users it always has; here it was seen to rest for minutes.
        """
        self.command("scontrol", "update", f"NodeName={HOST}", f"Comment={time.monotonic()}")

    def requeued(self, job: str, count: int) -> None:
        """Wait until the tasks of a job have been requeued so often, and cut Slurm's delay (cred_expire) short."""
        until(lambda: self.restarts(job) >= count, f"{count} requeues of job {job}", self, 300)

        asked: dict[str, float] = {}

        def goes_on() -> bool:
            rows = self.command("squeue", "--noheader", f"--jobs={job}", "--array", "--format=%i %T").splitlines()
            parts = [row.split() for row in rows]
            held = [part for part, state in parts if state == "PENDING"]
            # A script that ends only now begins the delay anew, and backfill may hold on to an earlier one; but asked
            # for again and again, the groups of a heterogeneous job never begin together.
            for part in (part for part in held if time.monotonic() - asked.get(part, -math.inf) > 30):
                # Not this very second: a node refuses a job that was revoked in the same one. And slurmctld 22.05 has
                # crashed over a heterogeneous job that began again while a node still told the end of its last steps.
                soon = ["scontrol", "update", f"JobId={part}", f"StartTime=now+{12 if '+' in part else 2}"]
                subprocess.run(soon, env=self.environment, capture_output=True)  # it may have begun meanwhile
                asked[part] = time.monotonic()
            self.stir()
            return not held and all(state != "COMPLETING" for _, state in parts)

        until(goes_on, f"job {job} goes on", self, 300)

    def restarts(self, job: str) -> int:
        """How often the tasks of a job have been requeued; the groups of a heterogeneous one are requeued together."""
        told = self.command("scontrol", "show", "job", job).split("\n\n")
        parts = [part for part in told if not re.search(r"HetJobOffset=[1-9]", part)]
        return sum(int(count) for part in parts for count in re.findall(r"Restarts=(\d+)", part))


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def until(ready: Callable[[], bool], what: str, cluster: Cluster, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not ready():
        assert time.monotonic() < deadline, f"{what} within {timeout_s:.0f} s\n{cluster.logs()}"
        time.sleep(0.1)


def write_configuration(directory: Path) -> None:
    controller, *nodes = free_ports(3)
    (directory / "state").mkdir()
    (directory / "munge.key").write_bytes(os.urandom(128))
    (directory / "munge.key").chmod(0o400)
    (directory / "slurm.conf").write_text(
        CONFIGURATION.format(host=HOST, controller_port=controller, ports=nodes, directory=directory)
    )


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A Slurm of two nodes; its jobs are cancelled and its daemons stopped when the tests are over."""
    assert os.getuid() == 0, "these tests start Slurm daemons, which needs root"
    for program in ("munged", "slurmctld", "slurmd"):
        assert shutil.which(program), f"{program} is not installed; make test-slurm installs it"
    directory = tmp_path_factory.mktemp("slurm")
    write_configuration(directory)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH"))}
    cluster = Cluster(inherited | {"SLURM_CONF": str(directory / "slurm.conf")}, directory)
    with contextlib.ExitStack() as stack:

        def start(*words: str) -> None:
            log = stack.enter_context((directory / f"{words[0]}.out.log").open("ab"))
            process = subprocess.Popen(
                words,
                cwd=directory,  # where one that crashes leaves its core
                env=cluster.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            stack.callback(stop, process)

        munge = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munge.pid", "seed-file": "munge.seed"}
        start("munged", "--foreground", "--force", *(f"--{name}={directory / file}" for name, file in munge.items()))
        until((directory / "munge.socket").exists, "munged listens", cluster)
        start("slurmctld", "-D", "-f", str(directory / "slurm.conf"))
        for node in (HOST, "localhost"):
            start("slurmd", "-D", "-N", node, "-f", str(directory / "slurm.conf"))
        sinfo = ["sinfo", "--noheader", "--format=%T"]

        def idle() -> bool:
            result = subprocess.run(sinfo, env=cluster.environment, capture_output=True, text=True)
            return result.stdout.strip() == "idle"

        until(idle, "the nodes are idle", cluster)
        stack.callback(cancel_all, cluster)
        yield cluster


def cancel_all(cluster: Cluster) -> None:
    subprocess.run(["scancel", "--user=root"], env=cluster.environment, timeout=30)
    deadline = time.monotonic() + 30
    while cluster.command("squeue", "--noheader").strip() and time.monotonic() < deadline:
        time.sleep(0.5)


def stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
