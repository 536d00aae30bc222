"""Do measured shares make unequal devices finish together, with the gradient of any others?"""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from torch import nn

import pyringar as pr
from pyringar.cli import main
from pyringar.parallel.shards import check_replicas_equal
from pyringar.train import ImageData, TrainConfig, Trainer, balance
from pyringar.train.synthetic import synthetic_images


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


def test_auto_is_measured_and_shown(capsys):
    options = ["--dataset", "synthetic", "--epochs", "1", "--batch-size", "2048"]
    assert main(["train", "lenet", "--ranks", "2", "--weights", "auto", *options]) == 0
    assert " shared 1:1," in capsys.readouterr().out  # ranks on one device share its speed


def test_auto_trains_to_the_same_parameters():
    data = ImageData("garments", *synthetic_images(600, 1), *synthetic_images(30, 2))
    config = TrainConfig(ranks=2, batch_size=64, lr=0.1, epochs=1, dtype="float64", seed=3)
    with Trainer(config, data) as trainer:
        plain = trainer.run()
    with Trainer(replace(config, weights="auto"), data) as trainer:
        trainer.weights = (3.0, 1.0)  # as if one had been faster
        uneven = trainer.run()
    for a, b in zip(plain.params, uneven.params, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("weights", ["car", ""])
def test_other_words_are_refused(weights):
    with pytest.raises(pr.ArgumentError, match=r"weights is .*expected one of auto"):
        TrainConfig(weights=weights)


def test_compile_and_sync_batch_norm_exclude_each_other():
    with pytest.raises(pr.ArgumentError, match="compile is on and batchnorm 'sync'"):
        TrainConfig(model="resnet18", batchnorm="sync", compile=True)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", ["lenet", "resnet18"])
def test_a_compiled_model_trains(model):
    options = {"dataset": "synthetic", "epochs": 1, "compile": True, "model": model}
    if model == "resnet18":
        options["width"] = 4
    config = TrainConfig(ranks=2, batch_size=128, lr=0.1, **options)
    with Trainer(config) as trainer:
        result = trainer.run()
        check_replicas_equal(trainer.replicas)
    assert result.curve[-1] > 0.3
