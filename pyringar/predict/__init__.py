"""Predict the time of an all-reduce, and of a training step, on a machine that you describe.

The engine's own schedules run message by message over links with a bandwidth and a latency; a step
launches the buckets that `pyringar.GradientBucketer` would make, as their gradients come.
Nothing is measured, unless you ask for the link ``cpu``.

`ALGORITHMS` and `LINKS` hold the algorithms, and the links with their sources, by name.
"""

from __future__ import annotations

from pyringar.predict.algorithms import ALGORITHMS, run_all_reduce
from pyringar.predict.events import Outcome, Program, simulate
from pyringar.predict.forecast import Forecast, Row, Workload, predict
from pyringar.predict.network import LINKS, Link, Network, Port, named_link
from pyringar.predict.step import Backward, StepForecast, predict_step

__all__ = [
    "ALGORITHMS",
    "LINKS",
    "Backward",
    "Forecast",
    "Link",
    "Network",
    "Outcome",
    "Port",
    "Program",
    "Row",
    "StepForecast",
    "Workload",
    "named_link",
    "predict",
    "predict_step",
    "run_all_reduce",
    "simulate",
]
