"""Be JAX's ranks, the devices of one process, with psum: jax_ranks.py ADDRESS; RANKS says how many.

JAX's arrays cannot be written: those that are filled are new ones, made by the devices' own
threads, and the sum may take their memory, as in place.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

RANKS = int(os.environ["RANKS"])
os.environ |= {"XLA_FLAGS": f"--xla_force_host_platform_device_count={RANKS}"}
os.environ |= {"JAX_PLATFORMS": "cpu"}

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import Mesh, PartitionSpec  # noqa: E402

sys.path.append(str(Path(__file__).resolve().parents[2]))

from benchmarks.peers.rank import PERIOD, SHIFTS, Sum, serve  # noqa: E402

MESH = Mesh(np.array(jax.devices()), ("ranks",))
SPLIT = PartitionSpec("ranks")


class Psum:
    """One array, of which each device holds its rank's part."""

    def __init__(self, numel: int) -> None:
        def numbers(shift: Any) -> Any:
            row = jnp.arange(numel) % PERIOD + shift % SHIFTS + jax.lax.axis_index("ranks")
            return row.astype(jnp.float32)

        def add(part: Any) -> Any:
            return jax.lax.psum(part, "ranks")

        self._numbers = jax.jit(
            jax.shard_map(numbers, mesh=MESH, in_specs=PartitionSpec(), out_specs=SPLIT)
        )
        self._add = jax.jit(
            jax.shard_map(add, mesh=MESH, in_specs=SPLIT, out_specs=SPLIT, check_vma=False),
            donate_argnums=0,
        )
        self._array: Any = None

    def fill(self, shift: int) -> None:
        """Make the ranks' numbers."""
        self._array = self._numbers(shift).block_until_ready()

    def barrier(self) -> None:
        """Do nothing: there is one caller."""

    def call(self) -> None:
        """Sum, and wait for it."""
        self._array = self._add(self._array).block_until_ready()

    def is_right(self, shift: int) -> bool:
        """Compare every device's part."""
        parts = [np.asarray(shard.data) for shard in self._array.addressable_shards]
        sums = [Sum([part], 0, RANKS, self.barrier, self.call) for part in parts]
        return len(sums) == RANKS and all(each.is_right(shift) for each in sums)


serve(sys.argv[1], 0, f"JAX {jax.__version__}", lambda candidate, numels: Psum(*numels))
