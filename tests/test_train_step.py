"""Test that a training step on k ranks equals the step on one rank."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from case_marks import mostly_slow
from training_runs import relative_error

from pyringar import Communicator, GradientBucketer
from pyringar.errors import ArgumentError
from pyringar.parallel.shards import (
    check_replicas_equal,
    get_params,
    shard_sizes,
    split_batch,
)
from pyringar.train import lenet, lenet_params, train_batch
from pyringar.train.step import EagerStep, sgd, sum_loss
from pyringar.train.synthetic import synthetic_images


def make_replicas(num_ranks, dtype=torch.float32, seed=0):
    params = lenet_params(generator=torch.Generator().manual_seed(seed), dtype=dtype)
    return [get_params(params, "cpu") for _ in range(num_ranks)]


def batch_of(n, dtype=torch.float32, seed=5):
    images, labels = synthetic_images(n, seed)
    return images.to(dtype), labels


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Each row: images, ranks, weights of the ranks. 61 is not divisible by 2, 4 or 8.
SPLITS = [(61, k, None) for k in (1, 2, 4, 8)] + [(n, 8, None) for n in (1, 7)]
SPLITS += [(64, len(w), w) for w in [(192, 64), (255, 1), (1, 0, 2)]]


@pytest.mark.parametrize(("n", "num_ranks", "weights"), SPLITS)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-13)], ids=str
)
def test_any_batch_split_equals_one_rank(n, num_ranks, weights, dtype, tolerance):
    images, labels = batch_of(n, dtype)
    replicas, (alone,) = make_replicas(num_ranks, dtype), make_replicas(1, dtype)
    loss = sum_loss(lenet(images, alone), labels)
    loss.backward()
    for param in itertools.chain(*replicas):
        param.grad = torch.full_like(param, 1e6)  # gradients of an earlier step must not be added
    losses = train_batch(images, labels, replicas, ["cpu"] * num_ranks, lr=0.25, weights=weights)
    sizes = shard_sizes(n, num_ranks, weights)
    assert [float(loss) == 0 for loss in losses] == [size == 0 for size in sizes]
    assert sum(map(float, losses)) == pytest.approx(loss.item(), rel=10 * tolerance)
    assert not any(loss.requires_grad for loss in losses)
    expected = [param.grad for param in alone]
    for params in replicas:
        assert relative_error([param.grad for param in params], expected) < tolerance
    check_replicas_equal(replicas)
    for param, start in zip(replicas[-1], alone, strict=True):
        assert torch.equal(param, start - 0.25 / n * param.grad)


def trajectory(num_ranks, dtype, algorithm, order="rank"):
    images, labels = batch_of(400, dtype)
    replicas = make_replicas(num_ranks, dtype)
    devices = ["cpu"] * num_ranks
    shuffle = torch.Generator().manual_seed(1)
    with Communicator(devices, algorithm=algorithm, order=order) as comm:
        for _ in range(2):
            chosen = torch.randint(400, (13,), generator=shuffle)
            train_batch(images[chosen], labels[chosen], replicas, devices, 0.1, comm=comm)
            check_replicas_equal(replicas)
    return [param.detach() for param in replicas[-1]]


@pytest.mark.parametrize("dtype", mostly_slow(DTYPES, *DTYPES[:2]), ids=str)
def test_rank_order_algorithms_give_equal_bits(dtype):
    expected = trajectory(3, dtype, "naive")
    for algorithm in ("fused", "direct", "sharded", "auto"):
        check_replicas_equal([expected, trajectory(3, dtype, algorithm)])
    first, again = (trajectory(4, dtype, "ring", "any") for _ in range(2))
    check_replicas_equal([first, again])


@pytest.mark.parametrize("options", [{}, {"overlap": False}, {"bucket_cap_mb": 0.05}])
def test_bucketed_step_equals_train_batch(options):
    images, labels = batch_of(26)
    ours, theirs = make_replicas(3), make_replicas(3)

    def scores(shards):
        return [lenet(X, params) for X, params in zip(shards, ours, strict=True)]

    with GradientBucketer(ours, **options) as bucketer:
        split = functools.partial(split_batch, devices=["cpu"] * 3)
        step = EagerStep(ours, scores, bucketer.wait, split)
        for n in (13, 2, 11):
            batch = (images[:n], labels[:n])
            step(*batch, 0.1 / n)
            train_batch(*batch, theirs, ["cpu"] * 3, 0.1)
            check_replicas_equal([*ours, *theirs])


def test_sgd_adds_momentum():
    param = torch.zeros(1, requires_grad=True)
    param.grad, velocity = torch.ones(1), torch.zeros(1)
    for expected in (-0.5, -1.25):
        sgd([param], 0.5, [velocity], momentum=0.5)
        assert param.item() == expected


def test_sgd_rounds_product_before_subtraction():
    param = torch.tensor([1.0], requires_grad=True)
    param.grad = torch.tensor([1 + 2.0**-12])
    sgd([param], 1 + 2.0**-12)
    # The product 1 + 2^-11 + 2^-24 rounds to 1 + 2^-11; a fused multiply-add would not round.
    assert param.item() == -(2.0**-11)


def test_wrong_arguments_raise():
    images, labels = batch_of(4)
    for num_images, num_labels, num_ranks, message in [
        (4, 4, 3, "2 replicas for 3 devices"),
        (0, 0, 2, "expected one sample or more"),
        (4, 3, 2, r"\(4, 1, 28, 28\) and y \(3,\)"),
    ]:
        given = images[:num_images], labels[:num_labels], make_replicas(2)
        with pytest.raises(ArgumentError, match=message):
            train_batch(*given, ["cpu"] * num_ranks, 0.1)


class TestLenet:
    def test_initial_parameters_follow_init_option(self):
        def draw(*options, dtype=torch.float32):
            generator = torch.Generator().manual_seed(7)
            return lenet_params(*options, generator=generator, dtype=dtype)

        book, he = draw("book"), draw()
        assert sum(param.numel() for param in book) == 129_068
        assert 0.0099 < book[4].std() < 0.0101
        for weight, inputs in ((he[2], 20 * 25), (he[4], 800)):
            assert float(weight.var() * inputs) == pytest.approx(2, rel=0.03)
        double = draw(dtype=torch.float64)
        check_replicas_equal([he, [param.float() for param in double]])

    def test_wrong_arguments_raise(self):
        params, X = lenet_params(), torch.rand(2, 1, 28, 28)  # noqa: N806
        for wrong, given, message in [
            (X[..., :27], params, r"\(2, 1, 28, 27\), expected \(n, 1, 28, 28\)"),
            (X.double(), params, r"torch.float64, but params\[0\] is torch.float32"),
            (X, params[:7], "7 tensors, expected 8"),
        ]:
            with pytest.raises(ArgumentError, match=message):
                lenet(wrong, given)
