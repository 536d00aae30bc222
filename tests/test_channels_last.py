"""ResNet-18 with its channels last in memory: layouts, bits on all ranks, checkpoints."""

from __future__ import annotations

import pytest
import torch
from sharded_runs import RECIPE
from training import garments, relative_error, run

from pyringar.errors import ArgumentError
from pyringar.parallel import shards
from pyringar.parallel.shards import check_replicas_equal, mismatch_flags
from pyringar.train import TrainConfig, Trainer, resnet18
from pyringar.train.checkpoint import Checkpoint, save_state

RESNET = {"model": "resnet18", "width": 4, "batch_size": 32, "epochs": 1}
LAST = {**RESNET, "channels_last": True}
GPU, OTHER, CPU = (torch.device(name) for name in ("cuda:0", "cuda:1", "cpu"))


@pytest.fixture(scope="module")
def data():
    return garments(100, 40)


def is_last(tensor):
    return tensor.is_contiguous(memory_format=torch.channels_last)


# -- choices ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "devices", "expected"),
    [
        ({"amp": True}, [GPU], (True, True)),
        ({"amp": True}, [GPU, GPU], (True, True)),
        ({"amp": True}, [GPU, OTHER], (True, False)),
        ({"amp": True}, [GPU, CPU], (False, False)),
        ({"amp": True}, [CPU], (False, False)),
        ({"amp": True, "compile": True}, [GPU], (True, False)),
        ({"amp": True, "ranks": 1, "shards": 2}, [GPU], (True, False)),
        ({"amp": True, "cuda_graph": False}, [GPU], (True, False)),
        ({"amp": True, "channels_last": False}, [GPU], (False, True)),
        ({"amp": True, "model": "lenet"}, [GPU], (False, True)),
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


# -- layouts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"amp": True}, {"momentum": 0.9}, {"batchnorm": "sync"}], ids=str
)
def test_layout_is_kept_everywhere(data, options):
    """Activations, parameters, gradients and velocities: reductions and updates copy nothing."""
    with Trainer(TrainConfig(**LAST, **options, ranks=2), data) as trainer:
        found = []
        for layer in trainer.model.replicas[0].modules():
            if isinstance(layer, torch.nn.Conv2d):
                layer.register_forward_hook(lambda *args: found.extend((*args[1], args[2])))
        trainer.run()
        tensors = [*trainer.replicas, *trainer._run_step.momentum.velocities]
        for param in (tensor for mine in tensors for tensor in mine if tensor.dim() == 4):
            assert is_last(param)
            assert param.grad is None or param.grad.stride() == param.stride()
    assert len(found) >= 2 * 20
    for activation in found:
        assert activation.stride(1) == 1
        assert is_last(activation)


def test_biases_before_norms_stay(data):
    with Trainer(TrainConfig(**LAST, ranks=2, momentum=0.9), data) as trainer:
        before = [param.clone() for param in trainer.replicas[0]]
        trainer.run()
        now = dict(trainer.model.replicas[0].named_parameters())
        same = [n for n, p in zip(now, before, strict=True) if torch.equal(now[n], p)]
    assert same == ["0.bias", *(n for n in now if n.endswith(("conv1.bias", "conv2.bias")))]


def test_ranks_agree_bit_for_bit(data):
    with Trainer(TrainConfig(**LAST, ranks=3, dtype="float64"), data) as trainer:
        result = trainer.run()
        check_replicas_equal(trainer.replicas)
    plain = run(data, **RESNET, ranks=3, dtype="float64")
    assert relative_error(result.params, plain.params) < 1e-9
    assert plain.state.keys() == result.state.keys()
    for name, tensor in plain.state.items():  # running means count the biases left out
        torch.testing.assert_close(tensor, result.state[name])


@pytest.mark.parametrize("is_gpu", [False, True], ids=["cpu", "as on a GPU"])
def test_replicas_of_two_layouts_compare(monkeypatch, is_gpu):
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


# -- shards and checkpoints ------------------------------------------------------------------------


def test_shards_give_equal_bits_on_any_ranks():
    few = garments(26, 10)
    options = {**LAST, **RECIPE}
    assert len({run(few, **options, ranks=ranks).digest for ranks in (1, 2, 4)}) == 1


def test_files_are_contiguous(data, tmp_path):
    with Trainer(TrainConfig(**LAST), data, save=tmp_path) as trainer:
        result = trainer.run()
    saved = Checkpoint.decode((tmp_path / "checkpoint.bin").read_bytes(), tmp_path)
    save_state(result.state, tmp_path / "net.pt")
    state = torch.load(tmp_path / "net.pt", weights_only=True)
    for tensor in [*saved.tensors, *state.values()]:
        assert tensor.is_contiguous()
    with pytest.raises(ArgumentError, match="channels_last is False, but the checkpoint has True"):
        Trainer(TrainConfig(**RESNET), data, resume=tmp_path)
    net = resnet18(width=4)
    net.load_state_dict(state)
    check_replicas_equal([list(net.state_dict().values()), list(result.state.values())])
