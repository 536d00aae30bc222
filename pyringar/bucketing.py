"""Gradients leave while backward still runs: buckets that are reduced as soon as they are full."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pyringar import _native
from pyringar.call import RankCommunicator, Work
from pyringar.communicator import Communicator
from pyringar.errors import ArgumentError, RingarError
from pyringar.process_buckets import ProcessRanks

__all__ = ["BucketStats", "GradientBucketer", "StepStats"]

Replica = nn.Module | Sequence[Tensor]


@dataclass(frozen=True)
class BucketStats:
    """One bucket of one step; times in seconds since the step's first gradient.

    Attributes:
        params: Indices of its parameters, in the order of ``parameters()``.
        nbytes: Bytes of one rank's gradients.
        ready_s: When the last gradient came; None where some parameter had none.
        launched_s: When its reduction was asked for; None where there was nothing to reduce.
        done_s: When it was reduced; None where that is not known (GPUs: nobody waited for it).
    """

    params: tuple[int, ...]
    nbytes: int
    ready_s: float | None
    launched_s: float | None
    done_s: float | None


@dataclass(frozen=True)
class StepStats:
    """The last step that was waited for.

    Attributes:
        begin_ns: When the first gradient came, as ``time.perf_counter_ns`` counts.
        buckets: In the order in which they were planned.
        backward_s: From the first gradient to the call of ``wait()``.
        communication_s: Sum over buckets of the time from launch to done, where it is known.
        exposed_s: How long ``wait()`` took: what backward did not hide.
    """

    begin_ns: int = 0
    buckets: tuple[BucketStats, ...] = ()
    backward_s: float = 0.0
    communication_s: float = 0.0
    exposed_s: float = 0.0


class GradientBucketer:
    """Reduces the gradients of replicas, bucket by bucket, while backward goes on.

    Every parameter gets a hook that counts its gradient. When all gradients of a bucket are there
    on all ranks, it is reduced in the background, where the gradients lie; nothing is packed.
    Buckets follow the order in which gradients became ready in the first step; until then, the
    reverse order of the parameters.

    Args:
        replicas: One module per rank, or one list of parameters per rank, alike in shapes and
            dtypes. Parameters that do not require grad when it is made are left alone.
        comm: What reduces; if not given, a communicator in rank order over the replicas' devices,
            closed with the bucketer. A :class:`ProcessCommunicator`: one replica, this process's;
            see below.
        bucket_cap_mb: A bucket closes once it holds this many megabytes (10**6 bytes) of one rank's
            gradients. Parameters are never split.
        first_bucket_mb: The same for the first bucket: a small one leaves early.
        op: As in :meth:`Communicator.all_reduce`.
        overlap: False: reduce everything in :meth:`wait`. The bits are the same.

    Raises:
        ArgumentError: Replicas that differ, also in other processes; caps that are no positive
            numbers.
        UnsupportedError: Over processes, a reduction other than sum, mean and max.

    Gradients are what is reduced, as they are in ``param.grad`` when the last rank has them. After
    steps under :meth:`no_sync` they hold what was accumulated. A parameter that some ranks did not
    use counts as zeros there; one that no rank used is left alone.

    For example:

        bucketer = pr.GradientBucketer(replicas)
        for loss in losses:
            loss.backward()
        bucketer.wait()

    With one rank per process, every rank makes a bucketer of its one replica, and calls
    :meth:`wait` once a step, with samples or without. Gradients get the bits that one process with
    all replicas would give them. All ranks reduce in one order, rank 0's of the first step, so a
    bucket waits for those before it. Where a rank breaks off a step that has begun to leave, it
    leaves the group: its communicator is closed, and the other ranks get a ``PeerLostError``.

    Cost: a call of a microsecond or less for every parameter and rank, one collective per bucket,
    over processes with one element more per parameter.
    With ``torch.compile`` all hooks run at the end of the compiled backward: right, not overlapped.
    Source: Li et al. 2020, "PyTorch Distributed"; the first bucket's own cap is theirs too.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        *,
        comm: Communicator | RankCommunicator | None = None,
        bucket_cap_mb: float = 10,
        first_bucket_mb: float = 1,
        op: Any = "sum",
        overlap: bool = True,
    ) -> None:
        self._replicas = _check_replicas(replicas)
        caps = check_caps(bucket_cap_mb=bucket_cap_mb, first_bucket_mb=first_bucket_mb)
        self._params = [_trainable(replica) for replica in self._replicas]
        _check_alike(self._params)
        self._op = op
        self._overlap = bool(overlap)
        self._is_first_step = True
        self._has_failed = False
        self._works: dict[int, Work | None] = {}
        self._reduced: dict[int, list[Tensor]] = {}  # by rank, in this step
        self._stats = StepStats()
        self._owned: Communicator | None = None
        self._comm: Communicator | None = None
        self._elsewhere: ProcessRanks | None = None  # the ranks in other processes
        if isinstance(comm, RankCommunicator):
            if len(self._replicas) != 1:
                raise ArgumentError(
                    f"replicas has {len(self._replicas)} entries, but comm is one rank of "
                    f"{comm.world_size}, each in a process of its own: expected one replica"
                )
            self._elsewhere = ProcessRanks(comm, op, self._params[0], caps)
        else:
            self._comm = self._make_comm() if comm is None else comm
            if self._comm.world_size != len(self._replicas):
                raise ArgumentError(
                    f"comm has {self._comm.world_size} ranks for {len(self._replicas)} replicas"
                )
        this = weakref.ref(self)  # hooks must not keep the bucketer alive
        self._native = _native.engine().Bucketer(
            world_size=len(self._replicas),
            items=_items(self._params),
            first_cap_bytes=caps["first_bucket_mb"],
            cap_bytes=caps["bucket_cap_mb"],
            on_pass=_method(this, GradientBucketer._begin_pass),
            on_complete=_method(this, GradientBucketer._complete),
            on_trouble=_method(this, GradientBucketer._trouble),
        )
        self._handles: list[Any] = []
        self._add_hooks()

    def _make_comm(self) -> Communicator:
        devices = [params[0].device if params else "cpu" for params in self._params]
        self._owned = Communicator(devices, order="rank")
        return self._owned

    @property
    def buckets(self) -> list[list[int]]:
        """Indices of the parameters of each bucket, in the order in which buckets are expected."""
        buckets: list[list[int]] = self._native.buckets()
        return buckets

    def wait(self) -> None:
        """Reduce what has not been, and return when all gradients are reduced.

        On GPUs the current streams are ordered after the reductions; the host does not wait. Over
        processes this is a collective: also a rank without a backward pass takes part.

        Raises:
            RingarError: A backward pass failed since the last call; nothing that is in ``grad`` can
                be relied on. The next step starts afresh, unless the ranks are in processes and
                some buckets had left; it says so.
            ArgumentError, UnsupportedError, CollectiveTimeout, PeerLostError: As
                ``all_reduce_coalesced`` of the communicator; where that does not refuse further
                calls, the next step starts afresh.
        """
        began_ns = time.perf_counter_ns()
        try:
            self._check_passes()
            has_marks = self._adopt_new_parameters() or self._native.has_marks()
            if not has_marks and self._elsewhere is None:
                return
            for bucket in range(len(self._native.buckets())):
                if bucket not in self._works:
                    self._launch(bucket, is_complete=False, has_marks=has_marks)
            for work in self._works.values():
                if work is not None:
                    work.wait()
            order = self._settle_order()
        except BaseException:
            self._start_over()
            raise
        self._finish_step(began_ns, order)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of backward passes in here only accumulate; the next step outside reduces."""
        before = self._native.is_counting
        self._native.is_counting = False
        try:
            yield
        finally:
            self._native.is_counting = before

    def stats(self) -> StepStats:
        """What the last step did, and when."""
        return self._stats

    def close(self) -> None:
        """Remove the hooks; close the communicator if it is the bucketer's. May be called again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._settle()
        if self._owned is not None:
            self._owned.close()

    def __enter__(self) -> GradientBucketer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_handles"):
            self.close()

    # -- called by hooks ---------------------------------------------------------------------------

    def _begin_pass(self, number: int) -> None:
        """A new backward pass: have it tell when it ends, which one that fails does not."""
        self._has_failed = False
        native = self._native
        torch.autograd.Variable._execution_engine.queue_callback(lambda: native.finish_pass(number))

    def _complete(self, bucket: int) -> None:
        if not self._overlap:
            return
        try:
            turns = [bucket] if self._elsewhere is None else self._elsewhere.take(bucket)
            for turn in turns:
                self._launch(turn, is_complete=True)
        except BaseException:
            self._start_over()
            self._has_failed = True
            raise

    def _trouble(self, what: str, rank: int, param: int) -> None:
        """A gradient that was counted before: start over if it is new, else say what is wrong."""
        grad = self._params[rank][param].grad
        is_new = all(grad is not reduced for reduced in self._reduced.get(rank, ()))
        had_launched = bool(self._works)
        self._start_over()
        if self._elsewhere is not None and had_launched and (what == "after failure" or is_new):
            self._has_failed = True
            self._elsewhere.check()
            raise RingarError(
                "the step before was not waited for: ranks in other processes wait for it; call "
                "wait() once for every step, on all ranks"
            )
        if what == "after failure" or (what == "after launch" and is_new):
            return
        self._has_failed = True
        if what == "failure unnoticed":
            raise RingarError(
                "an earlier backward pass failed, and this one began with other parameters: clear "
                "all gradients (zero_grad) and run it again"
            )
        shape = tuple(self._params[rank][param].shape)
        raise RingarError(
            f"parameter {param} of rank {rank}, of shape {shape}, got a gradient after its bucket "
            "was reduced: call wait() between two backward passes, or put all but the last into "
            "no_sync(); where one pass adds to a parameter twice (a shared parameter under a "
            "reentrant checkpoint), take overlap=False"
        )

    # -- one step ----------------------------------------------------------------------------------

    def _launch(self, bucket: int, *, is_complete: bool, has_marks: bool = True) -> None:
        if self._elsewhere is not None:
            if is_complete:
                self._gradients(bucket, is_complete)  # they must be there
            wanted = self._native.buckets()[bucket]
            self._native.launched(bucket)
            self._works[bucket], grads = self._elsewhere.send(
                wanted, self._params[0], has_marks=has_marks
            )
            self._reduced.setdefault(0, []).extend(grads)
            return
        lists = self._gradients(bucket, is_complete)
        work = None
        if lists[0] and self._comm is not None:
            self._native.launched(bucket)  # before: it may be done when the call returns
            work = self._comm.all_reduce_coalesced(lists, self._op, async_op=True)
            for rank, grads in enumerate(lists):
                self._reduced.setdefault(rank, []).extend(grads)
        self._works[bucket] = work

    def _gradients(self, bucket: int, is_complete: bool) -> list[list[Tensor]]:
        """The gradients of a bucket by rank; zeros where other ranks have one."""
        wanted = self._native.buckets()[bucket]
        if not is_complete:
            used = [i for i in wanted if any(params[i].grad is not None for params in self._params)]
            for params in self._params:
                for i in used:
                    if params[i].grad is None:
                        params[i].grad = torch.zeros_like(params[i])
            wanted = used
        lists: list[list[Tensor]] = [[] for _ in self._params]
        for mine, params in zip(lists, self._params, strict=True):
            for i in wanted:
                grad = params[i].grad
                if grad is None:
                    raise RingarError(
                        f"the gradient of parameter {i} was gone before it was reduced: another "
                        "hook, such as an optimizer inside backward, has set it to None"
                    )
                mine.append(grad)
        return lists

    def _check_passes(self) -> None:
        if self._has_failed or self._native.has_unfinished_pass():
            self._has_failed = False
            raise RingarError(
                "a backward pass failed or still runs: its gradients cannot be waited for; clear "
                "them (zero_grad) and run backward again"
            )

    def _settle_order(self) -> list[int] | None:
        """After the first step: the order in which the gradients came, the same on all ranks."""
        has_gradients = self._native.has_marks()
        if self._elsewhere is not None:
            has_gradients = self._elsewhere.finish_step(self._params[0])
        if not (self._is_first_step and has_gradients):
            return None
        order: list[int] = self._native.ready_order()
        return order if self._elsewhere is None else self._elsewhere.agree_on_order(order)

    def _finish_step(self, began_ns: int, order: list[int] | None) -> None:
        if self._native.has_marks():
            self._stats = self._measure(began_ns, time.perf_counter_ns())
        self._forget_works()
        if order is not None:
            self._native.plan(order)
            self._is_first_step = False
        self._native.reset()

    def _measure(self, began_ns: int, ended_ns: int) -> StepStats:
        first_ns = self._native.begin_ns()

        def since(time_ns: int) -> float | None:
            return (time_ns - first_ns) * 1e-9 if time_ns else None

        rows = []
        for bucket, (params, (ready_ns, launched_ns)) in enumerate(
            zip(self._native.buckets(), self._native.times(), strict=True)
        ):
            work = self._works.get(bucket)
            done_ns = 0 if work is None else work.finished_ns()
            nbytes = self._native.bytes_of(bucket)
            rows.append(
                BucketStats(
                    tuple(params), nbytes, since(ready_ns), since(launched_ns), since(done_ns)
                )
            )
        spent = [b.done_s - b.launched_s for b in rows if b.done_s and b.launched_s is not None]
        return StepStats(
            begin_ns=first_ns,
            buckets=tuple(rows),
            backward_s=(began_ns - first_ns) * 1e-9,
            communication_s=sum(spent),
            exposed_s=(ended_ns - began_ns) * 1e-9,
        )

    def _settle(self) -> None:
        """Wait for what is under way, whatever becomes of it: the tensors are the user's again."""
        for work in self._works.values():
            if work is not None:
                with suppress(RingarError):
                    work.wait()
        if self._elsewhere is not None:
            self._elsewhere.leave(len(self._works), len(self._native.buckets()))
        self._forget_works()

    def _forget_works(self) -> None:
        self._works.clear()
        self._reduced.clear()
        if self._elsewhere is not None:
            self._elsewhere.begin_step()

    def _start_over(self) -> None:
        self._settle()
        self._native.reset()

    # -- parameters --------------------------------------------------------------------------------

    def _add_hooks(self) -> None:
        for rank, params in enumerate(self._params):
            for i, param in enumerate(params):
                hook = self._native.hook(rank, i)
                handle = param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                self._handles.append(handle)

    def _adopt_new_parameters(self) -> bool:
        """Parameters that were replaced (``load_state_dict(assign=True)``) get hooks."""
        if not any(isinstance(replica, nn.Module) for replica in self._replicas):
            return False
        now = [_trainable(replica) for replica in self._replicas]
        same = all(
            len(new) == len(old) and all(a is b for a, b in zip(new, old, strict=True))
            for new, old in zip(now, self._params, strict=True)
        )
        if same:
            return False
        if _items(now) != _items(self._params):
            raise ArgumentError(
                "the replicas' parameters have changed in number, shape, dtype or requires_grad; "
                "make a new GradientBucketer"
            )
        _check_alike(now)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._params = now
        self._add_hooks()
        return True


def _method(
    this: weakref.ref[GradientBucketer], method: Callable[..., None]
) -> Callable[..., None]:
    def call(*arguments: Any) -> None:
        bucketer = this()
        if bucketer is not None:
            method(bucketer, *arguments)

    return call


def _check_replicas(replicas: Any) -> list[Replica]:
    if isinstance(replicas, nn.Module) or not isinstance(replicas, Sequence) or not replicas:
        raise ArgumentError(
            f"replicas is a {type(replicas).__name__}, expected a list with one module, or one "
            "list of parameters, per rank"
        )
    return [r if isinstance(r, nn.Module) else list(r) for r in replicas]


def check_caps(**caps: Any) -> dict[str, int]:
    """Bytes of caps in megabytes, by name.

    Raises:
        ArgumentError: One is no positive number; names it.
    """
    for name, value in caps.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise ArgumentError(f"{name} is {value!r}, expected a positive number of megabytes")
    return {name: max(1, int(min(value, 1e12) * 1e6)) for name, value in caps.items()}


def _trainable(replica: Replica) -> list[Tensor]:
    params = replica.parameters() if isinstance(replica, nn.Module) else replica
    return [param for param in params if param.requires_grad]


def _check_alike(all_params: Sequence[Sequence[Tensor]]) -> None:
    for rank, params in enumerate(all_params):
        if len(params) != len(all_params[0]):
            raise ArgumentError(
                f"replicas[{rank}] has {len(params)} parameters that require grad, replicas[0] has "
                f"{len(all_params[0])}"
            )
        for i, (param, other) in enumerate(zip(params, all_params[0], strict=True)):
            if param.shape != other.shape or param.dtype != other.dtype:
                raise ArgumentError(
                    f"parameter {i} of replicas[{rank}] is {tuple(param.shape)} {param.dtype}, of "
                    f"replicas[0] {tuple(other.shape)} {other.dtype}"
                )


def _items(all_params: Sequence[Sequence[Tensor]]) -> list[tuple[int, int]]:
    """Bytes of every parameter, and its kind: the dtype and the devices of all ranks."""
    kinds: dict[Any, int] = {}
    items = []
    for column in zip(*all_params, strict=True):
        key = (column[0].dtype, tuple(param.device for param in column))
        kind = kinds.setdefault(key, len(kinds))
        items.append((column[0].numel() * column[0].element_size(), kind))
    return items
