"""Calls of a graded function: `CallCase` describes a call, `GradedCall` holds its tensors."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyringar.audit.probes import TargetError, dtype_name

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int32, torch.int64)


class MemoryLayout(NamedTuple):
    """Functions that map a tensor's shape to its base's shape, and the base to the tensor."""

    base_shape: Callable[[tuple[int, ...]], tuple[int, ...]]
    view: Callable[[Tensor, tuple[int, ...]], Tensor]


_LAYOUTS = {
    # A view, so that `t.data = ...` in a solution changes only the view, not the base.
    "contiguous": MemoryLayout(lambda s: s, lambda base, s: base.view(s)),
    "slice of a buffer": MemoryLayout(
        lambda s: (math.prod(s) + 12,), lambda base, s: base[7 : 7 + math.prod(s)].view(s)
    ),
    "every other element": MemoryLayout(lambda s: (2 * s[0],), lambda base, s: base[::2]),
    "inner columns": MemoryLayout(
        lambda s: (s[0], s[1] + 3), lambda base, s: base[:, 1 : 1 + s[1]]
    ),
    "transposed": MemoryLayout(lambda s: (s[1], s[0]), lambda base, s: base.t()),
    "channels_last": MemoryLayout(
        lambda s: (s[0], s[2], s[3], s[1]), lambda base, s: base.permute(0, 3, 1, 2)
    ),
}
# Ranks with different layouts: rank r has names[r % len(names)].
_MIXES = {
    "contiguous beside transposed": ("contiguous", "transposed"),
    "contiguous beside channels_last": ("contiguous", "channels_last"),
    "inner columns beside contiguous": ("inner columns", "contiguous", "slice of a buffer"),
}


@dataclass(frozen=True)
class CallCase:
    """The description of one call: ``k`` ranks, and the tensors of all ranks.

    ``values``: ``positional``, small integers; ``random``, full-precision; ``special``, positional
    with NaN, infinities and the largest number; ``crafted``, inputs that the caller passes.
    """

    k: int
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    layout: str = "contiguous"
    values: str = "positional"

    @classmethod
    def from_dict(cls, words: dict[str, Any]) -> CallCase:
        shape, dtype = tuple(words["shape"]), getattr(torch, words["dtype"])
        return cls(words["k"], shape, dtype, words["layout"], words["values"])

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def __str__(self) -> str:
        layout = "" if self.layout == "contiguous" else f", {self.layout} {list(self.shape)}"
        dtype = dtype_name(self.dtype)
        return f"k={self.k}, numel={self.numel}, {dtype}{layout}, {self.values} values"

    def as_dict(self) -> dict[str, Any]:
        words = {"shape": list(self.shape), "dtype": dtype_name(self.dtype), "numel": self.numel}
        return {**vars(self), **words}


def even_case(k: int, **options: Any) -> CallCase:
    """Return a case whose number of elements is divisible by 1 to 8 and by ``k``."""
    return CallCase(k, (math.lcm(840, k),), **options)


class Failure(Exception):  # noqa: N818
    """A failed property: a text, and the case that shows the failure.

    ``is_wrong_sum``: False if the sums are right but violate another requirement. The wrong result
    ``is_like_sum``, such as the mean, or ``is_near``: that, or half of the elements are right.
    """

    is_like_sum = False
    is_near = False

    def __init__(
        self, case: CallCase, detail: str, *, is_wrong_sum: bool = True, **more: Any
    ) -> None:
        super().__init__(f"{detail} ({case})")
        self.detail = detail
        self.tried = case
        self.is_wrong_sum = is_wrong_sum
        # Convert infinities and NaN to text, because JSON cannot represent them.
        clear = {
            key: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in more.items()
        }
        self.case = {**case.as_dict(), **clear}


class OddResult(NamedTuple):
    """The description of a result that is not a tensor of the case's shape and dtype."""

    words: str

    @classmethod
    def of(cls, found: Any, case: CallCase) -> OddResult | None:
        """Return None if ``found`` has the shape and dtype of ``case``, else its description."""
        if isinstance(found, OddResult):
            return found
        if not isinstance(found, Tensor):
            return cls(f"a {type(found).__name__}, not a tensor")
        is_dense = found.layout is torch.strided
        if found.shape == case.shape and found.dtype == case.dtype and is_dense:
            return None
        return cls(
            f"{'' if is_dense else 'sparse '}{dtype_name(found.dtype)} of shape "
            f"{list(found.shape)}, not {dtype_name(case.dtype)} of shape {list(case.shape)}"
        )


def layout_names(layout: str) -> tuple[str, ...]:
    return _MIXES.get(layout, (layout,))


def layouts_of(case: CallCase) -> list[MemoryLayout]:
    names = layout_names(case.layout)
    return [_LAYOUTS[names[rank % len(names)]] for rank in range(case.k)]


def _values(case: CallCase, rank: int) -> Tensor:
    """Return the flat input of a rank, on the CPU. Values differ between positions and ranks."""
    if case.values != "random":
        values = (torch.arange(case.numel) % 17 - 8 + rank).to(case.dtype)
        if case.values == "special":
            _put_special(values, rank, case.k)
        return values
    generator = torch.Generator().manual_seed(1_000_003 * case.numel + rank)
    if case.dtype.is_floating_point:
        digits = torch.float64 if case.dtype == torch.float64 else torch.float32
        return torch.randn(case.numel, generator=generator, dtype=digits).to(case.dtype)
    bound = torch.iinfo(case.dtype).max // case.k
    return torch.randint(-bound, bound, (case.numel,), generator=generator, dtype=case.dtype)


def _put_special(values: Tensor, rank: int, k: int) -> None:
    """Put NaN, infinities and the largest number at every fifth position of some ranks."""
    largest = torch.finfo(values.dtype).max
    is_first, is_last = rank == 0, rank == k - 1
    if is_first:
        values[0::35] = math.nan
        values[10::35] = math.inf
        values[20::35] = -math.inf
    if is_last:
        values[5::35] = math.nan
        values[15::35] = math.inf
        values[20::35] = math.inf  # rank 0 has -inf here, so the sum is NaN
    values[25::35] = largest  # the sum overflows from two ranks on
    values[30::35] = -largest


def is_exact(case: CallCase) -> bool:
    """Return whether the sums are exact in every order of addition.

    Positional values are from -8 to ``8 + rank``, so bfloat16 holds the sums of 16 ranks. Special
    values overflow in every order.
    """
    if not case.dtype.is_floating_point:
        return True
    largest_sum = 8 * case.k + case.k * (case.k - 1) // 2
    return case.values != "random" and largest_sum <= 2 / torch.finfo(case.dtype).eps


class GradedCall:
    """The tensors of one call of the graded function, before and after the call.

    ``bases``: the memory of every rank. ``given``: the ranks' tensors, which are views of the bases
    until the function replaces their memory. ``data``: the list that the function got. ``inputs``:
    flat values. ``returned``: the type of the function's result, or None.
    """

    def __init__(
        self,
        case: CallCase,
        devices: Sequence[torch.device],
        inputs: Sequence[Tensor] | None = None,
    ) -> None:
        self.case = case
        self.layouts = layouts_of(case)
        self.inputs = list(inputs or (_values(case, rank) for rank in range(case.k)))
        self.bases: list[Tensor] = []
        self.given: list[Any] = []
        for rank, values in enumerate(self.inputs):
            # Fill the memory around the view by rank: a copy of another rank's base is detected.
            layout = self.layouts[rank]
            shape = layout.base_shape(case.shape)
            device = devices[rank % len(devices)]
            base = torch.full(shape, -50 - rank, dtype=case.dtype, device=device)
            tensor = layout.view(base, case.shape)
            tensor.copy_(values.view(case.shape))
            self.bases.append(base)
            self.given.append(tensor)
        self.bases_before = [base.clone().cpu() for base in self.bases]
        self.data: list[Any] = list(self.given)
        self.returned: str | None = None

    @functools.cached_property
    def expected(self) -> tuple[Tensor, Tensor | float]:
        """Return the flat sum, and the largest allowed error."""
        dtype = self.case.dtype
        if not dtype.is_floating_point:
            return torch.stack(self.inputs).sum(0, dtype=torch.int64), 0.0
        terms = torch.stack(self.inputs).to(torch.float64)
        total = terms.sum(0)
        if self.case.values == "special":  # round as the dtype does: float64 sums do not overflow
            return total.to(dtype).to(torch.float64), 0.0
        if is_exact(self.case):
            return total, 0.0
        return total, self.case.k * torch.finfo(dtype).eps * terms.abs().sum(0)

    def result(self, rank: int) -> Any:
        """Return ``data[rank]``; if the list's length changed, return the caller's tensor."""
        return self.data[rank] if len(self.data) == self.case.k else self.given[rank]

    def own_memory(self, rank: int) -> Tensor:
        """Return a view of the rank's base, even if the function replaced the tensor's memory."""
        return self.layouts[rank].view(self.bases[rank], self.case.shape)


class ListAllreduce:
    """A function of a list of tensors, one per rank, as a `pyringar.audit.probes.AuditTarget`."""

    ways: tuple[str, ...] = ("in place", "unaligned")

    def __init__(
        self, run: Callable[[CallCase, list[Tensor]], GradedCall], name: str, ranks: int
    ) -> None:
        self.name, self.ranks, self._run = name, ranks, run

    def reduce(
        self, inputs: Sequence[Tensor], way: str = "in place", cuts: Sequence[int] = ()
    ) -> list[Tensor]:
        """Return the values of the caller's tensors after a call; see `AuditTarget.reduce`."""
        results = [x.clone() for x in inputs]
        edges = [0, *cuts, len(results[0])]
        layout = "slice of a buffer" if way == "unaligned" else "contiguous"
        for start, stop in itertools.pairwise(edges):
            case = CallCase(len(inputs), (stop - start,), inputs[0].dtype, layout, values="crafted")
            try:
                call = self._run(case, [x[start:stop] for x in inputs])
            except Failure as failure:
                raise TargetError(str(case), failure.detail) from failure
            except TimeoutError as error:
                raise TargetError(str(case), "no answer in time") from error
            for rank, result in enumerate(results):
                found = call.result(rank)
                if other := OddResult.of(found, case):
                    raise TargetError(str(case), f"rank {rank} holds {other.words}")
                result[start:stop] = call.own_memory(rank).cpu()
        return results
