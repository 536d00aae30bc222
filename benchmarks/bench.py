"""What all benchmarks share: a case, a section of the report, and a run of a section."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import rows as files
from benchmarks.machine import describe_machine
from benchmarks.rows import Results, Row
from benchmarks.timing import Effort, Timing, torch_threads

KIB, MIB = 2**10, 2**20
DTYPES = {
    "fp32": torch.float32,
    "fp64": torch.float64,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
LENET = ((20, 1, 3, 3), (20,), (50, 20, 5, 5), (50,), (800, 128), (128,), (128, 10), (10,))


@dataclass(frozen=True)
class Case:
    """Tensors of these shapes on every rank, and the candidates that take turns.

    ``settings`` holds what only one benchmark knows.
    """

    name: str
    world_size: int
    candidates: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...] = ()
    dtype: str = "fp32"
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """Bytes of one rank's tensors."""
        numel = sum(torch.Size(shape).numel() for shape in self.shapes)
        return numel * DTYPES[self.dtype].itemsize


def flat_case(size_bytes: int, k: int, candidates: Sequence[str], dtype: str = "fp32") -> Case:
    """Return a case with one flat tensor per rank."""
    shape = (size_bytes // DTYPES[dtype].itemsize,)
    return Case(f"{format_size(size_bytes)} {dtype}", k, tuple(candidates), (shape,), dtype)


def resnet18_shapes() -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the parameters of the book's ResNet-18."""
    from pyringar.train.model_resnet18 import resnet18

    return tuple(tuple(param.shape) for param in resnet18().parameters())


def format_size(size_bytes: int) -> str:
    """Write 1048576 as "1 MiB"."""
    for unit, factor in (("MiB", MIB), ("KiB", KIB)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:g} {unit}"
    return f"{size_bytes} B"


def format_s(seconds: float) -> str:
    """Write a time with three digits, in the unit that suits it."""
    for factor, unit in ((1e6, "us"), (1e3, "ms")):
        if abs(seconds) * factor < 1e3:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"


@dataclass(frozen=True)
class Benchmark:
    """A section of the report: its cases, and the function that measures them.

    Attributes:
        title: The heading of the section.
        about: Stands above the table; says how it was measured and what the limit is.
        efforts: By name: ``full``, ``quick``, and ``trial``, which only tries the program.
        cases: Maps the name of an effort to the cases.
        measure: Runs the cases of a `Run`, and gives it their rows.
        ours: The candidate that is compared with the peers.
        peers: The candidates that are not ours.
        limit: The candidate that is the limit of the others.
        threads: Number of torch's threads; None leaves it.
        device: ``cpu`` or ``cuda``. A trial runs on the CPU.
    """

    section: str
    title: str
    about: str
    efforts: Mapping[str, Effort]
    cases: Callable[[str], list[Case]]
    measure: Callable[[Run], None]
    ours: str
    peers: tuple[str, ...] = ()
    limit: str | None = None
    threads: int | None = 1
    device: str = "cpu"

    def why_not(self, effort: str) -> str | None:
        """Return the reason why it cannot run on this machine, or None."""
        needs_gpu = self.device == "cuda" and effort != "trial"
        return "no CUDA device" if needs_gpu and not torch.cuda.is_available() else None


class Run:
    """One run of a section.

    Args:
        benchmark: The section.
        effort: One of its efforts.
        cases: Replaces the cases of that effort.
        folder: Gets the results file, which is rewritten after each case.
        tell: Called with the name of each case that has ended.
    """

    def __init__(
        self,
        benchmark: Benchmark,
        effort: str = "full",
        *,
        cases: Sequence[Case] | None = None,
        folder: Path | None = None,
        tell: Callable[[Case], None] = lambda case: None,
    ) -> None:
        self.benchmark, self.effort = benchmark, benchmark.efforts[effort]
        self.cases = benchmark.cases(effort) if cases is None else list(cases)
        self.is_trial = effort == "trial"
        is_cuda = benchmark.device == "cuda" and not self.is_trial
        self.device = "cuda:0" if is_cuda and torch.cuda.is_available() else "cpu"
        self._folder, self._tell = folder, tell
        with torch_threads(benchmark.threads):
            self.results = Results(benchmark.section, describe_machine(self.device), effort)

    def measure(self) -> Results:
        """Run all cases. An error ends the section; its rows until then stay."""
        if why := self.benchmark.why_not(self.results.effort):
            self.skip("the section", why)
            return self.results
        try:
            with torch_threads(self.benchmark.threads):
                self.benchmark.measure(self)
        except Exception as error:  # other sections can still be measured
            self.fail("the section", error)
        return self.results

    def add(
        self,
        case: Case,
        timings: Mapping[str, Timing],
        correct: Mapping[str, bool],
        *,
        limit_s: float | None = None,
        clock: str | None = None,
        parts_s: Mapping[str, dict[str, float]] | None = None,
    ) -> None:
        """Take one row per timing of a case that has ended."""
        self.results.rows += [
            Row(
                section=self.benchmark.section,
                case=case.name,
                world_size=case.world_size,
                candidate=name,
                **asdict(timing),
                correct=bool(correct[name]),
                limit_s=limit_s,
                size_bytes=case.size_bytes or None,
                clock=clock,
                parts_s=(parts_s or {}).get(name, {}),
            )
            for name, timing in timings.items()
        ]
        self.save()
        self._tell(case)

    def skip(self, what: str, why: str) -> None:
        """Note what could not be measured, and the reason."""
        self.results.not_run.append({"what": what, "why": why})
        self.save()

    def fail(self, what: str, error: Exception) -> None:
        """Record an error. It makes the run a failure."""
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
        self.results.failed.append({"what": what, "why": why})
        self.save()

    def save(self) -> None:
        """Write the results file."""
        if self._folder:
            files.write(self._folder / self.results.filename, self.results)


def each_case(run_case: Callable[[Run, Case], None]) -> Callable[[Run], None]:
    """Return a `Benchmark.measure` that runs one case after the other.

    A case that ends with an error costs no other case.
    """

    def measure(run: Run) -> None:
        for case in run.cases:
            try:
                run_case(run, case)
            except Exception as error:
                run.fail(f"{case.name}, {case.world_size} ranks", error)

    return measure
