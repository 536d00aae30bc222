"""ResNet-18: the chapters' structure and names, and training runs on many ranks.

The recipe of the gate is the one measured for these sizes: width 8, torch's initial weights, batch
32, learning rate 0.1 falling to 0, 4 epochs (188 steps). Accuracy was 0.78 to 0.84 there.
"""

from __future__ import annotations

import math

import pytest
import torch
import training
from torch import nn
from torch.nn import functional as F  # noqa: N812
from training import garments, relative_error

import pyringar as pr
from pyringar.parallel.shards import check_replicas_equal, evaluate_accuracy_gpus
from pyringar.train import TrainConfig, Trainer, initialise, load_data, resnet18, train_resnet18
from pyringar.train.synthetic import synthetic_images

SMALL = {"model": "resnet18", "width": 4, "epochs": 1, "batch_size": 12}


def run(data, **options):
    return training.run(data, **{**SMALL, **options})


@pytest.fixture(scope="module")
def small():
    return garments(36, 30)


class WithoutReset(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))


class TestModel:
    def test_numbers_and_names_of_the_chapters(self):
        full = resnet18()
        params, buffers = list(full.parameters()), list(full.buffers())
        assert sum(param.numel() for param in params) == 11_175_818
        assert len(params) == 76
        assert (len(buffers), sum(buffer.numel() for buffer in buffers)) == (51, 7_825)
        assert sum(p.numel() for p in resnet18(width=8).parameters()) == 176_634
        layers = list(dict.fromkeys(name.rpartition(".")[0] for name in full.state_dict()))
        block = ["conv1", "conv2", "bn1", "bn2"]
        wide = ["conv1", "conv2", "conv3", "bn1", "bn2"]
        expected = ["0", "1"]
        for stage in (1, 2, 3, 4):
            first = block if stage == 1 else wide
            expected += [f"resnet_block{stage}.0.{name}" for name in first]
            expected += [f"resnet_block{stage}.1.{name}" for name in block]
        assert layers == [*expected, "fc.1"]
        assert full.state_dict()["resnet_block4.1.conv2.weight"].shape == (512, 512, 3, 3)

    def test_stages_halve_the_image(self):
        net, shapes = resnet18(width=2), []
        for stage in (1, 2, 3, 4):
            part = net.get_submodule(f"resnet_block{stage}")
            part.register_forward_hook(lambda part, args, out: shapes.append(tuple(out.shape)))
        assert net(torch.rand(3, 1, 28, 28)).shape == (3, 10)
        assert shapes == [(3, 2, 28, 28), (3, 4, 14, 14), (3, 8, 7, 7), (3, 16, 4, 4)]

    def test_seed_decides_weights(self):
        before = torch.get_rng_state()
        first, second, other = (resnet18(width=2, seed=seed) for seed in (5, 5, 6))
        assert torch.equal(torch.get_rng_state(), before)
        check_replicas_equal([list(first.parameters()), list(second.parameters())])
        assert not torch.equal(first[0].weight, other[0].weight)
        double = resnet18(width=2, seed=5, dtype=torch.float64)
        assert torch.equal(double[0].weight.float(), first[0].weight)

    def test_initialising_again_forgets_everything(self):
        net, fresh = resnet18(width=16, seed=3), resnet18(width=16, seed=4)
        net(torch.rand(5, 1, 28, 28)).sum().backward()
        with torch.no_grad():
            for param in net.parameters():
                param -= param.grad
        initialise(net, seed=4)
        for name, tensor in net.state_dict().items():
            assert torch.equal(tensor, fresh.state_dict()[name]), name
        initialise(net, "book")
        assert 0.0095 < net.resnet_block4[1].conv2.weight.std() < 0.0105
        assert torch.equal(net[1].weight, torch.ones(16))

    @pytest.mark.parametrize(
        ("call", "message"),
        [
            (lambda: resnet18(width=0), "width is 0, expected a whole number"),
            (lambda: resnet18(init="he"), "init is 'he', expected one of default, book"),
            (lambda: initialise(nn.Sequential(WithoutReset())), "'0', a WithoutReset, .* no reset"),
        ],
    )
    def test_wrong_arguments_are_named(self, call, message):
        with pytest.raises(pr.ArgumentError, match=message):
            call()


@pytest.mark.parametrize(
    ("dtype", "width", "tolerance"),
    [(torch.float32, 16, 1e-5), (torch.float64, 8, 1e-12)],
    ids=str,
)
def test_frozen_batch_norm_matches_one_rank(dtype, width, tolerance):
    net = resnet18(width=width, dtype=dtype).eval()
    X, y = synthetic_images(5, 0)  # noqa: N806
    X = X.to(dtype)  # noqa: N806
    grads = []
    for module in (net, pr.DataParallel(net, ["cpu"] * 2)):
        net.zero_grad()
        F.cross_entropy(module(X), y).backward()
        grads.append([param.grad for param in net.parameters()])
    assert relative_error(grads[1], grads[0]) < tolerance


class TestTraining:
    @pytest.mark.parametrize("options", [{}, {"overlap": False}, {"bucket_cap_mb": 0.01}])
    def test_run_repeats_with_any_buckets(self, small, options):
        result = run(small, ranks=2, **options)
        training.same_results(result, run(small, ranks=2))
        assert result.state.keys() == resnet18(width=4).state_dict().keys()

    def test_sync_batch_norm_matches_one_rank(self, small):
        options = {"batchnorm": "sync", "dtype": "float64", "lr": 0.01}
        alone = run(small, ranks=1, **options)
        for more in ({"ranks": 2}, {"ranks": 3, "weights": (3, 1, 0)}):
            found = run(small, **options, **more)
            assert found.losses == pytest.approx(alone.losses, rel=1e-9)
            assert relative_error(found.params, alone.params) < 1e-9
            assert found.state["1.running_var"] == pytest.approx(alone.state["1.running_var"])

    def test_ranks_evaluate_as_returned_state(self, small):
        with Trainer(TrainConfig(**SMALL, ranks=3), small) as trainer:
            result = trainer.run()
            check_replicas_equal(trainer.replicas)
        net = resnet18(width=4)
        net.load_state_dict(result.state)
        test = [(small.test_images, small.test_labels)]
        assert result.curve[-1] == evaluate_accuracy_gpus([net], test)

    def test_amp_keeps_float32_parameters(self, small):
        plain, amp = run(small, ranks=2), run(small, ranks=2, amp=True)
        assert all(param.dtype == torch.float32 for param in amp.params)
        assert 0 < abs(amp.losses[0] - plain.losses[0]) < 0.1

    def test_the_short_form_trains_resnet18(self, monkeypatch):
        monkeypatch.setattr("pyringar.train.trainer.load_data", lambda *_: garments(14, 10))
        result = train_resnet18(5, 12, 0.05, width=2, epochs=1)
        assert result.config.model == "resnet18"
        assert math.isfinite(result.losses[-1])
        assert str(result).endswith("on [cpu x 5 ranks]")
        with pytest.raises(pr.ArgumentError, match="no option 'depth'"):
            train_resnet18(2, 12, 0.05, depth=50)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(1, 5))]
)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_resnet18_learns_real_images(real_data_dir, num_ranks, seed):
    recipe = {"batch_size": 32, "lr": 0.1, "epochs": 4, "model": "resnet18", "width": 8}
    images = load_data("fashion-mnist", real_data_dir)
    with Trainer(TrainConfig(ranks=num_ranks, seed=seed, **recipe), images) as trainer:
        result = trainer.run()
        check_replicas_equal(trainer.replicas)
    print(f"real images, {num_ranks} ranks, seed {seed}: {result.curve} {result.losses[-1]}")
    assert result.curve[-1] >= 0.70
    assert result.losses[-1] <= 0.80
