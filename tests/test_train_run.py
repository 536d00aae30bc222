"""Whole training runs: they learn, repeat themselves, count ranks truly, and notice divergence."""

from __future__ import annotations

import re

import pytest
import torch
from training import garments, run, same_results

from pyringar.errors import ArgumentError, RingarError
from pyringar.parallel.shards import check_replicas_equal
from pyringar.train import TrainConfig, Trainer, load_data, train
from pyringar.train import step as step_module
from pyringar.train import trainer as trainer_module

RESNET = {"model": "resnet18", "width": 8, "epochs": 4}
# Options, least accuracy and largest loss. Measured with 5 seeds: LeNet on drawn images 0.875 to
# 0.903 and 0.23 to 0.25, ResNet-18 0.78 to 0.84.
GATE = {
    "lenet, drawn images": ({"epochs": 8}, 0.83, 0.30),
    "lenet, real images": ({"epochs": 8}, 0.70, 0.65),
    "resnet18, real images": (RESNET, 0.70, 0.80),
}


@pytest.fixture(scope="module")
def small():
    return garments(200, 100)


@pytest.mark.timeout(400)  # 5 s of work, but a busy machine has been seen to take a minute
@pytest.mark.parametrize("name", GATE)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize(
    "seed",
    [pytest.param(n, marks=pytest.mark.thorough if n else pytest.mark.slow) for n in range(5)],
)
def test_model_learns(request, name, num_ranks, seed):
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


def test_rank_counts_agree_in_float64(small):
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
            assert len(waited) == 2 * max(0, step - 1), "every GPU once a step"
        trainer._check_steps(0)
    assert sorted(map(str, waited)) == ["cuda:0"] * 6 + ["cuda:1"] * 6


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", ["lenet", pytest.param("resnet18", marks=pytest.mark.thorough)])
def test_compiled_model_trains(model):
    # Below 8 channels oneDNN writes past its memory on CPUs without AVX-512 (its issue 6035).
    options = {"width": 8} if model == "resnet18" else {}
    config = TrainConfig(
        batch_size=128, epochs=1, dataset="synthetic", compile=True, model=model, **options
    )
    with Trainer(config) as trainer:
        result = trainer.run()
        check_replicas_equal(trainer.replicas)
    assert result.curve[-1] > 0.3


@pytest.mark.parametrize("allreduce", ["auto", "ring"])
def test_the_result_says_what_ran(small, allreduce):
    result = run(small, ranks=4, epochs=2, allreduce=allreduce)
    line = rf"test acc: {result.curve[-1]:.2f}, \d+\.\d sec/epoch on \[cpu x 4 ranks\]"
    assert re.fullmatch(line, str(result))
    assert result.plan.algorithm == ("fused" if allreduce == "auto" else allreduce)
    assert result.data == "garments, 200 training and 100 test images"
    assert [epoch.epoch for epoch in result.epochs] == [1, 2]
    assert all(seconds > 0 for seconds in result.seconds)


def test_missing_device_raises_before_loading(monkeypatch):
    monkeypatch.setattr(trainer_module, "load_data", None)
    with pytest.raises(ArgumentError, match=r"devices\[0\] is 'cuda:93'.*there are: cpu"):
        train(1, 64, 0.1, devices=["cuda:93"])


def test_divergence_names_the_step(small, monkeypatch):
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
