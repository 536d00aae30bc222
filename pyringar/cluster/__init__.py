"""Ranks as threads or forked processes, behind the real torch.distributed: a cluster in a notebook.

    import pyringar as pr

    def train():                       # an unmodified torchrun program
        dist.init_process_group()
        model = DistributedDataParallel(make_model())
        ...

    losses = pr.launch(train, ranks=4)  # one result per rank

Of threads, one rank runs at a time, and another one when it waits. A seed draws the order, so that
a run can be repeated, and other orders tried. Processes run at once. A rank that fails, a deadlock
and calls that differ are one exception with a table of all calls.
"""
