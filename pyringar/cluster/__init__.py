"""Ranks as threads of one process, behind the real torch.distributed: a cluster in a notebook.

    import pyringar as pr

    def train():                       # an unmodified torchrun program
        dist.init_process_group()
        model = DistributedDataParallel(make_model())
        ...

    losses = pr.launch(train, ranks=4)  # one result per rank

One rank runs at a time, and another one when it waits; a seed decides which, so that a run can be
repeated, and other interleavings tried. Sums are the engine's, in rank order.
A rank that fails, a deadlock and calls that differ are one exception, which says who called what.
"""
