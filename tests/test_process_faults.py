"""One rank per process: what if ranks call different things, cannot meet, or get other results?"""

from __future__ import annotations

import os
import resource
import signal
import time

import pytest
import torch
from cases import mostly_slow
from process_checks import (
    LARGE,
    LATE_S,
    PROMPT_S,
    SMALL,
    assert_survivors_go_on,
    leave_nothing,
    needs_linux,
    open_memories,
    reduce,
    tensor_is_untouched,
)
from ranks import join, value_of
from torch.distributed import TCPStore

import pyringar as pr
from pyringar.engine import load

pytestmark = needs_linux

# -- ranks that call different things --------------------------------------------------------------


def call_something(state, usual: str, odd: str) -> None:
    comm, k, rank = state.comm, state.world_size, state.rank
    # What holds the results, before and after.
    state.tensor = torch.arange(600.0).view(20, 30) + rank
    state.before = state.tensor.clone()
    tensor = state.tensor
    calls = {
        "all_reduce": lambda: comm.all_reduce(tensor),
        "fewer elements": lambda: comm.all_reduce(tensor[:10]),
        "other sizes": lambda: comm.all_reduce(tensor.view(30, 20)),
        "many more": lambda: comm.all_reduce(torch.ones(LARGE)),
        "two tensors": lambda: comm.all_reduce([tensor[:10], tensor[10:]]),
        "an empty one more": lambda: comm.all_reduce([tensor, torch.empty(0)]),
        "other dtype": lambda: comm.all_reduce(tensor.view(torch.int32)),
        "mixed dtypes": lambda: comm.all_reduce([tensor[:19], tensor[19:].view(torch.int32)]),
        "mixed otherwise": lambda: comm.all_reduce([tensor[:19].view(torch.int32), tensor[19:]]),
        "other op": lambda: comm.all_reduce(tensor, "max"),
        "mean": lambda: comm.all_reduce(tensor, "mean"),
        "ring": lambda: comm.all_reduce(tensor, algorithm="ring"),
        "barrier": comm.barrier,
        "broadcast": lambda: comm.broadcast(tensor),
        "other root": lambda: comm.broadcast(tensor, 1),
        "all_gather": lambda: comm.all_gather(tensor[:k], tensor[5]),
        "reduce_scatter": lambda: comm.reduce_scatter(tensor[5], tensor[10 : 10 + k]),
        "in the background": lambda: comm.all_reduce(tensor[:5], async_op=True).wait(),
    }
    calls[odd if rank == 1 else usual]()


DIFFERENT = [
    ("all_reduce", "fewer elements", "of 600 float32 elements", "of 300 float32 elements"),
    ("all_reduce", "many more", "600", "200000"),
    ("all_reduce", "other sizes", "600", "different sizes"),
    ("all_reduce", "two tensors", "600", "in 2 tensors"),
    ("all_reduce", "an empty one more", "600", "in 2 tensors"),
    ("all_reduce", "other dtype", "float32", "int32"),
    ("mixed dtypes", "mixed otherwise", "float32", "int32"),
    ("all_reduce", "other op", "(sum)", "(max)"),
    ("all_reduce", "mean", "(sum)", "(mean)"),
    ("all_reduce", "ring", "600", "different algorithms"),
    ("all_reduce", "barrier", "all_reduce", "barrier"),
    ("broadcast", "other root", "from rank 0", "from rank 1"),
    ("all_gather", "reduce_scatter", "all_gather", "reduce_scatter"),
    ("all_reduce", "broadcast", "all_reduce", "broadcast"),
    ("all_reduce", "in the background", "600", "150"),
]


@pytest.mark.parametrize(
    ("usual", "odd", "word", "odd_word"), mostly_slow(DIFFERENT, *DIFFERENT[::3])
)
def test_ranks_that_call_different_things(joined_crew, usual, odd, word, odd_word):
    """An error on every rank, naming two; nothing written; the group refuses, a new one works."""
    crew = joined_crew(3)
    crew.run(reduce)
    crew.start(call_something, usual=usual, odd=odd)
    for outcome in crew.outcomes():
        assert outcome.error == "ArgumentError", outcome
        assert outcome.text.startswith("ranks call different things: ")
        assert crew.name(1) in outcome.text, outcome.text
        assert word in outcome.text
        assert odd_word in outcome.text, outcome.text
        assert "call 2" in outcome.text
        assert outcome.seconds < PROMPT_S, "they waited for a deadline"
    assert all(crew.run(tensor_is_untouched))
    assert_survivors_go_on(crew, [0, 1, 2], "ArgumentError")


def reduce_sizes(state, usual: list[int], odd: list[int]) -> None:
    for numel in odd if state.rank == 1 else usual:
        state.comm.all_reduce(torch.ones(numel))


@pytest.mark.parametrize(
    ("usual", "odd", "words"),
    [([10, 20], [20, 10], "call 1"), ([100, 101, 102], [100, 102], "call 2")],
    ids=["swapped", "skipped"],
)
def test_calls_that_are_swapped_or_skipped(joined_crew, usual, odd, words):
    crew = joined_crew(3)
    crew.start(reduce_sizes, usual=usual, odd=odd)
    for outcome in crew.outcomes():
        assert outcome.error == "ArgumentError", outcome
        assert words in outcome.text


def test_the_last_call_skipped(joined_crew):
    crew = joined_crew(2, timeout=1.0)
    crew.start(reduce_sizes, usual=[100, 100, 100], odd=[100, 100])
    value_of(crew[1].outcome())
    outcome = crew[0].outcome()
    assert outcome.error == "CollectiveTimeout"
    assert "call 3" in outcome.text
    assert "its last was call 2" in outcome.text


# -- joining ---------------------------------------------------------------------------------------


def test_a_rank_that_never_comes(new_crew):
    crew = new_crew(3)
    crew.start_group([0, 2], world_size=3, timeout=1.0)
    for outcome in crew.outcomes([0, 2]):
        assert outcome.error == "CollectiveTimeout", outcome
        assert "ranks [1] to join" in outcome.text
        assert "of 3 ranks" in outcome.text
        assert 0.9 < outcome.seconds < 1.0 + LATE_S
    assert crew.run(open_memories, [0, 2]) == [[], []]
    crew.join([0, 2])
    crew.run(reduce, [0, 2])


def test_a_rank_that_comes_late(new_crew):
    crew = new_crew(3)
    name = crew.start_group([0, 2], world_size=3, timeout=20.0)
    time.sleep(0.7)
    crew.start_group([1], world_size=3, timeout=20.0, name=name)
    crew.values()
    crew.run(reduce)


def join_without_room(state, limit: int, **options) -> None:
    """No file of this process may be larger, memory that others map included."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        join(state, **options)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_no_room_for_the_groups_memory(new_crew):
    crew = new_crew(3)
    name = crew.start_group([0], join_without_room, world_size=3, limit=100_000)
    crew.start_group([1, 2], world_size=3, name=name)
    for rank, outcome in enumerate(crew.outcomes()):
        assert outcome.error == "RingarError", outcome
        assert "bytes of shared memory for a group of processes: File too large" in outcome.text
        assert rank == 0 or crew.name(0) in outcome.text, outcome.text
        assert outcome.seconds < 5, "they waited for a deadline"
    crew.run(leave_nothing)
    crew.join()
    crew.run(reduce)


def register_without_room(state) -> str:
    """Rank 1 has no address space left for the others' memory."""
    shared = pr.shared_empty(64 << 20, torch.uint8)
    before = resource.getrlimit(resource.RLIMIT_AS)
    if state.rank == 1:
        with open("/proc/self/statm") as statm:
            used = int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + (32 << 20), before[1]))
    try:
        with pytest.raises(pr.RingarError) as caught:
            state.comm.register(shared)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    reduce(state)
    return str(caught.value)


def test_no_room_for_registered_memory(joined_crew):
    crew = joined_crew(3)
    texts = crew.run(register_without_room)
    assert "cannot map 67108864 bytes" in texts[1]
    for rank in (0, 2):
        assert crew.name(1) in texts[rank]
        assert "could not map" in texts[rank]


# -- the store -------------------------------------------------------------------------------------


def serve(state) -> int:
    """A store in this process."""
    state.server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return state.server.port


def test_the_store_is_gone_while_joining(new_crew):
    crew = new_crew(3)
    crew.port = crew[0].call(serve)
    crew.start_group([1, 2], world_size=3)
    time.sleep(0.5)
    died_at = crew[0].kill()
    for outcome in crew.outcomes([1, 2]):
        assert outcome.error == "PeerLostError", outcome
        assert "the store of group" in outcome.text
        assert outcome.at - died_at < PROMPT_S


def test_the_store_is_gone_later(new_crew):
    """A group that has met needs no store; a new one says that it is gone."""
    crew = new_crew(3)
    crew.port = crew[0].call(serve)
    crew.join([1, 2])
    crew[0].kill()
    crew.run(reduce, [1, 2], numel=LARGE)
    crew.start_group({1: 0, 2: 1})
    for outcome in crew.outcomes([1, 2]):
        assert outcome.error == "PeerLostError", outcome
    crew.run(reduce, [1, 2])


def test_the_store_is_stopped_while_joining(new_crew):
    """It neither answers nor breaks off; its own timeout is far away."""
    crew = new_crew(2)
    crew.port = crew[0].call(serve)
    crew.start_group([1], world_size=2, timeout=2.0)
    time.sleep(0.5)
    crew[0].send(signal.SIGSTOP)
    outcome = crew[1].outcome(20)
    assert outcome.error in ("CollectiveTimeout", "PeerLostError"), outcome
    assert "store" in outcome.text
    assert outcome.seconds < 2.0 + LATE_S


# -- digests ---------------------------------------------------------------------------------------


def everything_passes(state) -> None:
    comm, k = state.comm, state.world_size
    for numel in (0, SMALL, LARGE):
        reduce(state, numel)
        reduce(state, numel, "ring")
    wide = torch.ones(100, 2)
    comm.all_reduce(wide[:, 0])
    comm.all_reduce([torch.ones(3), torch.ones(5).half(), torch.ones(100_001).int()])
    comm.broadcast(torch.full((SMALL,), float(state.rank)), 1)
    comm.all_gather(torch.empty(2 * k), torch.full((2,), float(state.rank)))
    part = torch.empty(2)
    comm.reduce_scatter(part, torch.arange(2.0 * k))  # results differ, as they should
    assert part.tolist() == [2.0 * state.rank * k, (2.0 * state.rank + 1) * k]
    comm.barrier()
    nan = torch.tensor([float("nan"), float("inf"), -0.0])
    comm.all_reduce(nan)
    comm.all_reduce(nan, async_op=True).wait()
    shared = pr.shared_empty(LARGE).fill_(1.0)
    comm.register(shared)
    comm.all_reduce(shared)
    assert torch.equal(shared, torch.full((LARGE,), float(k)))


def flip_and_reduce(state, numel: int, algorithm: str) -> None:
    if state.rank == 1:
        state.comm._group.flip_bit_of_next()
    reduce(state, numel, algorithm)


@pytest.mark.parametrize("numel", [SMALL, LARGE])
@pytest.mark.parametrize("algorithm", ["direct", "ring"])
def test_digests(joined_crew, numel, algorithm):
    crew = joined_crew(3, env={"PYRINGAR_CHECK": "digest"})
    crew.run(everything_passes)
    crew.start(flip_and_reduce, numel=numel, algorithm=algorithm)
    for outcome in crew.outcomes():
        assert outcome.error == "RingarError", outcome
        assert outcome.text.startswith("results differ: after call ")
        assert crew.name(1) in outcome.text, outcome.text
        assert f"of {numel} float32 elements" in outcome.text
    assert_survivors_go_on(crew, [0, 1, 2], "RingarError")


def test_without_digests_nobody_notices(joined_crew):
    """That the flip is what the test above finds."""
    crew = joined_crew(2)
    crew.run(flip_and_reduce, numel=SMALL, algorithm="ring")


def test_digests_on_some_ranks_only(new_crew):
    crew = new_crew(3)
    name = crew.start_group([0, 2], world_size=3)
    crew.start_group([1], world_size=3, name=name, env={"PYRINGAR_CHECK": "digest"})
    for outcome in crew.outcomes():
        assert outcome.error == "ArgumentError", outcome
        assert "PYRINGAR_CHECK is ''" in outcome.text
        assert "'digest' for rank 1 (process" in outcome.text


# -- memory ----------------------------------------------------------------------------------------


def test_a_rank_joins_once():
    engine = load.engine()
    memory = engine.create_segment(2, b"t" * 32)
    again = engine.open_segment(os.getpid(), memory.fd, 2)
    options = {"world_size": 2, "token": b"t" * 32, "timeout_s": 5.0, "checks_digests": False}
    group = engine.ProcessGroup(memory=memory, rank=0, **options)
    with pytest.raises(pr.RingarError, match=f"rank 0 has joined .* as process {os.getpid()}"):
        engine.ProcessGroup(memory=again, rank=0, **options)
    group.close()


def test_another_user_cannot_open_it():
    if os.geteuid() != 0:
        pytest.skip("must be root to become somebody else")
    memory = load.engine().create_segment(2, b"t" * 32)
    parent, path = os.getpid(), f"/proc/{os.getpid()}/fd/{memory.fd}"
    with open(path, "rb"):
        pass  # we may
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(memory.fd)
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            try:
                os.open(path, os.O_RDWR)
            except PermissionError:
                try:
                    load.engine().open_segment(parent, memory.fd, 2)
                except pr.RingarError as error:
                    status = 0 if "Permission denied" in str(error) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
