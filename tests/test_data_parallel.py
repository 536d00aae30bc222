"""Helpers of the book's chapter: copies, shards, accuracy on all ranks, equality of replicas."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from pyringar.errors import ArgumentError, RingarError
from pyringar.parallel import shards as data_parallel
from pyringar.parallel.shards import (
    check_replicas_equal,
    evaluate_accuracy_gpus,
    get_params,
    mismatch_flags,
    shard_sizes,
    split_batch,
)
from pyringar.train import lenet, lenet_params
from pyringar.train.synthetic import synthetic_images


def cpus(count):
    return ["cpu"] * count


class Launches(TorchDispatchMode):
    """Names the operators that would each launch a kernel on a GPU: all but views."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class TestGetParams:
    def test_copies_share_no_memory_with_the_source_or_each_other(self):
        params = lenet_params()
        replicas = [get_params(params, "cpu") for _ in range(3)]
        pointers = {t.untyped_storage().data_ptr() for ts in (params, *replicas) for t in ts}
        assert len(pointers) == 4 * len(params)

    def test_copies_are_leaves_that_collect_gradients_and_the_source_is_left_alone(self):
        params = lenet_params()
        copies = get_params(params, "cpu")
        for copy, param in zip(copies, params, strict=True):
            assert copy.is_leaf
            assert copy.requires_grad
            assert copy.grad is None
            assert torch.equal(copy, param)
            assert not param.requires_grad

    def test_copies_of_parameters_do_not_backpropagate_into_them(self):
        source = nn.Parameter(torch.ones(3))
        (copy,) = get_params([source], "cpu")
        copy.sum().backward()
        assert source.grad is None
        assert torch.equal(copy.grad, torch.ones(3))

    def test_layout_and_dtype_are_kept(self):
        source = torch.zeros(2, 3, 4, 5, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
        (copy,) = get_params([source], "cpu")
        assert copy.dtype == torch.bfloat16
        assert copy.stride() == source.stride()

    def test_a_missing_device_is_named_with_those_that_are_there(self):
        with pytest.raises(ArgumentError, match=r"^device is 'cuda:77'.*there are: cpu"):
            get_params(lenet_params(), "cuda:77")

    def test_a_parameter_without_gradients_is_refused(self):
        with pytest.raises(ArgumentError, match=r"params\[1\] is torch.int64"):
            get_params([torch.zeros(1), torch.zeros(1, dtype=torch.int64)], "cpu")

    def test_something_that_is_no_tensor_is_refused(self):
        with pytest.raises(ArgumentError, match=r"params\[0\] is a float"):
            get_params([1.0], "cpu")


class TestSplit:
    @given(st.integers(0, 300), st.integers(1, 40))
    def test_exactly_k_shards_in_order_whose_sizes_differ_by_at_most_one(self, n, k):
        samples = torch.arange(2 * n).reshape(n, 2)
        shards, label_shards = split_batch(samples, torch.arange(n), cpus(k))
        sizes = [len(shard) for shard in shards]
        assert len(shards) == len(label_shards) == k
        assert max(sizes) - min(sizes) <= 1
        assert sizes == [len(shard) for shard in label_shards]
        assert torch.equal(torch.cat(shards), samples)
        assert torch.equal(torch.cat(label_shards), torch.arange(n))
        assert sizes == [len(part) for part in torch.arange(n).tensor_split(k)]

    @given(
        st.integers(0, 2000),
        st.lists(st.floats(0, 1e6), min_size=1, max_size=20).filter(lambda w: sum(w) > 0),
    )
    def test_weighted_sizes_add_up_and_are_within_one_of_the_share(self, n, weights):
        sizes = shard_sizes(n, len(weights), weights)
        assert sum(sizes) == n
        total = sum(weights)
        for size, weight in zip(sizes, weights, strict=True):
            assert abs(size - n * weight / total) < 1 + 1e-6
            assert size == 0 or weight > 0

    @given(st.integers(0, 300), st.integers(1, 20), st.integers(1, 9))
    def test_equal_weights_are_no_weights(self, n, k, weight):
        assert shard_sizes(n, k, [weight] * k) == shard_sizes(n, k)

    def test_weights_known_cases(self):
        assert shard_sizes(256, 2, [3, 1]) == [192, 64]
        assert shard_sizes(10, 3, [1, 0, 2]) == [3, 0, 7]
        assert shard_sizes(3, 2, [1, 1]) == [2, 1]
        # In floating point 0.1 / (0.1 + 0.2 + 0.7) of 10 may come out just below 1.
        assert shard_sizes(10, 3, [0.1, 0.2, 0.7]) == [1, 2, 7]

    def test_a_shard_on_the_same_device_is_a_view(self):
        samples = torch.zeros(4, 2)
        shards, _ = split_batch(samples, torch.zeros(4), cpus(2))
        assert shards[1].data_ptr() == samples[2:].data_ptr()

    @pytest.mark.parametrize(
        ("x", "y", "devices", "weights", "message"),
        [
            (torch.zeros(3, 2), torch.zeros(4), cpus(2), None, r"\(3, 2\) and y \(4,\)"),
            (torch.tensor(1.0), torch.zeros(1), cpus(2), None, r"shape \(\) and y \(1,\)"),
            (torch.zeros(3), torch.zeros(3), [], None, "devices is empty"),
            (torch.zeros(3), torch.zeros(3), ["cuda:9"], None, r"'cuda:9'.*there are: cpu"),
            (torch.zeros(3), torch.zeros(3), cpus(2), [1], r"weights has 1 entry \(\[1\]\)"),
            (torch.zeros(3), torch.zeros(3), cpus(2), [1, -2], r"weights\[1\] is -2"),
            (torch.zeros(3), torch.zeros(3), cpus(2), [1, float("nan")], r"weights\[1\] is nan"),
            (torch.zeros(3), torch.zeros(3), cpus(2), [float("inf"), 1], r"weights\[0\] is inf"),
            (torch.zeros(3), torch.zeros(3), cpus(2), ["a", 1], r"weights\[0\] is 'a'"),
            (torch.zeros(3), torch.zeros(3), cpus(2), [0, 0.0], r"weights is \[0, 0.0\]"),
        ],
    )
    def test_wrong_arguments_are_named(self, x, y, devices, weights, message):
        with pytest.raises(ArgumentError, match=message):
            split_batch(x, y, devices, weights)

    def test_counts_out_of_range_are_named(self):
        with pytest.raises(ArgumentError, match="n is -1"):
            shard_sizes(-1, 2)
        with pytest.raises(ArgumentError, match="num_shards 0"):
            shard_sizes(1, 0)


class TestEvaluate:
    @pytest.mark.parametrize("num_ranks", [2, 3, 4, 7, 16])
    def test_all_ranks_count_what_one_rank_counts(self, num_ranks):
        samples, labels = synthetic_images(500, seed=3)
        params = lenet_params(generator=torch.Generator().manual_seed(0))
        batches = list(zip(samples.split(130), labels.split(130), strict=True))

        def accuracy(ranks):
            replicas = [functools.partial(lenet, params=get_params(params, "cpu"))] * ranks
            return evaluate_accuracy_gpus(replicas, batches)

        correct = int((lenet(samples, params).argmax(1) == labels).sum())
        assert accuracy(1) == correct / 500
        assert accuracy(num_ranks) == correct / 500

    def test_every_rank_works(self):
        seen = [0, 0, 0]

        def replica(rank, samples):
            seen[rank] += len(samples)
            return torch.zeros(len(samples), 2)

        replicas = [functools.partial(replica, rank) for rank in range(3)]
        data = [(torch.zeros(7, 1), torch.zeros(7)), (torch.zeros(2, 1), torch.ones(2))]
        assert evaluate_accuracy_gpus(replicas, data) == 7 / 9
        assert seen == [4, 3, 2]

    def test_modules_are_in_eval_mode_and_then_as_before_also_after_an_error(self):
        net = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(), nn.Linear(3, 2))
        net.train()
        net[0].eval()  # frozen batch norm must stay frozen
        modes = []
        net[2].register_forward_hook(lambda *_: modes.append([m.training for m in net.modules()]))
        data = [(torch.randn(5, 3), torch.zeros(5))]
        evaluate_accuracy_gpus([net, net], data)
        assert modes == [[False] * 4] * 2
        expected = [True, False, True, True]
        assert [m.training for m in net.modules()] == expected
        with pytest.raises(RuntimeError, match="running_mean"):
            evaluate_accuracy_gpus([net], [(torch.randn(5, 4), torch.zeros(5))])
        assert [m.training for m in net.modules()] == expected

    def test_no_graph_is_built(self):
        net = nn.Linear(3, 2)
        grads = []
        net.register_forward_hook(lambda *_: grads.append(torch.is_grad_enabled()))
        evaluate_accuracy_gpus([net], [(torch.randn(5, 3), torch.zeros(5))])
        assert grads == [False]

    def test_another_split_may_be_used(self):
        def all_to_the_last(samples, labels, devices):
            empty = [samples[:0]] * (len(devices) - 1), [labels[:0]] * (len(devices) - 1)
            return [*empty[0], samples], [*empty[1], labels]

        def never(samples):
            raise AssertionError("a rank without samples was called")

        replicas = [never, lambda samples: torch.eye(3)[: len(samples)]]
        data = [(torch.zeros(3, 1), torch.tensor([0, 1, 0]))]
        assert evaluate_accuracy_gpus(replicas, data, all_to_the_last) == 2 / 3

    def test_wrong_arguments_are_named(self):
        one = [(torch.zeros(2, 1), torch.zeros(2))]

        def scores(samples):
            return torch.zeros(len(samples), 2)

        with pytest.raises(ArgumentError, match="replicas is empty"):
            evaluate_accuracy_gpus([], one)
        with pytest.raises(ArgumentError, match="no samples"):
            evaluate_accuracy_gpus([scores], [])
        with pytest.raises(ArgumentError, match="no samples"):
            evaluate_accuracy_gpus([scores], [(torch.zeros(0, 1), torch.zeros(0))])
        with pytest.raises(ArgumentError, match=r"replicas\[0\] gave shape \(2, 1, 2\)"):
            evaluate_accuracy_gpus([lambda s: torch.zeros(len(s), 1, 2)], one)
        with pytest.raises(ArgumentError, match="split_f gave 1 and 1 shards"):
            evaluate_accuracy_gpus([scores] * 2, one, lambda x, y, d: ([x], [y]))
        with pytest.raises(ArgumentError, match=r"devices has 1 entry.*2 replicas"):
            evaluate_accuracy_gpus([scores] * 2, one, devices=["cpu"])


class TestReplicasEqual:
    def test_equal_replicas_pass_whatever_they_hold(self):
        values = torch.tensor([0.0, -0.0, float("nan"), float("inf"), 1e-45])
        others = [torch.arange(6).reshape(2, 3).T, torch.tensor(True), torch.zeros(0)]
        everything = [values, *others, torch.randn(3, dtype=torch.complex64)]
        check_replicas_equal([[t.clone() for t in everything] for _ in range(3)])
        check_replicas_equal([everything])
        check_replicas_equal([[], []])

    @pytest.mark.parametrize(
        "dtype",
        [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.complex128],
    )
    def test_one_element_is_found_in_every_dtype(self, dtype):
        replicas = [[torch.zeros(4, dtype=dtype), torch.ones(3, 5, dtype=dtype)] for _ in range(4)]
        replicas[2][1][1, 3] = 2
        with pytest.raises(RingarError, match=r"parameter 1, .*rank 2 .* in 1 of \d+ elements"):
            check_replicas_equal(replicas)

    def test_the_first_parameter_and_rank_and_the_number_of_elements_are_named(self):
        replicas = [[torch.zeros(4), torch.zeros(5)] for _ in range(3)]
        replicas[1][1] += 1
        replicas[2][0][1:] = 0.5
        message = r"parameter 0, shape \(4,\), on rank 2 .* in 3 of 4 elements \(first: 0.5 instead"
        with pytest.raises(RingarError, match=message):
            check_replicas_equal(replicas)

    def test_zeros_of_unlike_sign_differ(self):
        with pytest.raises(RingarError, match=r"first: -0.0 instead of 0.0"):
            check_replicas_equal([[torch.zeros(1)], [-torch.zeros(1)]])

    def test_a_transposed_replica_is_compared_by_position(self):
        square = torch.randn(3, 3)
        check_replicas_equal([[square], [square.T.contiguous().T]])

    def test_flags_tell_the_ranks_apart(self):
        replicas = [[torch.zeros(4)] for _ in range(4)]
        replicas[3][0][0] = 1
        assert [bool(flag) for flag in mismatch_flags(replicas)] == [False, False, True]

    @pytest.mark.parametrize("place", ["cpu", "as on a GPU"])
    def test_flags_find_one_bit_in_any_tensor_of_any_dtype(self, monkeypatch, place):
        """The comparison of a GPU's tensors, too, on the CPU's."""
        monkeypatch.setattr(data_parallel, "_stops_early", lambda _: place == "cpu")
        generator = torch.Generator().manual_seed(7)
        dtypes = [torch.float32, torch.float16, torch.float64, torch.bfloat16, torch.int32]
        dtypes += [torch.uint8, torch.complex64, torch.float32]
        shapes = [(3, 5), (), (7,), (2, 1, 4), (0,), (6,), (2, 2), (4, 3)]
        first = [
            (torch.randn(shape, generator=generator) * 9).to(dtype)
            for dtype, shape in zip(dtypes, shapes, strict=True)
        ]
        first[7] = first[7].T  # with other strides than those of its copies
        first[2][3] = float("nan")
        replicas = [first, *([t.clone().contiguous() for t in first] for _ in range(2))]
        assert [bool(flag) for flag in mismatch_flags(replicas)] == [False, False]
        for tensor in (t for t in replicas[2] if t.numel()):
            last = tensor.flatten()[-1:].clone()
            octets = tensor.view(-1).view(torch.uint8)
            octets[-1] ^= 1
            assert [bool(flag) for flag in mismatch_flags(replicas)] == [False, True]
            tensor.view(-1)[-1:] = last
        assert [bool(flag) for flag in mismatch_flags(replicas)] == [False, False]

    @pytest.mark.parametrize("ranks", [2, 4])
    def test_flags_take_as_many_launches_for_many_tensors_as_for_few(self, monkeypatch, ranks):
        monkeypatch.setattr(data_parallel, "_stops_early", lambda _: False)

        def launches(num_tensors):
            replicas = [[torch.ones(3) for _ in range(num_tensors)] for _ in range(ranks)]
            with Launches() as seen:
                flags = mismatch_flags(replicas)
            assert not any(flags)
            return seen.names

        assert launches(100) == launches(2)
        assert len(launches(100)) == 1 + 3 * (ranks - 1)  # rank 0 is put end to end once

    def test_ranks_that_cannot_be_compared_are_named(self):
        with pytest.raises(ArgumentError, match="replicas is empty"):
            check_replicas_equal([])
        with pytest.raises(ArgumentError, match=r"replicas\[1\] has 2 tensors, rank 0 has 1"):
            check_replicas_equal([[torch.zeros(1)], [torch.zeros(1)] * 2])
        with pytest.raises(ArgumentError, match=r"replicas\[1\]\[0\] is \(2,\).*\(1,\)"):
            check_replicas_equal([[torch.zeros(1)], [torch.zeros(2)]])
        with pytest.raises(ArgumentError, match="float64"):
            check_replicas_equal([[torch.zeros(1)], [torch.zeros(1, dtype=torch.float64)]])
