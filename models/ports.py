"""Ports for the servers that we start, on nodes that many jobs share.

A port that is free when one asks may be taken a minute later, when the server has loaded its model and binds to it. So
a port is claimed by an abstract socket of that name, for as long as the process that starts the server lives: it is in
the same network namespace as the port itself, whatever container or user asks, and the kernel takes it back when the
process dies. The ports are none that a system hands out by itself (from 32,768 on), and none of training
(slurm/train.sbatch: below 30,000).
"""

from __future__ import annotations

import os
import socket

from models.errors import Refused

PORTS = range(30_000, 32_768)

_claims: list[socket.socket] = []


def claim_port(host: str) -> int:
    """A port of `host`, an address of this machine, that nobody listens on and no other process of ours will take.

    Raises:
        Refused: there is none, or no such address here.
    """
    error = OSError()
    for offset in range(len(PORTS)):
        port = PORTS[(os.getpid() + offset) % len(PORTS)]
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            claim.bind(f"\0draftsmith-port-{port}")
            with socket.create_server((host, port)):
                _claims.append(claim)
                return port
        except OSError as failed:
            claim.close()
            error = failed
    raise Refused(f"no port of {host} is free between {PORTS[0]} and {PORTS[-1]} ({error})")
