"""Are tensors in shared memory, registered by ranks in processes, reduced there, and let go?"""

from __future__ import annotations

import gc
import os
import signal
import time

import pytest
import torch
from cases import mostly_slow
from oracle import OPS, assert_bits, expected, inputs, reduced, same_bits
from process_checks import WORLD_SIZES, crc, mapped_memories, needs_linux
from ranks import another, on_ranks

import pyringar as pr
from pyringar.comm.shared_tensors import shared_empty

pytestmark = needs_linux


def registered_calls(comm) -> int:
    return comm.stats().get("registered", {}).get("calls", 0)


@on_ranks(*WORLD_SIZES)
def test_registered_tensors(state):
    comm, k, rank = state.comm, state.world_size, state.rank
    found = []
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        numel = 70_003
        parts = inputs(numel, dtype, k, seed=1)
        shared = shared_empty(numel, dtype)
        assert shared.count_nonzero() == 0
        comm.register(shared)
        for op in OPS:
            shared.copy_(parts[rank])
            before = registered_calls(comm)
            comm.all_reduce(shared, op)
            assert registered_calls(comm) == before + (k > 1)
            assert_bits(shared, reduced(parts, op), f"registered {op} {dtype}")
            found.append(crc(shared))
        # Views at an offset, in a list, and through bind and async.
        shared.copy_(parts[rank])
        views = [shared[5:1005], shared[2000:2001], shared[3000:60_000]]
        comm.all_reduce_coalesced(views, "max")
        wanted = parts[rank].clone()
        for where in (slice(5, 1005), slice(2000, 2001), slice(3000, 60_000)):
            wanted[where] = reduced([p[where] for p in parts], "max")
        assert_bits(shared, wanted, "views, and nothing between them")
        shared.copy_(parts[rank])
        comm.bind(shared)()
        assert_bits(shared, reduced(parts, "sum"), "bound")
        shared.copy_(parts[rank])
        comm.all_reduce(shared, async_op=True).wait()
        assert_bits(shared, reduced(parts, "sum"), "async")
        del shared, views
    assert registered_calls(comm) >= 3 * 8 or k == 1
    return found


@on_ranks(2, 3)
def test_registered_and_other_tensors_together(state):
    """Registered and others in one list, with gaps, empty: right all the same."""
    comm, k, rank = state.comm, state.world_size, state.rank
    parts = inputs(4000, torch.float32, k, seed=2)
    shared = shared_empty((4, 1000))
    comm.register(shared[1:])  # any view shows the whole memory
    before = registered_calls(comm)
    shared.copy_(parts[rank].view(4, 1000))
    own = parts[rank].clone()
    comm.all_reduce_coalesced([shared, own])
    assert_bits(shared.view(-1), reduced(parts, "sum"))
    assert_bits(own, reduced(parts, "sum"))
    shared.copy_(parts[rank].view(4, 1000))
    comm.all_reduce(shared[:, ::2])
    even = [p.view(4, 1000)[:, ::2].reshape(-1) for p in parts]
    assert_bits(shared[:, ::2].reshape(-1), reduced(even, "sum"))
    assert same_bits(shared[:, 1::2], parts[rank].view(4, 1000)[:, 1::2])
    assert registered_calls(comm) == before
    shared.copy_(parts[rank].view(4, 1000))
    comm.all_reduce_coalesced([shared[0], shared[1, :0], torch.empty(0), shared[1:]])
    assert_bits(shared.view(-1), reduced(parts, "sum"), "with empties")
    transposed = shared_empty((30, 20))
    comm.register(transposed)
    flat = [p[:600] for p in parts]
    transposed.copy_(flat[rank].view(30, 20))
    comm.all_reduce(transposed.t())
    assert_bits(transposed.view(-1), reduced(flat, "sum"), "transposed")
    nothing = shared_empty(0)
    assert nothing.numel() == 0
    comm.all_reduce(nothing)
    return [crc(shared), crc(own)]


@on_ranks(3)
def test_unequal_registration_is_refused_on_all_ranks(state):
    """On every rank the same error, and the communicator works on."""
    comm, rank = state.comm, state.rank
    texts = []
    # First another size on rank 1, then no shared memory on rank 1.
    cases = (shared_empty(150), ("600 bytes", "400")), (torch.zeros(100), ("0 bytes",))
    for odd, told in cases:
        tensor = odd if rank == 1 else shared_empty(100)
        with pytest.raises(pr.ArgumentError, match="register: the tensor of rank 1") as caught:
            comm.register(tensor)
        texts.append(str(caught.value))
        assert all(text in texts[-1] for text in told), texts
        plain = torch.ones(10)
        comm.all_reduce(plain)
        assert torch.equal(plain, torch.full((10,), float(state.world_size)))
    with pytest.raises(pr.ArgumentError, match="tensor is 3, expected"):
        comm.register(3)
    return texts


GIVES_UP_S = 0.5
COMES_LATE_S = 1.0

CALLS = {
    "now": lambda comm, shared: comm.all_reduce(shared),
    "in a list": lambda comm, shared: comm.all_reduce([shared[:900], shared[900:]]),
    "bound": lambda comm, shared: comm.bind(shared)(),
    "in the background": lambda comm, shared: comm.all_reduce(shared, async_op=True).wait(),
}


def come_late(state, call: str, late: int) -> tuple[str, list[float]]:
    """What the call told this rank, and what a rank that gave up finds of what it wrote then."""
    comm = state.comm
    shared = shared_empty(1000)
    comm.register(shared)
    shared.fill_(state.rank + 1.0)
    if state.rank == late:
        comm._group.delay("reduce", COMES_LATE_S)
    try:
        CALLS[call](comm, shared)
        told = ""
    except pr.CollectiveTimeout as error:
        told = str(error)
    if state.rank != late:
        shared.fill_(7.0)
        time.sleep(COMES_LATE_S)
    return told, shared.unique().tolist()


@pytest.mark.parametrize("call", mostly_slow(CALLS, "bound"))
@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_who_comes_late_writes_to_nobody_who_gave_up(joined_crew, world_size, call):
    late = world_size - 1
    crew = joined_crew(world_size, timeout=GIVES_UP_S)
    results = crew.run(come_late, call=call, late=late)
    for rank, (told, values) in enumerate(results):
        assert f"waited for {crew.name(late)}" in told, (rank, results)
        assert rank == late or values == [7.0], (rank, results)


@pytest.mark.slow
@on_ranks(2)
def test_registering_again_and_again(state):
    """Memory is freed and taken again, at the same address as likely as not."""
    comm, k = state.comm, state.world_size
    before = len(mapped_memories())
    descriptors = len(os.listdir("/proc/self/fd"))
    for turn in range(20):
        shared = shared_empty(5000)
        if turn % 3 == 2:  # not registered: by another way, with the same result
            used = registered_calls(comm)
        else:
            comm.register(shared)
            if turn % 3 == 1:
                comm.register(shared)
            used = registered_calls(comm) + 1
        shared.fill_(float(state.rank + turn))
        comm.all_reduce(shared)
        assert registered_calls(comm) == used
        assert shared[4999] == k * turn + k * (k - 1) // 2
        del shared
        gc.collect()
    comm.barrier()
    assert len(mapped_memories()) == before, "memory of freed tensors is still mapped"
    assert len(os.listdir("/proc/self/fd")) == descriptors, "a descriptor leaks"


@on_ranks(2)
def test_shared_tensors_outlive_their_communicator(state):
    comm = another(state)
    shared = shared_empty(1000)
    comm.register(shared)
    call = comm.bind(shared)
    shared.fill_(1.0)
    call()
    comm.close()
    with pytest.raises(pr.RingarError, match="closed"):
        call()
    shared.add_(1.0)
    del comm, call
    gc.collect()
    assert shared.sum().item() == 3000.0
    state.comm.register(shared)  # in another group
    state.comm.all_reduce(shared)
    assert shared.sum().item() == 6000.0


def test_shared_empty():
    tensor = shared_empty((3, 5), torch.float16)
    assert tensor.shape == (3, 5)
    assert tensor.dtype == torch.float16
    assert tensor.is_contiguous()
    assert tensor.count_nonzero() == 0
    tensor.requires_grad_()  # as any other
    assert shared_empty(7).shape == (7,)
    assert shared_empty(()).shape == ()
    assert shared_empty(torch.Size([2, 0])).shape == (2, 0)
    wrong = (2.5, "ab", None, True, -1, (3, -1), (2, 2.0), [True], {3: 4}, (2**70,), (2**61,))
    for shape in wrong:
        with pytest.raises(pr.ArgumentError, match="shape is "):
            shared_empty(shape)
    with pytest.raises(pr.ArgumentError, match="dtype is 'float32', expected a "):
        shared_empty(3, "float32")
    with pytest.raises(pr.RingarError, match=r"cannot allocate 4611686018427387904 bytes.*limit"):
        shared_empty(2**60)


def test_shared_empty_while_signals_come():
    """An alarm every millisecond interrupts the kernel while it finds pages."""
    beats = []
    before = signal.signal(signal.SIGALRM, lambda *_: beats.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
    try:
        for _ in range(5):
            tensor = shared_empty(4_000_000)
            assert tensor[-1] == 0
            del tensor
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert beats


# -- tensors that lie otherwise on some ranks ------------------------------------------------------


def on_rank_registered(state) -> dict:
    """Registered tensors at other places, in other strides, on some ranks only: through slots."""
    comm, k, rank = state.comm, state.world_size, state.rank
    for numel in (6, 60_000):
        parts = inputs(numel, torch.float32, k, seed=6)
        wanted = reduced(parts, "sum")
        shared = shared_empty(2 * numel)
        comm.register(shared)
        odd = rank == k - 1
        own = {
            "the same place": shared[:numel],
            "another place": shared[numel:] if odd else shared[:numel],
            "not registered": torch.empty(numel) if odd else shared[:numel],
            "other strides": shared[:numel].view(2, -1).t().reshape(-1) if odd else shared[:numel],
            "gaps": shared[::2] if odd else shared[:numel],
        }
        own["other strides"] = shared[:numel].view(2, -1)
        if odd:
            own["other strides"] = shared[:numel].view(-1, 2).t()
        for name, tensor in own.items():
            tensor.copy_(parts[rank].view(tensor.shape))
            before = registered_calls(comm)
            comm.all_reduce(tensor)
            assert registered_calls(comm) - before == (name == "the same place"), name
            assert_bits(tensor.reshape(-1), wanted, name)
    return {}


@pytest.mark.parametrize("world_size", [2, 3])
def test_registered_tensors_that_lie_otherwise(crew_of, world_size):
    crew_of(world_size).run(on_rank_registered)


@on_ranks(3)
@pytest.mark.parametrize("order", ["tree", "exact"])
def test_registered_tensors_keep_the_order(state, order):
    parts = inputs(4000, torch.float32, state.world_size)
    with another(state, order=order) as comm:
        shared = shared_empty(4000)
        comm.register(shared)
        shared.copy_(parts[state.rank])
        comm.all_reduce(shared)
        assert_bits(shared, expected(parts, "sum", "direct", order))
        assert registered_calls(comm) == 1
