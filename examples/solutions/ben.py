"""As the book printed it in 2021: the second loop rebinds items of the list."""


def allreduce(data):
    """Sum the tensors of all ranks into every one of them."""
    for i in range(1, len(data)):
        data[0][:] += data[i].to(data[0].device)
    for i in range(1, len(data)):
        data[i] = data[0].to(data[i].device)
