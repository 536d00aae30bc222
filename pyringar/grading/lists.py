"""Let a function of a list of tensors be audited."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from pyringar.audit.probes import TargetError
from pyringar.errors import ArgumentError
from pyringar.grading.cases import Case, Failure, Other
from pyringar.grading.checks import Subject
from pyringar.grading.remote import Limits, graded
from pyringar.grading.solution import CannotLoadError, Target

__all__ = ["Lists", "remote_lists"]

_MEMORY_BYTES = 4 << 30


class Lists:
    """A function of a list of tensors, one per rank, as a `pyringar.audit.probes.Target`.

    Args:
        subject: The function.
        name: For people.
    """

    ways: tuple[str, ...] = ("in place",)

    def __init__(self, subject: Subject, name: str) -> None:
        self.name, self.ranks = name, subject.most
        self._subject = subject

    def reduce(
        self, inputs: Sequence[Tensor], way: str = "in place", cuts: Sequence[int] = ()
    ) -> list[Tensor]:
        """Return what stands in the list after a call.

        Args:
            inputs: A flat tensor of every rank.
            way: ``"in place"``.
            cuts: Where the tensors are cut, to be reduced by several calls.

        Raises:
            TargetError: It raised, is late, or left what is no result.
        """
        results = [x.clone() for x in inputs]
        edges = [0, *cuts, len(results[0])]
        for start, stop in itertools.pairwise(edges):
            case = Case(len(inputs), (stop - start,), inputs[0].dtype, values="crafted")
            try:
                call = self._subject.rested().run(case, [x[start:stop] for x in inputs])
            except Failure as failure:
                raise TargetError(str(case), failure.detail) from failure
            except TimeoutError as error:
                raise TargetError(str(case), "no answer in time") from error
            for rank, result in enumerate(results):
                found = call.result(rank)
                if other := Other.of(found, case):
                    raise TargetError(str(case), f"rank {rank} holds {other.words}")
                result[start:stop] = found.cpu()
        return results


@contextlib.contextmanager
def remote_lists(
    target: Target, ranks: int, timeout_s: float, show: Callable[[bytes], object]
) -> Iterator[Lists]:
    """Load a function in a process of its own, to be audited.

    Args:
        target: What to load.
        ranks: How many, on the CPU.
        timeout_s: Seconds for the import, and for a call.
        show: Called with what the function prints.

    Raises:
        ArgumentError: It cannot be loaded.
    """
    try:
        with graded(target, ["cpu"] * ranks, Limits(timeout_s, _MEMORY_BYTES), show) as remote:
            yield Lists(remote, f"{os.path.basename(target.where)}:{target.function}")
    except CannotLoadError as error:
        raise ArgumentError(f"nothing was audited: {error}") from error
