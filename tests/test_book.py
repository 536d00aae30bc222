"""The book's notebook with its own allreduce, its repaired one, and pyringar's in its place.

The code under "cells" is what a reader would have in a notebook: only ``allreduce`` comes from
pyringar. Devices are CPU ranks, and batches are cut by slices, for the book's scatter wants GPUs.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from training import rebinding, repaired

import pyringar
from pyringar.errors import RingarError
from pyringar.parallel.shards import check_replicas_equal
from pyringar.train import train_batch
from pyringar.train.synthetic import synthetic_images

# -- cells -----------------------------------------------------------------------------------------

loss_of = nn.CrossEntropyLoss(reduction="none")


def first_params(seed):
    generator = torch.Generator().manual_seed(seed)

    def weight(*size):
        return torch.randn(*size, generator=generator) * 0.01

    return [
        *(weight(20, 1, 3, 3), torch.zeros(20)),
        *(weight(50, 20, 5, 5), torch.zeros(50)),
        *(weight(800, 128), torch.zeros(128)),
        *(weight(128, 10), torch.zeros(10)),
    ]


def notebook_lenet(images, params):
    out = F.relu(F.conv2d(input=images, weight=params[0], bias=params[1]))
    out = F.avg_pool2d(input=out, kernel_size=(2, 2), stride=(2, 2))
    out = F.relu(F.conv2d(input=out, weight=params[2], bias=params[3]))
    out = F.avg_pool2d(input=out, kernel_size=(2, 2), stride=(2, 2))
    out = out.reshape(out.shape[0], -1)
    out = F.relu(torch.mm(out, params[4]) + params[5])
    return torch.mm(out, params[6]) + params[7]


def copy_params(params, device):
    copies = [param.clone().to(device) for param in params]
    for param in copies:
        param.requires_grad_()
    return copies


def notebook_step(images, labels, device_params, lr, allreduce):
    num_ranks = len(device_params)
    shards = zip(images.tensor_split(num_ranks), labels.tensor_split(num_ranks), strict=True)
    losses = [
        loss_of(notebook_lenet(shard, params), shard_labels).sum()
        for (shard, shard_labels), params in zip(shards, device_params, strict=True)
    ]
    for loss in losses:
        loss.backward()
    with torch.no_grad():
        for i in range(len(device_params[0])):
            allreduce([device_params[rank][i].grad for rank in range(num_ranks)])
    for params in device_params:
        with torch.no_grad():
            for param in params:
                param -= lr * param.grad / images.shape[0]
                param.grad.zero_()


# -- what comes of it ------------------------------------------------------------------------------


def run_notebook(num_ranks, allreduce, num_steps=6):
    params = first_params(seed=0)
    device_params = [copy_params(params, "cpu") for _ in range(num_ranks)]
    images, labels = synthetic_images(30 * num_steps, seed=1)
    for batch, batch_labels in zip(images.split(30), labels.split(30), strict=True):
        notebook_step(batch, batch_labels, device_params, 0.2, allreduce)
    return device_params


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_notebook_with_our_allreduce_leaves_replicas_bit_equal(num_ranks):
    device_params = run_notebook(num_ranks, pyringar.allreduce)
    check_replicas_equal(device_params)
    # And with the very bits of the book's repaired version, which adds in the same order.
    theirs = run_notebook(num_ranks, repaired)
    check_replicas_equal([device_params[-1], theirs[0]])


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_notebook_with_its_own_allreduce_diverges(num_ranks):
    device_params = run_notebook(num_ranks, rebinding, num_steps=1)
    with pytest.raises(RingarError, match=r"replicas have diverged: parameter \d, .* on rank 1"):
        check_replicas_equal(device_params)


def test_our_train_batch_does_the_notebook_step():
    params = first_params(seed=0)
    theirs = [copy_params(params, "cpu") for _ in range(3)]
    ours = [copy_params(params, "cpu") for _ in range(3)]
    images, labels = synthetic_images(31, seed=1)
    notebook_step(images, labels, theirs, 0.2, repaired)
    train_batch(images, labels, ours, ["cpu"] * 3, 0.2)
    for a, b in zip(ours[2], theirs[0], strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), rtol=1e-6, atol=1e-8)


def test_the_toy_prints_what_the_book_prints(capsys):
    data = [torch.ones((1, 2)) * (rank + 1) for rank in range(2)]
    first, second = data
    print("before allreduce:\n", data[0], "\n", data[1])
    pyringar.allreduce(data)
    print("after allreduce:\n", data[0], "\n", data[1])
    assert capsys.readouterr().out == (
        "before allreduce:\n tensor([[1., 1.]]) \n tensor([[2., 2.]])\n"
        "after allreduce:\n tensor([[3., 3.]]) \n tensor([[3., 3.]])\n"
    )
    # The rebinding version prints the same; it does not pass this.
    assert data[0] is first
    assert data[1] is second
    assert torch.equal(second, torch.tensor([[3.0, 3.0]]))


def test_helpers_print_what_the_book_prints(capsys):
    copies = pyringar.get_params(first_params(seed=0), "cpu")
    print("b1 weight:", copies[1])
    print("b1 grad:", copies[1].grad)
    printed = capsys.readouterr().out
    assert printed.startswith("b1 weight: tensor([0., 0.,")
    assert printed.endswith("requires_grad=True)\nb1 grad: None\n")
    rows = torch.arange(20).reshape(4, 5)
    shards, _ = pyringar.split_batch(rows, torch.zeros(4), ["cpu", "cpu"])
    assert [shard.tolist() for shard in shards] == [rows[:2].tolist(), rows[2:].tolist()]
