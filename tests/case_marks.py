"""Marks for cases of parametrized tests."""

import pytest
import torch

forks_run_backward = pytest.mark.skipif(
    torch.cuda.is_available(), reason="after a backward beside a GPU, forked ranks can run none"
)


def mostly_slow(cases, *kept):
    """Return all cases; mark each case that is not in ``kept`` as slow.

    Args:
        cases: Values, or tuples of values, for `pytest.mark.parametrize`.
        kept: The cases that stay without the mark.
    """
    cases = list(cases)
    assert all(case in cases for case in kept), f"{kept} are not all of {cases}"
    return [case if case in kept else _slow(case) for case in cases]


def _slow(case):
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)
