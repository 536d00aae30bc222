"""What a report measures, and with how much effort: choices of cases and rounds, nothing else."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks import (
    allreduce,
    allreduce_cuda,
    bucketing,
    ddp,
    peers_cuda,
    processes,
    training,
    training_cuda,
)
from benchmarks.machine import num_cores
from benchmarks.timing import torch_threads

__all__ = ["EFFORTS", "SECTIONS", "Plan", "Section", "why_not"]

Progress = Callable[[str, Sequence[Any]], None]
KIB, MIB = 2**10, 2**20
EFFORTS = ("full", "quick", "smoke")


@dataclass(frozen=True)
class Plan:
    """One section's work: so many calls of ``progress``, in about so many seconds.

    Seconds are those of two cores, and only tell the bar how sections compare.
    """

    num_units: int
    expected_s: float
    measure: Callable[[Progress], dict[str, Any]]


@dataclass(frozen=True)
class Section:
    """A benchmark that takes part: ``plan`` takes an effort, the name of one of `EFFORTS`."""

    name: str
    plan: Callable[[str], Plan]
    needs_cuda: bool = False


def why_not(section: Section) -> str | None:
    """Why a section cannot run on this machine; None if it can."""
    if section.needs_cuda and not torch.cuda.is_available():
        return "no CUDA device"
    return None


# -- CPU -------------------------------------------------------------------------------------------


def plan_allreduce(effort: str) -> Plan:
    """Grids of sizes and ranks with all algorithms and peers; full: README's cases beside them."""
    if effort == "full":
        sizes = (4 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
        cases = allreduce.grid_cases(sizes, (2, 4, 8)) + allreduce.readme_cases()
        cases += allreduce.list_cases((2, 4, 8))
        effort_s, rounds, budget_s, settle_s = 340.0, 31, 6.0, 0.02
    elif effort == "quick":
        cases = allreduce.grid_cases((4 * KIB, 64 * KIB, MIB, 16 * MIB), (2, 4, 8))
        cases += allreduce.list_cases((2, 4))
        effort_s, rounds, budget_s, settle_s = 55.0, 9, 1.0, 0.01
    else:
        cases = allreduce.grid_cases((4 * KIB, 16 * KIB), (2,))
        effort_s, rounds, budget_s, settle_s = 2.0, 5, 0.0, 0.0
    merged = allreduce.merged(cases)

    def measure(progress: Progress) -> dict[str, Any]:
        # Peers and the limit get all cores, as ours do, whatever the environment says of OpenMP.
        with torch_threads(num_cores()):
            return allreduce.measure(
                merged, progress, rounds=rounds, budget_s=budget_s, settle_s=settle_s
            )

    return Plan(len(merged), effort_s, measure)


def plan_processes(effort: str) -> Plan:
    """A grid with all algorithms, gloo and the limit; full: README's cases beside it."""
    if effort == "full":
        sizes = (4 * KIB, 64 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
        cases = processes.report_cases(sizes, (2, 4)) + processes.readme_cases()
        effort_s, rounds, budget_s = 220.0, 61, 8.0
    elif effort == "quick":
        cases = processes.report_cases((4 * KIB, MIB, 16 * MIB), (2, 4))
        effort_s, rounds, budget_s = 45.0, 7, 1.0
    else:
        cases = [replace(processes.report_cases((4 * KIB,), (2,))[0], awake=False)]
        effort_s, rounds, budget_s = 6.0, 5, 0.0
    merged = processes.merged(cases)

    def measure(progress: Progress) -> dict[str, Any]:
        return processes.measure(merged, progress, rounds=rounds, budget_s=budget_s)

    return Plan(len(merged), effort_s, measure)


def plan_ddp(effort: str) -> Plan:
    """DDP on gloo and on ours."""
    names = tuple(ddp.MODELS)
    options, effort_s = {
        "full": (ddp.Options(2, 31, names), 60.0),
        "quick": (ddp.Options(2, 7, names), 25.0),
        "smoke": (ddp.Options(2, 2, names[:1]), 8.0),
    }[effort]
    return Plan(len(options.models), effort_s, lambda progress: ddp.measure(options, progress))


def plan_bucketing(effort: str) -> Plan:
    """A step's gradients, reduced after backward and while it runs."""
    options, effort_s = {
        "full": (bucketing.Options(), 90.0),
        "quick": (bucketing.Options(caps=(1.0, 10.0), rounds=5, budget_s=0.5), 35.0),
        "smoke": (bucketing.Options(("lenet",), (2,), (1.0,), 5, 0.0, hook_rounds=3), 2.0),
    }[effort]
    units = len(options.models) * len(options.ranks)
    return Plan(units, effort_s, lambda progress: bucketing.measure(options, progress))


def plan_training(effort: str) -> Plan:
    """Steps of the trainer, the book's loop and nn.DataParallel; on a GPU if there is one."""
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    full = training.Options(device=device)
    options, effort_s = {
        "full": (full, 120.0),
        "quick": (replace(full, rounds=5, budget_s=1.0), 25.0),
        "smoke": (
            replace(full, models=("LeNet",), ranks=(2,), steps=1, rounds=5, budget_s=0.0),
            3.0,
        ),
    }[effort]
    units = len(options.models) * len(options.ranks)
    return Plan(units, effort_s, lambda progress: training.measure(options, progress))


# -- GPU -------------------------------------------------------------------------------------------


def plan_allreduce_cuda(effort: str) -> Plan:
    """All cases of the script, NCCL on one GPU among them."""
    flags = {"full": [], "quick": ["--quick"], "smoke": ["--quick", "--only", "4 KiB"]}[effort]
    args = allreduce_cuda.parse_arguments(flags)
    return _scripted(allreduce_cuda, args, {"full": 120.0, "quick": 40.0, "smoke": 10.0}[effort])


def plan_peers_cuda(effort: str) -> Plan:
    """NCCL through torch and through CuPy, and torch's symmetric memory."""
    options = {
        "full": peers_cuda.Options(),
        "quick": peers_cuda.Options(sizes=(64 * KIB, 16 * MIB), rounds=9),
        "smoke": peers_cuda.Options(sizes=(64 * KIB,), ranks=(2,), rounds=5),
    }[effort]
    units = peers_cuda.num_units(options)
    return Plan(units, 15.0 * units, lambda progress: peers_cuda.measure(options, progress))


def plan_training_cuda(effort: str) -> Plan:
    """Epochs of 60,000 images, eager and as a graph."""
    flags = {"full": [], "quick": ["--quick"], "smoke": ["--quick", "--only", "LeNet"]}[effort]
    args = training_cuda.parse_arguments(flags)
    return _scripted(training_cuda, args, {"full": 120.0, "quick": 60.0, "smoke": 20.0}[effort])


def _scripted(script: Any, args: argparse.Namespace, expected_s: float) -> Plan:
    """A script whose choices are its command line."""
    return Plan(script.num_units(args), expected_s, lambda progress: script.measure(args, progress))


SECTIONS = (
    Section("allreduce", plan_allreduce),
    Section("processes", plan_processes),
    Section("ddp", plan_ddp),
    Section("bucketing", plan_bucketing),
    Section("training", plan_training),
    Section("allreduce_cuda", plan_allreduce_cuda, needs_cuda=True),
    Section("peers_cuda", plan_peers_cuda, needs_cuda=True),
    Section("training_cuda", plan_training_cuda, needs_cuda=True),
)
