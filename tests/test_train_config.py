"""Choices of a training run: ranges, learning rates and devices."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from pyringar.errors import ArgumentError, UnsupportedError
from pyringar.train import TrainConfig, train
from pyringar.train import devices as devices_module
from pyringar.train.devices import choose_devices, describe_devices

SHARDS = {"ranks": 2, "shards": 4}
SYNC = {"model": "resnet18", "batchnorm": "sync"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": 0}, "ranks is 0, expected a whole number, 1 or more"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"epochs": True}, "epochs is True"),
        ({"batch_size": 10**20}, "batch_size is 1000.*, 1 or more and below"),
        ({"seed": -1}, "seed is -1, expected a whole number, 0 or more"),
        ({"seed": 2**63}, "seed is 9223.*, expected a whole number, 0 or more and below"),
        ({"lr": 0.0}, "lr is 0.0, expected a positive number"),
        ({"lr": float("nan")}, "lr is nan"),
        ({"allreduce": "tree"}, "allreduce is 'tree', expected one of auto, fused"),
        ({"lr_schedule": "cosine"}, "lr_schedule is 'cosine', expected one of constant, linear"),
        ({"init": "zeros"}, "init is 'zeros', expected one of he, book"),
        ({"model": "resnet18", "init": "he"}, "init is 'he', expected one of default, book"),
        ({"model": "resnet50"}, "model is 'resnet50', expected one of lenet, resnet18"),
        ({"model": "resnet18", "batchnorm": "global"}, "batchnorm is 'global'"),
        ({"width": 8}, "width is 8, but the model is lenet"),
        ({"bucket_cap_mb": 0}, "bucket_cap_mb is 0, expected a positive number"),
        ({"amp": True, "dtype": "float64"}, "amp is on and dtype 'float64', expected float32"),
        ({**SYNC, "compile": True}, "compile is on and batchnorm 'sync'"),
        ({"dtype": "int8"}, "dtype is 'int8', expected one of float32, float64"),
        ({"ranks": 2, "weights": (1, 2, 3)}, r"weights has 3 entries .* each of 2 ranks"),
        ({"ranks": 2, "weights": (0, 0)}, "expected at least one above 0"),
        ({"ranks": 2, "devices": ("cpu",)}, "ranks is 2, but devices names 1"),
        ({"devices": ()}, "devices is empty"),
        ({**SHARDS, "shards": 0}, "shards is 0, expected a whole number, 1 or more"),
        ({"shards": 8, "ranks": 3}, "shards is 8 on 3 ranks, .* fit on 1, 2, 4, 8 ranks"),
        ({"shards": 2, "ranks": 4}, "shards is 2 on 4 ranks, .* fit on 1, 2 ranks"),
        ({**SHARDS, "allreduce": "ring"}, "allreduce is 'ring' and shards 4, expected 'auto' or"),
        ({**SHARDS, "weights": (1, 1)}, "weights is .* and shards 4, expected None"),
        ({**SHARDS, "bucket_cap_mb": 1}, "bucket_cap_mb is 1"),
        ({**SHARDS, "compile": True}, "compile is True"),
        ({**SHARDS, "cuda_graph": True}, "cuda_graph is True"),
        ({**SHARDS, **SYNC}, "batchnorm is 'sync'"),
        ({"momentum": 1.0}, "momentum is 1.0, expected a number from 0 to below 1"),
        ({"devices": "cpu"}, "devices is 'cpu', expected a list"),
    ],
)
def test_wrong_options_raise(options, message):
    with pytest.raises(ArgumentError, match=message):
        TrainConfig(**options)


def test_an_unknown_option_of_train_is_named():
    with pytest.raises(ArgumentError, match="no option 'nesterov', only allreduce, amp, batchnorm"):
        train(2, 64, 0.1, nesterov=True)


def test_defaults_depend_on_other_choices():
    assert (TrainConfig().world_size, TrainConfig().init) == (2, "he")
    assert TrainConfig(devices=("cpu",) * 3).world_size == 3
    assert TrainConfig(model="resnet18").init == "default"
    assert TrainConfig(model="resnet18", init="book").init == "book"


def test_linear_schedule_falls_to_zero():
    config = TrainConfig(lr=0.4, lr_schedule="linear")
    rates = [config.lr_at(step, 4) for step in range(5)]
    assert rates == pytest.approx([0.4, 0.3, 0.2, 0.1, 0.0])
    assert TrainConfig(lr=0.4, lr_schedule="constant").lr_at(3, 4) == 0.4


@pytest.mark.parametrize(
    ("ranks", "gpus", "expected"),
    [
        (3, 0, "[cpu x 3 ranks]"),
        (2, 4, "[cuda:0, cuda:1]"),
        (4, 2, "[cuda:0 x 2 ranks, cuda:1 x 2 ranks]"),
        (3, 2, "[cuda:0 x 2 ranks, cuda:1]"),
    ],
)
def test_ranks_are_spread_over_gpus(monkeypatch, ranks, gpus, expected):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(devices_module, "Communicator", mock.Mock())  # one that can do GPUs
    assert describe_devices(choose_devices(ranks)) == expected


def test_gpus_without_engine_stay_idle(monkeypatch, caplog):
    refusal = mock.Mock(side_effect=UnsupportedError("an engine for CPU ranks only"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(devices_module, "Communicator", refusal)
    assert describe_devices(choose_devices(2)) == "[cpu x 2 ranks]"
    assert "the 2 GPUs of this machine stay idle: an engine for CPU ranks only" in caplog.text


def test_missing_device_raises(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    message = r"devices\[1\] is 'cuda:1', which is not on this machine; .*: cpu, cuda:0$"
    with pytest.raises(ArgumentError, match=message):
        TrainConfig(devices=("cuda:0", "cuda:1"))
