"""Do works and futures of the backend `ringar` tell the truth, and end without anybody waiting?"""

from __future__ import annotations

import threading
from datetime import timedelta
from unittest import mock

import distributed_works
import pytest
from ranks import Died, Failed, run_cases, run_group
from test_distributed import check, verdicts
from torch.futures import Future

import pyringar as pr
from pyringar.distributed.fallback import Fallback
from pyringar.distributed.work import Completer


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("case", distributed_works.CASES)
def test_works(case, size):
    check(verdicts("works", size), case)


# -- threads that complete futures -----------------------------------------------------------------


def test_future_after_close_is_done():
    completer = Completer("of test_future_after_the_end")
    completer.close()
    future: Future[None] = Future()
    completer.complete(future, lambda: None)
    assert future.done()


def refuse_threads(monkeypatch) -> None:
    def refuse(self) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)


def test_no_thread_can_start(monkeypatch):
    completer = Completer("of test_no_thread")
    with monkeypatch.context() as patch:
        refuse_threads(patch)
        with pytest.raises(pr.RingarError, match=r"futures of test_no_thread.*ulimit"):
            completer.complete(Future(), lambda: None)
    future: Future[None] = Future()
    completer.complete(future, lambda: None)
    future.wait()
    completer.close()


def test_hooks_of_torch():
    work = [("hooks", distributed_works.hooks_of_torch)]
    check(run_group(run_cases, 2, work), "hooks")


def test_failed_copy_raises_each_time():
    for result in run_group(distributed_works.copy_fails, 2):
        assert not isinstance(result, (Failed, Died)), result
        assert len(result) == 5, result
        assert all("no copy into this" in text for text in result), result


def test_peer_killed():
    survivor, dead = run_group(distributed_works.peer_killed, 2)
    assert dead == Died(-9)
    assert not isinstance(survivor, Failed), survivor
    answers, rows = survivor
    assert [is_success for is_success, _ in answers] == [False, False]
    assert answers[0][1] == "PeerLostError"
    assert rows == [[0.0] * distributed_works.N] * 2, "what failed copies nothing"


def test_nested_note_is_kept():
    fallback = Fallback(None, 0, 1, timedelta(seconds=1), lambda _: None, lambda _: None)

    first, second, third = (mock.Mock(**{"is_completed.return_value": False}) for _ in range(3))
    meanwhile = [second]
    first.is_completed.side_effect = lambda: bool(meanwhile and fallback.add(meanwhile.pop()))
    fallback.add(first)
    fallback.add(third)
    assert set(fallback.under_way()) == {first, second, third}


@pytest.mark.parametrize(
    ("backend", "debug"),
    [("cpu:ringar", None), ("cpu:ringar,cuda:gloo", None), ("ringar", "DETAIL")],
)
def test_torch_wraps_no_works(backend, debug):
    env = {"TORCH_DISTRIBUTED_DEBUG": debug} if debug else None
    results = run_group(distributed_works.wrapped, 2, backend=backend, env=env)
    assert results == [("RingarProcessGroup", True)] * 2
