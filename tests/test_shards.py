"""Helpers of data parallel loops: get_params, split_batch, accuracy, comparison of replicas."""

import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import pyringar as pr
from pyringar.errors import ArgumentError, RingarError
from pyringar.parallel import shards as shards_module
from pyringar.parallel.shards import (
    check_replicas_equal,
    evaluate_accuracy_gpus,
    get_params,
    mismatch_flags,
    shard_sizes,
    split_batch,
)
from pyringar.train import lenet_params


def cpus(count):
    return ["cpu"] * count


def test_get_params_copies_leaves():
    image = torch.zeros(2, 3, 4, 5, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    source = [*lenet_params(), image, nn.Parameter(torch.ones(3))]
    replicas = [get_params(source, "cpu") for _ in range(2)]
    pointers = {t.untyped_storage().data_ptr() for ts in (source, *replicas) for t in ts}
    assert len(pointers) == 3 * len(source)
    for copy, param in zip(replicas[0], source, strict=True):
        assert (copy.is_leaf, copy.requires_grad, copy.grad) == (True, True, None)
        assert torch.equal(copy, param)
        assert (copy.dtype, copy.stride()) == (param.dtype, param.stride())
    assert not any(param.requires_grad for param in source[:-1])


class TestSplit:
    @given(st.integers(0, 300), st.integers(1, 40))
    def test_shards_match_tensor_split(self, n, k):
        samples = torch.arange(2 * n).reshape(n, 2)
        labels = torch.arange(n)
        for shards, whole in zip(
            split_batch(samples, labels, cpus(k)), (samples, labels), strict=True
        ):
            parts = whole.tensor_split(k)
            assert [shard.tolist() for shard in shards] == [part.tolist() for part in parts]
            assert [shard.data_ptr() for shard in shards] == [part.data_ptr() for part in parts]

    def test_shard_sizes_follow_weights(self):
        assert shard_sizes(8, 3, [9, 9, 9]) == shard_sizes(8, 3) == [3, 3, 2]
        assert shard_sizes(10, 3, [1, 0, 2]) == [3, 0, 7]
        # Rounding may make 10 * 0.1 / (0.1 + 0.2 + 0.7) less than 1; the size must still be 1.
        assert shard_sizes(10, 3, [0.1, 0.2, 0.7]) == [1, 2, 7]


def scores_of(samples):
    return torch.zeros(len(samples), 2)


class TestEvaluate:
    def test_every_rank_evaluates_its_shard(self):
        seen = [0, 0, 0]

        def replica(rank, samples):
            assert len(samples), "a rank without samples was called"
            seen[rank] += len(samples)
            return scores_of(samples)

        replicas = [functools.partial(replica, rank) for rank in range(3)]
        data = [(torch.zeros(7, 1), torch.zeros(7)), (torch.zeros(2, 1), torch.ones(2))]
        assert evaluate_accuracy_gpus(replicas, data) == 7 / 9
        assert seen == [4, 3, 2]

    def test_training_modes_are_restored(self):
        net = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(), nn.Linear(3, 2))
        net.train()
        net[0].eval()  # frozen batch norm must stay frozen
        seen = []

        def hook(*_):
            seen.append([torch.is_grad_enabled(), *(m.training for m in net.modules())])

        net[2].register_forward_hook(hook)
        expected = [True, False, True, True]
        evaluate_accuracy_gpus([net, net], [(torch.randn(5, 3), torch.zeros(5))])
        assert seen == [[False] * 5] * 2
        assert [m.training for m in net.modules()] == expected
        with pytest.raises(RuntimeError, match="running_mean"):
            evaluate_accuracy_gpus([net], [(torch.randn(5, 4), torch.zeros(5))])
        assert [m.training for m in net.modules()] == expected

    def test_evaluation_accepts_single_module(self):
        net, layer, seen = nn.Identity(), nn.Linear(4, 4), []
        data = ((torch.eye(4), torch.tensor([0, 1, 2, 0])),)
        for replicas in (net, lambda scores: scores, nn.ModuleList([net, net])):
            assert evaluate_accuracy_gpus(replicas, data) == 0.75
        layer.register_forward_hook(lambda *_: seen.append(1))
        found = evaluate_accuracy_gpus(pr.DataParallel(layer, cpus(3)), data)
        assert len(seen) == 3, "every rank runs its shard"
        assert found == evaluate_accuracy_gpus([layer], data)


def flags_of(replicas):
    return [bool(flag) for flag in mismatch_flags(replicas)]


class TestReplicasEqual:
    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int8])
    def test_mismatch_error_names_first_difference(self, dtype):
        replicas = [[torch.zeros(4, dtype=dtype), torch.zeros(5, dtype=dtype)] for _ in range(3)]
        replicas[1][1] += 1
        replicas[2][0][1:] = 2
        message = r"parameter 0, shape \(4,\), on rank 2 .* in 3 of 4 elements \(first: 2"
        with pytest.raises(RingarError, match=message):
            check_replicas_equal(replicas)
        with pytest.raises(RingarError, match=r"first: -0.0 instead of 0.0"):
            check_replicas_equal([[torch.zeros(1)], [-torch.zeros(1)]])

    @pytest.mark.parametrize("place", ["cpu", "gpu code"])
    def test_mismatch_flags_detect_one_bit(self, monkeypatch, place):
        monkeypatch.setattr(shards_module, "_are_on_cpu", lambda _: place == "cpu")
        generator = torch.Generator().manual_seed(7)
        dtypes = ["float32", "float16", "float64", "bfloat16", "int32", "uint8", "complex64"]
        shapes = [(3, 5), (), (7,), (2, 1, 4), (0,), (6,), (2, 2)]
        first = [
            (torch.randn(shape, generator=generator) * 9).to(getattr(torch, dtype))
            for dtype, shape in zip(dtypes, shapes, strict=True)
        ]
        first.append(torch.randn(4, 3, generator=generator).T)  # the copies below are contiguous
        first[2][3] = float("nan")
        replicas = [first, *([t.clone().contiguous() for t in first] for _ in range(2))]
        assert flags_of(replicas) == [False, False]
        for tensor in (t for t in replicas[2] if t.numel()):
            last_octet = tensor.view(-1).view(torch.uint8)[-1:]
            last_octet ^= 1
            assert flags_of(replicas) == [False, True]
            last_octet ^= 1
        assert flags_of(replicas) == [False, False]


ONE, TWO = torch.zeros(1), torch.zeros(2)
BATCHES = [(torch.zeros(2, 1), TWO)]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: get_params([ONE, ONE.long()], "cpu"), r"params\[1\] is torch.int64"),
        (lambda: split_batch(torch.zeros(3, 2), ONE, cpus(2)), r"\(3, 2\) and y \(1,\)"),
        (lambda: split_batch(torch.tensor(1.0), ONE, cpus(2)), r"shape \(\) and y \(1,\)"),
        (lambda: split_batch(TWO, TWO, ["cuda:9"]), r"'cuda:9'.*there are: cpu"),
        (lambda: split_batch(TWO, TWO, cpus(2), [1]), r"weights has length 1 \(\[1\]\)"),
        (lambda: shard_sizes(3, 2, [1, -2]), r"weights\[1\] is -2"),
        (lambda: shard_sizes(3, 2, [1, float("nan")]), r"weights\[1\] is nan"),
        (lambda: shard_sizes(3, 2, [0, 0.0]), r"weights is \[0, 0.0\]"),
        (lambda: shard_sizes(-1, 2), "n is -1"),
        (lambda: evaluate_accuracy_gpus([scores_of], []), "no samples"),
        (lambda: evaluate_accuracy_gpus([torch.flatten], BATCHES), r"replicas\[0\] gave shape"),
        (
            lambda: evaluate_accuracy_gpus([scores_of] * 2, BATCHES, devices=["cpu"]),
            "devices has length 1",
        ),
        (lambda: check_replicas_equal([[ONE], [ONE] * 2]), r"\[1\] has 2 tensors, .*\[0\] has 1"),
        (lambda: check_replicas_equal([[ONE], [TWO]]), r"tensor 0 of replicas\[1\] is \(2,\)"),
        (lambda: check_replicas_equal([[ONE], [ONE.double()]]), "float64"),
    ],
)
def test_wrong_arguments_raise(call, message):
    with pytest.raises(ArgumentError, match=message):
        call()
