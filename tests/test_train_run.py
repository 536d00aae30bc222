"""Test whole training runs: accuracy, repeatability, divergence, and options."""

from __future__ import annotations

import re
from unittest import mock

import pytest
import torch
from training_runs import garments, run, same_results

from pyringar.errors import ArgumentError, RingarError, UnsupportedError
from pyringar.parallel.shards import check_replicas_equal
from pyringar.train import TrainConfig, Trainer, load_data, train
from pyringar.train import devices as devices_module
from pyringar.train import step as step_module
from pyringar.train import trainer as trainer_module
from pyringar.train.devices import choose_devices, describe_devices

RESNET = {"model": "resnet18", "width": 8, "epochs": 4}
# Options, lowest accuracy and highest loss. Measured with 5 seeds: LeNet on synthetic images has an
# accuracy of 0.875 to 0.903 and a loss of 0.23 to 0.25, ResNet-18 an accuracy of 0.78 to 0.84.
GATE = {
    "lenet, drawn images": ({"epochs": 8}, 0.83, 0.30),
    "lenet, real images": ({"epochs": 8}, 0.70, 0.65),
    "resnet18, real images": (RESNET, 0.70, 0.80),
}


@pytest.fixture(scope="module")
def small():
    return garments(200, 100)


@pytest.mark.timeout(400)  # a run takes 5 s, but over a minute on a busy machine
@pytest.mark.parametrize("name", GATE)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize(
    "seed",
    [pytest.param(n, marks=pytest.mark.thorough if n else pytest.mark.slow) for n in range(5)],
)
def test_model_reaches_accuracy_and_loss(request, name, num_ranks, seed):
    options, accuracy, loss = GATE[name]
    data = garments(1500, 400)
    if "real" in name:
        data = load_data("fashion-mnist", request.getfixturevalue("real_data_dir"))
    result = run(data, ranks=num_ranks, seed=seed, batch_size=32, lr=0.1, **options)
    print(f"{name}, {num_ranks} ranks, seed {seed}: {result.curve} {result.losses}")
    assert result.curve[-1] >= accuracy
    assert result.losses[-1] <= loss


def test_run_repeats_bit_by_bit(small):
    first, second = (run(small, ranks=3, epochs=2, seed=4) for _ in range(2))
    same_results(first, second)
    assert run(small, ranks=3, epochs=2, seed=5).digest != first.digest


def test_float64_training_ignores_rank_count(small):
    options = {"dtype": "float64", "epochs": 2, "batch_size": 24}
    alone = run(small, ranks=1, **options)
    assert all(param.dtype == torch.float64 for param in alone.params)
    assert alone.losses[-1] < alone.losses[0]
    for more in ({"ranks": 5, "allreduce": "ring"}, {"ranks": 2, "weights": (3, 1)}):
        result = run(small, **options, **more)
        assert result.losses == pytest.approx(alone.losses, abs=1e-12)
        for ours, theirs in zip(result.params, alone.params, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_host_is_at_most_two_steps_ahead(small, monkeypatch):
    waited = []

    class Event:
        def __init__(self, device):
            self.device = device

        def synchronize(self):
            waited.append(self.device)

    monkeypatch.setattr(trainer_module, "_record_event", Event)
    gpus = [torch.device("cuda:1"), torch.device("cuda:0"), torch.device("cuda:1")]
    images, labels = small.train_images[:9], small.train_labels[:9]
    with Trainer(TrainConfig(ranks=3), small) as trainer:
        trainer._train_batch(images, labels)
        assert not trainer._unchecked, "CPU ranks are never ahead"
        trainer.devices = tuple(gpus)
        monkeypatch.setattr(trainer, "_run_step", lambda *_: [torch.tensor(False)])
        for step in range(6):
            trainer._train_batch(images, labels)
            assert len(trainer._unchecked) == min(step + 1, 2)
            assert len(waited) == 2 * max(0, step - 1), "each GPU once per step"
        trainer._check_steps(0)
    assert sorted(map(str, waited)) == ["cuda:0"] * 6 + ["cuda:1"] * 6


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", ["lenet", pytest.param("resnet18", marks=pytest.mark.thorough)])
def test_compiled_model_trains(model):
    # With fewer than 8 channels oneDNN writes out of bounds on CPUs without AVX-512 (oneDNN#6035).
    options = {"width": 8} if model == "resnet18" else {}
    options |= {"batch_size": 128, "epochs": 1, "dataset": "synthetic", "compile": True}
    with Trainer(TrainConfig(model=model, **options)) as trainer:
        result = trainer.run()
        check_replicas_equal(trainer.replicas)
    assert result.curve[-1] > 0.3


@pytest.mark.parametrize("allreduce", ["auto", "ring"])
def test_result_names_devices_and_algorithm(small, allreduce):
    result = run(small, ranks=4, epochs=2, allreduce=allreduce)
    line = rf"test acc: {result.curve[-1]:.2f}, \d+\.\d sec/epoch on \[cpu x 4 ranks\]"
    assert re.fullmatch(line, str(result))
    assert result.plan.algorithm == ("fused" if allreduce == "auto" else allreduce)
    assert result.data == "garments, 200 training and 100 test images"
    assert [epoch.epoch for epoch in result.epochs] == [1, 2]


def test_missing_device_raises_before_loading(monkeypatch):
    monkeypatch.setattr(trainer_module, "load_data", None)
    with pytest.raises(ArgumentError, match=r"devices\[0\] is 'cuda:93'.*there are: cpu"):
        train(1, 64, 0.1, devices=["cuda:93"])


def test_divergence_error_names_step(small, monkeypatch):
    real, steps = step_module.mismatch_flags, []

    def flags_after_a_slip(replicas):
        steps.append(1)
        if len(steps) == 3:
            with torch.no_grad():
                replicas[1][4][5, 6] += 1e-3
        return real(replicas)

    monkeypatch.setattr(step_module, "mismatch_flags", flags_after_a_slip)
    message = r"after step 2: .*parameter 4, shape \(800, 128\), on rank 1 .* in 1 of 102400"
    with pytest.raises(RingarError, match=message):
        run(small, ranks=2)
    assert len(steps) == 3


SHARDS = {"ranks": 2, "shards": 4}
SYNC = {"model": "resnet18", "batchnorm": "sync"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": 0}, "ranks is 0, expected a whole number, 1 or more"),
        ({"epochs": True}, "epochs is True"),
        ({"batch_size": 10**20}, "batch_size is 1000.*, 1 or more and below"),
        ({"seed": -1}, "seed is -1, expected a whole number, 0 or more"),
        ({"lr": 0.0}, "lr is 0.0, expected a positive number"),
        ({"allreduce": "tree"}, "allreduce is 'tree', expected one of auto, fused"),
        ({"lr_schedule": "cosine"}, "lr_schedule is 'cosine', expected one of constant, linear"),
        ({"init": "zeros"}, "init is 'zeros', expected one of he, book"),
        ({"model": "resnet18", "init": "he"}, "init is 'he', expected one of default, book"),
        ({"model": "resnet50"}, "model is 'resnet50', expected one of lenet, resnet18"),
        ({"width": 8}, "width is 8, expected 64 with model lenet"),
        ({"bucket_cap_mb": 0}, "bucket_cap_mb is 0, expected a positive number"),
        ({"amp": True, "dtype": "float64"}, "dtype is 'float64', expected 'float32' with amp"),
        ({**SYNC, "compile": True}, "batchnorm is 'sync', expected 'local' with compile"),
        (
            {"cuda_graph": True, "allreduce": "ring"},
            "allreduce is 'ring', expected .* cannot capture the ring",
        ),
        ({"ranks": 2, "weights": (1, 2, 3)}, r"weights has length 3 .* each of 2 ranks"),
        ({"ranks": 2, "weights": (0, 0)}, "expected at least one above 0"),
        ({"ranks": 2, "devices": ("cpu",)}, "ranks is 2, but devices names 1"),
        ({**SHARDS, "shards": 0}, "shards is 0, expected a whole number, 1 or more"),
        ({"shards": 8, "ranks": 3}, "shards is 8 on 3 ranks, .* fit on 1, 2, 4, 8 ranks"),
        ({"shards": 2, "ranks": 4}, "shards is 2 on 4 ranks, .* fit on 1, 2 ranks"),
        ({**SHARDS, "allreduce": "ring"}, "allreduce is 'ring', expected 'auto' or .* with shards"),
        ({**SHARDS, "weights": (1, 1)}, "weights is .*, expected None with shards"),
        ({**SHARDS, "bucket_cap_mb": 1}, "bucket_cap_mb is 1"),
        ({**SHARDS, "compile": True}, "compile is True"),
        ({**SHARDS, **SYNC}, "batchnorm is 'sync'"),
        ({"momentum": 1.0}, "momentum is 1.0, expected a number from 0 to below 1"),
        ({"devices": "cpu"}, "devices is 'cpu', expected a list"),
    ],
)
def test_wrong_options_raise(options, message):
    with pytest.raises(ArgumentError, match=message):
        TrainConfig(**options)


def test_unknown_train_option_raises():
    with pytest.raises(ArgumentError, match="no option 'nesterov', only allreduce, amp, batchnorm"):
        train(2, 64, 0.1, nesterov=True)


def test_config_defaults_depend_on_other_options():
    assert (TrainConfig().world_size, TrainConfig().init) == (2, "he")
    assert TrainConfig(devices=("cpu",) * 3).world_size == 3
    assert TrainConfig(model="resnet18").init == "default"


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
    monkeypatch.setattr(devices_module, "Communicator", mock.Mock())  # a fake that accepts GPUs
    assert describe_devices(choose_devices(ranks)) == expected


def test_gpus_without_cuda_engine_stay_idle(monkeypatch, caplog):
    refusal = mock.Mock(side_effect=UnsupportedError("an engine for CPU ranks only"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(devices_module, "Communicator", refusal)
    assert describe_devices(choose_devices(2)) == "[cpu x 2 ranks]"
    assert "the 2 GPUs of this machine stay idle: an engine for CPU ranks only" in caplog.text
