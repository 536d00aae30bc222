"""Wrong: computes the mean instead of the sum."""

import torch


def allreduce(data):
    """Write the mean of all ranks' tensors into each tensor."""
    mean = torch.stack(data).mean(0)
    for tensor in data:
        tensor.copy_(mean)
