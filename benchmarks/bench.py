"""Data classes of all benchmarks: a case, a report section, and a run of a section."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import rows as files
from benchmarks.machine import OtherPrograms, describe_machine
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
class BenchmarkCase:
    """Tensor shapes of every rank, and the candidates to time.

    ``settings`` holds options that a single section reads.
    """

    name: str
    world_size: int
    candidates: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...] = ()
    dtype: str = "fp32"
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """Size of all tensors of one rank, in bytes."""
        numel = sum(torch.Size(shape).numel() for shape in self.shapes)
        return numel * DTYPES[self.dtype].itemsize


def flat_case(
    size_bytes: int, k: int, candidates: Sequence[str], dtype: str = "fp32"
) -> BenchmarkCase:
    shape = (size_bytes // DTYPES[dtype].itemsize,)
    return BenchmarkCase(
        f"{format_size(size_bytes)} {dtype}", k, tuple(candidates), (shape,), dtype
    )


def resnet18_shapes() -> tuple[tuple[int, ...], ...]:
    from pyringar.train.model_resnet18 import resnet18

    return tuple(tuple(param.shape) for param in resnet18().parameters())


def format_size(size_bytes: int) -> str:
    for unit, factor in (("MiB", MIB), ("KiB", KIB)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:g} {unit}"
    return f"{size_bytes} B"


def format_s(seconds: float) -> str:
    """Write a time with three significant digits, in us, ms or s."""
    for factor, unit in ((1e6, "us"), (1e3, "ms")):
        if abs(seconds) * factor < 1e3:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"


@dataclass(frozen=True)
class Benchmark:
    """A section of the report: its cases, and the function that measures them.

    Attributes:
        section: Name on the command line and of the results file.
        title: Heading in the report.
        about: Text above the table: the method, the candidates and the limit.
        efforts: Round and time limits by effort: ``full``, ``quick``, ``trial`` (a smoke test).
        cases: Maps the name of an effort to the cases.
        measure: Measures the cases of a `Run` and adds their rows to it.
        ours: The candidate of pyringar that is compared with the peers.
        peers: The candidates of other implementations.
        limit: The candidate whose time is the limit; None if the limit is no candidate.
        setup_s: Assumed seconds per case beyond its budget, to estimate the time left.
        threads: Number of torch threads; None keeps torch's number.
        device: ``cpu`` or ``cuda``. A trial always runs on the CPU.
    """

    section: str
    title: str
    about: str
    efforts: Mapping[str, Effort]
    cases: Callable[[str], list[BenchmarkCase]]
    measure: Callable[[Run], None]
    ours: str
    peers: tuple[str, ...] = ()
    limit: str | None = None
    setup_s: float = 1.0
    threads: int | None = 1
    device: str = "cpu"

    def why_not(self, effort: str) -> str | None:
        """Return the reason why this machine cannot run the section, or None."""
        needs_gpu = self.device == "cuda" and effort != "trial"
        return "no CUDA device" if needs_gpu and not torch.cuda.is_available() else None


class Run:
    """One run of a section.

    Args:
        benchmark: The section.
        effort: One of its efforts.
        cases: Replaces the cases of that effort.
        folder: Folder of the results file, which is rewritten after each case.
        tell: Called with each finished case.
    """

    def __init__(
        self,
        benchmark: Benchmark,
        effort: str = "full",
        *,
        cases: Sequence[BenchmarkCase] | None = None,
        folder: Path | None = None,
        tell: Callable[[BenchmarkCase], None] = lambda case: None,
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
        """Run all cases. An error ends the section and keeps the rows of finished cases."""
        if why := self.benchmark.why_not(self.results.effort):
            self.skip("the section", why)
            return self.results
        others = OtherPrograms()
        try:
            with torch_threads(self.benchmark.threads):
                self.benchmark.measure(self)
        except Exception as error:  # the other sections still run
            self.fail("the section", error)
        finally:
            self.results.machine |= others.facts()
            self.save()
        return self.results

    def add(
        self,
        case: BenchmarkCase,
        timings: Mapping[str, Timing],
        correct: Mapping[str, bool],
        *,
        limit_s: float | None = None,
        clock: str | None = None,
        parts_s: Mapping[str, dict[str, float]] | None = None,
    ) -> None:
        """Add a results row for each candidate of a finished case."""
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
        """Record an item that this machine cannot measure, and the reason."""
        self.results.not_run.append({"what": what, "why": why})
        self.save()

    def fail(self, what: str, error: Exception) -> None:
        """Record an error, which makes the exit status 1."""
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
        self.results.failed.append({"what": what, "why": why})
        self.save()

    def save(self) -> None:
        """Write the results file."""
        if self._folder:
            files.write(self._folder / self.results.filename, self.results)


def each_case(run_case: Callable[[Run, BenchmarkCase], None]) -> Callable[[Run], None]:
    """Return a `Benchmark.measure` that runs all cases, including those after a failed case."""

    def measure(run: Run) -> None:
        for case in run.cases:
            try:
                run_case(run, case)
            except Exception as error:
                run.fail(f"{case.name}, {case.world_size} ranks", error)

    return measure
