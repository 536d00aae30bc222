"""Communicators and other owners of threads are closed at exit, and not in forked children."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from case_marks import mostly_slow
from process_checks import LARGE
from programs import programs, run_programs
from rank_processes import value_of

import pyringar as pr
from pyringar.comm import exits
from pyringar.comm.background_work import Work

# Python 3.12 warns of fork() in a process with threads.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture
def events(monkeypatch) -> list[str]:
    """Empty the registry of objects to close at exit; return a list that tests append to."""
    monkeypatch.setattr(exits, "_living", {})
    monkeypatch.setattr(exits, "_inherited", set())
    monkeypatch.setattr(exits, "_end_reading", lambda: None)
    monkeypatch.setattr(sys, "last_value", None, raising=False)
    return []


def test_newest_owner_closes_first(events):
    def close_b(_) -> None:
        events.append("b")
        raise ValueError("in the middle")

    closes = {"a": lambda _: events.append("a"), "b": close_b, "c": lambda _: events.append("c")}
    owners = [threading.Event() for _ in closes]
    for owner, close in zip(owners, closes.values(), strict=True):
        exits.close_at_exit(owner, close)
    exits.close_at_exit(threading.Event(), lambda _: events.append("dropped"))
    with pytest.raises(ValueError, match="in the middle"):
        exits.close_all()
    assert events == ["c", "b", "a"]


def test_forked_child_closes_no_owner(events):
    owner, shared = threading.Event(), threading.Event()
    exits.close_at_exit(owner, lambda _: events.append("close"))
    exits.close_at_exit(
        shared, lambda _: events.append("close shared"), in_child=lambda _: events.append("forget")
    )
    exits._leave_to_parent()  # os.fork() calls this function in the child
    assert exits.is_inherited(owner)
    assert not exits.is_inherited(shared)
    exits.close_all()
    assert events == ["forget", "close shared"]
    watch = weakref.ref(owner)
    del owner
    gc.collect()
    assert watch() is not None, "destroying a copy would wait for threads of the parent"


# Uses each kind of group and gloo, then forks a child that exits, or uses or destroys the groups.
GROUPS = """
import os, sys, time
import torch
import torch.distributed as dist
import pyringar as pr
import pyringar.distributed as prd

rank, size, path, how = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
torch.set_num_threads(1)

def store(name):
    return dist.FileStore(path + name, size)

dist.init_process_group("ringar", store=store("group"), rank=rank, world_size=size)
x = torch.arange(4.0) + rank
dist.all_reduce(x)
dist.reduce(x, 0)
dist.all_reduce(x, async_op=True).get_future().wait()
comm = pr.ProcessCommunicator(store("comm"), rank, size)
state = prd.HookState(comm)
state.reduce(torch.ones(4)).wait()
os.environ["PYRINGAR_NODE_ID"] = f"machine {rank}"
machines = prd.HierarchicalCommunicator(store("machines"), rank, size)
machines.all_reduce(x)
pr.allreduce([torch.ones(2), torch.ones(2)])
pid = os.fork()
if pid == 0:
    if how == "destroy":
        machines.close()
        state.close()
        comm.close()
        dist.destroy_process_group()
    if how == "use":
        for call in (dist.all_reduce, lambda t: dist.reduce(t, 0), machines.all_reduce):
            try:
                call(x)
            except pr.RingarError as error:
                assert "before fork()" in str(error), error
            else:
                raise SystemExit("used the parent's rank")
        ours = [torch.ones(2), torch.ones(2)]
        pr.allreduce(ours)
        assert ours[0].tolist() == [2.0, 2.0]
    # how == "end": the child closes nothing
else:
    deadline = time.monotonic() + 60
    while not (found := os.waitpid(pid, os.WNOHANG))[0] and time.monotonic() < deadline:
        time.sleep(0.01)
    if found[0] == 0:
        os.kill(pid, 9)
    assert found == (pid, 0), f"the child: {found}"
    y = torch.arange(3.0) + rank
    for reduce in (dist.all_reduce, comm.all_reduce, machines.all_reduce):
        reduce(y)
    assert y.tolist() == [size**2 * (i * size + size * (size - 1) / 2) for i in range(3)], y
    dist.reduce(y, 0)
    dist.barrier()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("how", "size"), [("end", 2), ("end", 1), ("use", 2), ("destroy", 2)])
def test_forked_child_exits_cleanly(how, size, tmp_path):
    ranks = [(rank, size, tmp_path / "store", how) for rank in range(size)]
    for done in run_programs(GROUPS, *ranks, timeout_s=180):
        assert done.returncode == 0, done
        assert "Traceback" not in done.stdout + done.stderr
        assert "terminate called" not in done.stdout + done.stderr


ENDING = """
import os, sys, time
import torch
import torch.distributed as dist
import pyringar as pr
import pyringar.distributed as prd

rank, path, how, end = int(sys.argv[1]), *sys.argv[2:]
torch.set_num_threads(1)
x = torch.arange(4.0) + rank
if how in ("group", "gloo call"):
    dist.init_process_group("ringar", init_method=f"file://{path}", rank=rank, world_size=2)
    call = dist.all_reduce
    if how == "gloo call":  # the backend runs all_to_all with gloo
        call = lambda x, async_op=False: dist.all_to_all_single(x, x.clone(), async_op=async_op)
elif how == "machines":
    os.environ["PYRINGAR_NODE_ID"] = f"machine {rank}"
    comm = prd.HierarchicalCommunicator(dist.FileStore(path, 2), rank, 2)
    call = comm.all_reduce
else:
    comm = pr.ProcessCommunicator(dist.FileStore(path, 2), rank, 2)
    call = comm.all_reduce
call(x)
if rank == 0:
    work = call(x, async_op=True)
    print("ends", flush=True)
    if end == "raise":
        raise ValueError("of the program")
    sys.exit(1 if end == "exit" else 0)
sys.stdin.readline()  # is busy until the test writes a line
try:
    call(x)
    print("got", x.tolist())
except pr.PeerLostError as error:
    print("lost", error)
"""


def ending(folder, how, end):
    return programs(ENDING, *((rank, folder / "store", how, end) for rank in range(2)))


KINDS = ["communicator", "group", "gloo call", "machines"]


@pytest.mark.parametrize("end", mostly_slow(["raise", "exit"], "raise"))
@pytest.mark.parametrize("how", mostly_slow(KINDS, KINDS[0]))
def test_failing_program_exits_at_once(how, end, tmp_path):
    """A peer raises PeerLostError before its timeout of 30 s.

    sys.exit(1) leaves no traceback, so the failing program aborts the group only after 5 s.
    """
    with ending(tmp_path, how, end) as (failing, peer):
        _, errors = failing.communicate(timeout=25)  # the peer is busy meanwhile
        output, _ = peer.communicate("go on\n", timeout=25)
    assert ("ValueError: of the program" in errors) == (end == "raise")
    assert failing.returncode == 1
    assert output.startswith("lost"), output
    assert ("ranks [0] of the other machines" if how == "machines" else "rank 0 (process") in output


@pytest.mark.parametrize("how", mostly_slow(KINDS, KINDS[0]))
def test_exit_waits_for_late_peer(how, tmp_path):
    with ending(tmp_path, how, "end") as (first, late):
        assert first.stdout.readline() == "ends\n"
        time.sleep(1.5)
        output, errors = late.communicate("go on\n", timeout=25)
        first.wait(25)
        first_errors = first.stderr.read()
    assert output.startswith("got"), output + errors
    assert first.returncode == 0
    assert "Traceback" not in first_errors
    assert "terminate called" not in first_errors


FAILED_PASS = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
import pyringar as pr

class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, grad):
        raise ValueError("in backward")

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)
    def forward(self, x):
        kept = checkpoint(lambda x: self.first(x).sin(), x, use_reentrant=False)
        return self.last(kept + Failing.apply(self.first(x)))

def step():
    torch.set_num_threads(1)
    net = pr.DataParallel(Net(), ["cpu"] * 2)
    net(torch.rand(4, 3)).sum().backward()

step()
"""


@pytest.mark.slow
def test_program_exits_after_failed_backward():
    [done] = run_programs(FAILED_PASS, [])
    assert "in backward" in done.stderr
    assert done.returncode == 1


# Each child is forked while a call waits in the background. A lock that an engine thread holds at
# the fork stays locked in the child.
LIMIT_S = 20  # a child may run this many seconds
HARMLESS = "harmless"
FORK_ERRORS = ("made before fork()", "begun before fork()")


def outcome_in_child(call: Callable[[], Any]) -> str:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(LIMIT_S)  # kills a child that hangs
        try:
            call()
            text = HARMLESS
        except pr.RingarError as error:
            text = f"{type(error).__name__}: {error}"
        except BaseException as error:
            text = f"unexpected {error!r}"
        os.write(writer, json.dumps(text).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else "hangs"


def wrong_outcomes(calls: dict[str, Callable[[], Any]], harmless: set[str]) -> dict[str, str]:
    wrong = {}
    for name, call in calls.items():
        outcome = outcome_in_child(call)
        is_refused = any(words in outcome for words in FORK_ERRORS)
        if not (outcome == HARMLESS if name in harmless else is_refused):
            wrong[name] = outcome
    return wrong


def calls_of(comm: Any, data: Any, whole: Any) -> dict[str, Callable[[], Any]]:
    lists = [[tensor] for tensor in data] if isinstance(data, list) else [data]
    bound = comm.bind(data)
    done = comm.all_reduce(data, async_op=True)
    done.wait()
    return {
        "all_reduce": lambda: comm.all_reduce(data),
        "async": lambda: comm.all_reduce(data, async_op=True),
        "coalesced": lambda: comm.all_reduce_coalesced(lists),
        "reduce_scatter": lambda: comm.reduce_scatter(data, whole),
        "all_gather": lambda: comm.all_gather(whole, data, async_op=True),
        "broadcast": lambda: comm.broadcast(data),
        "bind": lambda: comm.bind(data),
        "bind_coalesced": lambda: comm.bind_coalesced(lists),
        "bound": bound,
        "check": comm.check,
        "stats": comm.stats,
        "plan": lambda: comm.plan(100),
        "done": done.wait,
        "close": comm.close,
        "repr": lambda: repr(comm),
    }


HARMLESS_CALLS = {"plan", "done", "close", "repr", "new group"}


def calls_of_work(work: Work) -> dict[str, Callable[[], Any]]:
    names = ("wait", "is_completed", "exception", "finished_ns")
    return {f"work.{name}": getattr(work, name) for name in names}


def reduce_two() -> None:
    two = [torch.ones(1_000), torch.ones(1_000)]
    pr.allreduce(two)
    assert torch.equal(two[0], torch.full((1_000,), 2.0))


def test_child_cannot_use_communicator():
    reduce_two()
    comm = pr.Communicator(["cpu"] * 2, timeout=60)
    two, four = ([torch.ones(n), torch.ones(n)] for n in (4, 8))
    calls = calls_of(comm, two, four) | {
        "reduce": lambda: comm.reduce(torch.empty(4), two),
        "reduce_coalesced": lambda: comm.reduce_coalesced(two[:1], [two[:1], two[1:]]),
        "broadcast_coalesced": lambda: comm.broadcast_coalesced([two[:1], two[1:]]),
        "naive": lambda: comm.all_reduce(two, algorithm="naive"),
        "new group": reduce_two,
    }
    comm._group.delay_rank(1, 20.0)
    work = comm.all_reduce([torch.ones(4), torch.ones(4)], algorithm="ring", async_op=True)
    assert wrong_outcomes(calls | calls_of_work(work), HARMLESS_CALLS) == {}
    comm._group.end_delay()
    assert work.wait(), "fork() must not disturb the parent"
    comm.close()


def use_new_group() -> None:
    with pr.ProcessCommunicator(torch.distributed.HashStore(), 0, 1) as own:
        tensor = torch.ones(3)
        own.all_reduce(tensor)
        own.all_reduce(tensor, async_op=True).wait()
        assert torch.equal(tensor, torch.ones(3))


def on_rank_forks_for_every_call(state) -> dict[str, str]:
    comm = state.comm
    calls = calls_of(comm, torch.ones(4), torch.ones(4 * state.world_size)) | {
        "barrier": comm.barrier,
        "check_peers": lambda: comm.check_peers([1]),
        "abort": comm.abort,
        "set_timeout": lambda: comm.set_timeout(7.0),
        "new group": use_new_group,
    }
    if state.rank != 0:
        time.sleep(0.5)
        return {}
    work = comm.all_reduce(torch.ones(LARGE), async_op=True)
    time.sleep(0.1)  # until the engine thread waits for rank 1
    return wrong_outcomes(calls | calls_of_work(work), HARMLESS_CALLS | {"abort", "set_timeout"})


def reduce_large(state) -> None:
    state.comm.all_reduce(torch.ones(LARGE))


def test_child_cannot_use_process_communicator(joined_rank_group):
    group = joined_rank_group(2, timeout=60)
    group.start(on_rank_forks_for_every_call)
    assert value_of(group[0].outcome()) == {}
    # The parent's call finishes, and the group still works.
    group[1].outcome()
    group[1].call(reduce_large)


def outcome_in_forked_handler(wait: Callable[[], Any]) -> str:
    reader, writer = os.pipe()
    parent, children = os.getpid(), []

    def fork(*_: object) -> None:
        child = os.fork()
        if child != 0:
            children.append(child)
        else:
            signal.alarm(LIMIT_S)

    previous = signal.signal(signal.SIGUSR1, fork)
    threading.Timer(0.3, os.kill, (parent, signal.SIGUSR1)).start()
    text = "returned"
    try:
        wait()
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
    finally:
        if os.getpid() != parent:
            os.write(writer, text.encode())
            os._exit(0)
        signal.signal(signal.SIGUSR1, previous)
    os.close(writer)
    assert text == "returned", text
    with os.fdopen(reader) as answer:
        text = answer.read()
    assert [os.waitpid(child, 0)[1] for child in children] == [0], text
    return text


def on_rank_forks_in_handler(state) -> str:
    tensor = torch.full((1000,), float(state.rank + 1))
    error = ""
    if state.rank != 0:
        time.sleep(1.5)
        state.comm.all_reduce(tensor)
    else:
        error = outcome_in_forked_handler(lambda: state.comm.all_reduce(tensor))
    assert torch.equal(tensor, torch.full((1000,), 3.0)), tensor
    state.comm.all_reduce(tensor)  # the group still works
    return error


def test_fork_in_handler_raises_in_child(joined_rank_group):
    error = joined_rank_group(2, timeout=60).run(on_rank_forks_in_handler)[0]
    assert "a signal handler has called fork() while" in error
