"""`pr.launch(processes=True)` leaves no rank after signals, Ctrl-C and failed starts."""

import contextlib
import os
import pty
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch.distributed as dist

import pyringar as pr


def launch(fn, **options):
    return pr.launch(fn, 2, processes=True, **options)


def test_ignored_signals_are_kept():
    before = {
        number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGCHLD)
    }
    try:
        with pytest.raises(pr.UnsupportedError, match="SIGCHLD is ignored"):
            launch(os.getpid)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        assert launch(lambda: signal.getsignal(signal.SIGINT)) == [signal.SIG_IGN] * 2
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, BlockingIOError])
def test_failed_start_leaves_no_process(monkeypatch, kind):
    pids, fork = [], os.fork

    def fork_and_fail():
        if pids and kind is BlockingIOError:
            raise BlockingIOError
        pids.append(fork())
        if pids[-1] and kind is KeyboardInterrupt:
            signal.raise_signal(signal.SIGINT)
        return pids[-1]

    launch(os.getpid)
    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(os, "fork", fork_and_fail)
    with pytest.raises(kind):
        launch(lambda: time.sleep(60))
    left = 4 * (kind is BlockingIOError)  # multiprocessing does not close 4 files
    assert len(os.listdir("/proc/self/fd")) == len(before) + left
    for pid in pids:
        with pytest.raises(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def test_handler_exception_ends_ranks(tmp_path):
    def program():
        (tmp_path / os.environ["RANK"]).write_text(str(os.getpid()))
        dist.init_process_group()
        time.sleep(60)

    def handle(*_):
        raise TimeoutError("of a handler")

    before = signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 1.0)
    try:
        with pytest.raises(TimeoutError, match="of a handler"):
            launch(program)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    for file in tmp_path.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.read_text()), 0)


def started(tmp_path, body, timeout=30):
    """Start a Python program that calls launch; return it with the process ids of its ranks."""
    script = tmp_path / "program.py"
    script.write_text(
        "import os, sys, time, torch, torch.distributed as dist, pyringar as pr\n"
        "def program():\n"
        "    dist.init_process_group()\n"
        f"    open(os.path.join({str(tmp_path)!r}, f'rank{{os.getpid()}}'), 'w').close()\n"
        f"{textwrap.indent(textwrap.dedent(body), '    ')}\n"
        f"pr.launch(program, 2, processes=True, timeout={timeout})\n"
    )
    python = subprocess.Popen(
        [sys.executable, script], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    ends_s = time.monotonic() + 60
    while len(ranks := list(tmp_path.glob("rank*"))) < 2 and time.monotonic() < ends_s:
        time.sleep(0.02)
    time.sleep(0.1)
    return python, [int(path.name[4:]) for path in ranks]


def are_gone(pids, within_s):
    ends_s = time.monotonic() + within_s
    while time.monotonic() < ends_s:
        left = [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
        if not left:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.slow
@pytest.mark.parametrize("to_all", [True, False], ids=["terminal", "notebook"])
def test_ctrl_c_ends_all_ranks(tmp_path, to_all):
    body = """
    try:
        dist.barrier() if dist.get_rank() else time.sleep(60)
    except KeyboardInterrupt:
        open(os.environ["RANK"] + ".interrupted", "w").close()
        raise
    """
    body = body.replace('os.environ["RANK"]', f'{str(tmp_path)!r} + "/" + os.environ["RANK"]')
    python, ranks = started(tmp_path, body)
    (os.killpg if to_all else os.kill)(python.pid, signal.SIGINT)
    assert are_gone(ranks, 2)
    assert "KeyboardInterrupt" in python.communicate(timeout=30)[1].splitlines()[-1]
    assert sorted(p.name for p in tmp_path.glob("*.interrupted")) == [
        "0.interrupted",
        "1.interrupted",
    ]


@pytest.mark.slow
def test_rank_can_use_debugger_prompt(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(
        "import torch.distributed as dist, pyringar as pr\n"
        "def program():\n"
        "    dist.init_process_group()\n"
        "    if dist.get_rank() == 1:\n"
        "        number = 41\n"
        "        breakpoint()\n"
        "    dist.barrier()\n"
        "pr.launch(program, 2, processes=True, timeout=float('inf'))\n"
    )
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, script])
    shown = b""
    for expected, command in ((b"(Pdb)", b"p number + 1\n"), (b"42", b"c\n")):
        while expected not in shown:
            shown += os.read(terminal, 1 << 16)
        os.write(terminal, command)
    assert os.waitpid(pid, 0)[1] == 0
    os.close(terminal)


@pytest.mark.slow
def test_sigkill_of_caller_ends_ranks(tmp_path):
    python, ranks = started(tmp_path, "while True: pass")
    python.kill()
    python.communicate(timeout=30)
    assert are_gone(ranks, 5)


@pytest.mark.slow
def test_suspended_launch_does_not_time_out(tmp_path):
    body = "for _ in range(4): time.sleep(1.6 * dist.get_rank()); dist.barrier()"
    python, _ = started(tmp_path, body, timeout=2)
    os.killpg(python.pid, signal.SIGSTOP)
    time.sleep(4)
    os.killpg(python.pid, signal.SIGCONT)
    _, err = python.communicate(timeout=30)
    assert python.returncode == 0, err


@pytest.mark.slow
def test_rank_ignoring_signals_is_killed(tmp_path):
    def program():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        dist.init_process_group()
        if dist.get_rank() == 1:
            raise ValueError("planted")
        with contextlib.suppress(BaseException):
            dist.barrier()
        time.sleep(60)

    began_s = time.monotonic()
    with pytest.raises(ValueError, match="planted"):
        launch(program)
    assert time.monotonic() - began_s < 15
