"""Run a torch.distributed program on ranks that are threads or forked processes.

    import pyringar as pr

    def train():                       # an unmodified torchrun program
        dist.init_process_group()
        model = DistributedDataParallel(make_model())
        ...

    losses = pr.launch(train, ranks=4)  # one result per rank

Threads: one rank runs at a time; when it waits, another rank runs. A seed sets the order, so that
a run can be repeated and other orders tried. Processes: all ranks run at once. A failed rank, a
deadlock and calls that differ raise one exception, with a table of all ranks' calls.
"""
