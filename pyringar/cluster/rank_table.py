"""Text for errors: a table of all ranks' calls, and the stacks of the program."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from traceback import StackSummary, walk_stack
from types import CodeType, TracebackType
from typing import Any

from pyringar.cluster.rank_calls import RankCall, is_inside, names_of, some
from pyringar.cluster.rank_threads import RankThread

_COLUMNS = ("rank", "state", "call", "number", "in", "shape", "dtype", "waits for", "line")


def report(ranks: Sequence[RankThread], calls: Mapping[int, RankCall]) -> str:
    rows = [_row(rank, calls.get(rank.index)) for rank in ranks]
    frames = {rank.index: rank.frame() for rank in ranks}
    return layout(rows, {index: stack_of(frame) for index, frame in frames.items() if frame})


def layout(rows: Sequence[tuple[str, ...]], stacks: Mapping[int, str]) -> str:
    rows = [_COLUMNS, *rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    kept = [i for i in range(len(_COLUMNS)) if any(row[i] for row in rows[1:])]
    table = "\n".join("  ".join(row[i].ljust(widths[i]) for i in kept).rstrip() for row in rows)
    return f"\n\n{table}\n\n{by_text(stacks)}"


def by_text(texts: Mapping[int, str]) -> str:
    """Return each distinct nonempty text below the names of the ranks that have it."""
    found: dict[str, list[int]] = {}
    for rank, text in texts.items():
        found.setdefault(text, []).append(rank)
    pairs = [(text, sorted(ranks)) for text, ranks in found.items() if text]
    return "\n".join(f"{names_of(ranks)}:\n{text}" for text, ranks in pairs)


def of_program(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and is_inside(trace.tb_frame.f_globals.get("__name__", "")):
        trace = trace.tb_next
    return trace


def is_at_prompt(rank: RankThread) -> bool:
    return any(
        frame.f_globals.get("__name__") in ("bdb", "pdb", "pydevd")
        and not frame.f_code.co_name.startswith("run")  # a debugger runs the program
        for frame, _ in walk_stack(rank.frame())
    )


def _row(rank: RankThread, shown: RankCall | None) -> tuple[str, ...]:
    wait = rank.waits_for
    if rank.has_ended:
        state = f"failed: {type(rank.error).__name__}" if rank.error else "returned"
    elif rank.polls:
        state = "polls"
    elif wait is None:
        state = "runs" if rank.is_running else "has not begun"
    else:
        state = "ready" if wait.is_done else "waits"
    call = shown or (wait.call or wait if wait else None)
    if not isinstance(call, RankCall):
        calls = f"after {rank.num_calls} call{'s' * (rank.num_calls != 1)}"
        return (str(rank.index), state, call.what if call else calls, *[""] * 6)
    missing = [] if shown is call else call.missing()
    return (
        str(rank.index),
        state,
        str(call),
        str(call.number or ""),
        call.meeting.name,
        some(call.shapes),
        some(dict.fromkeys(call.dtypes)),
        ", ".join(map(str, missing)),
        call.line,
    )


def stack_of(frame: Any, *, after: CodeType | None = None) -> str:
    """Format the program's frames, from the code ``after`` to the innermost frame."""
    inner = itertools.takewhile(lambda pair: pair[0].f_code is not after, walk_stack(frame))
    frames = [(f, n) for f, n in inner if not is_inside(f.f_globals.get("__name__", ""))]
    return "".join(StackSummary.extract(iter(frames[::-1])).format())
