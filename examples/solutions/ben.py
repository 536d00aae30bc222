"""Wrong, the book's 2021 version: the second loop replaces list items, not tensor values."""


def allreduce(data):
    """Write the sum of all ranks' tensors into each tensor."""
    for i in range(1, len(data)):
        data[0][:] += data[i].to(data[0].device)
    for i in range(1, len(data)):
        data[i] = data[0].to(data[i].device)
