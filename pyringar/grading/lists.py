"""Make a function of a list of tensors a target of the audit."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from torch import Tensor

from pyringar.audit.probes import TargetError
from pyringar.grading.cases import Call, Case, Failure, Other


class Lists:
    """A function of a list of tensors, one per rank, as a `pyringar.audit.probes.Target`.

    ``run`` calls it with the tensors of a case, of up to ``ranks`` ranks.
    """

    ways: tuple[str, ...] = ("in place", "unaligned")

    def __init__(
        self, run: Callable[[Case, Sequence[Tensor]], Call], name: str, ranks: int
    ) -> None:
        self.name, self.ranks, self._run = name, ranks, run

    def reduce(
        self, inputs: Sequence[Tensor], way: str = "in place", cuts: Sequence[int] = ()
    ) -> list[Tensor]:
        """Return the values of the caller's tensors after a call.

        See `pyringar.audit.probes.Target.reduce`.
        """
        results = [x.clone() for x in inputs]
        edges = [0, *cuts, len(results[0])]
        layout = "slice of a buffer" if way == "unaligned" else "contiguous"
        for start, stop in itertools.pairwise(edges):
            case = Case(len(inputs), (stop - start,), inputs[0].dtype, layout, values="crafted")
            try:
                call = self._run(case, [x[start:stop] for x in inputs])
            except Failure as failure:
                raise TargetError(str(case), failure.detail) from failure
            except TimeoutError as error:
                raise TargetError(str(case), "no answer in time") from error
            for rank, result in enumerate(results):
                found = call.result(rank)
                if other := Other.of(found, case):
                    raise TargetError(str(case), f"rank {rank} holds {other.words}")
                result[start:stop] = call.own_memory(rank).cpu()
        return results
