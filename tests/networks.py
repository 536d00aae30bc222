"""Two machines with a cable between them, on one: network namespaces joined by a veth pair.

Needs root, Linux, and `ip` (iproute2); a rate needs `tc` with the queueing discipline `tbf`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

_CLONE_NEWNET = 0x40000000
# What may leave at once after a pause: small beside the messages that are timed.
_BURST_BYTES = 128 * 2**10
_QUEUE_BYTES = 16 * 2**20  # nothing is dropped


@dataclass(frozen=True)
class Machine:
    """One end of the cable.

    Attributes:
        name: The namespace's, and what stands for the machine's.
        link: Its network device.
        address: Its IPv4 address there.
    """

    name: str
    link: str
    address: str

    @property
    def environment(self) -> dict[str, str]:
        """Return what a rank on it has in its environment."""
        return {
            "PYRINGAR_NODE_ID": self.name,
            "GLOO_SOCKET_IFNAME": self.link,
            "OMP_NUM_THREADS": "1",
        }

    def command(self, *words: str) -> list[str]:
        """Return a command that runs another there."""
        return ["ip", "netns", "exec", self.name, *words]

    def enter(self) -> None:
        """Put this process there; call it before other threads use the network."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{self.name}", "rb") as space:
            if libc.setns(space.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"setns {self.name}")
        os.environ.update(self.environment)

    def sent_bytes(self) -> int:
        """Return what left it so far, headers and all; asked from anywhere."""
        command = self.command("cat", f"/sys/class/net/{self.link}/statistics/tx_bytes")
        return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def why_not(*, with_rate: bool = False) -> str | None:
    """Return why there can be no such machines here; None if there can."""
    if os.name != "posix" or os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "tc") if with_rate else ("ip",):
        if shutil.which(tool) is None:
            return f"there is no `{tool}` (iproute2)"
    try:
        with two_machines(1.0 if with_rate else None):
            return None
    except (subprocess.CalledProcessError, OSError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip()
        return f"network namespaces cannot be made here: {said}"


@contextlib.contextmanager
def two_machines(rate_gbps: float | None = None) -> Iterator[list[Machine]]:
    """Make two machines while the block runs.

    Args:
        rate_gbps: Of the cable, each way, in Gbit/s; None: as fast as this machine's memory.

    Raises:
        OSError, subprocess.CalledProcessError: They cannot be made here.
    """
    number = os.getpid() % 10**6
    net = f"10.{200 + number % 50}.{number // 50 % 250}"
    ends = [
        Machine(f"ringar{number}{end}", f"rv{number}{end}", f"{net}.{at}")
        for at, end in enumerate("ab", 1)
    ]
    with contextlib.ExitStack() as stack:
        for end in ends:  # the veth pair goes with them
            _run("ip", "netns", "add", end.name)
            stack.callback(_run, "ip", "netns", "del", end.name)
        first, second = ends
        _run("ip", "link", "add", first.link, "type", "veth", "peer", "name", second.link)
        for end in ends:
            _run("ip", "link", "set", end.link, "netns", end.name)
            inside = ("ip", "-n", end.name)
            _run(*inside, "addr", "add", f"{end.address}/24", "dev", end.link)
            _run(*inside, "link", "set", end.link, "up")
            _run(*inside, "link", "set", "lo", "up")
            if rate_gbps is not None:
                rate = ("rate", f"{rate_gbps * 1000:g}mbit", "burst", str(_BURST_BYTES))
                shaped = ("dev", end.link, "root", "tbf", *rate, "limit", str(_QUEUE_BYTES))
                _run(*end.command("tc"), "qdisc", "add", *shaped)
        yield ends


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
