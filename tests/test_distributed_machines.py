"""Is the backend `ringar` on several machines what it is on one: every collective, works, training?"""

from __future__ import annotations

import distributed_cases
import pytest
from test_distributed import check, verdicts

PLACES = ["ab", "abb", "aba"]


@pytest.mark.parametrize("machines", PLACES)
@pytest.mark.parametrize("case", distributed_cases.CASES)
def test_collectives(case, machines):
    check(verdicts("cases", len(machines), machines=machines), case)
