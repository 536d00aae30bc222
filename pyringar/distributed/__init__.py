"""Ranks in processes, on one machine or several."""

from __future__ import annotations

from pyringar.distributed.hierarchical import HierarchicalCommunicator

__all__ = ["HierarchicalCommunicator"]
