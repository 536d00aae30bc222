"""`pr.launch(processes=True)`: results, failures and output of ranks."""

import atexit
import ctypes
import logging
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from case_marks import forks_run_backward
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import pyringar as pr
from pyringar.cluster.process_rank import SharedValue
from pyringar.cluster.rank_calls import text_of


def launch(fn, ranks=2, **options):
    return pr.launch(fn, ranks, processes=True, **options)


def rank_of(backend=None):
    dist.init_process_group(backend)
    return dist.get_rank()


def failure_of(fn, ranks=3, **options):
    """Return the error of a launch, its text, and the tracebacks of ranks."""
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        launch(fn, ranks, **options)
    return caught.value, str(caught.value), str(caught.value.__cause__ or "")


@pytest.mark.parametrize("backend", [None, "gloo", "ringar"])
def test_results_are_ordered_by_rank(backend):
    def program(first, *, last):
        rank = rank_of(backend)
        x = torch.full((5,), float(rank))
        dist.all_reduce(x)
        return rank, x, first, last, dist.get_backend()

    results = launch(program, 3, args=(1,), kwargs={"last": 2})
    assert [(rank, x.tolist(), *rest) for rank, x, *rest in results] == [
        (rank, [3.0] * 5, 1, 2, backend or "ringar") for rank in range(3)
    ]


def sharded(net):
    fully_shard(net[1])
    return fully_shard(net)


@forks_run_backward
@pytest.mark.parametrize("wrap", [DistributedDataParallel, sharded])
def test_threads_match_bits_of_processes(wrap):
    def program():
        rank = rank_of()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        net = wrap(nn.Sequential(nn.Conv1d(1, 4, 3), layer))
        optimizer = torch.optim.Adam(net.parameters(), 0.01)
        torch.manual_seed(rank)  # seeds dropout and the data
        for _ in range(3):
            optimizer.zero_grad()
            net(torch.randn(4, 1, 18)).square().mean().backward()
            optimizer.step()
        whole = [p.full_tensor() if wrap is sharded else p for p in net.parameters()]
        return [p.detach().clone() for p in whole]

    processes = launch(program, 2)
    for seed in range(3):
        for ours, theirs in zip(pr.launch(program, 2, seed=seed), processes, strict=True):
            assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))


def test_ranks_start_with_fresh_state():
    def program():
        draws = float(torch.rand(())), random.random()
        with warnings.catch_warnings(record=True) as told:
            warnings.warn("old", DeprecationWarning, stacklevel=1)
        dtype, num_threads = torch.get_default_dtype(), torch.get_num_threads()
        return draws, torch.is_grad_enabled(), dtype, num_threads, len(told)

    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad():
            processes = launch(program)
    finally:
        torch.set_default_dtype(torch.float32)
    assert processes == pr.launch(program, 2)
    assert processes[0][1:] == (True, torch.float32, 1, 1)
    assert processes[0][0] != processes[1][0]


@pytest.mark.parametrize("processes", [False, True])
def test_caller_can_have_process_group(tmp_path, processes):
    def program():
        assert not dist.is_initialized()
        x = torch.ones(1)
        rank_of()
        dist.all_reduce(x)
        return float(x), dist.get_world_size()

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert pr.launch(program, 3, processes=processes) == [(3.0, 3)] * 3
        assert (dist.get_world_size(), dist.get_backend()) == (1, "gloo")
        dist.all_reduce(torch.ones(2))
    finally:
        dist.destroy_process_group()


def test_process_rank_can_launch():
    assert launch(lambda: launch(lambda: os.environ["RANK"])) == [["0", "1"]] * 2


def test_thread_rank_cannot_fork():
    with pytest.raises(pr.RingarError, match="a rank that is a thread cannot fork"):
        pr.launch(lambda: launch(os.getpid), 1)


def test_threads_can_call_torch_distributed(tmp_path):
    def program():
        rank = rank_of()
        beside, got = dist.new_group(), torch.zeros(1)

        def later():
            time.sleep(0.05)
            dist.send(torch.ones(1), 1, group=beside)

        if rank == 0:
            threading.Thread(target=later).start()
        else:
            dist.recv(got, 0, group=beside)
        dist.barrier()
        group = dist.new_group(backend="gloo")
        dcp.async_save({"x": torch.ones(3)}, checkpoint_id=tmp_path, process_group=group).result()
        return float(got)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert launch(program) == [0.0, 1.0]


def test_set_num_threads_warns_after_openmp(capsys):
    def program():
        logging.getLogger("pyringar").addHandler(logging.StreamHandler(sys.stderr))
        torch.set_num_threads(2)
        return torch.rand(1_000_000).sum() > 0, torch.get_num_threads()

    torch.rand(1_000_000).sum()  # the caller uses OpenMP before it forks
    assert launch(program) == [(True, 1)] * 2
    assert "[rank 1] torch.set_num_threads(2)" in capsys.readouterr().err


def raises():
    if rank_of() == 1:
        raise ValueError("planted")
    dist.all_reduce(torch.ones(3))


def test_exception_has_traceback_of_rank():
    error, text, traces = failure_of(raises)
    assert (type(error), text) == (ValueError, "planted")
    assert getattr(error, "__notes__", []) == ["raised by rank 1 of 3"] * hasattr(error, "add_note")
    first, _, others = traces.strip().partition("\n\n")
    assert first.startswith("rank 1:\nTraceback")
    assert first.endswith("ValueError: planted")
    assert "in raises" in first
    assert "run_rank" not in traces
    assert others.startswith("ranks 0, 2:\n") or "rank 0:\n" in others
    assert "rank 1" in others


def gets(number):
    rank = rank_of()
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), number)
    dist.all_reduce(torch.ones(3))


def is_killed_beside_gloo():
    rank = rank_of("gloo")
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(3))


def joins_without_rank_2():
    if os.environ["RANK"] != "2":
        rank_of()


@pytest.mark.parametrize(
    ("program", "first_line", "row"),
    [
        (partial(gets, signal.SIGKILL), "rank 1 (process", "1 +was killed by SIGKILL +barrier +1 "),
        (is_killed_beside_gloo, "rank 1 (process", "1 +was killed by SIGKILL +after 0 calls"),
        (joins_without_rank_2, "ranks wait for rank 2, which has ended", "1 +waits in the store "),
    ],
    ids=["killed", "killed-beside-gloo", "absent"],
)
def test_lost_process_is_named(program, first_line, row):
    """test_cluster_failures.py tests mistakes of programs."""
    began_s = time.monotonic()
    error, text, _ = failure_of(program, timeout=1)
    assert type(error) is pr.PeerLostError
    assert text.startswith(first_line)
    assert re.search(f"^{row}", text, re.MULTILINE), text
    assert time.monotonic() - began_s < 8


def test_stopped_rank_is_named():
    error, text, _ = failure_of(partial(gets, signal.SIGSTOP), timeout=2.5)
    assert type(error) is pr.CollectiveTimeout
    assert text.startswith("rank 1 gave no sign for 2.5 s, while others waited")
    assert re.search(r"^1 +is silent .*\n2 +waits +all_reduce", text, re.MULTILINE), text


def forks_a_child_that_raises():
    child = os.fork()
    if child == 0:
        raise ValueError("of the child")
    os.waitpid(child, 0)
    sys.exit(0)


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (forks_a_child_that_raises, None),
        (lambda: sys.exit(0), None),
        (lambda: os._exit(0), None),
        (lambda: sys.exit(3), "3"),
        (lambda: os._exit(3), r"rank 1 \(process \d+\) exited with status 3"),
        (lambda: os.abort(), r"rank 1 \(process \d+\) was killed by SIGABRT"),
    ],
    ids=["fork", "exit", "_exit", "exit-3", "_exit-3", "abort"],
)
def test_exit_status_decides_result(end, expected):
    def program():
        if os.environ["RANK"] == "1":
            end()
        return 5

    if expected is None:
        assert launch(program) == [5, None]
    else:
        _, text, _ = failure_of(program, 2)
        assert re.match(expected, text)


@forks_run_backward
def test_error_in_backward_has_rank_table():
    def program():
        rank, net = rank_of(), DistributedDataParallel(nn.Linear(2, 1))
        for _ in range(3 if rank == 0 else 2):
            net(torch.ones(1, 2)).sum().backward()

    error, text, _ = failure_of(program)
    assert type(error) is pr.PeerLostError
    assert re.search(r"^0 +waits +all_reduce \(sum\) .* 1, 2 +test_launch", text, re.M), text
    assert "At:" not in text


def test_running_ranks_ignore_timeout():
    assert launch(lambda: time.sleep(1 + int(os.environ["RANK"])), timeout=0.2) == [None] * 2
    keep_the_lock = ctypes.PyDLL(None).usleep  # no rank can report while it holds the GIL
    assert launch(lambda: keep_the_lock(3_000_000), timeout=0.2) == [0] * 2


def test_computing_during_receive_is_progress():
    def program():
        rank, received = rank_of(), torch.zeros(1)
        work = dist.irecv(received, 1 - rank)
        time.sleep(1.2)
        dist.isend(torch.ones(1), 1 - rank).wait()
        work.wait()
        return received.item()

    assert launch(program, timeout=0.3) == [1.0] * 2


def test_waiting_backward_counts_as_waiting():
    def program():
        rank, model = rank_of(), DistributedDataParallel(nn.Linear(3, 1))
        loss = model(torch.ones(2, 3)).sum()
        loss.backward() if rank == 0 else dist.recv(torch.zeros(1), 0)

    error, text, _ = failure_of(program, 2, timeout=0.5)
    assert type(error) is pr.CollectiveTimeout
    assert text.startswith("all ranks wait for each other")


@pytest.mark.parametrize("is_thread", [True, False], ids=["thread", "atexit"])
def test_rank_that_never_exits_raises(is_thread):
    def program():
        if rank_of() == 1 and is_thread:
            threading.Thread(target=time.sleep, args=(60,)).start()
        elif os.environ["RANK"] == "1":
            atexit.register(time.sleep, 60)

    error, text, _ = failure_of(program, 2, timeout=1)
    assert type(error) is pr.CollectiveTimeout
    assert text.startswith("rank 1 returned, and did not exit for 1 s")


class UnpicklableError(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


@pytest.mark.parametrize(
    ("make", "fails", "text"),
    [
        (lambda: lambda: 1, False, r"RingarError: rank \d returned .*, which cannot be pickled"),
        (lambda: UnpicklableError(1, 2), True, "RingarError: UnpicklableError: 1 and 2"),
    ],
    ids=["result", "exception"],
)
def test_unpicklable_value_raises(make, fails, text):
    def program():
        if fails:
            raise make()
        return make()

    with pytest.raises(Exception) as caught:  # noqa: PT011
        launch(program)
    assert re.match(text, text_of(caught.value))


def test_wrong_arguments_raise():
    with pytest.raises(pr.ArgumentError, match="seed is 3, expected 0 with processes"):
        launch(rank_of, seed=3)
    with pytest.raises(pr.ArgumentError, match="processes is 1, expected True or False"):
        pr.launch(rank_of, processes=1)


def test_initialised_cuda_raises(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(pr.UnsupportedError, match=r"'cuda:1'.*initialised CUDA"):
        launch(rank_of, devices=["cpu", "cuda:1"])


def test_shared_value_survives_torn_write():
    shared = SharedValue("default")
    assert shared.get() == "default"
    shared.set(["first"])
    shared.set(["all_reduce", list(range(2000))])
    assert shared.get() == ["all_reduce", list(range(2000))]
    shared._slots[1 - shared._last[0]][:4] = b"torn"  # simulates a rank killed during a write
    assert shared.get() == ["all_reduce", list(range(2000))]
    shared.set(list(range(100_000)))  # longer than a slot
    assert shared.get() == "default"


def test_output_is_marked_by_rank(capsys):
    def program():
        print("one\ntwo")
        os.write(1, b"raw \xff\r\n")
        sys.stderr.write("50 %\r100 %\rno end")
        subprocess.run(["sh", "-c", "echo from a shell"], check=True)

    launch(program)
    out, err = capsys.readouterr()
    for rank in range(2):
        own = [line for line in out.splitlines() if line.startswith(f"[rank {rank}] ")]
        texts = ["one", "two", "raw \ufffd", "from a shell"]
        assert own == [f"[rank {rank}] {text}" for text in texts]
        assert f"[rank {rank}] 50 %\r[rank {rank}] 100 %\r" in err
    assert len(out.splitlines()) == 8
    assert "raw \ufffd\r\n" in out


@pytest.mark.parametrize("end", ["\n", ""], ids=["lines", "no-lines"])
def test_endless_output_keeps_failure_visible(monkeypatch, end):
    def program():
        dist.init_process_group()
        if dist.get_rank() == 1:
            raise ValueError("planted")
        while True:
            print("x" * 1000, end=end)

    lengths = []
    stream = SimpleNamespace(write=lambda text: lengths.append(len(text)), flush=int)
    monkeypatch.setattr(sys, "stdout", stream)
    with pytest.raises(ValueError, match="planted"):
        launch(program)
    assert 1000 < max(lengths) < 1 << 20


def test_output_before_kill_is_shown(capsys):
    def program():
        print("last words", end="")
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(pr.PeerLostError):
        launch(program, 1)
    assert capsys.readouterr().out == "[rank 0] last words\n"


def test_exit_handlers_run_in_ranks_only(capsys):
    def program():
        atexit.register(print, "of the rank")
        thread = threading.Thread(target=lambda: (time.sleep(0.1), print("of a thread")))
        thread.start()

    planted = atexit.register(lambda: print("of the caller"))
    try:
        launch(program, 1)
    finally:
        atexit.unregister(planted)
    assert sorted(capsys.readouterr().out.splitlines()) == [
        "[rank 0] of a thread",
        "[rank 0] of the rank",
    ]


@pytest.mark.parametrize("processes", [False, True])
def test_table_has_python_names_of_calls(processes):
    def program():
        dist.init_process_group()
        if dist.get_rank() == 0:
            DistributedDataParallel(nn.Linear(2, 2))  # its C++ code calls "allgather"

    with pytest.raises(pr.PeerLostError, match=r"0 +waits +all_gather +1 +the world"):
        pr.launch(program, 2, processes=processes)
