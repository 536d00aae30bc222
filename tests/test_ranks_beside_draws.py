"""Ranks that compute at the same time: where modules draw random numbers, ranks take turns."""

from __future__ import annotations

import logging
import random
import textwrap
import threading
import time

import pytest
import torch
from programs import run_programs
from test_ranks_beside import SHARED, assert_equal, mlp, rows, step, torch_threads, trained
from test_ranks_beside_life import acts
from torch import nn
from torch.nn import functional as F  # noqa: N812

import pyringar as pr

__all__ = ["acts", "torch_threads"]  # fixtures


def slow_down_some_ranks():
    """So that ranks at the same time do things in another order than in turns."""
    name = threading.current_thread().name
    if name.startswith("pyringar-rank"):
        time.sleep(0.01 if name.endswith("0") else 0.002)


class TestRandomNumbers:
    @pytest.mark.parametrize("of", ["torch", "python"])
    def test_are_drawn_as_in_turns(self, acts, of, torch_threads):
        torch_threads(1)
        X, y = rows(9)  # noqa: N806
        draw = {"torch": lambda: torch.rand(()), "python": random.random}[of]
        acts.act = staticmethod(lambda x: x * draw())
        found = []
        for in_turns in (None, None, True):
            torch.manual_seed(5)
            module = acts()
            random.seed(5)
            found.append(trained(module, 3, X, y, steps=4, in_turns=in_turns))
        assert_equal(found[0], found[1])
        assert_equal(found[0], found[2])

    @pytest.mark.parametrize("from_what", ["an argument", "the module", "where it is set back"])
    def test_are_drawn_from_any_generator_of_torch_as_in_turns(
        self, acts, from_what, torch_threads
    ):
        """Also where the state of the one that all threads share tells nothing."""
        torch_threads(1)
        X, _ = rows()  # noqa: N806

        class Noise(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = nn.Linear(4, 3)

            def forward(self, x, generator=None):
                if from_what == "the module":
                    generator = SHARED[0]
                with torch.random.fork_rng(devices=[], enabled=from_what == "where it is set back"):
                    if generator is None:
                        torch.manual_seed(7)
                    slow_down_some_ranks()
                    noise = torch.randn(x.shape, generator=generator)
                    slow_down_some_ranks()
                    return self.linear(x + noise + torch.randn(4, generator=generator))

        found = []
        for in_turns in (None, True):
            SHARED[:] = [torch.Generator().manual_seed(5)]
            args = [X, SHARED[0]] if from_what == "an argument" else [X]
            torch.manual_seed(0)
            with pr.DataParallel(Noise(), ["cpu"] * 3, in_turns=in_turns) as net:
                outs = [net(*args) for _ in range(4)]
                assert in_turns or not net._beside.may_run(args)
            found.append([*outs, torch.get_rng_state()])
        assert_equal(*found)

    def test_looking_for_them_imports_nothing_and_what_forward_imports_is_no_draw(self):
        program = """
            import sys, torch
            from torch import nn
            import pyringar as pr
            class Imports(nn.Linear):
                def forward(self, x):
                    import numpy.random
                    return super().forward(x)
            torch.set_num_threads(1)
            assert "numpy.random" not in sys.modules
            with pr.DataParallel(Imports(4, 3), ["cpu"] * 2) as net:
                net(torch.ones(4, 4)).sum().backward()
                assert net._beside.may_run([])
            assert "torch._dynamo" not in sys.modules
        """
        (ended,) = run_programs(textwrap.dedent(program), ())
        assert ended.returncode == 0, ended.stderr

    @pytest.mark.parametrize("cap_mb", [10, 0.00001])
    def test_of_hooks_on_parameters_are_drawn_as_in_turns(self, torch_threads, cap_mb):
        def add_noise(param):
            param.grad.add_(torch.randn_like(param), alpha=0.1)

        torch_threads(1)
        X, y = rows()  # noqa: N806
        options = {"overlap": False, "bucket_cap_mb": cap_mb, "first_bucket_mb": cap_mb}
        found = []
        for in_turns in (None, True):
            module = mlp()
            with pr.DataParallel(module, ["cpu"] * 2, in_turns=in_turns, **options) as net:
                optimizer = net.optimizer(torch.optim.SGD, lr=0.1)
                step(net, optimizer, X, y)
                for replica in net.replicas:
                    for param in replica.parameters():
                        param.register_post_accumulate_grad_hook(add_noise)
                torch.manual_seed(5)
                for _ in range(3):
                    step(net, optimizer, X, y)
                found.append([p.detach() for r in net.replicas for p in r.parameters()])
        assert_equal(*found)

    def test_of_a_generator_that_only_a_later_call_has(self):
        X, _ = rows()  # noqa: N806
        with pr.DataParallel(nn.Linear(4, 3), ["cpu"] * 2) as net:
            net(X)
            assert net._beside.may_run([((X, None), {})])
            assert not net._beside.may_run([((X,), {"options": {"generator": torch.Generator()}})])

    def test_of_backward_alone_are_drawn_as_in_turns(self, acts, torch_threads):
        torch_threads(1)
        generator = torch.Generator()
        acts.react = staticmethod(
            lambda grad: (
                slow_down_some_ranks(),
                grad + torch.randn(grad.shape, generator=generator),
            )[1]
        )
        module = acts()
        found = []
        for in_turns in (None, True):
            generator.manual_seed(5)
            found.append(trained(module, 3, *rows(9), steps=4, in_turns=in_turns))
        assert_equal(*found)

    @pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
    def test_that_none_are_drawn_is_seen_where_they_might_be(self, mode):
        """Dropout in evaluation and attention on CPUs have torch's mark of what draws."""
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True)
        module = nn.Sequential(layer, nn.Dropout(), nn.RReLU()).eval()
        X = torch.randn(4, 5, 8)  # noqa: N806
        with pr.DataParallel(module, ["cpu"] * 2) as net, mode():
            for _ in range(2):
                net(X)
            assert net._beside.may_run([X])

    def test_dropout_is_the_same_every_time(self, torch_threads):
        torch_threads(1)
        module = nn.Sequential(nn.Linear(4, 32), nn.Dropout(), nn.Linear(32, 3))
        found = []
        for in_turns in (None, None, True):
            torch.manual_seed(7)
            found.append(trained(module, 3, *rows(9), in_turns=in_turns))
        assert_equal(found[0], found[1])
        assert_equal(found[0], found[2])

    def test_that_a_module_begins_to_draw_is_told_and_then_it_takes_turns(self, acts, caplog):
        X, _ = rows()  # noqa: N806
        with pr.DataParallel(acts(), ["cpu"] * 2) as net, caplog.at_level(logging.WARNING):
            net(X)
            net(X)
            assert not caplog.records
            acts.act = staticmethod(lambda x: x * torch.rand(()))
            net(X)
            assert "not repeatable" in caplog.text
            names = []
            acts.act = staticmethod(lambda x: names.append(threading.current_thread().name) or x)
            net(X)
        assert names == ["MainThread"] * 2
        assert len(caplog.records) == 1

    def test_another_thread_may_draw_from_a_generator_of_its_own(self, acts, caplog):
        X, y = rows()  # noqa: N806
        has_ended = threading.Event()

        def prefetch():
            generator = torch.Generator()
            while not has_ended.wait(0.0002):
                torch.rand(10, generator=generator)

        thread = threading.Thread(target=prefetch)
        thread.start()
        with pr.DataParallel(acts(), ["cpu"] * 2) as net, caplog.at_level(logging.WARNING):
            for _ in range(10):
                net.zero_grad()
                F.cross_entropy(net(X), y).backward()
                net.wait()
            assert net._beside.may_run([X])
            assert not caplog.records
            has_ended.set()
            thread.join()
            torch.rand(1)
            assert net._beside.may_run([X])

    def test_a_generator_that_backward_has_set_as_in_forward_is_as_it_was(self, acts):
        """As two threads may leave it that set it so and back, as activation checkpoints do."""
        X, y = rows()  # noqa: N806
        states = []
        acts.act = staticmethod(lambda x: states.append(torch.get_rng_state()) or x)
        acts.react = staticmethod(lambda grad: torch.set_rng_state(states[-1]) or grad)
        with pr.DataParallel(acts(), ["cpu"] * 2) as net:
            for number in range(3):
                loss = F.cross_entropy(net(X), y)
                torch.manual_seed(number)
                random.random()  # which tells nothing of torch's generator
                before = torch.get_rng_state()
                loss.backward()
                assert torch.equal(torch.get_rng_state(), before)
                net.wait()
                net.zero_grad()
            assert net._beside.may_run([X])

    def test_a_checkpoint_leaves_the_callers_generator_alone(self):
        """Its backward sets the generator to what it was in forward, and back: in all threads."""

        class Recomputes(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.second = nn.Linear(4, 300), nn.Linear(300, 3)

            def forward(self, x):
                return torch.utils.checkpoint.checkpoint(
                    lambda h: self.second(self.first(h).tanh()), x, use_reentrant=False
                )

        X, y = rows(400)  # noqa: N806
        with pr.DataParallel(Recomputes(), ["cpu"] * 4) as net:
            for number in range(20):
                loss = F.cross_entropy(net(X), y)
                torch.manual_seed(number)
                before = torch.get_rng_state()
                loss.backward()
                assert torch.equal(torch.get_rng_state(), before)
                net.wait()
                net.zero_grad()
