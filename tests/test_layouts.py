"""Any layout without overlap: results in the right places, and not a byte touched between them."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from oracle import (
    ALGORITHMS,
    DTYPES,
    NATIVE,
    assert_all_ranks,
    assert_bits,
    expected,
    inputs,
    random,
)

import pyringar as pr

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies


def is_dense(tensor):
    """Whether the elements fill one block of memory, in whatever order."""
    block = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != block:
            return False
        block *= size
    return True


def as_chunks_lie(tensor):
    """A view whose index order is the order in which the ring cuts chunks.

    Dense tensors are cut as they lie in memory, those with gaps in the order of their index.
    """
    if not is_dense(tensor):
        return tensor
    return tensor.permute(sorted(range(tensor.ndim), key=lambda dim: -tensor.stride(dim)))


def check(comm, bases, view_of, op="sum", algorithm="fused"):
    """Reduces ``view_of(base, rank)``; the bases must change there and nowhere else."""
    after = [base.clone() for base in bases]
    views = [view_of(base, rank) for rank, base in enumerate(bases)]
    flats = [as_chunks_lie(view).reshape(-1).clone() for view in views]
    wanted = expected(flats, op, algorithm)
    for rank, base in enumerate(after):
        target = as_chunks_lie(view_of(base, rank))
        target.copy_(wanted.view(target.shape))
    if comm is None:
        pr.allreduce(views, op)
    else:
        comm.all_reduce(views, op, algorithm=algorithm)
    for rank, (base, want) in enumerate(zip(bases, after, strict=True)):
        context = f"{algorithm} rank {rank} shape {tuple(views[0].shape)} {views[0].stride()}"
        assert_bits(base, want, context)


def bases_of(numel, dtype, world_size, shape):
    return [base.view(shape) for base in inputs(numel, dtype, world_size)]


# -- the layouts one meets -------------------------------------------------------------------------

SHAPE = (4, 6, 5, 3)
LAYOUTS = {
    "whole": lambda base, rank: base,
    "channels_last": lambda base, rank: base.permute(0, 3, 1, 2),
    "transposed": lambda base, rank: base.transpose(0, 1),
    "reversed dims": lambda base, rank: base.permute(3, 2, 1, 0),
    "rows": lambda base, rank: base[1:3],
    "inner slice": lambda base, rank: base[:, 1:4, :, 1:],
    "every other": lambda base, rank: base[::2, ::3, :, ::2],
    "column": lambda base, rank: base[:, :, 2, 1],
    "sliced and permuted": lambda base, rank: base[:, 1:, ::2].permute(2, 0, 3, 1),
    "one element": lambda base, rank: base[2, 3, 1, 2],
    "empty slice": lambda base, rank: base[:, 3:3],
    "diagonal": lambda base, rank: base[0].diagonal(),
    "new dims": lambda base, rank: base[:, None, ..., None],
    "offset by one": lambda base, rank: base.view(-1)[1:],
    "offset by its rank": lambda base, rank: base.view(-1)[rank : rank + 301],
}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(comm_of, layout, algorithm):
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        for world_size in (1, 3, 4):
            bases = bases_of(360, dtype, world_size, SHAPE)
            check(comm_of(world_size), bases, LAYOUTS[layout], "sum", algorithm)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_in_the_books_call(layout):
    check(None, bases_of(360, torch.float32, 3, SHAPE), LAYOUTS[layout])


@pytest.mark.usefixtures("two_torch_threads")
@pytest.mark.parametrize("algorithm", NATIVE)
def test_large_layouts(comm_of, algorithm):
    """Large enough for several threads and many pieces."""
    shape = (8, 33, 41, 37)
    numel = 8 * 33 * 41 * 37
    for name in ("channels_last", "inner slice", "every other", "offset by one"):
        bases = bases_of(numel, torch.float32, 2, shape)
        check(comm_of(2), bases, LAYOUTS[name], "mean", algorithm)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scalars(comm_of, dtype):
    for algorithm in ALGORITHMS:
        parts = inputs(1, dtype, 5)
        tensors = [part.clone().view(()) for part in parts]
        comm_of(5).all_reduce(tensors, algorithm=algorithm)
        wanted = expected(parts, "sum", algorithm).view(())
        assert_all_ranks(tensors, wanted, algorithm)


@pytest.mark.parametrize(
    ("dtype", "shape", "dim"), [(torch.float32, (501, 4), 1), (torch.float16, (4, 501), 0)]
)
def test_ranks_in_one_base(comm_of, dtype, shape, dim):
    """Columns, interleaved in memory, and rows, as the parts of a flat buffer: no shared byte."""
    for algorithm in ALGORITHMS:
        base = random(4 * 501, dtype, 1).view(shape)
        parts = base.unbind(dim)
        wanted = expected([part.clone() for part in parts], "sum", algorithm)
        comm_of(4).all_reduce(list(parts), algorithm=algorithm)
        assert_all_ranks(list(base.unbind(dim)), wanted, algorithm)


def test_strides_of_dimensions_of_one_do_not_matter(comm_of):
    for algorithm in ALGORITHMS:
        parts = inputs(15, torch.float32, 3)
        odd = [(15, 1, 3), (77, 999, 3), (0, 0, 3)]
        tensors = [
            part.clone().as_strided((1, 1, 5), stride)
            for part, stride in zip(parts, odd, strict=True)
        ]
        wanted = expected([t.reshape(-1).clone() for t in tensors], "sum", algorithm)
        comm_of(3).all_reduce(tensors, algorithm=algorithm)
        assert_all_ranks(tensors, wanted.view(1, 1, 5), algorithm)
        single = [part[:1].as_strided((1, 1), (stride, 9)) for stride, part in enumerate(parts)]
        wanted = expected([t.reshape(-1).clone() for t in single], "sum", algorithm)
        comm_of(3).all_reduce(single, algorithm=algorithm)
        assert_all_ranks(single, wanted.view(1, 1), algorithm)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
def test_addresses_that_no_element_should_have(comm_of, dtype):
    """Memory from elsewhere may begin at any byte."""
    for algorithm in NATIVE:
        buffers = [bytearray(1009 * dtype.itemsize + 1) for _ in range(3)]
        tensors = [torch.frombuffer(b, dtype=dtype, offset=1) for b in buffers]
        assert all(t.data_ptr() % dtype.itemsize for t in tensors)
        parts = inputs(1009, dtype, 3)
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part)
        comm_of(3).all_reduce(tensors, algorithm=algorithm)
        assert_all_ranks(tensors, expected(parts, "sum", algorithm), algorithm)


def test_memory_of_numpy(comm_of):
    arrays = [np.arange(101, dtype=np.float64) * (rank + 1) for rank in range(3)]
    comm_of(3).all_reduce([torch.from_numpy(array) for array in arrays])
    assert (arrays[2] == np.arange(101) * 6).all()


def test_checking_a_thin_slice_of_a_large_tensor_is_quick(comm_of):
    """The check for overlaps may cost what the slice costs, not what lies between."""
    base = torch.empty(1 << 31, dtype=torch.int8)  # pages that nobody touches cost nothing
    for apart in (1 << 30, 1):  # one behind the other, interleaved
        tensors = [base[rank * apart :][: 1 << 30 : 1 << 22] for rank in range(2)]
        comm_of(2).all_reduce(tensors)
        start = time.perf_counter()
        for _ in range(20):
            comm_of(2).all_reduce(tensors)
        assert time.perf_counter() - start < 1


# -- another layout on every rank ------------------------------------------------------------------

MIXES = {
    "transposed": ((4, 4), [lambda t: t.clone(), lambda t: t.t().contiguous().t()]),
    "channels_last": (
        (3, 4, 5, 6),
        [lambda t: t.clone(), lambda t: t.contiguous(memory_format=torch.channels_last)],
    ),
    "all permuted, each its own way": (
        (3, 4, 5),
        [
            lambda t: t.permute(2, 1, 0).contiguous().permute(2, 1, 0),
            lambda t: t.permute(1, 2, 0).contiguous().permute(2, 0, 1),
            lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
        ],
    ),
    "steps beside dense": (
        (6, 7),
        [lambda t: t.clone(), lambda t: torch.stack([t, -t], 2)[:, :, 0]],
    ),
    "other offsets": (
        (6, 7),
        [lambda t: torch.cat([t, t])[6:], lambda t: torch.cat([t, t])[:6], lambda t: t.clone()],
    ),
    "columns of wider rows": (
        (6, 7),
        [lambda t: torch.cat([t, t], 1)[:, :7], lambda t: torch.cat([t, t, t], 1)[:, 7:14]],
    ),
}


def mixed(name, dtype=torch.float32, world_size=3):
    """Tensors of the same values whatever the mix; what they hold in the order of their index."""
    shape, layouts = MIXES[name]
    numel = int(np.prod(shape))
    flats = inputs(numel, dtype, world_size, seed=3)
    tensors = [layouts[rank % len(layouts)](flat.view(shape)) for rank, flat in enumerate(flats)]
    return tensors, flats, shape


def assert_mixed(tensors, wanted, shape, context=""):
    for rank, tensor in enumerate(tensors):
        assert_bits(tensor, wanted.view(shape), f"{context} rank {rank}")


@pytest.mark.parametrize("name", MIXES)
def test_elements_belong_together_by_index(comm_of, name):
    comm = comm_of(3)
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for algorithm in ALGORITHMS:
            tensors, flats, shape = mixed(name, dtype)
            comm.all_reduce(tensors, algorithm=algorithm)
            assert_mixed(tensors, expected(flats, "sum", algorithm), shape, algorithm)
            tensors, flats, shape = mixed(name, dtype)
            comm.all_reduce(tensors, "max", algorithm=algorithm, async_op=True).wait()
            assert_mixed(tensors, expected(flats, "max", algorithm), shape, algorithm)
            lists = [[t, t.new_ones(5)] for t in mixed(name, dtype)[0]]
            comm.all_reduce_coalesced(lists, algorithm=algorithm)
            wanted = expected(flats, "sum", algorithm)
            assert_mixed([ts[0] for ts in lists], wanted, shape, algorithm)
            assert all((ts[1] == 3).all() for ts in lists)


def check_mixed_reduce(comm, name, root, algorithm):
    """Reduce into an output of each layout of the mix, and in place."""
    for is_in_place in (True, False):
        for other in range(3):
            tensors, flats, shape = mixed(name)
            output = tensors[root] if is_in_place else mixed(name)[0][other]
            wanted = expected(flats, "sum", algorithm).view(shape)
            if other < 2:
                comm.reduce(output, tensors, root=root, algorithm=algorithm)
            else:
                lists = [[t, torch.ones(5)] for t in tensors]
                ones = torch.zeros(10)[::2]
                comm.reduce_coalesced([output, ones], lists, root=root, algorithm=algorithm)
                assert (ones == 3).all()
            context = f"reduce to {root}, in place: {is_in_place}"
            assert_bits(output, wanted, context)
            for rank, (tensor, flat) in enumerate(zip(tensors, flats, strict=True)):
                if tensor is not output:
                    assert_bits(tensor, flat.view(shape), f"{context}: input of rank {rank}")


@pytest.mark.parametrize("name", MIXES)
def test_mixed_layouts_in_the_other_calls(comm_of, name):
    comm = comm_of(3)
    tensors, flats, shape = mixed(name)
    pr.allreduce(tensors)
    assert_mixed(tensors, expected(flats, "sum", "fused"), shape, "the book's call")
    for algorithm in NATIVE:
        tensors, flats, shape = mixed(name)
        for bound in (
            comm.bind(tensors, algorithm=algorithm),
            comm.bind_coalesced([[t] for t in tensors], algorithm=algorithm),
        ):
            for _ in range(2):
                for tensor, flat in zip(tensors, flats, strict=True):
                    tensor.copy_(flat.view(shape))
                bound()
                assert_mixed(tensors, expected(flats, "sum", algorithm), shape, algorithm)
    for root in range(3):
        tensors, flats, shape = mixed(name)
        comm.broadcast(tensors, root)
        assert_mixed(tensors, flats[root], shape, "broadcast")
        lists = [list(pair) for pair in zip(mixed(name)[0], mixed(name)[0], strict=True)]
        comm.broadcast_coalesced(lists, root)
        for i in range(2):
            assert_mixed([pair[i] for pair in lists], flats[root], shape, "broadcast_coalesced")
        for algorithm in ("fused", "direct"):
            check_mixed_reduce(comm, name, root, algorithm)
    tensors, flats, shape = mixed(name)
    parts = [torch.empty(2, flats[0].numel() // 3)[rank % 2] for rank in range(3)]
    if flats[0].numel() % 3 == 0:
        parts[1] = torch.empty(flats[0].numel() // 3, 2)[:, 0]
        comm.reduce_scatter(parts, tensors)
        assert_bits(torch.cat(parts), expected(flats, "sum", "fused"), "reduce_scatter")
        comm.all_gather(tensors, parts)
        assert_mixed(tensors, expected(flats, "sum", "fused"), shape, "all_gather")


def test_replicas_of_different_memory_formats(make_comm):
    """Gradients lie as their parameters do, so that those of replicas lie otherwise."""
    torch.manual_seed(0)
    plain = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(36, 2)
    )
    replicas = pr.replicate(plain, ["cpu"] * 2)
    replicas[1].to(memory_format=torch.channels_last)
    assert replicas[0][0].weight.stride() != replicas[1][0].weight.stride()
    halves = torch.randn(4, 3, 5, 5).chunk(2)
    own = [
        torch.autograd.grad(replica(x).sum(), list(replica.parameters()))
        for replica, x in zip(replicas, halves, strict=True)
    ]
    bucketer = pr.GradientBucketer([list(r.parameters()) for r in replicas])
    for replica, x in zip(replicas, halves, strict=True):
        replica(x).sum().backward()
    bucketer.wait()
    bucketer.close()
    for i, pair in enumerate(zip(*[r.parameters() for r in replicas], strict=True)):
        assert torch.equal(pair[0].grad, pair[1].grad)
        assert torch.equal(pair[0].grad, own[0][i] + own[1][i])


# -- negated views ---------------------------------------------------------------------------------


def negated_views(dtype=torch.float32):
    """They hold 1, 2, 3 and ten and a hundred times as much, two of them with other signs."""
    dense = torch._neg_view(torch.tensor([-1, -2, -3]).to(dtype))
    with_steps = torch._neg_view(torch.tensor([-10, 0, -20, 0, -30]).to(dtype)[::2])
    return [dense, with_steps, torch.tensor([100, 200, 300]).to(dtype)]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_negated_views_have_their_sign(comm_of, algorithm):
    comm, total = comm_of(3), [111, 222, 333]
    for dtype in (torch.float32, torch.float64, torch.float16, torch.int64):
        tensors = negated_views(dtype)
        assert [t.is_neg() for t in tensors] == [True, True, False]
        comm.all_reduce(tensors, algorithm=algorithm)
        assert [t.tolist() for t in tensors] == [total] * 3
        tensors = negated_views(dtype)
        comm.all_reduce_coalesced([[t] for t in tensors], algorithm=algorithm)
        assert [t.tolist() for t in tensors] == [total] * 3
    if algorithm in NATIVE:
        tensors = negated_views()
        comm.bind(tensors, algorithm=algorithm)()
        assert [t.tolist() for t in tensors] == [total] * 3


def test_negated_views_in_the_other_calls(comm_of):
    comm = comm_of(3)
    tensors = negated_views()
    pr.allreduce(tensors)
    assert [t.tolist() for t in tensors] == [[111, 222, 333]] * 3
    tensors = negated_views()
    comm.broadcast(tensors, 0)
    assert [t.tolist() for t in tensors] == [[1, 2, 3]] * 3
    tensors = negated_views()
    comm.reduce(tensors[1], tensors, root=1)
    assert tensors[1].tolist() == [111, 222, 333]
    outputs = [torch._neg_view(torch.zeros(1)) for _ in range(3)]
    comm.reduce_scatter(outputs, negated_views())
    assert [t.item() for t in outputs] == [111, 222, 333]
    wholes = [torch._neg_view(torch.zeros(3)) for _ in range(3)]
    comm.all_gather(wholes, outputs)
    assert [t.tolist() for t in wholes] == [[111, 222, 333]] * 3
    imaginary = torch.tensor([1 - 2j, 3 - 4j]).conj().imag
    assert imaginary.is_neg()
    pr.allreduce([imaginary, torch.tensor([10.0, 20.0])])
    assert imaginary.tolist() == [12, 24]
    # Where all but one rank's lie alike, and not in the order of their index.
    tall = [torch.arange(6.0).view(2, 3).t() * 10**rank for rank in range(3)]
    wanted = sum(t.clone() for t in tall)
    tall[1] = torch._neg_view((-tall[1]).t().contiguous().t())
    assert tall[1].stride() == tall[0].stride()
    comm.all_reduce(tall)
    assert all(torch.equal(t, wanted) for t in tall)


# -- any layout ------------------------------------------------------------------------------------


@st.composite
def layouts(draw):
    """A base shape, and how a view of it is cut: slices, then a permutation."""
    ndim = draw(st.integers(0, 4))
    shape = tuple(draw(st.integers(1, 6)) for _ in range(ndim))
    cuts = []
    for size in shape:
        begin = draw(st.integers(0, size - 1))
        end = draw(st.integers(begin, size))
        cuts.append(slice(begin, end, draw(st.integers(1, 3))))
    if draw(st.booleans()):
        cuts = [slice(None)] * ndim
    return shape, tuple(cuts), draw(st.permutations(range(ndim)))


def run_any_layout(comm_of, data):
    shape, cuts, dims = data.draw(layouts())
    dtype = data.draw(st.sampled_from(DTYPES))
    algorithm = data.draw(st.sampled_from(ALGORITHMS))
    op = data.draw(st.sampled_from(["sum", "mean", "max"]))
    world_size = data.draw(st.integers(1, 6))
    numel = int(np.prod(shape, dtype=int))
    offset = data.draw(st.integers(0, 3))
    flats = inputs(numel + offset + 2, dtype, world_size, seed=data.draw(st.integers(0, 99)))

    def view_of(flat, _rank):
        return flat[offset : offset + numel].view(shape)[cuts].permute(dims)

    check(comm_of(world_size), flats, view_of, op, algorithm)


@hypothesis.settings(max_examples=300)
@hypothesis.given(data=st.data())
def test_any_layout(comm_of, data):
    run_any_layout(comm_of, data)


@pytest.mark.slow
@pytest.mark.timeout(900)
@hypothesis.settings(max_examples=3_000)
@hypothesis.given(data=st.data())
def test_any_layout_at_length(comm_of, data):
    run_any_layout(comm_of, data)


@hypothesis.settings(max_examples=200)
@hypothesis.given(data=st.data())
def test_overlap_is_found_exactly(comm_of, data):
    """Two views of one storage: refused if and only if they share an element, and never changed."""
    ndim = data.draw(st.integers(1, 3))
    shape = [data.draw(st.integers(1, 4)) for _ in range(ndim)]
    strides = [data.draw(st.integers(0, 9)) for _ in range(ndim)]
    starts = data.draw(st.integers(0, 20)), data.draw(st.integers(0, 20))
    base = torch.arange(128, dtype=torch.int32)
    views = [base.as_strided(shape, strides, start) for start in starts]
    places = [view.reshape(-1).tolist() for view in views]
    touched = places[0] + places[1]
    if len(set(touched)) == len(touched):
        comm_of(2).all_reduce(views)
        wanted = torch.tensor(places).sum(0)
        assert torch.equal(views[1].reshape(-1).long(), wanted)
        assert torch.equal(views[0].reshape(-1).long(), wanted)
        base[touched] = torch.tensor(touched, dtype=torch.int32)
    else:
        with pytest.raises(pr.ArgumentError, match=r"shares memory with|overlaps itself"):
            comm_of(2).all_reduce(views)
    assert torch.equal(base, torch.arange(128, dtype=torch.int32))
