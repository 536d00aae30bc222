"""Every algorithm at every number of ranks: the rows of ``pyringar predict``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pyringar.comm.auto import choose
from pyringar.comm.topology import Topology
from pyringar.predict.algorithms import ALGORITHMS, ITEM_BYTES, Algorithm, run_all_reduce
from pyringar.predict.events import Outcome
from pyringar.predict.network import Network
from pyringar.predict.step import Backward, StepForecast, plan_buckets, predict_step

__all__ = ["Forecast", "Row", "Workload", "predict"]


@dataclass(frozen=True)
class Workload:
    """Describe what one rank reduces.

    Attributes:
        name: For people.
        tensors: Numbers of float32 elements of its gradients, in the order of the parameters.
        backward: When they come; None: only the all-reduce is predicted.
        bucket_cap_mb: As for :class:`pyringar.GradientBucketer`.
        first_bucket_mb: Likewise.
        is_packed: The tensors of a call travel as one, packed by somebody at no cost. Else the
            algorithms that take one tensor at a time do so.
        order: ``"any"`` or ``"rank"``, for what ``auto`` takes.
    """

    name: str
    tensors: tuple[int, ...]
    backward: Backward | None = None
    bucket_cap_mb: float = 10
    first_bucket_mb: float = 1
    is_packed: bool = False
    order: str = "any"

    @property
    def nbytes(self) -> int:
        """Bytes of one rank's gradients."""
        return sum(self.tensors) * ITEM_BYTES

    def buckets(self) -> list[list[int]]:
        """The bucketer's plan."""
        assert self.backward is not None
        return plan_buckets(
            self.tensors,
            self.backward.order,
            bucket_cap_mb=self.bucket_cap_mb,
            first_bucket_mb=self.first_bucket_mb,
        )

    def reduce(self, algorithm: Algorithm, network: Network, tensors: Sequence[int]) -> Outcome:
        """Simulate one call for some of the tensors.

        Args:
            algorithm: One of :data:`ALGORITHMS`.
            network: Where it runs.
            tensors: Their numbers of elements.

        Returns:
            What it takes.
        """
        is_one = self.is_packed and algorithm.name != "sharded"  # whole parameters are its point
        return run_all_reduce(algorithm, network, [sum(tensors)] if is_one else tensors)


@dataclass(frozen=True)
class Row:
    """One algorithm at one number of ranks.

    Attributes:
        algorithm: Its name.
        is_in_engine: Whether this version runs it.
        world_size: Number of ranks.
        nodes: Number of nodes.
        all_reduce_s: One call for all tensors, with nothing beside it.
        rank_link_bytes: Through the busiest rank's link in the busier direction.
        node_link_bytes: The same of a node's network card.
        step: With buckets and overlap; None where no compute time is known.
        efficiency: Compute time over step time: 1 where ranks cost nothing. Every rank keeps its
            batch, so that k ranks do k times the work.
    """

    algorithm: str
    is_in_engine: bool
    world_size: int
    nodes: int
    all_reduce_s: float
    rank_link_bytes: int
    node_link_bytes: int
    step: StepForecast | None
    efficiency: float | None


@dataclass(frozen=True)
class Choice:
    """Hold what ``auto`` takes for a call with all tensors at one number of ranks, and why."""

    world_size: int
    algorithm: str
    reason: str


@dataclass(frozen=True)
class Forecast:
    """All rows for one workload.

    Attributes:
        workload: What was reduced.
        networks: Where, one for every number of ranks.
        rows: By number of ranks, then algorithm.
        choices: What ``auto`` takes, one for every number of ranks.
    """

    workload: Workload
    networks: tuple[Network, ...]
    rows: tuple[Row, ...]
    choices: tuple[Choice, ...]

    def of(self, world_size: int) -> list[Row]:
        """The rows of one number of ranks.

        Args:
            world_size: Number of ranks.
        """
        return [row for row in self.rows if row.world_size == world_size]


def predict(workload: Workload, networks: Sequence[Network]) -> Forecast:
    """Simulate every algorithm on every network.

    Args:
        workload: What is reduced.
        networks: One for every number of ranks.

    Returns:
        A row for every network and algorithm, and what ``auto`` takes.
    """
    rows = tuple(
        _row(workload, network, algorithm)
        for network in networks
        for algorithm in ALGORITHMS.values()
        if algorithm.suits(network)
    )
    choices = tuple(_choice(workload, network) for network in networks)
    return Forecast(workload, tuple(networks), rows, choices)


def _row(workload: Workload, network: Network, algorithm: Algorithm) -> Row:
    whole = workload.reduce(algorithm, network, workload.tensors)
    step = None
    if workload.backward is not None:
        reduction_s = _times(workload, network, algorithm)
        step = predict_step(workload.tensors, workload.backward, workload.buckets(), reduction_s)
    return Row(
        algorithm=algorithm.name,
        is_in_engine=algorithm.is_in_engine,
        world_size=network.world_size,
        nodes=network.nodes,
        all_reduce_s=whole.time_s,
        rank_link_bytes=whole.busiest_bytes("rank", "wire"),
        node_link_bytes=whole.busiest_bytes("node"),
        step=step,
        efficiency=_efficiency(workload, step),
    )


def _times(
    workload: Workload, network: Network, algorithm: Algorithm
) -> Callable[[Sequence[int]], float]:
    return lambda tensors: workload.reduce(algorithm, network, tensors).time_s


def _efficiency(workload: Workload, step: StepForecast | None) -> float | None:
    if step is None or workload.backward is None or step.step_s == 0:
        return None
    return workload.backward.compute_s / step.step_s


def _choice(workload: Workload, network: Network) -> Choice:
    """Ask the communicator's own rule, for one GPU per rank."""
    # By hand: torch counts no further than 128 devices.
    gpus: dict[str, tuple[int, ...]] = {
        f"cuda:{rank}": (rank,) for rank in range(network.world_size)
    }
    topology = Topology(tuple(gpus), gpus)
    name, reason = choose(topology.place, workload.order, workload.nbytes)
    return Choice(network.world_size, name, reason)
