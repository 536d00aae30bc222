"""Ranks of Open MPI on machines that are network namespaces; each runs mpi_rank.py."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.busy import adopt_orphans

FLAGS: Mapping[str, tuple[str, ...]] = {
    "open mpi": (),
    "open mpi, han": ("--mca", "coll_han_priority", "100"),
}
"""The collectives that Open MPI takes by itself, and those made for machines of several ranks."""

RANKS_EACH = 2
DEADLINE_S = 60.0
# For an answer, which is a call and the timed ones: with 64 MiB over a slow cable, two of these, it
# has taken from 2 s to more than a minute.
ANSWER_S = 300.0
_PROGRAM = str(Path(__file__).with_name("mpi_rank.py"))
# More ranks than processors: without yielding they are ten times as slow.
_COMMON = (
    "--mca",
    "mpi_yield_when_idle",
    "1",
    "--mca",
    "pml",
    "ob1",
    "--mca",
    "btl",
    "tcp,sm,self",
)
_AGENT = """#!/bin/sh
host=$1
shift
name=$(cat "$RINGAR_HOSTS/$host")
exec ip netns exec "$name" unshare --uts sh -c "hostname $name; $*"
"""


class MpiRanks:
    """Ranks that wait for requests, two on each machine.

    Args:
        prefix: Of an environment with Open MPI and mpi4py.
        machines: `benchmarks.networks.Machine` each.
        flags: Of mpirun.

    Raises:
        OSError: They did not come in time.
    """

    def __init__(self, prefix: str, machines: Sequence[Any], flags: Sequence[str]) -> None:
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        for machine in machines:
            (folder / machine.address).write_text(machine.name)
        agent = folder / "agent"
        agent.write_text(_AGENT)
        agent.chmod(0o700)
        network = f"{machines[0].address.rpartition('.')[0]}.0/24"
        command = [f"{prefix}/bin/mpirun", "--allow-run-as-root", "--bind-to", "none"]
        command += ["--host", ",".join(f"{m.address}:{RANKS_EACH}" for m in machines)]
        command += ["-n", str(RANKS_EACH * len(machines)), "--prtemca", "plm_ssh_agent", str(agent)]
        command += ["--prtemca", "prte_if_include", network, "--mca", "btl_tcp_if_include", network]
        command += [*_COMMON, *flags, f"{prefix}/bin/python", _PROGRAM, str(folder / "socket")]
        adopt_orphans()  # on the other machines the daemons leave whoever has started them
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', machines[0].name]
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder / "socket"))
            listener.listen()
            listener.settimeout(DEADLINE_S)
            self._program = subprocess.Popen(
                machines[0].command(*named, *command),
                env={**os.environ, "RINGAR_HOSTS": str(folder)},
                stdin=subprocess.DEVNULL,
            )
            self._ranks = [listener.accept()[0] for _ in range(RANKS_EACH * len(machines))]
        for rank in self._ranks:
            rank.settimeout(ANSWER_S)

    def seconds(self, numel: int, calls: int) -> float:
        """Return the seconds of a call on the slowest rank; none: the sum is checked only.

        Raises:
            TimeoutError: No answer within `ANSWER_S`.
        """
        for rank in self._ranks:
            rank.sendall(f"{numel} {calls}\n".encode())
        return max(float(rank.recv(64)) for rank in self._ranks)

    def close(self) -> None:
        """Let the ranks end."""
        for rank in self._ranks:
            rank.close()
        try:
            self._program.wait(10)
        except subprocess.TimeoutExpired:
            self._program.kill()
        self._folder.cleanup()
