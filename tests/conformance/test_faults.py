"""Does every fault of the table raise the error that names the victim, on all other ranks?"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from faults import all_faults, as_cases, check
from fork_server import servers
from promises import BODIES

FAULTS = list(all_faults())


@pytest.mark.parametrize("fault", as_cases(FAULTS))
def test_fault_is_named(fault):
    check(fault)


for row in ("dead", "deadline", "failed", "exit"):
    BODIES[row].append(__name__)


@pytest.mark.thorough
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(4))
def test_random_faults_are_named(seed):
    choice = random.Random(seed)
    before = servers()["ranks"].children()
    for _ in range(70):
        fault = choice.choice(FAULTS)
        k = choice.randint(2, 5 if fault.transport != "machines" else 4)
        check(replace(fault, k=k, victim=choice.randrange(k)))
    assert servers()["ranks"].children() == before, "a process is left"
