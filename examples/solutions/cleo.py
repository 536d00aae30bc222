"""Computes the mean instead of the sum."""

import torch


def allreduce(data):
    """Leave the mean of all ranks' tensors in every one of them."""
    mean = torch.stack(data).mean(0)
    for tensor in data:
        tensor.copy_(mean)
