"""One step on k ranks is the step on one: gradients, trajectories, bits of the replicas."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from training import relative_error

from pyringar import Communicator, GradientBucketer
from pyringar.errors import ArgumentError
from pyringar.parallel.shards import check_replicas_equal, get_params, split_batch
from pyringar.train import lenet, lenet_params, train_batch
from pyringar.train.step import EagerStep, reduce_gradients, sgd, sum_loss
from pyringar.train.synthetic import synthetic_images


def make_replicas(num_ranks, dtype=torch.float32, seed=0):
    params = lenet_params(generator=torch.Generator().manual_seed(seed), dtype=dtype)
    return [get_params(params, "cpu") for _ in range(num_ranks)]


def batch_of(n, dtype=torch.float32, seed=5):
    images, labels = synthetic_images(n, seed)
    return images.to(dtype), labels


def gradient(images, labels, dtype):
    """The gradient of the undivided batch, by torch alone."""
    (params,) = make_replicas(1, dtype)
    sum_loss(lenet(images, params), labels).backward()
    return [param.grad for param in params]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-13)], ids=str
)
def test_gradient_is_that_of_the_undivided_batch(num_ranks, dtype, tolerance):
    images, labels = batch_of(61, dtype)  # divides by none of the numbers of ranks
    replicas = make_replicas(num_ranks, dtype)
    for param in itertools.chain(*replicas):
        param.grad = torch.full_like(param, 1e6)  # of an earlier step: not added
    train_batch(images, labels, replicas, ["cpu"] * num_ranks, lr=0.1)
    expected = gradient(images, labels, dtype)
    for params in replicas:
        assert relative_error([param.grad for param in params], expected) < tolerance
    check_replicas_equal(replicas)


@pytest.mark.parametrize("weights", [(192, 64), (3, 1), (224, 16, 16), (255, 1), (1, 0, 2)])
def test_gradient_is_the_same_for_any_split(weights):
    images, labels = batch_of(64, torch.float64)
    replicas = make_replicas(len(weights), torch.float64)
    train_batch(images, labels, replicas, ["cpu"] * len(weights), lr=0.1, weights=weights)
    found = [param.grad for param in replicas[-1]]
    assert relative_error(found, gradient(images, labels, torch.float64)) < 1e-13


def test_short_batch_uses_own_size():
    images, labels = batch_of(5, torch.float64)
    replicas = make_replicas(2, torch.float64)
    before = [param.detach().clone() for param in replicas[0]]
    train_batch(images, labels, replicas, ["cpu"] * 2, lr=0.25)
    mean = [g / 5 for g in gradient(images, labels, torch.float64)]
    for param, start, slope in zip(replicas[1], before, mean, strict=True):
        torch.testing.assert_close(param.detach(), start - 0.25 * slope, rtol=0, atol=1e-13)


@pytest.mark.parametrize("n", [1, 3, 7])
def test_ranks_without_samples_take_part(n):
    images, labels = batch_of(n, torch.float64)
    replicas = make_replicas(8, torch.float64)
    loss_before = sum_loss(lenet(images, replicas[0]), labels).item()
    losses = train_batch(images, labels, replicas, ["cpu"] * 8, lr=0.1)
    assert [float(loss) == 0 for loss in losses] == [rank >= n for rank in range(8)]
    assert sum(map(float, losses)) == pytest.approx(loss_before, rel=1e-12)
    assert not any(loss.requires_grad for loss in losses)
    check_replicas_equal(replicas)
    expected = gradient(images, labels, torch.float64)
    assert relative_error([param.grad for param in replicas[7]], expected) < 1e-13


def test_missing_gradients_count_as_zeros():
    replicas = make_replicas(2)
    replicas[0][1].grad = torch.ones(20)
    reduce_gradients(replicas, ["cpu"] * 2)
    for params in replicas:
        assert torch.equal(params[1].grad, torch.ones(20))
        assert not params[0].grad.any()


def trajectory(num_ranks, num_steps, dtype, algorithm="fused", order="rank", batch_size=13):
    """Train; after every step the replicas must hold equal bits. Rank 0's parameters."""
    images, labels = batch_of(400, dtype)
    replicas = make_replicas(num_ranks, dtype)
    devices = ["cpu"] * num_ranks
    shuffle = torch.Generator().manual_seed(1)
    with Communicator(devices, algorithm=algorithm, order=order) as comm:
        for _ in range(num_steps):
            chosen = torch.randint(400, (batch_size,), generator=shuffle)
            train_batch(images[chosen], labels[chosen], replicas, devices, 0.1, comm=comm)
            check_replicas_equal(replicas)
    return [param.detach() for param in replicas[-1]]


@pytest.fixture(scope="module")
def trained_alone():
    return trajectory(1, 240, torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_240_float64_steps_match_one_rank(num_ranks, trained_alone):
    start = [param.detach() for param in make_replicas(1, torch.float64)[0]]
    assert relative_error(trained_alone, start) > 0.01, "went nowhere: the comparison is empty"
    found = trajectory(num_ranks, 240, torch.float64)
    for ours, theirs in zip(found, trained_alone, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_algorithms_in_rank_order_give_equal_bits(dtype):
    expected = trajectory(3, 3, dtype, "naive")
    for algorithm in ("fused", "direct", "sharded", "auto"):
        check_replicas_equal([expected, trajectory(3, 3, dtype, algorithm)])


@pytest.mark.parametrize("options", [{}, {"overlap": False}, {"bucket_cap_mb": 0.05}])
def test_bucketer_has_bits_of_one_call(options):
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


def test_ring_repeats_bit_by_bit():
    first = trajectory(4, 10, torch.float32, "ring", "any")
    check_replicas_equal([first, trajectory(4, 10, torch.float32, "ring", "any")])


def test_sgd_rounds_the_product_before_it_subtracts():
    param = torch.tensor([1.0], requires_grad=True)
    param.grad = torch.tensor([1 + 2.0**-12])
    sgd([param], 1 + 2.0**-12)
    # 1 - fl(1 + 2^-11 + 2^-24): a fused multiply-add would leave the last bit as well.
    assert param.item() == -(2.0**-11)


@pytest.mark.parametrize(
    ("num_images", "num_labels", "num_ranks", "message"),
    [
        (4, 4, 3, "2 replicas for 3 devices"),
        (0, 0, 2, "no sample"),
        (4, 3, 2, r"\(4, 1, 28, 28\) and y \(3,\)"),
    ],
)
def test_wrong_arguments_are_named(num_images, num_labels, num_ranks, message):
    images, labels = batch_of(4)
    replicas = make_replicas(2)
    with pytest.raises(ArgumentError, match=message):
        train_batch(images[:num_images], labels[:num_labels], replicas, ["cpu"] * num_ranks, 0.1)


class TestLenet:
    def test_parameters_are_those_of_the_book(self):
        params = lenet_params("book", generator=torch.Generator().manual_seed(0))
        shapes = [tuple(param.shape) for param in params]
        assert shapes[0::2] == [(20, 1, 3, 3), (50, 20, 5, 5), (800, 128), (128, 10)]
        assert shapes[1::2] == [(20,), (50,), (128,), (10,)]
        assert sum(param.numel() for param in params) == 129_068
        assert 0.0099 < params[4].std() < 0.0101
        assert not any(param.any() for param in params[1::2])

    def test_he_weights_have_variance_two_over_inputs(self):
        params = lenet_params(generator=torch.Generator().manual_seed(0))
        for weight, inputs in ((params[2], 20 * 25), (params[4], 800)):
            assert float(weight.var() * inputs) == pytest.approx(2, rel=0.03)

    def test_seed_gives_equal_numbers_per_dtype(self):
        double, single = (
            lenet_params(generator=torch.Generator().manual_seed(7), dtype=dtype)
            for dtype in (torch.float64, torch.float32)
        )
        check_replicas_equal([single, [param.float() for param in double]])

    @pytest.mark.parametrize("n", [256, 0])
    def test_scores(self, n):
        assert lenet(torch.rand(n, 1, 28, 28), lenet_params()).shape == (n, 10)

    @pytest.mark.parametrize(
        ("side", "dtype", "num_params", "message"),
        [
            (32, torch.float32, 8, r"\(2, 1, 32, 32\), expected \(n, 1, 28, 28\)"),
            (28, torch.float64, 8, r"torch.float64, but params\[0\] is torch.float32"),
            (28, torch.float32, 7, "7 tensors, expected 8"),
        ],
    )
    def test_wrong_arguments_are_named(self, side, dtype, num_params, message):
        with pytest.raises(ArgumentError, match=message):
            lenet(torch.rand(2, 1, side, side, dtype=dtype), lenet_params()[:num_params])
        with pytest.raises(ArgumentError, match="init is 'xavier', expected one of he, book"):
            lenet_params("xavier")
