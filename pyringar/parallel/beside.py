"""Replicas that compute at the same time: forward and backward of each in its rank's thread."""

from __future__ import annotations

import _thread
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from pyringar.comm.threads import Latch
from pyringar.errors import ArgumentError
from pyringar.parallel import nested
from pyringar.parallel.draws import RandomState, SeesDraws
from pyringar.parallel.graphs import differentiable, used_params
from pyringar.parallel.lockstep import (
    RankThreads,
    Running,
    can_leave_thread,
)
from pyringar.parallel.reducer import Reducer

__all__ = ["ReplicasBeside"]

logger = logging.getLogger(__name__)

Function = Callable[[], Any]
Tensors = Sequence[Tensor]


class ReplicasBeside:
    """Runs replicas at the same time, so that a graph through all of them does so in backward, too.

    A rank's part of the graph is its own. In the caller's graph a chain of nodes stands for all
    parts, one per bucket, with edges to its parameters. The first one's backward pass begins that
    of each rank, in its thread; each hands gradients on once all ranks have its own. So in the
    caller's thread, as ever, they are accumulated, hooks on parameters run, and buckets leave,
    while the ranks compute what is left.

    Random numbers come from generators that all threads share, in the order in which threads run.
    So the first call in each of the replicas' modes runs in turns, with what would be a rank's
    share of torch's threads; where that draws a number (`SeesDraws`), calls in this mode run in
    turns.

    Args:
        replicas: One per rank.
        threads: Where they run.
        reducer: Of their gradients.
    """

    def __init__(
        self, replicas: Sequence[nn.Module], threads: RankThreads, reducer: Reducer
    ) -> None:
        self.replicas, self.threads, self.reducer = replicas, threads, reducer
        self._in_turns: dict[Any, bool] = {}  # by mode, once that was tried

    def may_run(self, inputs: Any) -> bool:
        """Return whether a call can run so and give what it gives in turns.

        It cannot where this thread has modes or hooks of its own (`can_leave_thread`), an input
        requires a gradient, so that the graph goes on beyond the ranks, or is a generator of random
        numbers, where parameters have hooks, which may draw random numbers in the order of turns or
        wait for gradients of which some may stay None here, where a module is compiled, under
        ``parametrize.cached()``, which ties the graphs of several calls, and where the first call
        has shown that the module draws random numbers or that its graph is tied to others
        (`used_params`).

        Args:
            inputs: Of all ranks.
        """
        if self.threads.is_own() or not can_leave_thread() or self._in_turns.get(self._mode()):
            return False
        if torch.is_grad_enabled() and differentiable(inputs):
            return False
        if any(type(leaf) is torch.Generator for leaf in nested.leaves(inputs)):
            return False
        if getattr(parametrize, "_cache_enabled", 0):
            return False
        parts = [part for replica in self.replicas for part in replica.modules()]
        is_compiled = any(_is_compiled(part) for part in parts)
        return not is_compiled and not any(map(_has_users_hooks, _trained(self.replicas)))

    def run(self, functions: Mapping[int, Function]) -> dict[int, Any]:
        """Call ``functions[rank]()``, which calls the rank's replica, for all of them at once.

        Returns:
            The results by rank.

        Raises:
            RingarError: The system has no thread left.
            Exception: The first rank's that failed, in rank order, once all have ended.
        """
        mode = self._mode()
        is_first = mode not in self._in_turns
        before, seen = RandomState(), SeesDraws()
        looks = {
            rank: partial(
                self._call_and_look, rank, partial(seen.call, function) if is_first else function
            )
            for rank, function in functions.items()
        }
        found = self._call(looks, in_turns=is_first)
        outputs = {rank: output for rank, (output, _) in found.items()}
        used = {rank: params for rank, (_, params) in found.items() if params is not None}
        is_tied = len(used) < len(found)
        self._in_turns[mode] = self._in_turns.get(mode, False) or is_tied
        if seen.has_drawn or before != RandomState():
            self.note_draw(mode, is_first)
        if self._in_turns[mode] or not any(map(differentiable, outputs.values())):
            return outputs
        if not any(used.values()):
            return outputs
        graphs = _Graphs(self, mode, used, outputs, in_turns=is_first)
        joined = iter(_join(graphs))

        def exchange(tensor: Tensor) -> Tensor:
            return next(joined) if tensor.requires_grad else tensor

        return {rank: nested.map_tensors(exchange, output) for rank, output in outputs.items()}

    def _call(self, functions: Mapping[int, Function], *, in_turns: bool) -> dict[int, Any]:
        run = partial(self.threads.run, num_threads=self.threads.share())
        if not in_turns:
            return run(functions)
        return {rank: run({rank: function})[rank] for rank, function in functions.items()}

    def _call_and_look(self, rank: int, function: Function) -> tuple[Any, set[int] | None]:
        """Return what a rank's call returns, and what `used_params` does; in its thread."""
        output = function()
        has_graph = torch.is_grad_enabled() or bool(differentiable(output))
        return output, used_params(self.replicas[rank], output) if has_graph else set()

    def _mode(self) -> Any:
        parts = self.replicas[0].modules()
        return torch.is_grad_enabled(), tuple(part.training for part in parts)

    def note_draw(self, mode: Any, is_first: bool) -> None:
        """Let calls in a mode take turns; warn if they have not done so from the first."""
        self._in_turns[mode] = True
        if not is_first:
            logger.warning(
                "random numbers were drawn while the ranks of this DataParallel ran at the same "
                "time, which was not so before: if by the module, this step is not repeatable; "
                "from now on they take turns, as with in_turns=True. Where another thread of yours "
                "drew them, give that a generator of its own"
            )


def _trained(replicas: Sequence[nn.Module]) -> list[Tensor]:
    return [p for replica in replicas for p in replica.parameters() if p.requires_grad]


class _Graphs:
    """Hold what the ranks' calls have recorded, each in a graph of its own.

    Attributes:
        params: Of each rank that ran, those that require gradients.
        sections: Which of these, by rank and index, get their gradients together: those of a
            bucket, as planned now.
    """

    def __init__(
        self,
        owner: ReplicasBeside,
        mode: Any,
        used: Mapping[int, set[int]],
        outputs: Mapping[int, Any],
        *,
        in_turns: bool,
    ) -> None:
        self.owner, self.mode, self.in_turns = owner, mode, in_turns
        self.forward_state = RandomState()
        self.outputs = {rank: differentiable(outputs[rank]) for rank in used}
        _check_alike({rank: owner.replicas[rank] for rank in used})
        self.params = {rank: _trained([owner.replicas[rank]]) for rank in used}
        plan = owner.reducer.sections(len(next(iter(self.params.values()))))
        # Hooks of a parameter that a rank has not used are not to run.
        everywhere = [
            [(r, i) for i in bucket for r, mine in self.params.items() if id(mine[i]) in used[r]]
            for bucket in plan
        ]
        self.sections = [places for places in everywhere if places]
        self.passes: dict[int, _Pass] = {}  # those that have not ended, by torch's number

    def column(self, section: int) -> list[Tensor]:
        """Return a section's parameters, one after the other, each on all ranks."""
        return [self.params[rank][i] for rank, i in self.sections[section]]

    def backward(self, section: int, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients of a section's parameters; the first section's begins a pass.

        Args:
            section: Its number.
            grads: Of the outputs, for the first section.
        """
        number = torch._C._current_graph_task_id()
        if section > 0:
            return self.passes[number].take(section)
        begun = self.passes[number] = _Pass(self, number)
        # Untyped. Torch holds it until the pass ends, well or not.
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(_PassEnd(begun))
        begun.begin(grads)
        return begun.take(0)


class _Ended:
    """Stand for a `_PassEnd` that was run: nothing is left to run when torch drops it.

    An interrupt that comes while a finalizer runs is lost.
    """


class _PassEnd:
    """Torch calls it when a pass ends well, and drops it when one fails, before that is raised.

    Then another node of the caller's graph may have failed, or a bucket that left, while ranks
    still compute: they are waited for.
    """

    def __init__(self, of: _Pass) -> None:
        self.of = of

    def __call__(self) -> None:
        self.of.finish()
        self.of.forget()
        self.__class__ = _Ended  # type: ignore[assignment]

    def __del__(self) -> None:
        is_interrupted = False
        while not self.of.is_finished:
            try:
                self.of.stop()
            except KeyboardInterrupt:  # cannot be raised in here
                is_interrupted = True
        self.of.forget()
        if is_interrupted:
            _thread.interrupt_main()


class _Pass:
    """One backward pass through the graphs of all ranks, each in its thread.

    A section is handed on once all ranks have its gradients, while their threads compute others.
    All are once all ranks have ended where ranks take turns, under ``create_graph=True``, and where
    users' hooks on parameters would run meanwhile: they may draw random numbers, or look around.
    Where the caller's thread has modes (`can_leave_thread`), all run there.
    """

    def __init__(self, graphs: _Graphs, number: int) -> None:
        self._graphs, self._number = graphs, number
        sections, ranks = graphs.sections, graphs.params
        self._is_here = not can_leave_thread()
        self._in_turns = graphs.in_turns or self._is_here
        self._is_early = (
            len(sections) > 1
            and not (self._in_turns or torch.is_grad_enabled())
            and not any(_has_users_hooks(param) for mine in ranks.values() for param in mine)
        )
        self._wants_order = graphs.owner.reducer.wants_order
        self._section_of = {place: n for n, places in enumerate(sections) for place in places}
        self._found: dict[int, list[Tensor | None]] = {r: [None] * len(ranks[r]) for r in ranks}
        self._came: dict[int, list[int]] = {rank: [] for rank in ranks}  # in this order, by hooks
        self._missing = {r: [sum(q == r for q, _ in places) for places in sections] for r in ranks}
        self._arrived: list[list[int]] = [[] for _ in sections]  # ranks that have all of it
        self._latches = [Latch() for _ in sections]  # open where all ranks have
        self._numbers: dict[int, int] = {}  # torch's, of the ranks' own passes
        self._num_ranks = 0
        self._has_failed = self.is_finished = False
        self._before, self._seen = RandomState(), SeesDraws()
        self._running = Running()

    def begin(self, grads: Sequence[Tensor | None]) -> None:
        """Let all ranks' passes begin; where they take turns, end."""
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        rest = iter(grads)
        tasks: dict[int, Function] = {}
        for rank, outputs in self._graphs.outputs.items():
            pairs = [(t, g) for t in outputs if (g := next(rest)) is not None]
            if pairs and self._graphs.params[rank]:
                tasks[rank] = partial(self._run_rank, rank, pairs, keep)
        self._num_ranks = len(tasks)
        threads = self._graphs.owner.threads
        try:
            if self._in_turns:
                # As torch does where one graph has them all: what was recorded last comes first.
                for rank, task in reversed(tasks.items()):
                    if self._is_here:
                        task()
                    else:
                        seen = partial(self._seen.call, task)
                        threads.run({rank: seen}, num_threads=threads.share())
            else:
                threads.begin(tasks, self._running, num_threads=threads.share())
        except BaseException:
            self.stop()
            raise

    def take(self, section: int) -> list[Tensor | None]:
        """Return a section's gradients, as `_Graphs.column` has the parameters, and forget them."""
        is_last = section == len(self._latches) - 1
        try:
            if self._is_early and self._num_ranks and not is_last:
                while not self._latches[section].wait(1.0):
                    self._running.check()
            else:
                self.finish()
            if self._has_failed:
                self.finish()
        except BaseException:
            self.stop()
            raise
        # Forgotten, so that torch need not copy them.
        return [_pop(self._found[rank], i) for rank, i in self._graphs.sections[section]]

    def finish(self) -> None:
        """Wait until all ranks have ended; raise the error of the first that failed."""
        if self.is_finished:
            return
        try:
            self._running.wait()
        except BaseException:
            self.stop()
            raise
        self.is_finished = True
        self._running.results()
        owner, before, after = self._graphs.owner, self._before, RandomState()
        # Activation checkpointing sets the state of the call in forward, and then the one before:
        # two threads at once may leave the former.
        if after.is_torch_as(self._graphs.forward_state) and not after.is_torch_as(before):
            before.restore()
            after = RandomState()
        if self._seen.has_drawn or before != after:
            owner.note_draw(self._graphs.mode, self._in_turns)
        if self._wants_order:
            owner.reducer.note_order(self._came.get(0, []))

    def stop(self) -> None:
        """Let no rank begin any more, and wait for those that have."""
        self._running.stop()
        self.is_finished = True

    def forget(self) -> None:
        """Let nothing find this any more; it has ended."""
        self._graphs.passes.pop(self._number, None)

    # -- in the thread of a rank -------------------------------------------------------------------

    def _run_rank(self, rank: int, pairs: Sequence[tuple[Tensor, Tensor]], keep: bool) -> None:
        params = self._graphs.params[rank]
        roots = [output.grad_fn for output, _ in pairs if output.grad_fn is not None]
        is_hooked = bool(roots) and (self._is_early or (self._wants_order and rank == 0))
        takes = [partial(self._take, rank, i, param) for i, param in enumerate(params)]
        for section, num_missing in enumerate(self._missing[rank]):
            if num_missing == 0:
                self._arrive(rank, section)
        try:
            with ExitStack() as stack:
                stack.enter_context(_without_hooks(params))
                if is_hooked:
                    stack.enter_context(_with_hooks(params, takes))
                    for root in roots:
                        stack.callback(root.register_prehook(partial(self._note, rank)).remove)
                found = _gradients(pairs, params, keep)
            came = set(self._came[rank])
            for i, grad in enumerate(found):
                if i not in came:
                    self._found[rank][i] = grad
        except BaseException:
            self._has_failed = True
            raise
        finally:
            for section, num_missing in enumerate(self._missing[rank]):
                if num_missing > 0:
                    self._arrive(rank, section)

    def _note(self, rank: int, grads: Any) -> None:
        """Note the number of the rank's own pass; modules may run passes inside of it."""
        self._numbers.setdefault(rank, torch._C._current_graph_task_id())

    def _take(self, rank: int, i: int, param: Tensor, grad: Tensor | None) -> Tensor | None:
        """Take a gradient; give torch, which would hold it to the end, something in its place."""
        if torch._C._current_graph_task_id() != self._numbers.get(rank):
            return None
        _hooks_of(param).pop(_OURS, None)  # the caller's graph is not to meet it
        self._found[rank][i] = grad
        self._came[rank].append(i)
        section = self._section_of[rank, i]
        self._missing[rank][section] -= 1
        if self._missing[rank][section] == 0:
            self._arrive(rank, section)
        return param.detach() if grad is not None and grad.layout == param.layout else None

    def _arrive(self, rank: int, section: int) -> None:
        arrived = self._arrived[section]
        arrived.append(rank)
        if arrived[self._num_ranks - 1 :] == [rank]:  # the last one, whoever looks meanwhile
            self._latches[section].open()


_OURS = "pyringar"  # the key of a pass's own hook on a parameter


def _pop(found: list[Tensor | None], i: int) -> Tensor | None:
    grad, found[i] = found[i], None
    return grad


def _check_alike(replicas: Mapping[int, nn.Module]) -> None:
    """Refuse parameters that require gradients on some ranks only.

    Raises:
        ArgumentError: Names the first one, and the ranks.
    """
    named = {rank: dict(replica.named_parameters()) for rank, replica in replicas.items()}
    first, *others = named
    for other in others:
        for name, param in named[other].items():
            if param.requires_grad != named[first][name].requires_grad:
                ranks = (first, other) if param.requires_grad else (other, first)
                raise ArgumentError(
                    f"parameter '{name}' does not require gradients on rank {ranks[0]}, but does "
                    f"on rank {ranks[1]}, expected the same on all: freeze it on the module, and "
                    "make DataParallel from that"
                )


class _Join(torch.autograd.Function):
    """A section of the graphs of all ranks: from their outputs to some of their parameters.

    The first section's node has the outputs. Each has an edge to the next one's, made before it,
    beside those to its parameters: torch runs it once these have got their gradients.
    """

    @staticmethod
    def forward(ctx: Any, graphs: _Graphs, section: int, *_: Tensor) -> Any:
        ctx.graphs, ctx.section = graphs, section
        ctx.set_materialize_grads(False)
        if section > 0:
            return torch.empty(())
        return tuple(t.detach() for outputs in graphs.outputs.values() for t in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        found = ctx.graphs.backward(ctx.section, grads)
        return None, None, *[None] * (len(ctx.needs_input_grad) - 2 - len(found)), *found


def _join(graphs: _Graphs) -> Tensors:
    # Through Any: torch 2.13 does not type `apply`, torch 2.15 does.
    apply: Any = _Join.apply
    joined: Any = ()
    for section in reversed(range(1, len(graphs.sections))):
        joined = (apply(graphs, section, *joined, *graphs.column(section)),)
    outputs: Tensors = apply(graphs, 0, *joined, *graphs.column(0))
    return outputs


def _gradients(
    pairs: Sequence[tuple[Tensor, Tensor]], params: Tensors, keep: bool
) -> Sequence[Tensor | None]:
    outputs, grads = zip(*pairs, strict=True)
    try:
        return torch.autograd.grad(
            *(outputs, params, grads),
            retain_graph=keep,
            create_graph=torch.is_grad_enabled(),
            allow_unused=True,
        )
    except RuntimeError as error:
        if "second time" in str(error) and hasattr(error, "add_note"):  # from Python 3.11 on
            error.add_note(
                "Where a loss takes what modules keep beside their outputs, or gradients of "
                "gradients of parameters, make pyringar.DataParallel with in_turns=True."
            )
        raise


@contextmanager
def _without_hooks(params: Tensors) -> Iterator[None]:
    """Take the hooks off parameters' gradients: the caller's graph calls them, and only once."""
    kept = [(p._backward_hooks, dict(p._backward_hooks)) for p in params if p._backward_hooks]
    for hooks, _ in kept:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, copies in kept:
            hooks.update(copies)


@contextmanager
def _with_hooks(params: Tensors, hooks: Sequence[Callable[[Any], Any]]) -> Iterator[None]:
    """Let one hook more see the gradient of each parameter."""
    try:
        for param, hook in zip(params, hooks, strict=True):
            if param._backward_hooks is None:
                param._backward_hooks = OrderedDict()
            _hooks_of(param)[_OURS] = hook
        yield
    finally:
        for param in params:
            _hooks_of(param).pop(_OURS, None)


def _hooks_of(param: Tensor) -> dict[Any, Any]:
    hooks: dict[Any, Any] | None = param._backward_hooks
    return {} if hooks is None else hooks


def _has_users_hooks(param: Tensor) -> bool:
    return bool(param._backward_hooks) or len(param._post_accumulate_grad_hooks or ()) > 1


def _is_compiled(part: nn.Module) -> bool:
    return part._compiled_call_impl is not None or hasattr(part, "_orig_mod")
