"""Test ResNet-18: shapes and names as in the book, and training runs on several ranks."""

from __future__ import annotations

import pytest
import torch
import training_runs
from sharded_runs import RECIPE
from training_runs import garments, relative_error

import pyringar as pr
from pyringar.parallel import shards
from pyringar.parallel.shards import (
    check_replicas_equal,
    evaluate_accuracy_gpus,
    mismatch_flags,
)
from pyringar.train import TrainConfig, Trainer, resnet18
from pyringar.train.checkpoint import Checkpoint, save_state

SMALL = {"model": "resnet18", "width": 4, "epochs": 1, "batch_size": 12}


def run(data, **options):
    return training_runs.run(data, **{**SMALL, **options})


@pytest.fixture(scope="module")
def small():
    return garments(36, 30)


class TestModel:
    def test_shapes_and_names_match_book(self):
        full = resnet18()
        params, buffers = list(full.parameters()), list(full.buffers())
        assert sum(param.numel() for param in params) == 11_175_818
        assert len(params) == 76
        assert (len(buffers), sum(buffer.numel() for buffer in buffers)) == (51, 7_825)
        assert full.state_dict()["resnet_block4.1.conv2.weight"].shape == (512, 512, 3, 3)

    def test_seed_decides_weights(self):
        before = torch.get_rng_state()
        first, second, other = (resnet18(width=2, seed=seed) for seed in (5, 5, 6))
        assert torch.equal(torch.get_rng_state(), before)
        check_replicas_equal([list(first.parameters()), list(second.parameters())])
        assert not torch.equal(first[0].weight, other[0].weight)
        double = resnet18(width=2, seed=5, dtype=torch.float64)
        assert torch.equal(double[0].weight.float(), first[0].weight)

    def test_wrong_arguments_raise(self):
        with pytest.raises(pr.ArgumentError, match="width is 0, expected a whole number"):
            resnet18(width=0)
        with pytest.raises(pr.ArgumentError, match="init is 'he', expected one of default, book"):
            resnet18(init="he")


class TestTraining:
    @pytest.mark.parametrize("options", [{"overlap": False}, {"bucket_cap_mb": 0.01}])
    def test_bucket_options_keep_training_bits(self, small, options):
        result = run(small, ranks=2, **options)
        training_runs.same_results(result, run(small, ranks=2))
        assert result.state.keys() == resnet18(width=4).state_dict().keys()

    def test_sync_batch_norm_matches_one_rank(self, small):
        options = {"batchnorm": "sync", "dtype": "float64", "lr": 0.01}
        alone = run(small, ranks=1, **options)
        found = run(small, **options, ranks=3, weights=(3, 1, 0))
        assert found.losses == pytest.approx(alone.losses, rel=1e-9)
        assert relative_error(found.params, alone.params) < 1e-9
        assert found.state["1.running_var"] == pytest.approx(alone.state["1.running_var"])

    def test_returned_state_reproduces_accuracy(self, small):
        with Trainer(TrainConfig(**SMALL, ranks=3), small) as trainer:
            result = trainer.run()
            check_replicas_equal(trainer.replicas)
        net = resnet18(width=4)
        net.load_state_dict(result.state)
        test = [(small.test_images, small.test_labels)]
        assert result.curve[-1] == evaluate_accuracy_gpus([net], test)


RESNET = {"model": "resnet18", "width": 16, "batch_size": 32, "epochs": 1}
LAST = {**RESNET, "channels_last": True}
GPU, OTHER, CPU = (torch.device(name) for name in ("cuda:0", "cuda:1", "cpu"))


@pytest.fixture(scope="module")
def images():
    return garments(40, 10)


def is_last(tensor):
    return tensor.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("options", "devices", "expected"),
    [
        ({"amp": True}, [GPU], (True, True)),
        ({"amp": True}, [GPU, OTHER], (True, False)),
        ({"amp": True}, [CPU], (False, False)),
        ({"amp": True, "compile": True}, [GPU], (True, False)),
        ({"amp": True, "allreduce": "ring"}, [GPU], (True, False)),
        ({"amp": True, "ranks": 1, "shards": 2}, [GPU], (True, False)),
        ({"amp": True, "cuda_graph": False}, [GPU], (True, False)),
        ({"amp": True, "channels_last": False}, [GPU], (False, True)),
        ({}, [GPU], (False, False)),
        ({"channels_last": True, "cuda_graph": True}, [CPU], (True, True)),
    ],
    ids=str,
)
def test_defaults_follow_amp_and_devices(options, devices, expected):
    config = TrainConfig(**{"model": "resnet18", **options})
    resolved = config.resolve(devices, is_traced=False)
    assert (resolved.channels_last, resolved.cuda_graph) == expected
    traced = config.resolve(devices, is_traced=True)
    assert traced.cuda_graph is bool(config.cuda_graph)


@pytest.mark.parametrize(
    "options", [{}, {"amp": True}, {"momentum": 0.9}, {"batchnorm": "sync"}], ids=str
)
def test_all_tensors_keep_channels_last(images, options):
    with Trainer(TrainConfig(**LAST, **options, ranks=2), images) as trainer:
        found = []
        for layer in trainer.model.replicas[0].modules():
            if isinstance(layer, torch.nn.Conv2d):
                layer.register_forward_hook(lambda *args: found.extend((*args[1], args[2])))
        trainer.run()
        tensors = [*trainer.replicas, *trainer._run_step.velocities]
        for param in (tensor for mine in tensors for tensor in mine if tensor.dim() == 4):
            assert is_last(param)
            assert param.grad is None or param.grad.stride() == param.stride()
    assert len(found) >= 2 * 20
    for activation in found:
        assert activation.stride(1) == 1
        assert is_last(activation)


def test_biases_before_norms_are_not_trained(images):
    with Trainer(TrainConfig(**LAST, ranks=2, momentum=0.9), images) as trainer:
        before = [param.clone() for param in trainer.replicas[0]]
        trainer.run()
        now = dict(trainer.model.replicas[0].named_parameters())
        same = [n for n, p in zip(now, before, strict=True) if torch.equal(now[n], p)]
    assert same == ["0.bias", *(n for n in now if n.endswith(("conv1.bias", "conv2.bias")))]


def test_ranks_agree_bit_for_bit(images):
    with Trainer(TrainConfig(**LAST, ranks=3, dtype="float64"), images) as trainer:
        result = trainer.run()
        check_replicas_equal(trainer.replicas)
    plain = training_runs.run(images, **RESNET, ranks=3, dtype="float64")
    assert relative_error(result.params, plain.params) < 1e-9
    assert plain.state.keys() == result.state.keys()
    for name, tensor in plain.state.items():  # running means include biases that LAST skips
        torch.testing.assert_close(tensor, result.state[name])


@pytest.mark.parametrize("is_gpu", [False, True], ids=["cpu", "gpu path"])
def test_mismatch_flags_ignore_memory_layout(monkeypatch, is_gpu):
    if is_gpu:
        monkeypatch.setattr(shards, "_are_on_cpu", lambda _: False)
    weight = torch.randn(6, 5, 3, 3)
    other = weight.to(memory_format=torch.channels_last)
    odd = other.clone()
    odd[1, 2, 0, 1] += 1
    replicas = [[tensor, torch.ones(3)] for tensor in (weight, other, odd, weight.clone())]
    assert [bool(flag) for flag in mismatch_flags(replicas)] == [False, True, False]
    replicas = [replicas[1], *replicas]
    assert [bool(flag) for flag in mismatch_flags(replicas)] == [False, False, True, False]


def test_sharded_digest_ignores_rank_count():
    few = garments(26, 10)
    options = {**LAST, **RECIPE}
    assert len({training_runs.run(few, **options, ranks=ranks).digest for ranks in (1, 2, 4)}) == 1


def test_saved_tensors_are_contiguous(images, tmp_path):
    with Trainer(TrainConfig(**LAST), images, save=tmp_path) as trainer:
        result = trainer.run()
    saved = Checkpoint.decode((tmp_path / "checkpoint.bin").read_bytes(), tmp_path)
    save_state(result.state, tmp_path / "net.pt")
    state = torch.load(tmp_path / "net.pt", weights_only=True)
    for tensor in [*saved.tensors, *state.values()]:
        assert tensor.is_contiguous()
    with pytest.raises(pr.ArgumentError, match=r"channels_last is False, but .* has True"):
        Trainer(TrainConfig(**RESNET), images, resume=tmp_path)
