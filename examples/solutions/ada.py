"""Correct: adds all tensors on rank 0 and copies the sum back."""


def allreduce(data):
    """Write the sum of all ranks' tensors into each tensor."""
    for other in data[1:]:
        data[0] += other.to(data[0].device)
    for other in data[1:]:
        other.copy_(data[0])
