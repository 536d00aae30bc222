"""Tell people what every rank of a cluster does: a table, and the program's stacks."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from pyringar.cluster.calls import Call, is_inside, names_of, some
from pyringar.cluster.ranks import Rank

__all__ = ["is_at_prompt", "of_program", "report", "stack_of"]

_COLUMNS = ("rank", "state", "call", "number", "in", "shape", "dtype", "waits for", "line")


def report(ranks: Sequence[Rank], calls: Mapping[int, Call], note: str) -> str:
    """Return what every rank does, in several lines.

    Args:
        ranks: All of a cluster.
        calls: Those to show, by rank, if it is not what a rank waits for.
        note: How to come here again.
    """
    rows = [_COLUMNS, *(_row(rank, calls.get(rank.index)) for rank in ranks)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    kept = [i for i in range(len(_COLUMNS)) if any(row[i] for row in rows[1:])]
    table = "\n".join("  ".join(row[i].ljust(widths[i]) for i in kept).rstrip() for row in rows)
    return f"\n\n{table}\n\n{_stacks(ranks)}{note}"


def of_program(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback from where the program begins; None: nothing of it is the program's."""
    while trace is not None and is_inside(trace.tb_frame.f_globals.get("__name__", "")):
        trace = trace.tb_next
    return trace


def is_at_prompt(rank: Rank) -> bool:
    """Return whether a debugger holds a rank's thread."""
    ident = None if rank.thread is None else rank.thread.ident
    frame = sys._current_frames().get(ident or 0)
    while frame is not None:
        is_debuggers = frame.f_globals.get("__name__") in ("bdb", "pdb", "pydevd")
        if is_debuggers and not frame.f_code.co_name.startswith("run"):  # runs the program
            return True
        frame = frame.f_back
    return False


def _row(rank: Rank, shown: Call | None) -> tuple[str, ...]:
    wait = rank.waits_for
    if rank.has_ended:
        state = f"failed: {type(rank.error).__name__}" if rank.error else "returned"
    elif rank.asks_for is not None:
        state, wait = "asks", rank.asks_for
    elif wait is None:
        state = "runs" if rank.is_running else "has not begun"
    else:
        state = "ready" if wait.is_done else "waits"
    call = shown or (wait.call or wait if wait else None)
    if not isinstance(call, Call):
        calls = f"after {rank.num_calls} call{'s' * (rank.num_calls != 1)}"
        return (str(rank.index), state, call.what if call else calls, *[""] * 6)
    missing = [] if shown is call else call.missing()
    return (
        *(str(rank.index), state, str(call), str(call.number or ""), call.meeting.name),
        *(some(call.shapes), some(dict.fromkeys(call.dtypes)), ", ".join(map(str, missing))),
        call.line,
    )


def _stacks(ranks: Sequence[Rank]) -> str:
    """Return the stacks of the program on all ranks that have not ended; equal ones once."""
    frames = sys._current_frames()
    found: dict[str, list[int]] = {}
    for rank in ranks:
        if rank.thread is not None and not rank.has_ended and rank.thread.ident in frames:
            found.setdefault(stack_of(frames[rank.thread.ident]), []).append(rank.index)
    return "\n".join(f"{names_of(who)}:\n{stack}" for stack, who in found.items() if stack)


def stack_of(frame: Any) -> str:
    """Return the program's part of a stack: what is torch's, or ours, is left out."""
    walked = list(traceback.walk_stack(frame))[::-1]
    of_program = [(f, n) for f, n in walked if not is_inside(f.f_globals.get("__name__", ""))]
    return "".join(traceback.StackSummary.extract(iter(of_program)).format())
