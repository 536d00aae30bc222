"""After a step that broke off: is every sum right, or an error, however the user goes on?"""

from __future__ import annotations

import copy
import threading
import time
import warnings
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from bucketing_nets import (
    EACH,
    Explode,
    Net,
    armed,
    assert_next_step_is_right,
    assert_reduced,
    backward_one_by_one,
    backward_together,
    clear,
    nets_of,
    summed,
    vectors,
)
from programs import run_programs
from torch import Tensor, nn

import pyringar as pr
from pyringar.comm.work import Work

K = 3


def backward_in_reverse(nets, xs):
    backward_one_by_one(nets[::-1], xs[::-1])


# -- a backward pass that fails --------------------------------------------------------------------


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("victim", [0, K - 1])
@pytest.mark.parametrize("backward", [backward_together, backward_one_by_one, backward_in_reverse])
def test_clear_and_run_again(backward: Callable, victim, waits, set_to_none):
    nets, xs = nets_of(), vectors(1)
    expected = summed(nets, xs)
    with pr.GradientBucketer(nets, **EACH) as bucketer:
        backward(nets, vectors(2))  # gradients exist, as after any step
        bucketer.wait()
        for _ in range(2):
            clear(nets, set_to_none=set_to_none)
            with armed(victim):
                backward(nets, xs)
            if waits:
                for _ in range(2):
                    with pytest.raises(pr.RingarError, match="backward pass failed"):
                        bucketer.wait()
            clear(nets, set_to_none=set_to_none)
            bucketer.wait()  # cleared: nothing is wrong any more
            backward(nets, xs)
            bucketer.wait()
            assert_reduced(nets, expected)


def test_nothing_writes_to_gradients_once_backward_has_raised():
    """Large, so that a reduction which nobody waits for would still run when zero_() does."""
    numel = 1 << 22
    nets, xs = nets_of(numel, 2), vectors(1, numel, 2)
    expected = summed(nets, xs)
    with pr.GradientBucketer(nets) as bucketer:
        for net in nets:
            for param in net.parameters():
                param.grad = torch.zeros_like(param)
        for _ in range(3):
            with armed(0):
                backward_together(nets, xs)
            clear(nets, set_to_none=False)
            assert not any(param.grad.any() for net in nets for param in net.parameters())
            backward_together(nets, xs)
            bucketer.wait()
            assert_reduced(nets, expected)
            clear(nets, set_to_none=False)


def test_works_are_done_before_backward_raises(monkeypatch):
    works = []
    plain = pr.Communicator.all_reduce_coalesced

    def noted(self, *arguments, **options):
        works.append(plain(self, *arguments, **options))
        return works[-1]

    monkeypatch.setattr(pr.Communicator, "all_reduce_coalesced", noted)
    numel = 1 << 22
    nets, xs = nets_of(numel, 2), vectors(1, numel, 2)
    with pr.GradientBucketer(nets, **EACH), armed(0):
        try:
            backward_together(nets, xs)
        finally:
            assert [work.is_completed() for work in works] == [True]


@pytest.mark.parametrize("retried", [[0], [1], [2], [0, 1], [1, 2]])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_part_of_the_ranks_cannot_be_run_again_alone(retried, set_to_none):
    """The others' gradients may hold sums already, which would be added a second time."""
    nets, xs = nets_of(), vectors(1)
    expected = summed(nets, xs)
    with pr.GradientBucketer(nets, **EACH) as bucketer:
        with armed(K - 1):
            backward_one_by_one(nets, xs)
        some = [nets[rank] for rank in retried]
        clear(some, set_to_none=set_to_none)

        def retry() -> None:
            backward_one_by_one(some, [xs[rank] for rank in retried])
            bucketer.wait()

        with pytest.raises(pr.RingarError, match="clear the gradients of all ranks"):
            retry()
        assert_next_step_is_right(nets, xs, bucketer, expected, set_to_none=set_to_none)


def test_running_again_without_clearing_is_an_error():
    nets, xs = nets_of(), vectors(1)
    with pr.GradientBucketer(nets, **EACH) as bucketer:
        with armed(0):
            backward_together(nets, xs)
        with pytest.raises(pr.RingarError, match="clear the gradients of all ranks"):
            backward_together(nets, xs)
        with pytest.raises(pr.RingarError, match="backward pass failed"):
            bucketer.wait()


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("victim", [(0, 1), (1, 0), (1, 1)])
def test_a_pass_fails_that_had_counted_nothing(victim, set_to_none):
    """Two passes per rank, on parameters of their own: others may have sent buckets by then."""
    heads = [[torch.randn(9, requires_grad=True) for _ in "ab"] for _ in range(2)]
    xs = torch.randn(2, 2, 9)

    def run() -> None:
        for part in (0, 1):
            for rank in range(2):
                Explode.apply(heads[rank][part] * xs[rank, part], (part, rank)).sum().backward()

    def clear_all(*, set_to_none: bool) -> None:
        for param in (param for params in heads for param in params if param.grad is not None):
            param.grad = None if set_to_none else param.grad.zero_()

    with pr.GradientBucketer(heads, **EACH) as bucketer:
        run()
        bucketer.wait()
        for waits in (True, False):
            clear_all(set_to_none=set_to_none)
            with armed(victim):
                run()
            if waits:
                bucketer.wait()
            clear_all(set_to_none=set_to_none)
            if victim[0] == 1 and not waits and not set_to_none:
                with pytest.raises(pr.RingarError, match="also after a step that was given up"):
                    run()
                clear_all(set_to_none=False)
            run()
            bucketer.wait()
            for part in (0, 1):
                want = xs[0, part] + xs[1, part]
                assert all(torch.equal(heads[rank][part].grad, want) for rank in range(2))


def test_a_failed_pass_after_accumulation():
    nets, xs = nets_of(), vectors(1)
    local = [copy.deepcopy(net) for net in nets]
    backward_one_by_one(local, vectors(2))
    backward_one_by_one(local, xs)
    expected = [
        sum(c[1:], c[0].clone())
        for c in zip(*([p.grad for p in n.parameters()] for n in local), strict=True)
    ]
    with pr.GradientBucketer(nets, **EACH) as bucketer:
        for _ in range(2):
            clear(nets, set_to_none=False)
            with bucketer.no_sync():
                backward_one_by_one(nets, vectors(2))
            with armed(1):
                backward_one_by_one(nets, xs)
            clear(nets, set_to_none=False)
            with bucketer.no_sync():
                backward_one_by_one(nets, vectors(2))
            backward_one_by_one(nets, xs)
            bucketer.wait()
            assert_reduced(nets, expected)


def test_what_a_pass_in_another_thread_goes_on_to_do_counts_for_no_step():
    nets, xs = nets_of(world_size=2), vectors(1, world_size=2)
    expected = summed(nets, xs)
    inside, go = threading.Event(), threading.Event()

    def hold(grad: Tensor) -> None:
        inside.set()
        assert go.wait(60)

    with pr.GradientBucketer(nets, **EACH) as bucketer:
        handle = nets[1].early.register_hook(hold)  # its `late` is counted by then
        thread = threading.Thread(target=backward_one_by_one, args=(nets[1:], xs[1:]))
        thread.start()
        assert inside.wait(60)
        with armed(0):
            nets[0](xs[0]).backward()
        go.set()
        thread.join()
        handle.remove()
        clear(nets, set_to_none=True)
        backward_one_by_one(nets[1:], xs[1:])
        backward_one_by_one(nets[:1], xs[:1])
        bucketer.wait()
        assert_reduced(nets, expected)


def test_two_passes_of_one_replica_at_once_are_an_error():
    nets, xs = nets_of(world_size=1), vectors(1, world_size=1)
    inside, go = threading.Event(), threading.Event()

    def hold(grad: Tensor) -> None:
        inside.set()
        assert go.wait(60)

    with pr.GradientBucketer(nets, overlap=False) as bucketer:
        handle = nets[0].early.register_hook(hold)
        thread = threading.Thread(target=backward_one_by_one, args=(nets, xs))
        thread.start()
        assert inside.wait(60)
        handle.remove()
        with pytest.raises(pr.RingarError, match="a backward pass still runs"):
            bucketer.wait()
        try:
            with pytest.raises(pr.RingarError, match="two backward passes that ran at the same"):
                backward_one_by_one(nets, xs)
        finally:
            go.set()
            thread.join()
        clear(nets, set_to_none=False)
        expected = summed(nets, xs)
        backward_one_by_one(nets, xs)
        bucketer.wait()
        assert_reduced(nets, expected)


# -- gradients that are changed while they are away ------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("options", [{}, EACH])
@pytest.mark.parametrize("rank", range(K))
def test_clearing_before_wait_is_an_error(rank, options, overlap):
    nets, xs = nets_of(), vectors(1)
    expected = summed(nets, xs)
    with pr.GradientBucketer(nets, overlap=overlap, **options) as bucketer:
        backward_one_by_one(nets, xs)
        nets[rank].zero_grad()
        with pytest.raises(pr.RingarError, match="call wait\\(\\) before zero_grad"):
            bucketer.wait()
        assert_next_step_is_right(nets, xs, bucketer, expected)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("how", ["zero_grad", "replace", "clip"])
def test_changing_what_has_left_is_an_error(how, set_to_none):
    nets, xs = nets_of(), vectors(1)
    expected = summed(nets, xs)
    with pr.GradientBucketer(nets, **EACH) as bucketer:
        backward_one_by_one(nets, xs)
        if how == "zero_grad":
            nets[1].zero_grad(set_to_none=False)
        elif how == "replace":
            nets[1].late.grad = nets[1].late.grad.clone()
        else:
            nn.utils.clip_grad_norm_(nets[1].parameters(), 1e-3)
        for _ in range(2):
            with pytest.raises(pr.RingarError, match="changed or cleared after they had left"):
                bucketer.wait()
        assert_next_step_is_right(nets, xs, bucketer, expected, set_to_none=set_to_none)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("of", ["one buffer", "concatenated parameters"])
def test_gradients_that_lie_in_one_storage_may_go_one_by_one(of, overlap):
    """Torch counts changes by storage: what backward adds to one part is none of the others."""
    nets, xs = nets_of(), vectors(1)
    expected = []

    def loss(net: Net, x: Tensor) -> Tensor:
        if of == "one buffer":
            return net(x)
        return (torch.cat([net.early, net.late]) * torch.cat([x, x.square()])).sin().sum()

    def start(net: Net) -> None:
        if of == "one buffer":
            flat = torch.zeros(80)
            net.early.grad, net.late.grad = flat[:40], flat[40:]

    for net, x in zip(copy.deepcopy(nets), xs, strict=True):
        start(net)
        for _ in range(2):
            loss(net, x).backward()
        expected.append([net.early.grad, net.late.grad])
    expected = [a + b + c for a, b, c in zip(*expected, strict=True)]
    with pr.GradientBucketer(nets, overlap=overlap, **EACH) as bucketer:
        for net, x in zip(nets, xs, strict=True):
            start(net)
            with bucketer.no_sync():
                loss(net, x).backward()
        late = nets[0].late.grad
        storages = {g.untyped_storage().data_ptr() for g in (late, nets[0].early.grad)}
        assert len(storages) == (1 if of == "one buffer" else 2)
        for net, x in zip(nets, xs, strict=True):
            loss(net, x).backward()
        bucketer.wait()
        assert nets[0].late.grad is late
    assert_reduced(nets, expected)


@pytest.mark.parametrize("first", [True, False])
def test_hooks_that_change_gradients(first):
    """Before the bucketer's they are part of the gradient; after it they would be lost."""
    nets, xs = nets_of(), vectors(1)
    expected = [grad * 2 for grad in summed(nets, xs)]

    def add_hooks() -> None:
        for net in nets:
            for param in net.parameters():
                param.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad * 2))

    if first:
        add_hooks()
    with pr.GradientBucketer(nets, **EACH) as bucketer:
        if not first:
            add_hooks()
        backward_one_by_one(nets, xs)
        if first:
            bucketer.wait()
            assert_reduced(nets, expected)
        else:
            with pytest.raises(pr.RingarError, match="register hooks that change gradients"):
                bucketer.wait()


# -- interrupts, close -----------------------------------------------------------------------------


def test_an_interrupted_wait_can_be_called_again(monkeypatch):
    nets, xs = nets_of(), vectors(1)
    expected = summed(nets, xs)
    plain, calls = Work.wait, []

    def interrupted(self, *arguments):
        calls.append(self)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return plain(self, *arguments)

    with pr.GradientBucketer(nets, **EACH) as bucketer:
        monkeypatch.setattr(Work, "wait", interrupted)
        backward_one_by_one(nets, xs)
        with pytest.raises(KeyboardInterrupt):
            bucketer.wait()
        bucketer.wait()
        assert_reduced(nets, expected)


def test_an_interrupt_while_buckets_leave_is_an_error_until_cleared(monkeypatch):
    nets, xs = nets_of(), vectors(1)
    expected = summed(nets, xs)
    plain = pr.Communicator.all_reduce_coalesced

    def interrupted(self, *arguments, **options):
        plain(self, *arguments, **options)
        raise KeyboardInterrupt

    with pr.GradientBucketer(nets, **EACH) as bucketer:
        with monkeypatch.context() as patch:
            patch.setattr(pr.Communicator, "all_reduce_coalesced", interrupted)
            with pytest.raises(KeyboardInterrupt):
                backward_one_by_one(nets, xs)
        for _ in range(2):
            with pytest.raises(pr.RingarError, match="clear the gradients of all ranks"):
                bucketer.wait()
        assert_next_step_is_right(nets, xs, bucketer, expected, set_to_none=False)


def test_an_interrupt_while_a_failed_pass_is_settled_is_not_lost(monkeypatch):
    nets, xs = nets_of(), vectors(1)
    expected = summed(nets, xs)
    plain, calls = Work.wait, []

    def interrupted(self, *arguments):
        calls.append(self)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return plain(self, *arguments)

    with pr.GradientBucketer(nets, **EACH) as bucketer:

        def fail() -> None:
            with armed(K - 1):
                backward_one_by_one(nets, xs)
            for _ in range(1000):
                time.sleep(0.01)  # where the interrupt comes out

        with monkeypatch.context() as patch:
            patch.setattr(Work, "wait", interrupted)
            with pytest.raises(KeyboardInterrupt):
                fail()
        Explode.armed = None  # where the interrupt came out of armed() itself
        assert len(calls) >= 2, "waited for nevertheless"
        assert_next_step_is_right(nets, xs, bucketer, expected, set_to_none=False)


@pytest.mark.parametrize("where", ["between passes", "inside backward"])
def test_closing_in_the_middle_of_a_step_is_told_by_wait(where):
    nets, xs = nets_of(), vectors(1)
    bucketer = pr.GradientBucketer(nets, **EACH)
    if where == "inside backward":
        nets[1].late.register_hook(lambda grad: bucketer.close())
        backward_one_by_one(nets, xs)
    else:
        backward_one_by_one(nets[:2], xs[:2])
        bucketer.close()
        backward_one_by_one(nets[2:], xs[2:])
    for _ in range(2):
        with pytest.raises(pr.RingarError, match="closed in the middle of a step"):
            bucketer.wait()
    clear(nets, set_to_none=True)
    bucketer.wait()


@pytest.mark.parametrize(("what", "told"), [("wait", True), ("close", False), ("backward", True)])
def test_a_child_forked_in_the_middle_of_a_step_is_told_and_does_not_hang(what, told):
    """In a program: torch, too, refuses backward in a child once it has threads for it."""
    program = """
import os, signal, sys
import pyringar as pr
from bucketing_nets import EACH, assert_reduced, backward_one_by_one, nets_of, summed, vectors
nets, xs = nets_of(), vectors(1)
expected = summed(nets, xs)
with pr.GradientBucketer(nets, **EACH) as bucketer:
    backward_one_by_one(nets, xs)
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        calls = {"wait": bucketer.wait, "close": bucketer.close}
        calls.get(sys.argv[1], lambda: backward_one_by_one(nets, xs))()
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    bucketer.wait()
    assert_reduced(nets, expected)
"""
    (ended,) = run_programs(program, [what])
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == f"{int(told)}\n", ended.stderr
    assert ("RingarError" in ended.stderr) == told, ended.stderr


# -- other ways to run backward --------------------------------------------------------------------


def test_backward_that_makes_a_graph():
    nets, xs = nets_of(), vectors(1)
    expected = summed(nets, xs)
    with pr.GradientBucketer(nets, **EACH) as bucketer, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of a reference cycle
        for _ in range(2):
            clear(nets, set_to_none=True)
            for net, x in zip(nets, xs, strict=True):
                net(x).backward(create_graph=True)
            bucketer.wait()
            assert_reduced(nets, expected)
            assert nets[0].late.grad.requires_grad
    clear(nets, set_to_none=True)


@pytest.mark.parametrize("compiler", ["identity", pytest.param("eager", marks=pytest.mark.slow)])
def test_compiled_autograd_is_reduced_in_wait(compiler):
    import torch._dynamo.compiled_autograd as compiled_autograd

    def run(gm):
        return gm if compiler == "identity" else torch.compile(gm, backend="eager")

    nets = [nn.Linear(6, 3) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    xs = [torch.randn(4, 6) for _ in nets]
    copies = copy.deepcopy(nets)
    for net, x in zip(copies, xs, strict=True):
        net(x).square().sum().backward()
    with pr.GradientBucketer(nets, **EACH) as bucketer:
        for _ in range(2):
            clear(nets, set_to_none=True)
            with compiled_autograd._enable(run):
                for net, x in zip(nets, xs, strict=True):
                    net(x).square().sum().backward()
            bucketer.wait()
            for a, b, c, d in zip(*(n.parameters() for n in (*nets, *copies)), strict=True):
                assert torch.equal(a.grad, c.grad + d.grad)
                assert torch.equal(b.grad, a.grad)


def test_a_bucketer_that_cannot_be_made_leaves_no_hook():
    leaf = torch.ones(4, requires_grad=True)
    with pytest.raises(RuntimeError):
        pr.GradientBucketer([[leaf, leaf * 2]])
    assert not leaf._post_accumulate_grad_hooks


def test_a_bucketer_may_be_dropped_while_its_hook_runs(monkeypatch):
    """As the garbage collector may, which runs at any line of Python."""
    nets = [[torch.ones(4, requires_grad=True) for _ in range(2)] for _ in range(2)]
    held = [pr.GradientBucketer(nets, first_bucket_mb=1e-6, bucket_cap_mb=1e-6)]
    losses = [(a * b).sum() for a, b in nets]
    losses[0].backward()
    reduce = pr.Communicator.all_reduce_coalesced

    def drop_and_reduce(*args, **options):
        held.clear()
        return reduce(*args, **options)

    monkeypatch.setattr(pr.Communicator, "all_reduce_coalesced", drop_and_reduce)
    losses[1].backward()
    assert not held


@pytest.mark.parametrize("used", [[0], [0, 1]])
def test_a_bucket_with_nothing_in_it_has_left(used):
    """Its gradients of a later pass are not lost between two calls of an interrupted wait()."""
    nets = [[torch.ones(2, requires_grad=True) for _ in range(3)] for _ in range(2)]
    bucketer = pr.GradientBucketer(nets, bucket_cap_mb=1.6e-5, first_bucket_mb=8e-6)
    for net in nets:
        net[2].sum().backward()
    interrupted = mock.patch.object(pr.Work, "wait", side_effect=KeyboardInterrupt)
    with interrupted, pytest.raises(KeyboardInterrupt):
        bucketer.wait()

    def step():
        for net in nets:
            sum(net[i].sum() for i in used).backward()
        bucketer.wait()

    with pytest.raises(pr.RingarError):
        step()
