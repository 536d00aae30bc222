"""Replicas that compute at the same time: forward and backward of each in its rank's thread."""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pyringar.errors import ArgumentError
from pyringar.parallel import nested
from pyringar.parallel.lockstep import RankThreads, can_leave_thread, is_in_autocast, saving_hooks

__all__ = ["ReplicasBeside"]

logger = logging.getLogger(__name__)

Function = Callable[[], Any]
Tensors = Sequence[Tensor]


class ReplicasBeside:
    """Runs replicas at the same time, so that a graph through all of them does so in backward, too.

    A rank's part of the graph is its own; in the caller's graph one node stands for all parts, with
    an edge to every parameter. Its backward pass computes the gradients of all ranks, each in its
    thread, and hands them on: hooks on parameters run in the caller's thread, as ever.

    Random numbers come from generators that all threads share, in the order in which threads run.
    So the first call in each of the replicas' modes runs in turns, with what would be a rank's
    share of torch's threads; where that draws a number, calls in this mode run in turns.

    Args:
        replicas: One per rank.
        threads: Where they run.
    """

    def __init__(self, replicas: Sequence[nn.Module], threads: RankThreads) -> None:
        self._replicas = replicas
        self._threads = threads
        self._in_turns: dict[Any, bool] = {}  # by mode, once that was tried

    def may_run(self, inputs: Any) -> bool:
        """Return whether a call can run so and give what it gives in turns.

        It cannot where this thread has modes or hooks of its own (`can_leave_thread`), an input
        requires a gradient, so that the graph goes on beyond the ranks, where hooks wait for
        gradients of parameters, of which some may stay None here, where a module is compiled, and
        where the first call has shown that the module draws random numbers or that its graph is
        tied to others (`_is_tied`).

        Args:
            inputs: Of all ranks.
        """
        if self._threads.is_own() or not can_leave_thread() or self._in_turns.get(self._mode()):
            return False
        if torch.is_grad_enabled() and _differentiable(inputs):
            return False
        parts = [part for replica in self._replicas for part in replica.modules()]
        is_compiled = any(_is_compiled(part) for part in parts)
        return not is_compiled and not any(p._backward_hooks for p in self._params(self._replicas))

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
        before = _RandomState()
        outputs = self._call(functions, in_turns=is_first)
        outer = [t for rank in outputs for t in _differentiable(outputs[rank])]
        # In every call: what a module uses may require gradients from now on.
        is_tied = bool(outer) and any(self._is_tied(rank, outputs[rank]) for rank in outputs)
        self._in_turns[mode] = self._in_turns.get(mode, False) or is_tied
        if before != _RandomState():
            self._note_draw(mode, is_first)
        if not outer or self._in_turns[mode]:
            return outputs
        graphs = _Graphs(self, mode, functions, outputs, in_turns=is_first)
        joined = iter(_join(graphs))

        def exchange(tensor: Tensor) -> Tensor:
            return next(joined) if tensor.requires_grad else tensor

        return {rank: nested.map_tensors(exchange, output) for rank, output in outputs.items()}

    def _call(self, functions: Mapping[int, Function], *, in_turns: bool) -> dict[int, Any]:
        run = partial(self._threads.run, num_threads=self._threads.share())
        if not in_turns:
            return run(functions)
        return {rank: run({rank: function})[rank] for rank, function in functions.items()}

    def _is_tied(self, rank: int, output: Any) -> bool:
        """Return whether a rank's graph is not only from its outputs to its parameters.

        That is: it leads to other tensors, modules keep parts of it, for a loss to take, or it has
        a checkpoint that recomputes in a pass of its own (``use_reentrant=True``). Or the module
        has entered autocast itself and uses a parameter twice: how often that is cast depends on
        when the other ranks leave theirs.
        """
        replica = self._replicas[rank]
        params = set(replica.parameters())
        nodes = _nodes(_differentiable(output))
        leaves = [node.variable for node in nodes if hasattr(node, "variable")]
        return (
            any(leaf not in params for leaf in leaves)
            or any(type(node).__name__ == "CheckpointFunctionBackward" for node in nodes)
            or any(map(_keeps_graph, replica.modules()))
            or (not is_in_autocast() and _uses_casts_twice(nodes))
        )

    def _mode(self) -> Any:
        parts = self._replicas[0].modules()
        return torch.is_grad_enabled(), tuple(part.training for part in parts)

    def _note_draw(self, mode: Any, is_first: bool) -> None:
        self._in_turns[mode] = True
        if not is_first:
            logger.warning(
                "the ranks of this DataParallel have drawn random numbers while they ran at the "
                "same time, which they had not done before: this step is not repeatable; from now "
                "on they take turns, as with in_turns=True"
            )

    @staticmethod
    def _params(replicas: Sequence[nn.Module]) -> list[Tensor]:
        return [p for replica in replicas for p in replica.parameters() if p.requires_grad]


class _Graphs:
    """Hold what the ranks' calls have recorded, each in a graph of its own."""

    def __init__(
        self,
        owner: ReplicasBeside,
        mode: Any,
        functions: Mapping[int, Function],
        outputs: Mapping[int, Any],
        *,
        in_turns: bool,
    ) -> None:
        self._owner, self._mode, self._in_turns = owner, mode, in_turns
        self._forward_state = _RandomState()
        self.outputs = {rank: _differentiable(outputs[rank]) for rank in functions}
        _check_alike({rank: owner._replicas[rank] for rank in functions})
        self._params = {rank: owner._params([owner._replicas[rank]]) for rank in functions}
        columns = zip(*(reversed(params) for params in self._params.values()), strict=True)
        # As backward meets them: last to first, on all ranks.
        self.params = [param for column in columns for param in column]

    def backward(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients of ``params`` from those of the outputs."""
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        rest = iter(grads)
        tasks: dict[int, Function] = {}
        for rank, outputs in self.outputs.items():
            pairs = [(t, g) for t in outputs if (g := next(rest)) is not None]
            if pairs and self._params[rank]:
                tasks[rank] = partial(_gradients, pairs, self._params[rank], keep)
        before = _RandomState()
        in_turns = self._in_turns or saving_hooks() is not None  # those of create_graph=True
        with _without_hooks(self.params):
            found = self._owner._call(tasks, in_turns=in_turns)
        after = _RandomState()
        # Activation checkpointing sets the state of the call in forward, and then the one before:
        # two threads at once may leave the former.
        if after.is_torch_as(self._forward_state) and not after.is_torch_as(before):
            before.restore()
            after = _RandomState()
        if before != after:
            self._owner._note_draw(self._mode, in_turns)
        nothing = [None] * len(self.params)
        by_rank = [found.get(rank, nothing)[: len(own)] for rank, own in self._params.items()]
        return [grad for column in zip(*map(reversed, by_rank), strict=True) for grad in column]


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
    """One node for the graphs of all ranks: from their outputs to their parameters."""

    @staticmethod
    def forward(ctx: Any, graphs: _Graphs, *params: Tensor) -> tuple[Tensor, ...]:
        ctx.graphs = graphs
        ctx.set_materialize_grads(False)
        return tuple(t.detach() for outputs in graphs.outputs.values() for t in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *ctx.graphs.backward(grads)


def _join(graphs: _Graphs) -> Tensors:
    # Through Any: torch 2.13 does not type `apply`, torch 2.15 does.
    apply: Any = _Join.apply
    joined: Tensors = apply(graphs, *graphs.params)
    return joined


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


def _differentiable(output: Any) -> list[Tensor]:
    found: list[Tensor] = []
    nested.map_tensors(lambda t: found.append(t) if t.requires_grad else None, output)
    return found


def _is_compiled(part: nn.Module) -> bool:
    return part._compiled_call_impl is not None or hasattr(part, "_orig_mod")


def _nodes(tensors: Tensors) -> set[Any]:
    """Return all nodes of the graphs of these tensors."""
    found: set[Any] = set()
    todo: list[Any] = [tensor.grad_fn for tensor in tensors]
    while todo:
        node = todo.pop()
        if node is not None and node not in found:
            found.add(node)
            todo += [other for other, _ in node.next_functions]
    return found


def _uses_casts_twice(nodes: set[Any]) -> bool:
    """Return whether a leaf is used more than once in another dtype, from one cast or several."""
    edges = (other for node in nodes for other, _ in node.next_functions)
    casts = [node for node in edges if type(node).__name__ == "ToCopyBackward0"]
    leaves = [
        leaf for cast in casts for leaf, _ in cast.next_functions if hasattr(leaf, "variable")
    ]
    return len(set(leaves)) < len(leaves)


def _keeps_graph(part: nn.Module) -> bool:
    kept = [v for value in vars(part).values() for v in (_items(value) or [value])]
    return any(isinstance(value, Tensor) and value.grad_fn is not None for value in kept)


def _items(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, (list, tuple)) else []


class _RandomState:
    """Of the generators that all threads share: torch's for the CPU, Python's and NumPy's."""

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._python = random.getstate()
        self._numpy: tuple[Any, ...] = ()
        numpy = sys.modules.get("numpy.random")
        if numpy is not None:
            parts = numpy.get_state(legacy=False)["state"].values()
            self._numpy = tuple(p.tobytes() if hasattr(p, "tobytes") else p for p in parts)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _RandomState):
            return NotImplemented
        is_same = self._python == other._python and self._numpy == other._numpy
        return is_same and self.is_torch_as(other)

    __hash__ = None  # type: ignore[assignment]

    def is_torch_as(self, other: _RandomState) -> bool:
        """Return whether torch's generator is the same, whatever the others are."""
        return torch.equal(self._torch, other._torch)

    def restore(self) -> None:
        """Give torch's generator this state."""
        torch.set_rng_state(self._torch)
