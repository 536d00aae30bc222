"""Ranks that compute at the same time: failures, Ctrl-C, settings of torch, and their threads."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import signal
import sys
import textwrap
import threading
import time
import weakref

import pytest
import torch
from programs import run_programs
from test_ranks_beside import assert_equal, gradients, mlp, rows, step, torch_threads, trained
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import pyringar as pr
from pyringar.parallel.lockstep import RankThreads
from pyringar.parallel.shards import check_replicas_equal, get_params, split_batch
from pyringar.train import lenet, lenet_params
from pyringar.train.step import EagerStep, SideBySide
from pyringar.train.synthetic import synthetic_images

__all__ = ["torch_threads"]  # a fixture


class Acts(nn.Module):
    """Calls ``act(x)`` in forward and ``react(grad)`` in backward, which all ranks share."""

    act = react = staticmethod(lambda x: x)

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        out = self.linear(type(self).act(x))
        if out.requires_grad:
            out.register_hook(type(self).react)
        return out


@pytest.fixture
def acts():
    """A fresh class of modules that act."""
    torch.manual_seed(0)
    return type("Acting", (Acts,), {})


class TestFailures:
    @pytest.mark.parametrize("where", ["act", "react"])
    def test_the_first_error_names_its_rank_and_later_steps_work(self, acts, where):
        X, y = rows(8)  # noqa: N806
        module = acts()
        expected = trained(module, 4, X, y)
        ended = []

        def fail(x):
            name = threading.current_thread().name
            if "rank-1" in name or "rank-3" in name:
                raise ValueError(f"planted in {name}")
            time.sleep(0.05)
            ended.append(name)
            return x

        with pr.DataParallel(module, ["cpu"] * 4) as net:
            optimizer = net.optimizer(torch.optim.SGD, lr=0.05, momentum=0.9)
            step(net, optimizer, X, y)
            setattr(acts, where, staticmethod(fail))
            with pytest.raises(ValueError, match="planted in pyringar-rank-1") as failed:
                step(net, optimizer, X, y)
            delattr(acts, where)
            assert len(ended) == 2, "the others have ended"
            if sys.version_info >= (3, 11):
                assert failed.value.__notes__ == ["(in the thread of rank 1, cpu)"]
            for _ in range(2):
                step(net, optimizer, X, y)
            found = [t for replica in net.replicas for t in replica.state_dict().values()]
        assert_equal(found, expected)

    @pytest.mark.parametrize("overlap", [True, False])
    def test_a_step_whose_backward_fails_is_broken_off_and_the_next_is_right(self, overlap):
        images, labels = synthetic_images(12, 5)
        params = lenet_params(generator=torch.Generator().manual_seed(0))
        ours, theirs = ([get_params(params, "cpu") for _ in range(3)] for _ in range(2))

        def run_step(replicas, fails, bucketer, threads):
            def score(rank, X):  # noqa: N803
                out = lenet(X, replicas[rank])
                if rank == 1 and fails:
                    replicas[1][0].register_hook(fail)  # the first layer's: others have left
                return out

            split = functools.partial(split_batch, devices=["cpu"] * 3)
            beside = SideBySide(threads, score, bucketer.together)
            EagerStep(replicas, None, bucketer.wait, split, beside)(images, labels, 0.01)

        def fail(grad):
            raise ValueError("planted")

        threads = RankThreads([torch.device("cpu")] * 3)
        for replicas, fails in ((ours, True), (theirs, False)):
            with pr.GradientBucketer(replicas, bucket_cap_mb=0.01, overlap=overlap) as bucketer:
                run_step(replicas, False, bucketer, threads)
                if fails:
                    with pytest.raises(ValueError, match="planted"):
                        run_step(replicas, True, bucketer, threads)
                    with pytest.raises(pr.RingarError, match="backward pass failed"):
                        bucketer.wait()
                    replicas[1][0]._backward_hooks.clear()
                run_step(replicas, False, bucketer, threads)
        threads.close()
        check_replicas_equal([*ours, *theirs])

    def test_a_pass_that_fails_is_seen_to_once_all_have_ended(self):
        """Or nobody would know that others have left gradients, too."""
        replicas = [get_params([torch.ones(2)], "cpu") for _ in range(2)]

        def backward(rank):
            if rank == 0:
                replicas[0][0].register_hook(lambda grad: time.sleep(0.2))
                (2 * replicas[0][0]).sum().backward()
                return
            hook = replicas[1][0].register_post_accumulate_grad_hook(fail)
            try:
                (2 * replicas[1][0]).sum().backward()
            finally:
                hook.remove()

        def fail(param):
            raise ValueError("planted")

        threads = RankThreads([torch.device("cpu")] * 2)
        with pr.GradientBucketer(replicas) as bucketer:
            with pytest.raises(ValueError, match="planted"), bucketer.together():
                threads.run({rank: functools.partial(backward, rank) for rank in range(2)})
            replicas[1][0].grad = None
            with pytest.raises(pr.RingarError, match="parameter 0 of rank 0 still is what that"):
                bucketer.wait()
        threads.close()

    def test_a_step_whose_forward_fails_leaves_nothing_behind(self):
        """Or the others' marks would send buckets of the next step before they are full."""
        images, labels = synthetic_images(12, 5)
        params = lenet_params(generator=torch.Generator().manual_seed(0))
        ours, theirs = ([get_params(params, "cpu") for _ in range(3)] for _ in range(2))
        threads = RankThreads([torch.device("cpu")] * 3)

        def run_step(replicas, bucketer, fails, slow_rank=None):
            def score(rank, X):  # noqa: N803
                if rank == 1 and fails:
                    raise ValueError("planted")
                if rank == slow_rank:
                    time.sleep(0.1)
                return lenet(X, replicas[rank])

            split = functools.partial(split_batch, devices=["cpu"] * 3)
            beside = SideBySide(threads, score, bucketer.together)
            EagerStep(replicas, None, bucketer.wait, split, beside)(images, labels, 0.01)

        for replicas, fails in ((ours, True), (theirs, False)):
            with pr.GradientBucketer(replicas, bucket_cap_mb=0.01) as bucketer:
                if fails:
                    with pytest.raises(ValueError, match="planted"):
                        run_step(replicas, bucketer, True)
                run_step(replicas, bucketer, False, slow_rank=0)
        threads.close()
        check_replicas_equal([*ours, *theirs])

    def test_parameters_that_are_frozen_on_one_rank_are_named(self):
        X, _ = rows()  # noqa: N806
        with pr.DataParallel(mlp(), ["cpu"] * 2) as net:
            net.module[0].weight.requires_grad_(False)
            with pytest.raises(pr.ArgumentError, match=r"'0\.weight' does not .* on rank 0, but"):
                net(X)

    def test_an_error_is_let_go_with_all_that_it_holds(self):
        class Big:
            pass

        held = []

        def fail():
            big = Big()
            held.append(weakref.ref(big))
            raise ValueError("planted")

        threads = RankThreads([torch.device("cpu")] * 2)
        gc.disable()
        try:
            with contextlib.suppress(ValueError):
                threads.run({0: fail, 1: fail})
            assert [ref() for ref in held] == [None, None]
        finally:
            gc.enable()
            threads.close()

    def test_ctrl_c_ends_it_and_the_next_step_is_right(self, acts):
        X, y = rows(8)  # noqa: N806
        module = acts()
        expected = trained(module, 2, X, y, in_turns=True)
        started = threading.Event()
        with pr.DataParallel(module, ["cpu"] * 2) as net:
            optimizer = net.optimizer(torch.optim.SGD, lr=0.05, momentum=0.9)
            step(net, optimizer, X, y)
            for where in ("act", "react"):

                def slow(x):
                    started.set()
                    time.sleep(0.3)
                    return x

                def interrupt():
                    started.wait(20)
                    time.sleep(0.05)
                    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

                started.clear()
                setattr(acts, where, staticmethod(slow))
                thread = threading.Thread(target=interrupt)
                thread.start()
                began_s = time.monotonic()
                optimizer.zero_grad()
                with pytest.raises(KeyboardInterrupt):
                    F.cross_entropy(net(X), y).backward()
                assert time.monotonic() - began_s < 5
                thread.join()
                delattr(acts, where)
            for _ in range(2):
                step(net, optimizer, X, y)
            found = [t for replica in net.replicas for t in replica.state_dict().values()]
            assert_equal(found, expected)

    def test_no_finalizer_runs_in_a_step_that_ends_well(self):
        """A Ctrl-C that comes meanwhile would be printed, and lost."""
        X, y = rows()  # noqa: N806
        called = []
        with pr.DataParallel(mlp(), ["cpu"] * 2) as net:
            optimizer = net.optimizer(torch.optim.SGD, lr=0.05)
            step(net, optimizer, X, y)
            sys.setprofile(lambda frame, event, arg: called.append(frame.f_code))
            try:
                step(net, optimizer, X, y)
            finally:
                sys.setprofile(None)
        names = {(os.path.basename(code.co_filename), code.co_name) for code in called}
        assert ("beside.py", "finish") in names
        assert not [found for found in names if found[1] == "__del__" or found[0] == "weakref.py"]

    def test_a_signal_handler_may_call_the_module_that_runs(self, acts):
        X, _ = rows(4)  # noqa: N806
        found = []
        before = signal.signal(signal.SIGUSR1, lambda *_: found.append(net(X)))
        try:
            with pr.DataParallel(acts(), ["cpu"] * 2) as net:
                net(X)

                to_send = [signal.SIGUSR1]

                def slow(x):
                    with contextlib.suppress(IndexError):  # one rank, once
                        signal.pthread_kill(threading.main_thread().ident, to_send.pop())
                        time.sleep(0.1)
                    return x

                acts.act = staticmethod(slow)
                expected = net(X)
        finally:
            signal.signal(signal.SIGUSR1, before)
        assert torch.equal(found[0], expected)


class Counts(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


class TestSettings:
    @pytest.mark.parametrize(
        ("context", "look", "expected"),
        [
            (torch.no_grad, torch.is_grad_enabled, False),
            (torch.inference_mode, torch.is_inference_mode_enabled, True),
            (
                lambda: torch.autocast("cpu", torch.bfloat16),
                lambda: torch.is_autocast_enabled("cpu"),
                True,
            ),
            (torch.autograd.set_detect_anomaly, torch.is_anomaly_enabled, True),
            (lambda: torch.device("meta"), lambda: torch.empty(1).device.type, "meta"),
            (Counts, torch._C._len_torch_dispatch_stack, 1),
            (contextlib.nullcontext, torch.is_grad_enabled, True),
        ],
        ids=["no_grad", "inference", "autocast", "anomaly", "device", "dispatch", "none"],
    )
    def test_of_the_caller_hold_on_all_ranks(self, acts, context, look, expected):
        X, _ = rows()  # noqa: N806
        seen = []
        with pr.DataParallel(acts(), ["cpu"] * 2) as net:
            acts.act = staticmethod(lambda x: (seen.append(look()), x)[1])
            for _ in range(2):
                is_anomaly = context is torch.autograd.set_detect_anomaly
                with context(True) if is_anomaly else context():
                    net(X)
        assert seen == [expected] * 4

    @pytest.mark.parametrize("around", ["both", "backward"])
    @pytest.mark.parametrize("what", ["flops", "torch.profiler", "autograd.profiler"])
    def test_what_counts_operations_counts_those_of_all_ranks(self, what, around):
        def counter():
            if what == "torch.profiler":
                return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
            if what == "autograd.profiler":
                return torch.autograd.profiler.profile(use_cpu=True)
            return FlopCounterMode(display=False)

        found = []
        X, y = rows()  # noqa: N806
        for in_turns in (True, None):
            with pr.DataParallel(mlp(), ["cpu"] * 2, in_turns=in_turns) as net:
                net(X)
                loss = None if around == "both" else F.cross_entropy(net(X), y)
                with counter() as counts:
                    (F.cross_entropy(net(X), y) if loss is None else loss).backward()
                net.wait()
            if what == "flops":
                found.append(counts.get_total_flops())
            else:
                events = {event.key: event.count for event in counts.key_averages()}
                found.append([events.get(f"aten::{name}") for name in ("addmm", "mm", "tanh")])
        assert found[0] == found[1]

    def test_a_mode_around_backward_changes_what_ranks_compute(self):
        class Doubles(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                out = func(*args, **(kwargs or {}))
                return out * 2 if func is torch.ops.aten.mm.default else out

        found = []
        X, y = rows()  # noqa: N806
        for in_turns in (True, None):
            with pr.DataParallel(mlp(), ["cpu"] * 2, in_turns=in_turns) as net:
                for _ in range(2):
                    net.zero_grad()
                    loss = F.cross_entropy(net(X), y)
                    with Doubles():
                        loss.backward()
                    net.wait()
                found.append(gradients(net))
        assert_equal(*found)

    def test_that_hooks_on_saved_tensors_are_forbidden_holds(self):
        """Or a module that has such hooks would work, where the caller wants to see that it has."""

        class Hooks(nn.Linear):
            def forward(self, x):
                with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
                    return super().forward(x)

        X, _ = rows()  # noqa: N806
        with pr.DataParallel(Hooks(4, 3), ["cpu"] * 2) as net:
            net(X)
            with (
                torch.autograd.graph.disable_saved_tensors_hooks("planted"),
                pytest.raises(RuntimeError, match="planted"),
            ):
                net(X)

    def test_a_default_dtype_holds(self):
        torch.set_default_dtype(torch.float64)
        try:
            with pr.DataParallel(nn.Linear(2, 2), ["cpu"] * 2) as net:
                assert net(torch.rand(4, 2)).dtype == torch.float64
        finally:
            torch.set_default_dtype(torch.float32)

    @pytest.mark.filterwarnings("ignore:.*(Anomaly|Error) [Dd]ete")
    def test_hooks_on_saved_tensors_and_anomalies_reach_backward(self, acts):
        X, y = rows()  # noqa: N806
        packed, found = [], []
        with pr.DataParallel(acts(), ["cpu"] * 2) as net:
            net(X)
            hooks = torch.autograd.graph.saved_tensors_hooks(
                lambda t: packed.append(threading.current_thread().name) or t, lambda t: t
            )
            with hooks:
                F.cross_entropy(net(X), y).backward()
            assert set(packed) == {"MainThread"}, "hooks may count on the order"
            net.zero_grad()
            acts.react = staticmethod(lambda grad: found.append(grad) or grad * float("nan"))
            with (
                torch.autograd.detect_anomaly(check_nan=True),
                pytest.raises(RuntimeError, match="nan"),
            ):
                F.cross_entropy(net(X), y).backward()

    def test_torch_func_and_a_compiled_module_run_in_the_callers_thread(self, acts):
        X, _ = rows()  # noqa: N806
        names = []
        with pr.DataParallel(acts(), ["cpu"] * 2) as net:
            net(X)
            act = staticmethod(lambda x: (names.append(threading.current_thread().name), x)[1])
            acts.act = act
            _, tangent = torch.func.jvp(net, (X,), (torch.ones_like(X),))
            assert tangent.shape == (6, 3)
            for replica in net.replicas:
                replica.compile(backend="eager", dynamic=False)
            del acts.act
            assert net(X).shape == (6, 3)
            assert not net._beside.may_run([X])
        assert set(names) == {"MainThread"}

    def test_module_hooks_run_for_each_rank_and_parameters_hooks_once(self):
        X, y = rows()  # noqa: N806
        seen = []
        with pr.DataParallel(mlp(), ["cpu"] * 2) as net:
            for replica in net.replicas:
                replica[2].register_full_backward_hook(lambda part, into, out: seen.append("full"))
            for late in (False, True):
                net.zero_grad()
                seen.clear()
                loss = F.cross_entropy(net(X), y) if late else None
                handles = [
                    replica[0].weight.register_hook(lambda grad: seen.append("grad") or grad * 2)
                    for replica in net.replicas
                ]
                (loss if late else F.cross_entropy(net(X), y)).backward()
                net.wait()
                assert sorted(seen) == ["full", "full", "grad", "grad"]
                twice = [g.clone() for g in gradients(net)]
                for handle in handles:
                    handle.remove()
                net.zero_grad()
                F.cross_entropy(net(X), y).backward()
                net.wait()
                torch.testing.assert_close(twice[0], 2 * gradients(net)[0])


class TestThreads:
    def test_are_kept_and_end_with_their_owner(self):
        before = set(threading.enumerate())
        X, y = rows()  # noqa: N806
        net = pr.DataParallel(mlp(), ["cpu"] * 2)
        optimizer = net.optimizer(torch.optim.SGD, lr=0.1)
        names = []
        for _ in range(3):
            step(net, optimizer, X, y)
            mine = [t for t in set(threading.enumerate()) - before if "pyringar-rank" in t.name]
            names.append(sorted((t.name, t.native_id) for t in mine))
        assert names[0] == names[1] == names[2]
        assert len(names[0]) == 2
        net.close()
        assert not [t for t in set(threading.enumerate()) - before if t.name in dict(names[0])]
        ours = net(X)  # in turns
        assert ours.shape == (6, 3)
        assert not [t for t in set(threading.enumerate()) - before if "rank" in t.name]

    def test_those_of_a_dropped_one_end(self):
        before = set(threading.enumerate())
        net = pr.DataParallel(mlp(), ["cpu"] * 2)
        net(rows()[0])
        mine = [t for t in set(threading.enumerate()) - before if "pyringar-rank" in t.name]
        assert len(mine) == 2
        del net
        for thread in mine:
            thread.join(10)
            assert not thread.is_alive()

    def test_a_module_may_call_what_it_is_a_part_of(self, acts):
        """One of the threads that run would wait for itself."""
        X, _ = rows()  # noqa: N806
        with pr.DataParallel(acts(), ["cpu"] * 2) as net:
            expected = net(X)
            calls = [X]
            inner = []

            def again(x):
                with contextlib.suppress(IndexError):
                    inner.append(net(calls.pop()))
                return x

            acts.act = staticmethod(again)
            assert torch.equal(net(X), expected)
        assert torch.equal(inner[0], expected)

    def test_streams_of_gpus_are_the_callers_with_the_own_one_last(self, monkeypatch):
        """On the CPU, with names in the place of streams."""
        entered = {0: [], 1: []}
        here = threading.local()

        @contextlib.contextmanager
        def stream(name):
            entered[int(threading.current_thread().name.split("-")[2][0])].append(name)
            here.current = name
            yield

        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"of {device}")
        monkeypatch.setattr(torch.cuda, "stream", stream)
        devices = [torch.device("cuda", rank) for rank in range(2)]
        threads = RankThreads(devices)
        found = threads.run(dict.fromkeys(range(2), lambda: here.current), num_threads=1)
        threads.close()
        assert found == {0: "of cuda:0", 1: "of cuda:1"}
        assert entered == {0: ["of cuda:1", "of cuda:0"], 1: ["of cuda:0", "of cuda:1"]}

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
    def test_a_forked_child_has_its_own_and_a_program_ends(self):
        program = """
            import os, threading, torch
            from torch import nn
            import pyringar as pr
            from pyringar.parallel.lockstep import RankThreads
            torch.set_num_threads(1)
            threads = RankThreads([torch.device("cpu")] * 2)
            two = {rank: (lambda rank=rank: rank) for rank in range(2)}
            assert threads.run(two) == {0: 0, 1: 1}
            child = os.fork()
            if not child:
                ok = threads.run(two) == {0: 0, 1: 1}
                threads.close()
                os._exit(0 if ok else 1)
            assert os.waitpid(child, 0)[1] == 0
            net = pr.DataParallel(nn.Linear(2, 2), ["cpu"] * 2)
            for _ in range(2):
                net(torch.rand(4, 2)).sum().backward()
                net.wait()
                net.zero_grad()
            print("the end")
        """
        (ended,) = run_programs(textwrap.dedent(program), ())
        assert ended.returncode == 0, ended.stderr
        assert "the end" in ended.stdout

    def test_run_after_the_main_thread_and_at_exit(self):
        program = """
            import atexit, threading, torch
            from torch import nn
            import pyringar as pr
            torch.set_num_threads(1)
            net = pr.DataParallel(nn.Linear(2, 2), ["cpu"] * 2)
            X = torch.rand(4, 2)
            def call(where):
                for _ in range(2):
                    net(X).sum().backward()
                    net.wait()
                    net.zero_grad()
                print(where, flush=True)
            def late():
                threading.main_thread().join()
                call("late")
            atexit.register(lambda: (net(X), print("at exit", flush=True)))
            threading.Thread(target=late).start()
        """
        (ended,) = run_programs(textwrap.dedent(program), ())
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout.split("\n") == ["late", "at exit", ""], ended.stderr

    def test_a_signal_handler_may_run_functions_wherever_it_comes(self):
        program = """
            import signal, torch
            from pyringar.parallel.lockstep import RankThreads
            torch.set_num_threads(1)
            threads = RankThreads([torch.device("cpu")] * 2)
            two = {rank: (lambda rank=rank: rank) for rank in range(2)}
            threads.run(two)
            found = []
            def handle(*_):
                found.append(threads.run(two))
                if len(found) < 300:
                    signal.setitimer(signal.ITIMER_REAL, 1e-4)
            signal.signal(signal.SIGALRM, handle)
            signal.setitimer(signal.ITIMER_REAL, 1e-4)
            while len(found) < 300:
                assert threads.run(two) == {0: 0, 1: 1}
            assert found == [{0: 0, 1: 1}] * 300
        """
        (ended,) = run_programs(textwrap.dedent(program), ())
        assert ended.returncode == 0, ended.stderr
