"""Run a function per rank: in order, in one thread per GPU, or in lockstep."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from pyringar.comm.exits import empty_backward_at_exit
from pyringar.comm.threads import starting_thread
from pyringar.errors import RingarError
from pyringar.parallel.shards import Devices

Function = Callable[[], Any]
Combine = Callable[[list[Any]], Sequence[Any]]  # maps the ranks' values to outputs


def run_ranks(functions: Mapping[int, Function], devices: Devices) -> dict[int, Any]:
    """Call ``functions[rank]()`` for every rank; return the results by rank.

    Ranks on several GPUs run in one thread per GPU. On one device, or if the caller has entered
    torch modes, all ranks run in the caller's thread, in rank order. Raises the error of the lowest
    rank that failed, with a note that names the rank (Python 3.11).
    """
    named = {rank: partial(_named, rank, devices, function) for rank, function in functions.items()}
    by_device: dict[torch.device, dict[int, Function]] = {}
    for rank, function in named.items():
        by_device.setdefault(devices[rank], {})[rank] = function
    if len(by_device) == 1 or has_modes():
        return run_in_order(named)
    groups = [partial(run_in_order, mine) for mine in by_device.values()]
    results: dict[int, Any] = {}
    for found in _run_in_threads(groups, [*by_device]):
        results |= found
    return {rank: results[rank] for rank in functions}


def _named(rank: int, devices: Devices, function: Function) -> Any:
    try:
        return function()
    except Exception as error:
        if hasattr(error, "add_note"):
            error.add_note(f"(rank {rank} of {len(devices)}, on {devices[rank]})")
        raise


def run_in_order(functions: Mapping[int, Function]) -> dict[int, Any]:
    return {rank: function() for rank, function in functions.items()}


def has_modes() -> bool:
    """Return True if this thread has entered torch modes, which new threads do not inherit."""
    return bool(
        torch._C._len_torch_function_stack()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def _run_in_threads(
    functions: Sequence[Function], devices: Devices, abandon: Function = lambda: None
) -> list[Any]:
    """Call each function in a new thread with the caller's torch settings.

    ``devices``: the threads' current devices. An interrupt calls ``abandon``, which must make the
    functions end soon. After all functions have ended, raises the error of the first that failed.
    """
    call = _with_settings(devices)
    results: list[Any] = [None] * len(functions)
    errors: dict[int, BaseException] = {}
    running: set[int] = set()
    is_over = False
    changed = threading.Condition()

    def run(i: int) -> None:
        with changed:
            if is_over:
                return
            running.add(i)
        try:
            results[i] = call(devices[i], functions[i])
        except BaseException as error:
            errors[i] = error
        with changed:
            running.remove(i)
            changed.notify_all()

    started = []  # an executor would not wait for an interrupted start
    try:
        for i in range(len(functions)):
            in_context = partial(contextvars.copy_context().run, run, i)
            thread = threading.Thread(target=in_context, name="pyringar rank", daemon=True)
            with starting_thread("pyringar rank"):
                thread.start()
            started.append(thread)
        for thread in started:
            thread.join()
    except BaseException:
        abandon()
        with changed:  # join() no longer waits: the interrupt marked the thread as ended
            is_over = True
            changed.wait_for(lambda: not running)
        raise
    if errors:
        try:
            raise errors[min(errors, key=lambda i: (isinstance(errors[i], _AbandonedError), i))]
        finally:
            errors.clear()  # breaks a cycle: the error's traceback holds this frame
    return results


def _with_settings(devices: Devices) -> Callable[[torch.device, Function], Any]:
    """Return a function that calls functions with this thread's autocast, grad mode and streams."""
    gpus = {device for device in devices if device.type == "cuda"}
    streams = {device: torch.cuda.current_stream(device) for device in gpus}
    has_grad, is_inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    dtypes = {kind: torch.get_autocast_dtype(kind) for kind in kinds}
    caches_casts = torch.is_autocast_cache_enabled()
    saving = torch._C._autograd._top_saved_tensors_default_hooks(True)
    torch.autocast_increment_nesting()
    is_in_autocast = torch.autocast_decrement_nesting() > 0

    def call(device: torch.device, function: Function) -> Any:
        with ExitStack() as stack:
            # Enter the stream of the thread's device last, so that this device is current.
            for gpu in sorted(streams, key=lambda gpu: gpu == device):
                stack.enter_context(torch.cuda.stream(streams[gpu]))
            stack.enter_context(torch.inference_mode(is_inference))
            stack.enter_context(torch.set_grad_enabled(has_grad))
            if is_in_autocast:
                # A thread that leaves its outermost autocast clears the cast cache of all threads.
                torch.autocast_increment_nesting()
            for kind, dtype in dtypes.items():
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=caches_casts))
            if saving is not None:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*saving))
            return function()

    return call


def run_in_lockstep(functions: Mapping[int, Function], devices: Devices) -> dict[int, Any]:
    """Call ``functions[rank]()`` for every rank; the functions may exchange values in `meet`.

    One rank runs at a time: rank 0 until it calls `meet`, then rank 1, and so on. So ranks draw
    random numbers in the same order in every run. GPUs work at the same time, since a rank only
    enqueues kernels. Raises the error of the rank that failed; all other ranks end in their next
    `meet`.
    """
    run = _LockstepRun(len(functions))
    parts = [
        partial(_named, rank, devices, partial(run.take_part, position, function))
        for position, (rank, function) in enumerate(functions.items())
    ]
    results = _run_in_threads(parts, [devices[rank] for rank in functions], run.abandon)
    return dict(zip(functions, results, strict=True))


def meet(name: str, value: Any, combine: Combine) -> Any:
    """Wait until all ranks of the lockstep run call `meet`; return this rank's output.

    ``combine`` is called once, with the values of all ranks in rank order, and returns one output
    per rank. Raises RingarError outside of `run_in_lockstep`, or if ranks pass different names.
    """
    part: tuple[_LockstepRun, int] | None = getattr(_here, "part", None)
    if part is None:
        empty_backward_at_exit()
        raise RingarError(
            f"'{name}' needs all ranks, but was called outside of the forward pass of "
            "batchnorm='sync' (activation checkpointing calls layers again: use batchnorm='local')"
        )
    run, position = part
    return run.meet(position, name, value, combine)


_here = threading.local()  # .part: (lockstep run of this thread, its position in the run)


class _AbandonedError(RingarError):
    """Ends a rank after another rank has failed; the caller gets the error of that rank."""


class _LockstepRun:
    """One call of `run_in_lockstep`: only the rank at ``_current`` runs."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._condition = threading.Condition()
        self._current = 0
        self._is_abandoned = False
        self._name = ""
        self._values: list[Any] = []
        self._outputs: Sequence[Any] = ()

    def abandon(self) -> None:
        """End every rank in its next `meet`."""
        with self._condition:
            self._is_abandoned = True
            self._condition.notify_all()

    def take_part(self, position: int, function: Function) -> Any:
        """Call ``function()`` after all lower ranks have called `meet` or ended."""
        _here.part = (self, position)
        try:
            self._wait_for(position)
            result = function()
            self.meet(position, "the end", None, lambda values: values)
        except BaseException:
            self.abandon()
            raise
        finally:
            del _here.part
            self._pass_on(position)
        return result

    def meet(self, position: int, name: str, value: Any, combine: Combine) -> Any:
        if self._is_abandoned:
            raise _AbandonedError("another rank failed")
        if self._values and name != self._name:
            raise RingarError(
                f"with batchnorm='sync' all ranks must run the same batch norms: a rank is at "
                f"{self._name!r}, another rank at {name!r}"
            )
        self._name = name
        self._values.append(value)
        if len(self._values) == self._num_ranks:
            values, self._values = self._values, []
            self._outputs = combine(values)
        self._pass_on(position)
        self._wait_for(position)
        return self._outputs[position]

    def _pass_on(self, position: int) -> None:
        with self._condition:
            self._current = (position + 1) % self._num_ranks
            self._condition.notify_all()

    def _wait_for(self, position: int) -> None:
        with self._condition:
            self._condition.wait_for(lambda: self._current == position or self._is_abandoned)
        if self._is_abandoned:
            raise _AbandonedError("another rank failed")
