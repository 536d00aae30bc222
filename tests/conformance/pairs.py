"""Create two ranks in this process with the interface of a `Communicator`, on any transport.

The ranks of "processes" are two threads, so that a test can inspect the tensors of both ranks.
"""

from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

import pyringar as pr

K = 2


class RankPair:
    """Two `ProcessCommunicator`s; each call takes a list with one argument per rank."""

    def __init__(self, **options):
        store = dist.HashStore()
        self._threads = ThreadPoolExecutor(K)
        self.comms = self.on_ranks(
            lambda rank: pr.ProcessCommunicator(store, rank, K, **{"timeout": 20, **options})
        )

    def on_ranks(self, call):
        has_grad, is_inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

        def run(rank):
            with torch.inference_mode(is_inference), torch.set_grad_enabled(has_grad):
                return call(rank)

        futures = [self._threads.submit(run, rank) for rank in range(K)]
        errors = [future.exception() for future in futures]
        for error in errors:
            if error is not None:
                raise error
        return [future.result() for future in futures]

    def __getattr__(self, name):
        """Return a function that calls ``name`` on both ranks; a list has one entry per rank."""

        def call(*arguments, **options):
            def run(rank):
                mine = [arg[rank] if isinstance(arg, (list, tuple)) else arg for arg in arguments]
                return getattr(self.comms[rank], name)(*mine, **options)

            return self.on_ranks(run)

        if not name.startswith("bind"):
            return call

        def bind(*arguments, **options):
            bound = call(*arguments, **options)
            return lambda: self.on_ranks(lambda rank: bound[rank]())

        return bind

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
        self._threads.shutdown()


def make_pair(transport, **options):
    if transport == "processes":
        return RankPair(**options)
    return pr.Communicator(["cuda:0" if transport == "cuda" else "cpu"] * K, **options)
