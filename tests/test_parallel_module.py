"""DataParallel is the plain module: outputs, gradients, steps, state; on shards, in one process."""

from __future__ import annotations

import copy
import gc
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import pyringar as pr
from pyringar.parallel.shards import shard_sizes


def make_net(dtype=torch.float64, seed=0):
    """Convolution, batch norm, fully connected; some 500 numbers."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
    ).to(dtype)


def make_mlp(dtype=torch.float64):
    """Without batch norm: the same for any split."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


def batch_of(n, dtype=torch.float64, shape=(2, 6, 6), seed=3):
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(n, *shape, generator=generator, dtype=dtype)  # noqa: N806
    return X, torch.randint(3, (n,), generator=generator)


def rows_of(n, dtype=torch.float64, seed=3):
    return batch_of(n, dtype, (5,), seed)


def sharded_gradients(module, X, y, sizes):  # noqa: N803
    """By hand: a copy per rank, its shard, one loss over all, gradients added in rank order."""
    copies = [copy.deepcopy(module) for _ in sizes]
    shards = torch.split(X, list(sizes))
    outputs = [net(shard) for net, shard in zip(copies, shards, strict=True) if len(shard)]
    F.cross_entropy(torch.cat(outputs), y).backward()
    total = [torch.zeros_like(param) for param in module.parameters()]
    for net in copies:
        for sum_, param in zip(total, net.parameters(), strict=True):
            if param.grad is not None:
                sum_ += param.grad
    return total, copies[0]


def backward(module, batch):
    X, y = batch  # noqa: N806
    F.cross_entropy(module(X), y).backward()


def train_step(module, optimizer, batch):
    optimizer.zero_grad()
    backward(module, batch)
    optimizer.step()


def gradients(module):
    return [param.grad for param in module.parameters()]


def relative_error(found, expected):
    difference = sum(((a - b) ** 2).sum() for a, b in zip(found, expected, strict=True))
    return float(difference / sum((b**2).sum() for b in expected)) ** 0.5


def assert_all_ranks_equal(net):
    pr.check_replicas_equal([list(replica.parameters()) for replica in net.replicas])
    pr.check_replicas_equal([gradients(replica) for replica in net.replicas])


@pytest.fixture
def parallel():
    """``parallel(module, k, **options)``: a DataParallel over CPU ranks, closed after the test."""
    made = []

    def make(module, num_ranks, **options):
        made.append(pr.DataParallel(module, ["cpu"] * num_ranks, **options))
        return made[-1]

    yield make
    for net in made:
        net.close()


class TestGradients:
    @pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
    def test_local_batch_norm_gives_the_bits_of_shards_by_hand(self, parallel, num_ranks, dtype):
        module = make_net(dtype)
        X, y = batch_of(11, dtype)  # noqa: N806
        expected, first = sharded_gradients(module, X, y, shard_sizes(11, num_ranks))
        net = parallel(module, num_ranks)
        F.cross_entropy(net(X), y).backward()
        net.wait()
        for found, wanted in zip(gradients(net), expected, strict=True):
            assert torch.equal(found, wanted)
        assert_all_ranks_equal(net)
        for found, wanted in zip(net.buffers(), first.buffers(), strict=True):
            assert torch.equal(found, wanted)

    @pytest.mark.parametrize("num_ranks", [1, 2, 4])
    @pytest.mark.parametrize(
        ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)], ids=str
    )
    def test_frozen_batch_norm_gives_the_gradient_of_the_whole(
        self, parallel, num_ranks, dtype, tolerance
    ):
        module = make_net(dtype)
        module[1].eval()
        X, y = batch_of(13, dtype)  # noqa: N806
        net = parallel(module, num_ranks)
        whole = module(X)
        F.cross_entropy(whole, y).backward()
        found = net(X)
        torch.testing.assert_close(found, whole, rtol=tolerance, atol=tolerance)
        F.cross_entropy(found, y).backward()
        net.wait()
        assert relative_error(gradients(net), gradients(module)) < tolerance

    def test_gradients_reach_the_input(self, parallel):
        module = make_mlp()
        X, y = rows_of(7)  # noqa: N806
        ours, theirs = X.clone().requires_grad_(), X.clone().requires_grad_()
        F.cross_entropy(parallel(module, 3)(ours), y).backward()
        F.cross_entropy(module(theirs), y).backward()
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-15)

    @pytest.mark.parametrize("weights", [(3, 1), (1, 0, 2), (1, 5, 1, 1)])
    def test_any_split_gives_the_gradient_of_the_whole(self, parallel, weights):
        module = make_mlp()
        batch = rows_of(12)
        net = parallel(module, len(weights), weights=weights)
        sizes = []
        for replica in net.replicas:
            replica.register_forward_hook(lambda part, args, out: sizes.append(len(args[0])))
        backward(net, batch)
        net.wait()
        backward(module, batch)
        assert relative_error(gradients(net), gradients(module)) < 1e-13
        assert sizes == [n for n in shard_sizes(12, len(weights), weights) if n]

    @pytest.mark.parametrize("n", [1, 2, 3])
    def test_ranks_without_a_sample_get_the_same_gradient(self, parallel, n):
        module = make_net()
        X, y = batch_of(n)  # noqa: N806
        expected, _ = sharded_gradients(module, X, y, shard_sizes(n, 4))
        net = parallel(module, 4)
        before = net.replicas[3].state_dict()["1.running_mean"].clone()
        F.cross_entropy(net(X), y).backward()
        net.wait()
        assert relative_error(gradients(net), expected) < 1e-14
        assert_all_ranks_equal(net)
        assert torch.equal(net.replicas[3][1].running_mean, before), "it saw nothing"

    @pytest.mark.parametrize("options", [{"overlap": False}, {"bucket_cap_mb": 1e-3}])
    def test_buckets_change_no_bit(self, parallel, options):
        found = []
        for net in (parallel(make_net(), 3), parallel(make_net(), 3, **options)):
            for _ in range(2):  # the second step has buckets in the order of the first
                net.zero_grad()
                backward(net, batch_of(9))
                net.wait()
            found.append(gradients(net))
        pr.check_replicas_equal(found)

    def test_accumulated_gradients_are_summed_once(self, parallel):
        module = make_mlp()
        net = parallel(module, 2)
        X, y = rows_of(8)  # noqa: N806
        with net.no_sync():
            F.cross_entropy(net(X[:4]), y[:4], reduction="sum").backward()
        F.cross_entropy(net(X[4:]), y[4:], reduction="sum").backward()
        net.wait()
        F.cross_entropy(module(X), y, reduction="sum").backward()
        assert relative_error(gradients(net), gradients(module)) < 1e-13

    def test_a_second_backward_pass_before_the_step_is_refused(self, parallel):
        net = parallel(make_mlp(), 2)
        batch = rows_of(8)
        backward(net, batch)
        with pytest.raises(pr.RingarError, match="no_sync"):
            backward(net, batch)
        net.zero_grad()
        backward(net, batch)
        net.wait()
        assert_all_ranks_equal(net)

    @pytest.mark.parametrize("norm_type", [2.0, float("inf")])
    def test_clipping_counts_the_gradient_once(self, parallel, norm_type):
        module = make_mlp()
        net = parallel(module, 3)
        X, y = rows_of(9)  # noqa: N806
        for one in (net, module):
            (100 * F.cross_entropy(one(X), y)).backward()
        expected = nn.utils.clip_grad_norm_(module.parameters(), 0.5, norm_type)
        found = net.clip_grad_norm_(0.5, norm_type)
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)
        assert relative_error(gradients(net), gradients(module)) < 1e-13
        assert_all_ranks_equal(net)


class Pair(NamedTuple):
    scores: torch.Tensor
    extra: dict


class TestCalls:
    def test_outputs_are_those_of_the_plain_module(self, parallel):
        module = make_mlp()
        X, _ = rows_of(10)  # noqa: N806
        torch.testing.assert_close(parallel(module, 4)(X), module(X), rtol=0, atol=1e-15)

    def test_an_empty_batch_has_an_empty_output(self, parallel):
        assert parallel(make_mlp(), 2)(torch.rand(0, 5, dtype=torch.float64)).shape == (0, 3)

    def test_outputs_per_rank(self, parallel):
        module = make_mlp()
        X, _ = rows_of(2)  # noqa: N806
        outputs = parallel(module, 3, gather=False)(X)
        assert [tuple(output.shape) for output in outputs] == [(1, 3), (1, 3), (0, 3)]
        torch.testing.assert_close(torch.cat(outputs), module(X), rtol=0, atol=1e-15)

    def test_nested_arguments_are_cut_and_nested_outputs_put_together(self, parallel):
        class Model(nn.Module):
            def forward(self, x, scale, *, parts, name):
                loss = x.sum()
                return Pair(x * scale + parts["bias"][0], {"loss": loss, "name": None})

        x, bias = torch.arange(10.0).view(5, 2), torch.arange(5.0).view(5, 1)
        found = parallel(Model(), 2)(x, torch.tensor(3.0), parts={"bias": [bias]}, name="n")
        assert isinstance(found, Pair)
        assert torch.equal(found.scores, x * 3 + bias)
        assert torch.equal(found.extra["loss"], torch.stack([x[:3].sum(), x[3:].sum()]))
        assert found.extra["name"] is None

    def test_losses_of_the_ranks_may_be_what_the_module_returns(self, parallel):
        class WithLoss(nn.Module):
            def __init__(self):
                super().__init__()
                self.net = make_mlp()

            def forward(self, x, labels):
                return F.cross_entropy(self.net(x), labels, reduction="sum")

        X, y = rows_of(9)  # noqa: N806
        module = WithLoss()
        net = parallel(module, 4)
        (net(X, y).sum() / 9).backward()
        net.wait()
        F.cross_entropy(module.net(X), y).backward()
        assert relative_error(gradients(net), gradients(module)) < 1e-13

    def test_wrong_calls_are_named(self, parallel):
        net = parallel(nn.Identity(), 2)
        with pytest.raises(pr.ArgumentError, match="no tensor with a first dimension"):
            net(torch.tensor(1.0))
        net = parallel(nn.Bilinear(2, 2, 2), 2)
        with pytest.raises(pr.ArgumentError, match=r"shapes \(3, 2\), \(4, 2\), expected the same"):
            net(torch.rand(3, 2), torch.rand(4, 2))

    def test_an_output_that_cannot_be_put_together_is_named(self, parallel):
        class Words(nn.Module):
            def forward(self, x):
                return "words"

        with pytest.raises(pr.ArgumentError, match=r"returned a str.*gather=False"):
            parallel(Words(), 2)(torch.rand(3, 2))
        assert parallel(Words(), 2, gather=False)(torch.rand(3, 2)) == ["words", "words"]


class TestOptimizer:
    @pytest.mark.parametrize(
        ("kind", "options"),
        [
            (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
            (torch.optim.AdamW, {"lr": 0.01}),
        ],
    )
    @pytest.mark.parametrize("num_ranks", [1, 3])
    def test_steps_are_those_of_the_plain_module(self, parallel, num_ranks, kind, options):
        module = make_mlp()
        net = parallel(module, num_ranks)
        ours, theirs = net.optimizer(kind, **options), kind(module.parameters(), **options)
        for step in range(5):
            for one, optimizer in ((net, ours), (module, theirs)):
                train_step(one, optimizer, rows_of(7 + step, seed=step))
            assert_all_ranks_equal(net)
        for found, expected in zip(net.parameters(), module.parameters(), strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)

    def test_schedulers_set_the_rate_of_all_ranks(self, parallel):
        net = parallel(make_mlp(), 2)
        optimizer = net.optimizer(torch.optim.SGD, lr=0.5)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
        for expected in (0.5, 0.05, 0.005):
            train_step(net, optimizer, rows_of(4))
            rates = [one.param_groups[0]["lr"] for one in optimizer.optimizers]
            assert rates == pytest.approx([expected] * 2)
            assert_all_ranks_equal(net)
            scheduler.step()

    def test_a_grad_scaler_unscales_all_ranks_and_skips_together(self, parallel):
        module = make_mlp(torch.float32)
        net = parallel(module, 2, overlap=False)
        ours = net.optimizer(torch.optim.SGD, lr=0.1)
        theirs = torch.optim.SGD(module.parameters(), lr=0.1)
        X, y = rows_of(6, torch.float32)  # noqa: N806
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scaler.scale(F.cross_entropy(net(X), y)).backward()
        scaler.unscale_(ours)
        assert_all_ranks_equal(net)  # reduced before they were unscaled
        scaler.step(ours)
        scaler.update()
        F.cross_entropy(module(X), y).backward()
        theirs.step()
        assert_all_ranks_equal(net)
        for found, expected in zip(net.parameters(), module.parameters(), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        before = copy.deepcopy(net.state_dict())
        ours.zero_grad()
        scaler.scale(F.cross_entropy(net(X), y) * float("inf")).backward()
        scaler.step(ours)
        for name, tensor in net.state_dict().items():
            assert torch.equal(tensor, before[name]), "a step with infinite gradients"

    def test_groups_are_chosen_in_every_replica(self, parallel):
        net = parallel(make_mlp(), 2)
        optimizer = net.optimizer(
            torch.optim.SGD,
            lambda m: [{"params": m[0].parameters(), "lr": 0.0}, {"params": m[2].parameters()}],
            lr=0.1,
        )
        before = copy.deepcopy(net.state_dict())
        backward(net, rows_of(6))
        optimizer.step()
        assert_all_ranks_equal(net)
        changed = [n for n, t in net.state_dict().items() if not torch.equal(t, before[n])]
        assert changed == ["2.weight", "2.bias"]
        with pytest.raises(pr.UnsupportedError, match="parameter groups cannot be added"):
            optimizer.add_param_group({"params": [torch.zeros(1)]})

    def test_state_goes_to_a_plain_optimizer_and_back(self, parallel):
        module = make_mlp()
        options = {"lr": 0.1, "momentum": 0.9}
        net = parallel(module, 2)
        ours = net.optimizer(torch.optim.SGD, **options)
        batch = rows_of(6)
        backward(net, batch)
        ours.step()
        ours.param_groups[0]["lr"] = 0.025
        module.load_state_dict(net.state_dict())
        plain = torch.optim.SGD(module.parameters(), **options)
        plain.load_state_dict(copy.deepcopy(ours.state_dict()))
        assert plain.param_groups[0]["lr"] == 0.025
        resumed = parallel(module, 3)
        again = resumed.optimizer(torch.optim.SGD, **options)
        again.load_state_dict(plain.state_dict())
        assert again.param_groups[0]["lr"] == 0.025
        for one, optimizer in ((net, ours), (resumed, again), (module, plain)):
            train_step(one, optimizer, batch)
        assert_all_ranks_equal(resumed)
        for a, b, c in zip(*(m.parameters() for m in (net, resumed, module)), strict=True):
            torch.testing.assert_close(a, c, rtol=0, atol=1e-13)
            torch.testing.assert_close(b, c, rtol=0, atol=1e-13)

    def test_gradients_that_were_clipped_on_rank_0_only_are_noticed(self, parallel):
        net = parallel(make_mlp(), 2)
        optimizer = net.optimizer(torch.optim.SGD, lr=0.1)
        batch = rows_of(6)
        backward(net, batch)
        net.wait()
        nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
        with pytest.raises(pr.RingarError, match=r"on rank 0 and not on rank 1: .*net\.clip_grad"):
            optimizer.step()
        optimizer.zero_grad()
        backward(net, batch)
        net.clip_grad_norm_(1e-3)
        optimizer.step()
        assert_all_ranks_equal(net)

    def test_an_optimizer_of_rank_0_only_is_noticed(self, parallel):
        net = parallel(make_mlp(), 2)
        state = copy.deepcopy(net.state_dict())
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        X, y = rows_of(6)  # noqa: N806
        F.cross_entropy(net(X), y).backward()
        net.wait()
        optimizer.step()
        net.zero_grad()
        with pytest.raises(
            pr.RingarError, match=r"on rank 0 and not on rank 1: step with net\.opt"
        ):
            net(X)
        net.load_state_dict(state)
        assert net(X).shape == (6, 3)

    def test_a_failed_backward_pass_is_cleared_by_zero_grad(self, parallel):
        net = parallel(make_mlp(), 2)
        optimizer = net.optimizer(torch.optim.SGD, lr=0.1)
        X, y = rows_of(6)  # noqa: N806

        def fail(grad):
            raise ValueError("planted")

        loss = F.cross_entropy(net(X), y)
        handle = net.replicas[0][0].weight.register_hook(fail)
        with pytest.raises(ValueError, match="planted"):
            loss.backward()
        handle.remove()
        with pytest.raises(pr.RingarError, match="backward pass failed"):
            optimizer.step()
        optimizer.zero_grad()
        F.cross_entropy(net(X), y).backward()
        optimizer.step()
        assert_all_ranks_equal(net)


class TestAsThePlainModule:
    def test_names_are_those_of_the_plain_module(self, parallel):
        module = make_net()
        net = parallel(module, 2)
        assert list(net.state_dict()) == list(module.state_dict())
        for ours, theirs in (
            (net.named_parameters(), module.named_parameters()),
            (net.named_buffers(), module.named_buffers()),
        ):
            assert [name for name, _ in ours] == [name for name, _ in theirs]
        assert net.module is net.replicas[0]
        assert net.module is not module

    @pytest.mark.parametrize("assign", [False, True])
    def test_state_goes_to_the_plain_module_and_back(self, parallel, assign):
        module, net = make_net(seed=1), parallel(make_net(seed=2), 2)
        optimizer = net.optimizer(torch.optim.SGD, lr=0.1)
        result = net.load_state_dict(module.state_dict(), assign=assign)
        assert not result.missing_keys
        for replica in net.replicas:
            for name, tensor in replica.state_dict().items():
                assert torch.equal(tensor, module.state_dict()[name])
        if assign:
            optimizer = net.optimizer(torch.optim.SGD, lr=0.1)
        backward(net, batch_of(8))
        optimizer.step()
        assert_all_ranks_equal(net)
        assert not torch.equal(net.module[4].weight, module[4].weight)
        module.load_state_dict(net.state_dict())
        with pytest.raises(RuntimeError, match="Missing key"):
            net.load_state_dict({})

    def test_eval_mode_answers_as_the_module_that_would_be_saved(self, parallel):
        module = make_net()
        net = parallel(module, 3)
        X, _ = batch_of(9)  # noqa: N806
        net(X)
        means = [replica[1].running_mean for replica in net.replicas]
        assert not torch.equal(means[0], means[1]), "local statistics differ"
        module.load_state_dict(net.state_dict())
        assert net.eval() is net
        assert not any(replica.training for replica in net.replicas)
        torch.testing.assert_close(net(X), module.eval()(X), rtol=0, atol=1e-14)
        assert net.train().training
        assert all(replica[1].training for replica in net.replicas)

    def test_initialising_again_reaches_all_ranks(self, parallel):
        net = parallel(make_net(), 3)
        X, _ = batch_of(9)  # noqa: N806
        net(X)

        def start_again(part):
            if hasattr(part, "reset_parameters"):
                part.reset_parameters()

        net.apply(start_again)
        first = net.replicas[0].state_dict()
        assert not first["1.running_mean"].any()
        for replica in net.replicas[1:]:
            assert all(torch.equal(t, first[name]) for name, t in replica.state_dict().items())

    def test_moving_to_where_it_is_is_fine_and_all_else_refused(self, parallel):
        net = parallel(make_net(), 2)
        assert net.to("cpu") is net
        for convert in (net.float, net.half, lambda: net.to("meta")):
            with pytest.raises(pr.UnsupportedError, match="cannot be moved or converted"):
                convert()
        with pytest.raises(pr.UnsupportedError, match="requires_grad"):
            net.requires_grad_(False)

    def test_frozen_parameters_stay_as_they_are(self, parallel):
        module = make_mlp()
        module[0].requires_grad_(False)
        net = parallel(module, 2)
        optimizer = net.optimizer(torch.optim.SGD, lr=0.1)
        backward(net, rows_of(4))
        optimizer.step()
        assert torch.equal(net.module[0].weight, module[0].weight)
        assert not torch.equal(net.module[2].weight, module[2].weight)

    def test_repr_names_devices_and_module(self, parallel):
        text = repr(parallel(make_mlp(), 2))
        assert "devices=[cpu, cpu]" in text
        assert "Tanh" in text

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"weights": (1, 2, 3)}, "weights has 3 entries"),
            ({"batchnorm": "global"}, "batchnorm is 'global', expected one of local, sync"),
            ({"bucket_cap_mb": 0}, "bucket_cap_mb is 0"),
            ({"output_device": "cuda:93"}, "is 'cuda:93', which is not on this machine"),
        ],
    )
    def test_wrong_options_are_named(self, options, message):
        with pytest.raises(pr.ArgumentError, match=message):
            pr.DataParallel(make_mlp(), ["cpu"] * 2, **options)

    def test_lazy_parameters_are_refused(self):
        with pytest.raises(pr.ArgumentError, match="lazy parameter 'weight'"):
            pr.DataParallel(nn.LazyLinear(3), ["cpu"] * 2)

    def test_a_closed_one_reduces_no_more(self):
        with pr.DataParallel(make_mlp(), ["cpu"] * 2) as net:
            pass
        net.close()
        backward(net, rows_of(4))
        ours, theirs = (gradients(replica)[0] for replica in net.replicas)
        assert not torch.equal(ours, theirs)

    def test_a_dropped_one_leaves_no_hooks(self):
        net = pr.DataParallel(make_mlp(), ["cpu"] * 2)
        params = list(net.parameters())
        assert all(param._post_accumulate_grad_hooks for param in params)
        del net
        gc.collect()
        assert not any(param._post_accumulate_grad_hooks for param in params)

    def test_a_communicator_of_the_user_stays_open(self, make_comm):
        comm = make_comm(2, algorithm="ring")
        with pr.DataParallel(make_mlp(), ["cpu"] * 2, comm=comm) as net:
            backward(net, rows_of(4))
            net.wait()
            assert_all_ranks_equal(net)
        assert comm.stats()["ring"]["calls"] >= 1
        comm.all_reduce([torch.ones(1), torch.ones(1)])
