"""Measures every algorithm on this machine, and makes of it the table that ``auto`` follows."""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch

from pyringar.comm import tuning
from pyringar.comm.communicator import Communicator
from pyringar.comm.process_communicator import ProcessCommunicator
from pyringar.engine.files import make_private_dir
from pyringar.errors import RingarError

__all__ = ["Case", "Sample", "measure", "plan_cases", "table_of", "write_table"]

ROUNDS = 11
_LEAST_S = 3e-3  # of calls that are timed at once
_MOST_CALLS = 2000
# What must be gained for a change of algorithm: less is noise.
_WORTHWHILE = 1.05
_PATIENCE_S = 120.0
_ITEM_BYTES = 4

Call = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """What is measured: an all_reduce of one float32 tensor per rank.

    Attributes:
        place: As in :func:`pyringar.comm.tuning.choices`.
        world_size: Number of ranks.
        sizes_bytes: Bytes of one rank's tensor, ascending.
        devices: One per rank; none for processes.
        device_name: The GPUs' name; None on the CPU.
    """

    place: str
    world_size: int
    sizes_bytes: tuple[int, ...]
    devices: tuple[str, ...] = ()
    device_name: str | None = None


@dataclass(frozen=True)
class Sample:
    """One size, measured.

    Attributes:
        case: What it is part of.
        nbytes: Bytes of one rank's tensor.
        seconds: Of a call, by algorithm: lower quartiles of rounds in which all took turns.
    """

    case: Case
    nbytes: int
    seconds: Mapping[str, float]


def plan_cases(
    places: Sequence[str], world_sizes: Sequence[int], sizes_bytes: Sequence[int]
) -> list[Case]:
    """What this machine can measure of it.

    Args:
        places: Of ``"host"``, ``"processes"``, ``"gpu"``, ``"gpus"``; GPUs that are not there are
            left out.
        world_sizes: Numbers of ranks; on several GPUs only those that have one GPU each.
        sizes_bytes: Bytes of one rank's tensor.
    """
    sizes = tuple(sorted(set(sizes_bytes)))
    num_gpus = torch.cuda.device_count()
    name = torch.cuda.get_device_name(0) if num_gpus else None
    cases = []
    for place in places:
        for k in sorted(set(world_sizes)):
            if place == "host":
                cases.append(Case(place, k, sizes, ("cpu",) * k))
            elif place == "processes":
                cases.append(Case(place, k, sizes))
            elif place == "gpu" and num_gpus:
                cases.append(Case(place, k, sizes, ("cuda:0",) * k, name))
            elif place == "gpus" and 2 <= k <= num_gpus:
                cases.append(Case(place, k, sizes, tuple(f"cuda:{i}" for i in range(k)), name))
    return cases


def measure(case: Case, rounds: int = ROUNDS) -> Iterator[Sample]:
    """Time every algorithm at every size.

    Args:
        case: Where, with how many ranks.
        rounds: In which all algorithms take turns, so that drift hits all alike.

    Raises:
        RingarError: A process of its own failed; says how.
    """
    algorithms = tuning.algorithms_for(case.place, "any")
    if case.place == "processes":
        yield from _measure_processes(case, algorithms, rounds)
        return
    finish = torch.cuda.synchronize if case.device_name else _nothing
    with Communicator(case.devices) as comm:
        for nbytes in case.sizes_bytes:
            tensors = [torch.zeros(nbytes // _ITEM_BYTES, device=d) for d in case.devices]
            calls: dict[str, Call] = {
                name: functools.partial(comm.all_reduce, tensors, algorithm=name)
                for name in algorithms
            }
            yield Sample(case, nbytes, _quartiles(calls, rounds, _Alone(finish)))


def _nothing() -> None:
    pass


# -- timing ----------------------------------------------------------------------------------------


class _Alone:
    """One process drives all ranks."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish = finish

    def meet(self) -> None:
        """Begin together."""
        self._finish()

    def finish(self) -> None:
        """End of what is timed."""
        self._finish()

    def slowest(self, seconds: list[float]) -> list[float]:
        """Over all ranks."""
        return seconds


class _Together:
    """One of several processes: a time is that of the slowest."""

    def __init__(self, comm: ProcessCommunicator) -> None:
        self._comm = comm

    def meet(self) -> None:
        self._comm.barrier()

    def finish(self) -> None:
        pass

    def slowest(self, seconds: list[float]) -> list[float]:
        tensor = torch.tensor(seconds, dtype=torch.float64)
        self._comm.all_reduce(tensor, "max", algorithm="direct")
        slowest: list[float] = tensor.tolist()
        return slowest


def _quartiles(calls: Mapping[str, Call], rounds: int, who: _Alone | _Together) -> dict[str, float]:
    """Seconds a call, the lower quartile of the rounds: luck makes few of them shorter."""
    names = list(calls)
    counts = {}
    for name in names:
        _time(calls[name], 1, who)
        (once_s,) = who.slowest([_time(calls[name], 1, who)])
        counts[name] = max(1, min(_MOST_CALLS, round(_LEAST_S / once_s)))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    draw = random.Random(0)  # on all ranks alike
    for _ in range(rounds):
        draw.shuffle(names)  # who always came after the same one would find its caches
        for name in names:
            _time(calls[name], 1 + counts[name] // 4, who)  # what ran before has the caches
            samples[name].append(_time(calls[name], counts[name], who))
    return {
        name: sorted(who.slowest(seconds))[len(seconds) // 4] for name, seconds in samples.items()
    }


def _time(call: Call, count: int, who: _Alone | _Together) -> float:
    who.meet()
    begin_s = time.perf_counter()
    for _ in range(count):
        call()
    who.finish()
    return (time.perf_counter() - begin_s) / count


# -- processes -------------------------------------------------------------------------------------


def _measure_processes(case: Case, algorithms: Sequence[str], rounds: int) -> Iterator[Sample]:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="pyringar-tune-") as folder:
        processes = [
            context.Process(
                target=_run_rank,
                args=(rank, case, algorithms, rounds, f"{folder}/store", sender),
                daemon=True,
            )
            for rank in range(case.world_size)
        ]
        for process in processes:
            process.start()
        sender.close()  # so that the pipe ends with the ranks
        try:
            for nbytes in case.sizes_bytes:
                yield Sample(case, nbytes, _receive(receiver))
            for process in processes:
                process.join(_PATIENCE_S)
        finally:
            for process in processes:
                process.kill()
                process.join()
            receiver.close()


def _receive(receiver: Any) -> dict[str, float]:
    if not receiver.poll(_PATIENCE_S):
        raise RingarError(f"ranks in processes of their own said nothing for {_PATIENCE_S:g} s")
    try:
        message: dict[str, float] | str = receiver.recv()
    except EOFError:
        raise RingarError("a rank in a process of its own died") from None
    if isinstance(message, str):
        raise RingarError(f"a rank in a process of its own failed: {message}")
    return message


def _run_rank(
    rank: int, case: Case, algorithms: Sequence[str], rounds: int, store: str, sender: Any
) -> None:
    """A process: rank 0 sends the seconds of every size, and whoever fails why."""
    from torch._C._distributed_c10d import FileStore  # not every build of torch has it

    torch.set_num_threads(1)
    try:
        files = FileStore(store, case.world_size)
        with ProcessCommunicator(files, rank, case.world_size) as comm:
            for nbytes in case.sizes_bytes:
                tensor = torch.zeros(nbytes // _ITEM_BYTES)
                calls: dict[str, Call] = {
                    name: functools.partial(comm.all_reduce, tensor, algorithm=name)
                    for name in algorithms
                }
                seconds = _quartiles(calls, rounds, _Together(comm))
                if rank == 0:
                    sender.send(seconds)
    except RingarError as error:
        with contextlib.suppress(BrokenPipeError):  # who asked is gone, which may be why
            sender.send(f"rank {rank}: {type(error).__name__}: {error}")


# -- the table -------------------------------------------------------------------------------------


def table_of(samples: Sequence[Sample]) -> dict[str, Any]:
    """The file that :func:`~pyringar.comm.tuning.parse_table` reads, and what was measured beside it.

    Args:
        samples: Of any cases.
    """
    today = date.today().isoformat()
    by_case: dict[Case, list[Sample]] = {}
    for sample in samples:
        by_case.setdefault(sample.case, []).append(sample)
    return {
        "version": tuning.VERSION,
        "date": today,
        "machine": tuning.machine(),
        "tables": [
            {
                "place": case.place,
                "device": case.device_name,
                "world_size": case.world_size,
                "order": order,
                "choices": _choose(sorted(of_case, key=lambda s: s.nbytes), order, today).rows(),
                "measured_us": {
                    str(s.nbytes): {name: round(t * 1e6, 3) for name, t in s.seconds.items()}
                    for s in of_case
                },
            }
            for case, of_case in by_case.items()
            for order in ("any", "rank")
        ],
    }


def _choose(samples: Sequence[Sample], order: str, today: str) -> tuning.Choices:
    """The fastest at every size, changing only where that is worthwhile; ends half way between."""
    case = samples[0].case
    allowed = tuning.algorithms_for(case.place, order)
    chosen, _ = tuning.shipped(case.place, order).at(samples[0].nbytes)
    rows: list[tuple[int, str, str]] = []
    before_bytes = 0
    for sample in samples:
        best = min(allowed, key=lambda name: sample.seconds[name])
        if sample.seconds[chosen] > _WORTHWHILE * sample.seconds[best]:
            chosen = best
        begin = round((before_bytes * sample.nbytes) ** 0.5)
        times = ", ".join(f"{name} {_format_time(sample.seconds[name])}" for name in allowed)
        what = f"{sample.nbytes} bytes on {case.world_size} ranks"
        rows.append((begin, chosen, f"pyringar tune measured here, {today}: {what}: {times}"))
        before_bytes = sample.nbytes
    return tuning.Choices.of(rows)


def _format_time(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def write_table(content: Mapping[str, Any], path: Path) -> None:
    """Put a table where ``auto`` finds it, at once or not at all.

    Args:
        content: What :func:`table_of` made.
        path: For example :func:`pyringar.comm.tuning.path`.

    Raises:
        RingarError: It cannot be written; says why.
    """
    tuning.parse_table(content)
    try:
        make_private_dir(path.parent)
        handle, draft = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        try:
            with open(handle, "w", encoding="utf-8") as file:
                json.dump(content, file, indent=1)
                file.write("\n")
            os.replace(draft, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(draft)
            raise
    except OSError as error:
        raise RingarError(f"the table cannot be written to {path}: {error}") from error
