"""Threads in which ranks run: one per GPU, or one per rank where ranks exchange tensors."""

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
Combine = Callable[[list[Any]], Sequence[Any]]  # the offers of all ranks to their answers


def run_ranks(functions: Mapping[int, Function], devices: Devices) -> dict[int, Any]:
    """Call ``functions[rank]()`` for every rank, and return the results by rank.

    Ranks on several GPUs run at the same time, in one thread per GPU. All other ranks run in the
    caller's thread, in rank order, as do all ranks under modes of this thread. Raises the error of
    the first rank that failed, with a note that names the rank (Python 3.11).
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
    """Return whether this thread has entered modes of torch that other threads lack."""
    return bool(
        torch._C._len_torch_function_stack()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def _run_in_threads(
    functions: Sequence[Function], devices: Devices, abandon: Function = lambda: None
) -> list[Any]:
    """Call the functions at the same time, each in a new thread with the caller's torch settings.

    ``devices``: the threads' current devices. An interrupt calls ``abandon``, which makes the
    functions end soon. When all have ended, raises the error of the first function that failed.
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

    begun = []  # no executor: it would not wait for a thread whose start is interrupted
    try:
        for i in range(len(functions)):
            in_context = partial(contextvars.copy_context().run, run, i)
            thread = threading.Thread(target=in_context, name="pyringar rank", daemon=True)
            with starting_thread("pyringar rank"):
                thread.start()
            begun.append(thread)
        for thread in begun:
            thread.join()
    except BaseException:
        abandon()
        with changed:  # an interrupted join() leaves its thread marked as ended
            is_over = True
            changed.wait_for(lambda: not running)
        raise
    if errors:
        try:
            raise errors[min(errors, key=lambda i: (isinstance(errors[i], _AbandonedError), i))]
        finally:
            errors.clear()  # the error's traceback holds this frame
    return results


def _with_settings(devices: Devices) -> Callable[[torch.device, Function], Any]:
    """Return a function that calls another with this thread's modes, autocast and streams."""
    gpus = {device for device in devices if device.type == "cuda"}
    streams = {device: torch.cuda.current_stream(device) for device in gpus}
    has_grad, is_inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    dtypes = {kind: torch.get_autocast_dtype(kind) for kind in kinds}
    caches_casts = torch.is_autocast_cache_enabled()
    # The hooks on tensors that autograd saves.
    saving = torch._C._autograd._top_saved_tensors_default_hooks(True)
    torch.autocast_increment_nesting()
    is_in_autocast = torch.autocast_decrement_nesting() > 0

    def call(device: torch.device, function: Function) -> Any:
        with ExitStack() as stack:
            # The thread's own device comes last and stays current.
            for gpu in sorted(streams, key=lambda gpu: gpu == device):
                stack.enter_context(torch.cuda.stream(streams[gpu]))
            stack.enter_context(torch.inference_mode(is_inference))
            stack.enter_context(torch.set_grad_enabled(has_grad))
            if is_in_autocast:
                # torch clears the casts of all threads when one leaves its outermost autocast.
                torch.autocast_increment_nesting()
            for kind, dtype in dtypes.items():
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=caches_casts))
            if saving is not None:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*saving))
            return function()

    return call


def run_in_lockstep(functions: Mapping[int, Function], devices: Devices) -> dict[int, Any]:
    """Call ``functions[rank]()`` for every rank, each of which may `meet` the other ranks.

    One rank runs at a time: rank 0 until it meets, then rank 1, and so on, so random numbers are
    drawn in the same order in every run. GPUs work at the same time: a rank only enqueues. Raises
    the error of the rank that failed; the other ranks end at their next meeting.
    """
    run = _Run(len(functions))
    parts = [
        partial(_named, rank, devices, partial(run.take_part, position, function))
        for position, (rank, function) in enumerate(functions.items())
    ]
    results = _run_in_threads(parts, [devices[rank] for rank in functions], run.abandon)
    return dict(zip(functions, results, strict=True))


def meet(place: str, offer: Any, combine: Combine) -> Any:
    """Wait until all ranks of the run are here, and return this rank's answer.

    ``combine`` is called once, with all offers in rank order, and returns one answer per offer.
    RingarError outside of `run_in_lockstep`, or if another rank is at another ``place``.
    """
    part: tuple[_Run, int] | None = getattr(_here, "part", None)
    if part is None:
        empty_backward_at_exit()
        raise RingarError(
            f"'{place}' needs all ranks, but was called outside of the forward pass of "
            "batchnorm='sync' (activation checkpointing calls layers again: use batchnorm='local')"
        )
    run, position = part
    return run.meet(position, place, offer, combine)


_here = threading.local()  # .part: the run of this thread, and its position there


class _AbandonedError(RingarError):
    """Another rank failed, and its error is the one to raise."""


class _Run:
    """One run in lockstep; at most one rank, the current one, is not waiting."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._condition = threading.Condition()
        self._current = 0
        self._is_abandoned = False
        self._place = ""
        self._offers: list[Any] = []
        self._answers: Sequence[Any] = ()

    def abandon(self) -> None:
        """End all ranks at their next meeting."""
        with self._condition:
            self._is_abandoned = True
            self._condition.notify_all()

    def take_part(self, position: int, function: Function) -> Any:
        """Call ``function()`` when the ranks before this one have met or ended."""
        _here.part = (self, position)
        try:
            self._wait_for(position)
            result = function()
            self.meet(position, "the end", None, lambda offers: offers)
        except BaseException:
            self.abandon()
            raise
        finally:
            del _here.part
            self._pass_on(position)
        return result

    def meet(self, position: int, place: str, offer: Any, combine: Combine) -> Any:
        if self._is_abandoned:
            raise _AbandonedError("another rank failed")
        if self._offers and place != self._place:
            raise RingarError(f"the ranks meet at different places: {self._place!r}, {place!r}")
        self._place = place
        self._offers.append(offer)
        if len(self._offers) == self._num_ranks:
            offers, self._offers = self._offers, []
            self._answers = combine(offers)
        self._pass_on(position)
        self._wait_for(position)
        return self._answers[position]

    def _pass_on(self, position: int) -> None:
        with self._condition:
            self._current = (position + 1) % self._num_ranks
            self._condition.notify_all()

    def _wait_for(self, position: int) -> None:
        with self._condition:
            self._condition.wait_for(lambda: self._current == position or self._is_abandoned)
        if self._is_abandoned:
            raise _AbandonedError("another rank failed")
