"""Two simulated machines: network namespaces connected by a veth pair.

Needs root, Linux, and `ip` (iproute2).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """A network namespace with its network device and IPv4 address."""

    name: str
    link: str
    address: str

    @property
    def environment(self) -> dict[str, str]:
        names = {"PYRINGAR_NODE_ID": self.name, "GLOO_SOCKET_IFNAME": self.link}
        return {**names, "OMP_NUM_THREADS": "1"}

    def command(self, *words: str) -> list[str]:
        return ["ip", "netns", "exec", self.name, *words]


def why_not() -> str | None:
    if os.name != "posix" or os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "there is no `ip` (iproute2)"
    try:
        with two_machines():
            return None
    except (subprocess.CalledProcessError, OSError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip()
        return f"network namespaces cannot be made here: {said}"


@contextlib.contextmanager
def two_machines() -> Iterator[list[Machine]]:
    number = os.getpid() % 10**6
    net = f"10.{200 + number % 50}.{number // 50 % 250}"
    names = [(f"ringar{number}{end}", f"rv{number}{end}") for end in "ab"]
    first, second = ends = [Machine(*name, f"{net}.{at}") for at, name in enumerate(names, 1)]
    with contextlib.ExitStack() as stack:
        for end in ends:  # deleting a namespace also deletes its veth device
            _run("ip", "netns", "add", end.name)
            stack.callback(_run, "ip", "netns", "del", end.name)
        _run("ip", "link", "add", first.link, "type", "veth", "peer", "name", second.link)
        for end in ends:
            _run("ip", "link", "set", end.link, "netns", end.name)
            inside = ("ip", "-n", end.name)
            _run(*inside, "addr", "add", f"{end.address}/24", "dev", end.link)
            _run(*inside, "link", "set", end.link, "up")
            _run(*inside, "link", "set", "lo", "up")
        yield ends


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
