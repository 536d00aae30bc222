"""Does every fault of the table raise the error that names the victim, on all other ranks?"""

from __future__ import annotations

import pytest
from faults import all_faults, as_cases, check
from promises import BODIES

FAULTS = list(all_faults())


@pytest.mark.parametrize("fault", as_cases(FAULTS))
def test_fault_is_named(fault):
    check(fault)


BODIES["dead"].append(__name__)
