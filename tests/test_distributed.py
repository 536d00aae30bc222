"""Is torch.distributed right on the backend `ringar`, and DistributedDataParallel on top of it?"""

from __future__ import annotations

import functools
from typing import Any

import distributed_cases
import process_ranks
import pytest


@functools.cache
def verdicts(size: int) -> list[Any]:
    cases = list(distributed_cases.CASES.items())
    return process_ranks.run(process_ranks.run_cases, size, cases)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("case", distributed_cases.CASES)
def test_collectives(case, size):
    results = verdicts(size)
    assert all(isinstance(verdict, dict) for verdict in results), results
    failures = [verdict[case] for verdict in results if verdict[case] is not None]
    assert not failures, "\n".join(failures)
