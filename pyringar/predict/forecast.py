"""Every algorithm at every number of ranks: the rows of ``pyringar predict``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pyringar.comm.auto import choose
from pyringar.comm.topology import Topology
from pyringar.predict.algorithms import ALGORITHMS, ITEM_BYTES, Algorithm, run_all_reduce
from pyringar.predict.events import Outcome
from pyringar.predict.network import Network
from pyringar.predict.step import Backward, StepForecast, plan_buckets, predict_step

__all__ = ["Choice", "Forecast", "Row", "Workload", "predict"]


@dataclass(frozen=True)
class Workload:
    """The gradients that one rank reduces.

    Attributes:
        name: Shown in reports.
        tensors: Their numbers of float32 elements, in the order of the parameters.
        backward: When they are ready; None: only the all-reduce is predicted.
        bucket_cap_mb: See `pyringar.GradientBucketer`.
        first_bucket_mb: The cap of the first bucket, at most ``bucket_cap_mb``.
        is_packed: The tensors of a call travel as one, packed at no cost. Otherwise algorithms
            that take one tensor at a time do so.
    """

    name: str
    tensors: tuple[int, ...]
    backward: Backward | None = None
    bucket_cap_mb: float = 10
    first_bucket_mb: float = 1
    is_packed: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of one rank's gradients."""
        return sum(self.tensors) * ITEM_BYTES

    def buckets(self) -> list[list[int]]:
        """Return the bucketer's plan; there is none without a backward."""
        if self.backward is None:
            return []
        return plan_buckets(
            self.tensors,
            self.backward.order,
            bucket_cap_mb=self.bucket_cap_mb,
            first_bucket_mb=self.first_bucket_mb,
        )

    def reduce(self, algorithm: Algorithm, network: Network, tensors: Sequence[int]) -> Outcome:
        """Simulate one call for some of the tensors.

        Args:
            algorithm: One of `ALGORITHMS`.
            network: Where it runs.
            tensors: Their numbers of elements.
        """
        is_one = self.is_packed and algorithm.name != "sharded"  # which cuts between parameters
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
        efficiency: Compute time over step time: 1 if communication costs nothing. Every rank keeps
            its batch, so that k ranks do k times the work.
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
    """The algorithm that ``auto`` takes for a call with all tensors, and why."""

    world_size: int
    algorithm: str
    reason: str


@dataclass(frozen=True)
class Forecast:
    """All rows for one workload.

    Attributes:
        workload: What is reduced.
        networks: One for every number of ranks.
        rows: By number of ranks, then algorithm.
        choices: Those of ``auto``, one for every number of ranks.
    """

    workload: Workload
    networks: tuple[Network, ...]
    rows: tuple[Row, ...]
    choices: tuple[Choice, ...]

    def of(self, world_size: int) -> list[Row]:
        """Return the rows of one number of ranks.

        Args:
            world_size: Number of ranks.
        """
        return [row for row in self.rows if row.world_size == world_size]


def predict(workload: Workload, networks: Sequence[Network]) -> Forecast:
    """Simulate every algorithm that suits each network.

    Args:
        workload: What is reduced.
        networks: One for every number of ranks.
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
    step = efficiency = None
    backward = workload.backward
    if backward is not None:

        def reduction_s(tensors: Sequence[int]) -> float:
            return workload.reduce(algorithm, network, tensors).time_s

        step = predict_step(workload.tensors, backward, workload.buckets(), reduction_s)
        efficiency = backward.compute_s / step.step_s if step.step_s else None
    return Row(
        algorithm=algorithm.name,
        is_in_engine=algorithm.is_in_engine,
        world_size=network.world_size,
        nodes=network.nodes,
        all_reduce_s=whole.time_s,
        rank_link_bytes=whole.busiest_bytes("rank", "wire"),
        node_link_bytes=whole.busiest_bytes("node"),
        step=step,
        efficiency=efficiency,
    )


def _choice(workload: Workload, network: Network) -> Choice:
    """Ask the communicator's own rule, for one GPU per rank."""
    # By hand: torch counts no further than 128 devices.
    gpus: dict[str, tuple[int, ...]] = {
        f"cuda:{rank}": (rank,) for rank in range(network.world_size)
    }
    name, reason = choose(Topology(tuple(gpus), gpus).place)
    return Choice(network.world_size, name, reason)
