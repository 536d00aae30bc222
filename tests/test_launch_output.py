"""Output of ranks that are forked processes."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import threading
import time
import types

import pytest
import torch.distributed as dist

import pyringar as pr


def test_output_is_marked_by_rank(capsys):
    def program():
        print("one\ntwo")
        os.write(1, b"raw \xff\r\n")
        sys.stderr.write("50 %\r100 %\rno end")
        subprocess.run(["sh", "-c", "echo from a shell"], check=True)

    pr.launch(program, 2, processes=True)
    out, err = capsys.readouterr()
    for rank in range(2):
        own = [line for line in out.splitlines() if line.startswith(f"[rank {rank}] ")]
        texts = ["one", "two", "raw \ufffd", "from a shell"]
        assert own == [f"[rank {rank}] {text}" for text in texts]
        assert f"[rank {rank}] 50 %\r[rank {rank}] 100 %\r" in err
    assert len(out.splitlines()) == 8
    assert "raw \ufffd\r\n" in out


@pytest.mark.parametrize("end", ["\n", ""], ids=["lines", "no-lines"])
def test_endless_output_does_not_hide_a_failure(monkeypatch, end):
    def program():
        dist.init_process_group()
        if dist.get_rank() == 1:
            raise ValueError("planted")
        while True:
            print("x" * 1000, end=end)

    lengths = []
    stream = types.SimpleNamespace(write=lambda text: lengths.append(len(text)), flush=int)
    monkeypatch.setattr(sys, "stdout", stream)
    with pytest.raises(ValueError, match="planted"):
        pr.launch(program, 2, processes=True)
    assert 1000 < max(lengths) < 1 << 20


def test_output_before_a_kill_is_shown(capsys):
    def program():
        print("last words", end="")
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(pr.PeerLostError):
        pr.launch(program, 1, processes=True)
    assert capsys.readouterr().out == "[rank 0] last words\n"


def test_handlers_at_exit_run_in_ranks_alone(capsys):
    def program():
        atexit.register(print, "of the rank")
        thread = threading.Thread(target=lambda: (time.sleep(0.1), print("of a thread")))
        thread.start()

    planted = atexit.register(lambda: print("of the caller"))
    try:
        pr.launch(program, 1, processes=True)
    finally:
        atexit.unregister(planted)
    assert sorted(capsys.readouterr().out.splitlines()) == [
        "[rank 0] of a thread",
        "[rank 0] of the rank",
    ]
