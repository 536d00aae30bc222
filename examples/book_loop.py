"""Train LeNet on two CPU ranks with the book's loop and three functions of pyringar.

python examples/book_loop.py
"""

import torch
from torch.nn import functional as F

from pyringar import allreduce, get_params, split_batch
from pyringar.train import lenet, lenet_params, load_data

DEVICES = ["cpu", "cpu"]  # one per rank; with two GPUs ["cuda:0", "cuda:1"]
BATCH_SIZE, LR, NUM_EPOCHS = 32, 0.1, 3


def train_batch(X, y, device_params, devices, lr):
    """Take one step of SGD on all ranks."""
    X_shards, y_shards = split_batch(X, y, devices)
    for params, X_shard, y_shard in zip(device_params, X_shards, y_shards):
        F.cross_entropy(lenet(X_shard, params), y_shard, reduction="sum").backward()
    for grads in zip(*([p.grad for p in params] for params in device_params)):
        allreduce(list(grads))  # the gradients of one parameter on all ranks
    with torch.no_grad():
        for params in device_params:
            for p in params:
                p -= lr / len(X) * p.grad
                p.grad.zero_()


data = load_data("synthetic")  # load_data() is Fashion-MNIST, downloaded once
train_images, train_labels = data.train_images[:1500], data.train_labels[:1500]
torch.manual_seed(0)
start = lenet_params()
device_params = [get_params(start, device) for device in DEVICES]
for epoch in range(1, NUM_EPOCHS + 1):
    for batch in torch.randperm(len(train_labels)).split(BATCH_SIZE):
        train_batch(train_images[batch], train_labels[batch], device_params, DEVICES, LR)
    with torch.no_grad():
        answers = lenet(data.test_images.to(DEVICES[0]), device_params[0]).argmax(1)
    accuracy = (answers.cpu() == data.test_labels).float().mean()
    print(f"epoch {epoch}: test accuracy {accuracy:.2f}")

same = all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(*device_params))
print(f"both ranks hold the same bits: {same}")
