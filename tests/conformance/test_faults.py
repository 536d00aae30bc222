"""Does every fault of the table raise the error that names the victim, on all other ranks?"""

from __future__ import annotations

import pytest
from faults import all_faults, as_cases, check
from promises import BODIES


@pytest.mark.parametrize("fault", as_cases(list(all_faults())))
def test_fault_is_named(fault):
    check(fault)


for row in ("dead", "deadline", "failed", "exit"):
    BODIES[row].append(__name__)
