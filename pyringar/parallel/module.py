"""Drop-in replacement for nn.DataParallel."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pyringar.choices import BATCHNORMS, check_choice
from pyringar.comm.base import RankCommunicator
from pyringar.comm.communicator import Communicator
from pyringar.comm.topology import check_device, check_devices
from pyringar.errors import RingarError, UnsupportedError
from pyringar.parallel import nested
from pyringar.parallel.batchnorm import synchronise_batchnorm
from pyringar.parallel.beside import ReplicasBeside
from pyringar.parallel.bucketer import GradientBucketer, StepStats
from pyringar.parallel.lockstep import LockStep, RankThreads, are_side_by_side, can_leave_thread
from pyringar.parallel.optimizer import ParamGroups, ReplicaOptimizer
from pyringar.parallel.replicate import copy_buffers, copy_parameters, replicate
from pyringar.parallel.shards import Device, shard_sizes

__all__ = ["DataParallel"]

# What a copy makes anew.
_REBUILT = (
    *("replicas", "bucketer", "_threads", "_lockstep", "_beside"),
    *("_gradient_changes", "_parameter_changes", "_stats_then"),
)


class DataParallel(nn.Module):
    """Trains a module on many ranks at once; a drop-in replacement for ``nn.DataParallel``.

    Every rank keeps a full copy of the module. A call cuts its tensors along their first dimension,
    runs the copies, and puts their outputs together; backward reaches all copies, whose gradients
    are summed by a `GradientBucketer` while it goes on. An optimizer made by
    `optimizer` waits for them and updates each copy:

        net = pr.DataParallel(module, ["cuda:0", "cuda:1"])
        optimizer = net.optimizer(torch.optim.SGD, lr=0.1)
        for X, y in data:
            optimizer.zero_grad()
            loss(net(X), y).backward()
            optimizer.step()

    Args:
        module: What to train. Copied to all ranks (see `replicate`), itself left as it is.
        devices: One device per rank; ranks may share one.
        weights: Shares of the ranks in every batch; see `split_batch`.
        batchnorm: ``"local"``: every rank normalises with its own samples' statistics, as with
            ``nn.DataParallel``; the running statistics kept are rank 0's. ``"sync"``: with those of
            the whole batch, as the undivided module would.
        output_device: Where outputs are put together; if not given, where the input came from.
        gather: False: a call returns the list of the ranks' outputs, each on its device.
        op: ``"sum"`` for one loss over all samples; ``"mean"`` for the mean of per-rank losses.
        comm: What reduces; if not given, a communicator in rank order of its own.
        in_turns: None: ranks on CPUs compute at the same time, forward and backward, each in a
            thread of its own with its share of torch's threads, at least one. True: one after the
            other in the caller's thread, with all of torch's threads. False: as None, on CPUs only.

    See `GradientBucketer` for ``bucket_cap_mb``, ``first_bucket_mb`` and ``overlap``.

    Raises:
        ArgumentError: Lazy parameters that have no values yet, a device that is not there, weights
            that are no shares, an unknown ``batchnorm``.
        UnsupportedError: A module that cannot be copied, a batch norm that cannot be synchronised,
            or ``in_turns=False`` with a GPU.

    Ranks at the same time give the bits of ranks in turns with as many torch threads each, every
    time, and leave the caller's number of them alone. They take turns as with ``in_turns=True``
    where the module draws random numbers (dropout) or is compiled, where ``batchnorm`` is
    ``"sync"``, where an input requires a gradient or a parameter has a hook of yours, under
    reentrant checkpoints, where modules use outer tensors that require gradients or keep parts of
    their graph, where modules enter autocast and use a parameter twice, and where the calling
    thread has entered a mode of torch's (a default device, ``torch.func``, a counter of operations,
    a profiler) or hooks on saved tensors (a checkpoint around the whole). Such calls have the bits
    of all of torch's threads. Other exceptions: a call in which a module first draws, or first uses
    a parameter twice under its own autocast; and a parameter whose gradient has three parts or
    more, two with a ring over three ranks or more, some from outside of the call (a penalty). Hooks
    on modules run in the ranks' threads. Gradients of gradients of parameters, and losses of what
    such hooks put aside, take ``in_turns=True``.

    ``parameters()``, ``state_dict()`` and the like are rank 0's, with the plain module's names.
    Whatever changes parameters or gradients must do so on all ranks: `optimizer`,
    `clip_grad_norm_`, `zero_grad`, `apply` do; where something else did not, the
    next step or call raises. ``modules()`` gives the modules of all ranks, to set their modes and
    options: a loop that draws random parameters, or an optimizer of theirs, drives ranks apart,
    and the next call raises. Copies, pickled ones
    too, are made of rank 0's module and have a communicator of their own. Gradients that were
    reduced must be cleared before the next backward pass; to accumulate several, put all but the
    last into `no_sync`. As with ``nn.DataParallel``, a rank that no sample is left for does
    not run.

    Cost: a call copies no parameters, only samples and outputs between devices. CPU ranks run at
    the same time, those on one GPU one after the other, those on several GPUs forward at the same
    time. Buckets leave during backward; with ranks in threads only once all have ended in the first
    step, under ``create_graph=True``, and where parameters got hooks after the call.
    """

    def __init__(
        self,
        module: nn.Module,
        devices: Sequence[Device],
        *,
        weights: Sequence[float] | None = None,
        batchnorm: str = "local",
        output_device: Device | None = None,
        gather: bool = True,
        bucket_cap_mb: float = 10,
        first_bucket_mb: float = 1,
        op: Any = "sum",
        overlap: bool = True,
        comm: Communicator | RankCommunicator | None = None,
        in_turns: bool | None = None,
    ) -> None:
        super().__init__()
        self.devices = check_devices(devices)
        shard_sizes(0, len(self.devices), weights)  # says what is wrong with them
        self._batchnorm = check_choice("batchnorm", batchnorm, BATCHNORMS)
        self._weights = weights
        gpu = next((device for device in self.devices if device.type != "cpu"), None)
        if in_turns is False and gpu is not None:
            raise UnsupportedError(
                f"in_turns is False, but a rank is on {gpu}: backward of a DataParallel reaches "
                "GPUs from the caller's thread only; expected CPUs, or None or True"
            )
        self._wants_threads = are_side_by_side(self.devices, in_turns)
        self._gather = bool(gather)
        self._output_device = (
            None if output_device is None else check_device(output_device, "output_device")
        )
        self._bucketing: dict[str, Any] = {
            "bucket_cap_mb": bucket_cap_mb,
            "first_bucket_mb": first_bucket_mb,
            "op": op,
            "overlap": overlap,
        }
        self._spans_processes = isinstance(comm, RankCommunicator)
        self._make_replicas(module, comm)

    def _make_replicas(
        self, module: nn.Module, comm: Communicator | RankCommunicator | None
    ) -> None:
        # A tuple, which nn.Module does not look into: names shall be the plain module's.
        self.replicas = tuple(replicate(module, self.devices))
        self.training = module.training
        self._gradient_changes, self._parameter_changes = _Changes(), _Changes()
        self._threads = RankThreads(self.devices)
        self._lockstep: LockStep | None = None
        if self._batchnorm == "sync" and len(self.devices) > 1:
            lockstep = LockStep(self._threads)
            if synchronise_batchnorm(self.replicas, lockstep):
                self._lockstep = lockstep
        self.bucketer = self._make_bucketer(comm)
        self._beside: ReplicasBeside | None = None
        if self._wants_threads and self._lockstep is None:
            reducer = self.bucketer._reducer
            self._beside = ReplicasBeside(self.replicas, self._threads, reducer)
        self._remember_parameters()

    def _make_bucketer(self, comm: Communicator | RankCommunicator | None) -> GradientBucketer:
        return GradientBucketer(self.replicas, comm=comm, **self._bucketing)

    @property
    def module(self) -> nn.Module:
        """Rank 0's replica, under the name that it has in ``nn.DataParallel``."""
        return self.replicas[0]

    # -- forward -----------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run every replica on its shard of the arguments.

        Args:
            *args: Tensors, also in lists, tuples and dicts, are cut along their first dimension,
                in which all must agree; those of no dimension, and everything else, go to all.
            **kwargs: The same by name.

        Returns:
            The module's output, or the list of them with ``gather=False``. Tensors are put
            together along their first dimension, those of no dimension stacked, with one entry per
            rank that ran.

        Raises:
            ArgumentError: No tensor to cut, lengths that differ, or outputs that cannot be put
                together.
            RingarError: Parameters were changed on some ranks only, or to different values before
                any step.
        """
        self._check_parameters()
        first = nested.check_batches(nested.batches((args, kwargs)))
        sizes = shard_sizes(len(first), len(self.devices), self._weights)
        # An empty batch still has an output, and its shape is the module's business.
        ranks = [rank for rank, size in enumerate(sizes) if size] or [0]
        shards = nested.scatter((args, kwargs), sizes, self.devices)
        outputs = self._run({rank: shards[rank] for rank in ranks})
        if not self._gather:
            return self._one_per_rank(outputs)
        target = first.device if self._output_device is None else self._output_device
        return nested.gather([outputs[rank] for rank in ranks], target)

    def run_shards(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """Run every replica on a shard that lies on its device already.

        Args:
            shards: One tensor per rank, ``(n, ...)``, of which some may be empty but not all.

        Returns:
            One output per rank, on its device; an empty shard's is empty and has no graph.
        """
        calls: dict[int, tuple[Any, Any]] = {
            rank: ((X,), {}) for rank, X in enumerate(shards) if len(X)
        }
        return self._one_per_rank(self._run(calls))

    def _run(self, calls: Mapping[int, tuple[Any, Any]]) -> dict[int, Any]:
        functions = {
            rank: partial(self.replicas[rank], *args, **kwargs)
            for rank, (args, kwargs) in calls.items()
        }
        if self._lockstep is not None:
            return self._lockstep.run(functions)
        if (
            self._beside is not None
            and len(calls) > 1
            and self._beside.may_run(list(calls.values()))
        ):
            return self._beside.run(functions)
        may_leave = not self._threads.is_own() and can_leave_thread()
        num_gpus = len({self.devices[rank] for rank in functions} - {torch.device("cpu")})
        if may_leave and num_gpus > 1:
            return self._threads.run(functions)
        return {rank: function() for rank, function in functions.items()}

    def _one_per_rank(self, outputs: Mapping[int, Any]) -> list[Any]:
        ran = next(iter(outputs.values()))
        return [
            outputs[rank]
            if rank in outputs
            else nested.map_tensors(partial(nested.no_rows, device), ran)
            for rank, device in enumerate(self.devices)
        ]

    # -- gradients and steps -----------------------------------------------------------------------

    def optimizer(
        self,
        kind: Callable[..., torch.optim.Optimizer],
        params: Callable[[Any], ParamGroups] | None = None,
        **options: Any,
    ) -> ReplicaOptimizer:
        """Make one optimizer per replica, behind the face of a single one.

        Args:
            kind: Its class, such as ``torch.optim.SGD``.
            params: Given a replica, its parameters or parameter groups; all if not given.
            **options: Of the optimizer, such as ``lr``.

        Returns:
            An optimizer for loops, schedulers and ``GradScaler``.
        """
        return ReplicaOptimizer(
            self.replicas, kind, params, self.wait, self._check_gradients, **options
        )

    def wait(self) -> None:
        """Return when all gradients are reduced. `optimizer`'s steps do so themselves.

        Raises:
            RingarError: As `GradientBucketer.wait`.
        """
        before = self.bucketer.stats()
        self.bucketer.wait()
        if self.bucketer.stats() is not before:
            self._gradient_changes.remember(_gradients(self.replicas))

    def no_sync(self) -> AbstractContextManager[None]:
        """Gradients of backward passes in here only accumulate; the next one outside reduces."""
        return self.bucketer.no_sync()

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Wait, and scale the gradients of all ranks alike, to a norm of at most ``max_norm``.

        The norm is that of the reduced gradient, counted once, not of all ranks' together. See
        ``torch.nn.utils.clip_grad_norm_`` for the arguments.

        Returns:
            The norm before scaling, on rank 0's device.
        """
        self.wait()
        grads = [p.grad for p in self.replicas[0].parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm(grads, norm_type, error_if_nonfinite)
        self._check_gradients()
        for replica, device in zip(self.replicas, self.devices, strict=True):
            nn.utils.clip_grads_with_norm_(replica.parameters(), max_norm, norm.to(device))
        return norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients on all ranks, also those that a failed backward pass left.

        See ``torch.nn.Module.zero_grad``.
        """
        with suppress(RingarError):  # what failed is cleared now, and stays failed if it must
            self.wait()
        for replica in self.replicas:
            replica.zero_grad(set_to_none)

    def _check_gradients(self) -> None:
        rank = self._gradient_changes.find_odd_rank(_gradients(self.replicas))
        if rank is not None:
            raise RingarError(
                f"gradients were changed on rank 0 and not on rank {rank}: take "
                "net.clip_grad_norm_(...) instead of clip_grad_norm_(net.parameters(), ...), and "
                "change gradients in all of net.replicas alike"
            )

    def _check_parameters(self) -> None:
        params = [list(replica.parameters()) for replica in self.replicas]
        rank = self._parameter_changes.find_odd_rank(params)
        if rank is not None:
            raise RingarError(
                f"parameters were changed on rank 0 and not on rank {rank}: step with "
                "net.optimizer(torch.optim.SGD, lr=...), which updates all ranks, and not with an "
                "optimizer of net.parameters(), which are rank 0's; average net.module, and not "
                "net; net.load_state_dict() makes the ranks equal again"
            )
        # Until gradients are reduced, nothing but what goes round them all changes the ranks, as a
        # loop over modules() does; steps may differ by rounding on devices of different kinds.
        if self.stats() is self._stats_then and self._parameter_changes.are_there(params):
            rank = next((r for r, mine in enumerate(params) if not _are_equal(mine, params[0])), 0)
            if rank:
                raise RingarError(
                    f"parameters of rank 0 and of rank {rank} were changed to different values: "
                    "initialise with net.apply(...), which copies rank 0's to all ranks, and step "
                    "with net.optimizer(torch.optim.SGD, lr=...), which waits for the sums of all "
                    "ranks' gradients"
                )
            self._remember_parameters()

    def _remember_parameters(self) -> None:
        """From now on, changes on some ranks only are noticed."""
        self._parameter_changes.remember([list(r.parameters()) for r in self.replicas])
        self._stats_then = self.stats()

    def stats(self) -> StepStats:
        """Return the statistics of the last step's reductions."""
        return self.bucketer.stats()

    # -- as the plain module -----------------------------------------------------------------------

    def train(self, mode: bool = True) -> DataParallel:
        """Set the mode on all ranks.

        Turning to eval mode gives all ranks rank 0's buffers, so that running statistics, and with
        them answers, are those of the module that `state_dict` would save.

        Args:
            mode: True to train, False to evaluate.

        Returns:
            This module.
        """
        self.training = mode
        for replica in self.replicas:
            replica.train(mode)
        if not mode:
            copy_buffers(self.replicas)
        return self

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield rank 0's, by the plain module's names. See ``torch.nn.Module.named_parameters``."""
        return self.module.named_parameters(*args, **kwargs)

    def named_modules(
        self,
        memo: set[nn.Module] | None = None,
        prefix: str = "",
        remove_duplicate: bool = True,
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield this module, then those of all ranks, so that what is set in a loop is set on all.

        Rank 0's have the plain module's names, rank 1's begin with ``replicas.1``, and so on.
        ``modules()`` gives the same without names. See ``torch.nn.Module.named_modules``.
        """
        memo = set() if memo is None else memo
        if self in memo:
            return
        if remove_duplicate:
            memo.add(self)
        yield prefix, self
        for rank, replica in enumerate(self.replicas):
            begin = [part for part in (prefix, f"replicas.{rank}" if rank else "") if part]
            yield from replica.named_modules(memo, ".".join(begin), remove_duplicate)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the replicas: rank 0's as ``module``, the others as ``replicas.1`` and so on."""
        for rank, replica in enumerate(self.replicas):
            yield (f"replicas.{rank}" if rank else "module"), replica

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield rank 0's, by the plain module's names. See ``torch.nn.Module.named_buffers``."""
        return self.module.named_buffers(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return rank 0's, exactly as the plain module's. See ``torch.nn.Module.state_dict``."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load into all ranks what the plain module's ``state_dict`` gave, on any device.

        See ``torch.nn.Module.load_state_dict``; with ``assign`` every rank takes a copy of its own.
        """
        result: Any = None
        for replica, device in zip(self.replicas, self.devices, strict=True):
            own = state_dict
            if assign:
                own = nested.map_tensors(partial(nested.copy_to, device), dict(state_dict))
            result = replica.load_state_dict(own, strict=strict, assign=assign)
        self._remember_parameters()
        return result

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load into all replicas, for ``load_state_dict`` of a module that holds this one."""
        own = {
            name.removeprefix(prefix): value
            for name, value in state_dict.items()
            if name.startswith(prefix)
        }
        assign = bool(local_metadata.get("assign_to_params_buffers", False))
        try:
            result = self.load_state_dict(own, strict=False, assign=assign)
        except RuntimeError as error:  # shapes that differ, which go with what else is wrong
            error_msgs.append(str(error))
            return
        missing_keys += [prefix + name for name in result.missing_keys]
        if strict:
            unexpected_keys += [prefix + name for name in result.unexpected_keys]

    def apply(self, fn: Callable[[nn.Module], None]) -> DataParallel:
        """Apply ``fn`` to rank 0's modules, as to initialise them, and copy the result to all.

        Args:
            fn: Called with every submodule of rank 0's, children first, then itself.

        Returns:
            This module.
        """
        self.module.apply(fn)
        copy_parameters(self.replicas)
        copy_buffers(self.replicas)
        self._remember_parameters()
        return self

    def requires_grad_(self, requires_grad: bool = True) -> DataParallel:
        """Not once the replicas are made.

        Args:
            requires_grad: Whatever it is.

        Raises:
            UnsupportedError: Always; freeze parameters of the module before.
        """
        raise UnsupportedError(
            "requires_grad cannot be changed on replicas: set it on the module, and make "
            "DataParallel from that"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DataParallel:
        """Refuse ``to``, ``cuda``, ``half`` and the like, unless they change nothing."""
        held = [*self.module.parameters(), *self.module.buffers()]
        if all(fn(tensor) is tensor for tensor in held):
            return self
        raise UnsupportedError(
            "replicas cannot be moved or converted: do that to the module, and make DataParallel "
            "from it with the devices that the ranks shall have"
        )

    def extra_repr(self) -> str:
        """Show the ranks and, as a part, the module."""
        devices = ", ".join(map(str, self.devices))
        options = f"devices=[{devices}], batchnorm={self._batchnorm!r}"
        if self._weights is not None:
            options += f", weights={list(self._weights)}"
        return f"{options}\n{self.bucketer}\n(module): {self.module}"

    # -- life --------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Rank 0's replica and the options, for ``copy.deepcopy``, ``pickle`` and ``torch.save``.

        The copy has replicas, hooks and a communicator of its own, in rank order.

        Raises:
            UnsupportedError: Ranks are in other processes, which a copy could not reach.
        """
        if self._spans_processes:
            raise UnsupportedError(
                "DataParallel over processes cannot be copied or pickled: the copy would have no "
                "other ranks; copy or save net.module, or net.state_dict()"
            )
        state = {name: value for name, value in vars(self).items() if name not in _REBUILT}
        return {**state, "replicas": self.module}

    def __setstate__(self, state: dict[str, Any]) -> None:
        module = state.pop("replicas")
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._make_replicas(module, None)

    def close(self) -> None:
        """Remove all hooks, end all threads; the replicas stay usable. May be called again."""
        self.bucketer.close()
        self._beside = None
        self._threads.close()

    def __enter__(self) -> DataParallel:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class _Changes:
    """Notices tensors that were changed in place on some ranks and not on others.

    Reads torch's own count of in-place changes of a tensor, so it costs no look at the numbers.
    """

    def __init__(self) -> None:
        self._then: list[list[int]] = []

    def remember(self, tensors: Sequence[Sequence[Tensor]]) -> None:
        """From now on, changes of ``tensors[rank][i]`` count."""
        self._then = _versions(tensors)

    def are_there(self, tensors: Sequence[Sequence[Tensor]]) -> bool:
        """Say whether any rank's were changed."""
        return _versions(tensors) != self._then

    def find_odd_rank(self, tensors: Sequence[Sequence[Tensor]]) -> int | None:
        """Return the first rank whose tensors were not changed as often as rank 0's, or None."""
        if not self._then:
            return None
        changes = [
            [new - old for new, old in zip(now, then, strict=False)]
            for now, then in zip(_versions(tensors), self._then, strict=True)
        ]
        return next((rank for rank, mine in enumerate(changes) if mine != changes[0]), None)


def _versions(tensors: Sequence[Sequence[Tensor]]) -> list[list[int]]:
    return [[tensor._version for tensor in mine] for mine in tensors]


def _are_equal(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    pairs = zip(ours, theirs, strict=True)
    return all(torch.allclose(a, b.to(a.device), rtol=0, atol=0, equal_nan=True) for a, b in pairs)


def _gradients(replicas: Sequence[nn.Module]) -> list[list[Tensor]]:
    return [[p.grad for p in replica.parameters() if p.grad is not None] for replica in replicas]
