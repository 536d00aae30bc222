"""Has every entry, in one process and in several, the bits that NumPy works out for random calls?

A failure names its seed and its number; ``PYRINGAR_TEST_SEED=...`` makes the same calls again.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import secrets
import sys
import zlib
from collections.abc import Iterator

import differential as diff
import numpy as np
import pytest
import torch
from differential import KINDS, OPS, Parameter, Placed, check, check_ranks

import pyringar as pr

SEED = int(os.environ.get("PYRINGAR_TEST_SEED", "1"))
LONG_RUN = [pytest.mark.thorough, pytest.mark.timeout(1800)]
ALGORITHMS = ("fused", "direct", "ring", "naive", "sharded", "auto")
ENTRIES = ("allreduce", "all_reduce", "async", "bind", "bind lists", "coalesced", "other")


def seed_of(is_long: bool) -> int:
    """Another in every long run, unless one is asked for."""
    seed = SEED if not is_long or "PYRINGAR_TEST_SEED" in os.environ else secrets.randbits(32)
    print(f"seed {seed}")
    return seed


@contextlib.contextmanager
def float_mode(flushes: bool) -> Iterator[None]:
    """Whether this thread flushes denormals, as a caller's may."""
    torch.set_flush_denormal(flushes)
    try:
        yield
        assert (sys.float_info.min / 2 == 0) == flushes, "the caller's mode was changed"
    finally:
        torch.set_flush_denormal(False)


def pick(rng: np.random.Generator, choices):
    return choices[int(rng.integers(len(choices)))]


def arrays_of(rng: np.random.Generator, placed: list[Placed]) -> list:
    """The tensors; now and then NumPy's own arrays instead."""
    kind = placed[0].kind
    name = "float16" if kind.torch is torch.float16 else np.dtype(kind.wide).name
    if rng.random() < 0.8 or kind.torch is torch.bfloat16:
        return [p.tensor for p in placed]
    return [p.tensor if p.is_negated else p.view.view(name) for p in placed]


# -- one process -----------------------------------------------------------------------------------


def one_call(comm_of, seed: int, number: int) -> None:
    rng = np.random.default_rng([seed, number])
    k = int(rng.integers(1, 7))
    entry, op, algorithm = pick(rng, ENTRIES), pick(rng, OPS), pick(rng, ALGORITHMS)
    if entry.startswith("bind") and algorithm in ("naive", "sharded"):
        algorithm = "fused"
    flushes = rng.random() < 0.3
    context = f"seed {seed}, call {number}: {entry} {op} {algorithm} k={k} flushes={flushes}"
    comm = comm_of(k)
    if entry == "other":
        return other_collective(rng, comm, op, flushes, context)
    many = int(rng.integers(1, 5)) if entry in ("coalesced", "bind lists") else 1
    parameters = [Parameter(rng, k) for _ in range(many)]
    placed = [[p.place(rng, rank) for p in parameters] for rank in range(k)]
    container = pick(rng, (list, tuple))
    order = "rank" if algorithm == "auto" else "any"
    reduced_by = "fused" if algorithm == "auto" or entry == "allreduce" else algorithm
    first = container(arrays_of(rng, [row[0] for row in placed]))
    with float_mode(flushes):
        make_call(comm, entry, first, placed, parameters, op, algorithm=algorithm, order=order)
    for parameter, mine in zip(parameters, zip(*placed, strict=True), strict=True):
        where = f"{context}: {parameter}"
        wanted = parameter.expected(op, "fused" if k == 1 else reduced_by)
        check_parameter(parameter, mine, wanted, algorithm in ("naive", "sharded"), where)


def check_parameter(parameter, mine, wanted, is_torchs: bool, where: str) -> None:
    """Compare what all ranks hold of a parameter, and what lies around it."""
    results = [placed.read() for placed in mine]
    if is_torchs and any(parameter.are_negated):
        # Written by torch, whose negation makes another NaN of one.
        results = [diff.one_nan(found, parameter.kind) for found in results]
    check_ranks(results, wanted, parameter.kind, where)
    for placed in mine:
        placed.check_around(where)


def make_call(comm, entry: str, first, placed, parameters, op: str, **options: str) -> None:
    """Call one way of reducing: of the first parameter's arrays, or of all that are placed."""
    if entry == "allreduce":
        pr.allreduce(first, op)
    elif entry == "coalesced":
        comm.all_reduce_coalesced([[p.tensor for p in row] for row in placed], op, **options)
    elif entry.startswith("bind"):
        if entry == "bind":
            bound = comm.bind(first, op, **options)
        else:
            bound = comm.bind_coalesced([[p.tensor for p in row] for row in placed], op, **options)
        bound()
        for rank, row in enumerate(placed):  # once more, from the start
            for parameter, mine in zip(parameters, row, strict=True):
                mine.write(parameter.inputs[rank])
        bound()
    else:
        work = comm.all_reduce(first, op, async_op=entry == "async", **options)
        if work is not None:
            work.wait()


def other_collective(rng, comm, op: str, flushes: bool, context: str) -> None:
    what = pick(rng, ("reduce_scatter", "all_gather", "broadcast", "reduce", "lists"))
    if what in ("reduce", "lists"):
        return rooted_collective(rng, comm, what == "lists", op, flushes, f"{context}: {what}")
    k, kind = comm.world_size, pick(rng, KINDS)
    n = int(rng.integers(0, 3000))
    inputs = [diff.values(rng, n * k, kind) for _ in range(k)]
    wholes = [Placed(rng, kind, (n, k), diff.layout_of(rng, (n, k))) for _ in range(k)]
    parts = [Placed(rng, kind, (n,), diff.layout_of(rng, (n,))) for _ in range(k)]
    cuts = [slice(rank * n, (rank + 1) * n) for rank in range(k)]
    root = int(rng.integers(k))
    for rank in range(k):
        wholes[rank].write(inputs[rank])
        parts[rank].write(inputs[rank][:n])
    with float_mode(flushes):
        tensors = [p.tensor for p in wholes], [p.tensor for p in parts]
        if what == "reduce_scatter":
            comm.reduce_scatter(tensors[1], tensors[0], op)
        elif what == "all_gather":
            comm.all_gather(*tensors)
        else:
            comm.broadcast(tensors[0], root)
    context = f"{context}: {what} of {n} {kind.torch}, root {root}"
    total = diff.folded(inputs, op, kind)
    for rank in range(k):
        if what == "reduce_scatter":
            check(parts[rank].read(), total[cuts[rank]], kind, context)
            wanted = inputs[rank]
        elif what == "all_gather":
            wanted = np.concatenate([x[:n] for x in inputs])
        else:
            wanted = inputs[root]
        assert (wholes[rank].read() == wanted).all(), context
        for placed in (wholes[rank], parts[rank]):
            placed.check_around(context)


def rooted_collective(rng, comm, are_lists: bool, op: str, flushes: bool, context: str) -> None:
    """Reduce to one rank, in place or not; lists also broadcast what their root then has."""
    k, root = comm.world_size, int(rng.integers(comm.world_size))
    algorithm, is_async = pick(rng, ("fused", "direct", "auto")), bool(rng.random() < 0.3)
    parameters = [Parameter(rng, k) for _ in range(int(rng.integers(1, 5)) if are_lists else 1)]
    rows = [[p.place(rng, rank) for p in parameters] for rank in range(k)]
    outputs = [
        rows[root][i] if rng.random() < 0.5 else p.place(rng, int(rng.integers(k)))
        for i, p in enumerate(parameters)
    ]
    given = [p.tensor for p in outputs], [[p.tensor for p in row] for row in rows]
    options = {"root": root, "algorithm": algorithm, "async_op": is_async}
    with float_mode(flushes):
        if are_lists:
            work = comm.reduce_coalesced(*given, op, **options)
        else:
            work = comm.reduce(given[0][0], [row[0] for row in given[1]], op, **options)
        if is_async:
            work.wait()
    for i, parameter in enumerate(parameters):
        where = f"{context} {algorithm} {parameter}"
        check(outputs[i].read(), parameter.expected(op, "fused"), parameter.kind, where)
        for rank, row in enumerate(rows):
            if row[i] is not outputs[i]:
                assert (row[i].read() == parameter.inputs[rank]).all(), where
            row[i].check_around(where)
        outputs[i].check_around(where)
    if are_lists:
        roots = [placed.read() for placed in rows[root]]
        comm.broadcast_coalesced(given[1], root)
        for row in rows:
            for placed, wanted in zip(row, roots, strict=True):
                assert (placed.read() == wanted).all(), f"{context}: broadcast"
                placed.check_around(context)


@pytest.fixture(scope="module")
def rank_order_comm_of() -> Iterator:
    with contextlib.ExitStack() as made:
        yield functools.cache(
            lambda k: made.enter_context(pr.Communicator(["cpu"] * k, order="rank"))
        )


@pytest.mark.parametrize("count", [1_500, pytest.param(50_000, marks=LONG_RUN)])
def test_one_process(rank_order_comm_of, count):
    seed = seed_of(count > 1_500)
    for number in range(count):
        one_call(rank_order_comm_of, seed, number)


# -- a process per rank ----------------------------------------------------------------------------


def on_rank(state, seed: int, first: int, last: int) -> list[int]:
    """Calls first to last; every rank works out all inputs, and checks its own results."""
    return [rank_call(state.comm, seed, number) for number in range(first, last)]


def rank_call(comm: pr.ProcessCommunicator, seed: int, number: int) -> int:
    k, rank = comm.world_size, comm.rank
    rng = np.random.default_rng([seed, k, number])
    own = np.random.default_rng([seed, k, number, rank])
    op, algorithm = pick(rng, OPS), pick(rng, ("direct", "ring"))
    entry = pick(rng, ("all_reduce", "async", "bind", "list", "broadcast", "scatter"))
    flushes = own.random() < 0.3
    root = int(rng.integers(k))
    context = f"seed {seed}, call {number}: {entry} {op} {algorithm} rank {rank} of {k}"
    if entry == "scatter":
        return scatter_and_gather(comm, rng, own, op, flushes, context)
    many = int(rng.integers(1, 5)) if entry == "list" else 1
    parameters = [
        Parameter(rng, k, most=200_000 if number % 7 == 0 else 5_000) for _ in range(many)
    ]
    placed = [p.place(own, rank) for p in parameters]
    with float_mode(flushes):
        if entry == "broadcast":
            comm.broadcast(placed[0].tensor, root)
        else:
            reduce_as_rank(comm, entry, placed, parameters[0], op, algorithm)
    # One tensor that lies otherwise on another rank, and all of the call are taken by index.
    orders = {tuple(p.in_other_order(r) for p in parameters) for r in range(k)}
    digest = 0
    for parameter, mine in zip(parameters, placed, strict=True):
        where = f"{context}: {parameter}"
        used = algorithm if k > 1 else "direct"
        wanted = parameter.inputs[root]
        if entry != "broadcast":
            wanted = parameter.expected(op, used, by_index=len(orders) > 1)
        check(mine.read(), wanted, parameter.kind, where)
        mine.check_around(where)
        digest = zlib.crc32(mine.read().tobytes(), digest)
    return digest


def reduce_as_rank(comm, entry: str, placed, first, op: str, algorithm: str) -> None:
    """Call one way of reducing what this rank has placed."""
    if entry == "bind":
        bound = comm.bind(placed[0].tensor, op, algorithm=algorithm)
        bound()
        placed[0].write(first.inputs[comm.rank])
        bound()
    elif entry == "list":
        comm.all_reduce([p.tensor for p in placed], op, algorithm=algorithm)
    else:
        is_async = entry == "async"
        work = comm.all_reduce(placed[0].tensor, op, algorithm=algorithm, async_op=is_async)
        if work is not None:
            work.wait()


def scatter_and_gather(comm, rng, own, op: str, flushes: bool, context: str) -> int:
    k, rank, kind = comm.world_size, comm.rank, pick(rng, KINDS)
    n = int(rng.integers(0, 3000))
    inputs = [diff.values(rng, n * k, kind) for _ in range(k)]
    whole = Placed(own, kind, (n, k), diff.layout_of(own, (n, k)))
    part = Placed(own, kind, (n,), diff.layout_of(own, (n,)))
    whole.write(inputs[rank])
    with float_mode(flushes):
        comm.reduce_scatter(part.tensor, whole.tensor, op)
    total = diff.folded(inputs, op, kind)
    check(part.read(), total[rank * n : (rank + 1) * n], kind, context)
    assert (whole.read() == inputs[rank]).all(), context
    with float_mode(flushes):
        comm.all_gather(whole.tensor, part.tensor)
    check(whole.read(), total, kind, context)
    for placed in (whole, part):
        placed.check_around(context)
    return zlib.crc32(whole.read().tobytes())


@pytest.mark.parametrize(
    ("k", "calls"),
    [
        *((1, 50), (2, 300), (3, 200)),
        *(pytest.param(k, 3_000, marks=LONG_RUN) for k in (2, 3, 4, 5)),
    ],
)
def test_processes(crew_of, k, calls):
    seed = seed_of(calls == 3_000)
    for first in range(0, calls, 50):  # a rank answers within a minute
        results = crew_of(k).run(on_rank, seed=seed, first=first, last=first + 50)
        for rank, digests in enumerate(results):
            differ = [i for i, (a, b) in enumerate(zip(digests, results[0], strict=True)) if a != b]
            assert not differ, f"seed {seed}: calls {differ} from {first}: rank {rank} differs"


# -- would it notice? ------------------------------------------------------------------------------


def another_order(parts, op, kind):
    return diff.folded([*parts[1:], parts[0]], op, kind)


def loses_nan(parts, op, kind):
    result = diff.folded(parts, op, kind)
    nan = diff.is_nan(result, kind)
    return np.where(nan, parts[0], result)


def cuts_bits_off(parts, op, kind):
    """bfloat16 by truncation."""
    if kind.torch is not torch.bfloat16:
        return diff.folded(parts, op, kind)
    wide = kind._replace(torch=torch.float32, word=np.uint32, fraction_bits=23)
    exact = diff.folded([part.astype(np.uint32) << 16 for part in parts], op, wide)
    return (exact >> 16).astype(np.uint16)


def rounds_twice(parts, op, kind):
    total = parts[0]
    for part in parts[1:]:
        total = diff.folded([total, part], op, kind)
    return total


def one_short_at_a_border(parts, op, kind):
    result = diff.folded(parts, op, kind)
    border = 8192 // result.itemsize
    result[border - 1 : border] = parts[0][border - 1 : border]
    return result


def flushes_denormals(parts, op, kind):
    result = diff.folded(parts, op, kind)
    if not kind.is_float:
        return result
    tiny = (result & kind.word(((1 << kind.exponent_bits) - 1) << kind.fraction_bits)) == 0
    return np.where(tiny, kind.word(0), result)


class Mistaken:
    """A communicator that reduces with a mistake."""

    def __init__(self, mistake, world_size: int) -> None:
        self.mistake, self.world_size = mistake, world_size

    def all_reduce(self, tensors, op, **_options):
        words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        if not all(isinstance(t, torch.Tensor) for t in tensors):
            return
        kind = next(k for k in KINDS if k.torch is tensors[0].dtype)
        word = words[tensors[0].element_size()]
        flat = [t.contiguous().view(-1).view(word).numpy().view(kind.word) for t in tensors]
        result = self.mistake(flat, op, kind)
        signed = torch.from_numpy(np.ascontiguousarray(result).view(f"i{result.itemsize}").copy())
        for tensor in tensors:
            tensor.copy_(signed.view(tensor.dtype).view(tensor.shape))


def finds(mistake, most: int) -> bool:
    """Whether plain calls, of one tensor and in rank order, show it."""
    for number in range(most):
        rng = np.random.default_rng([SEED, number])
        k, op = int(rng.integers(2, 7)), pick(rng, OPS)
        parameter = Parameter(rng, k)
        parameter.are_negated = [False] * k
        placed = [parameter.place(rng, rank) for rank in range(k)]
        Mistaken(mistake, k).all_reduce([p.tensor for p in placed], op)
        wanted = parameter.expected(op, "fused")
        try:
            check_ranks([p.read() for p in placed], wanted, parameter.kind, "")
        except AssertionError:
            return True
    return False


@pytest.mark.parametrize(
    "mistake",
    [
        another_order,
        loses_nan,
        cuts_bits_off,
        rounds_twice,
        one_short_at_a_border,
        flushes_denormals,
    ],
)
def test_mistakes_are_found(mistake):
    assert not finds(diff.folded, 200)
    assert finds(mistake, 200)


def test_the_oracle_rounds_as_it_should():
    """Against all 16-bit numbers, and between them, in exact arithmetic."""
    half = next(k for k in KINDS if k.torch is torch.float16)
    brain = next(k for k in KINDS if k.torch is torch.bfloat16)
    everything = np.arange(1 << 16, dtype=np.uint16)
    for kind in (half, brain):
        numbers = ~diff.is_nan(everything, kind)
        back = diff.rounded(diff.widened(everything, kind), kind)
        assert (back == everything)[numbers].all()
    ones = np.array([0x3F80], dtype=np.uint16)  # 1 in bfloat16; its neighbour is 2^-7 away
    for add, wanted in ((0.5, 0x3F80), (0.75, 0x3F81), (1.5, 0x3F82), (0.25, 0x3F80)):
        total = diff.widened(ones, brain) + np.float32(add * 2.0**-7)
        assert diff.rounded(total, brain)[0] == wanted
    for numel, k in itertools.product((0, 1, 5, 12), (1, 2, 5)):
        sizes = [s.stop - s.start for s in diff.chunks(numel, k)]
        assert sum(sizes) == numel
        assert max(sizes) - min(sizes) <= 1
