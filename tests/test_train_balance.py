"""Do measured shares make unequal devices finish together, with the gradient of any others?"""

from __future__ import annotations

import time
from unittest import mock

import pytest
import torch
from torch import nn
from training import garments, run

from pyringar.cli import main
from pyringar.parallel.shards import check_replicas_equal
from pyringar.train import TrainConfig, Trainer, balance
from pyringar.train import trainer as trainer_module


class Slow(nn.Module):
    """A model that takes its time."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.layer = seconds, nn.Linear(4, 3)

    def forward(self, x):
        time.sleep(self.seconds)
        return self.layer(x)


def test_shares_follow_the_speed_of_devices(monkeypatch):
    # Two devices that are the same to torch, and not to us.
    fast, slow = torch.device("cpu"), torch.device("cpu", 0)
    monkeypatch.setattr(balance, "synchronize", lambda devices: None)
    images, labels = torch.randn(2, 4), torch.zeros(2, dtype=torch.long)

    def make(device):
        return Slow(0.01 if device == fast else 0.03)

    weights = balance.measure_weights(make, [fast, slow], images, labels)
    assert weights[1] == 1
    assert weights[0] == pytest.approx(3, rel=0.3)
    # Two ranks on the fast one have half of it each.
    weights = balance.measure_weights(make, [fast, slow, fast], images, labels)
    assert weights[0] == weights[2] == pytest.approx(1.5, rel=0.3)


def test_auto_is_measured_and_shown(capsys, monkeypatch):
    monkeypatch.setattr(trainer_module, "load_data", lambda *_: garments(100, 30))
    assert main(["train", "lenet", "--ranks", "2", "--epochs", "1", "--weights", "auto"]) == 0
    assert " shared 1:1," in capsys.readouterr().out  # ranks on one device share its speed


def test_auto_trains_to_the_same_parameters(monkeypatch):
    measure = mock.Mock(return_value=(3.0, 1.0))
    monkeypatch.setattr(trainer_module, "measure_weights", measure)
    options = {"ranks": 2, "epochs": 1, "dtype": "float64", "seed": 3}
    plain = run(garments(600, 30), **options)
    uneven = run(garments(600, 30), weights="auto", **options)
    measure.assert_called_once()
    for a, b in zip(plain.params, uneven.params, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", ["lenet", pytest.param("resnet18", marks=pytest.mark.thorough)])
def test_a_compiled_model_trains(model):
    # Below 8 channels oneDNN writes past its memory on CPUs without AVX-512 (its issue 6035).
    options = {"width": 8} if model == "resnet18" else {}
    config = TrainConfig(
        batch_size=128, epochs=1, dataset="synthetic", compile=True, model=model, **options
    )
    with Trainer(config) as trainer:
        result = trainer.run()
        check_replicas_equal(trainer.replicas)
    assert result.curve[-1] > 0.3
