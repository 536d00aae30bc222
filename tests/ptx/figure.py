"""Draws a ring on one GPU, block by block, from a run of its PTX, into the chapter.

``python tests/ptx/figure.py``: it needs nvcc and a minute, and replaces one picture of
docs/chapter.ipynb.
"""

from __future__ import annotations

import base64
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
from build_ptx import TESTS, build, run, write_ptx
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from pyringar.comm.ring_schedule import ring_schedule
from pyringar.figures import COLORS, Picture

sys.path.insert(0, str(TESTS.parent / "docs"))
import run_chapter

RANKS = 4
PICTURE = "ring-on-one-gpu.png"  # in the chapter's cell that has it
WAITS, SETS_UP = "#e4e4e4", "#9a9a9a"


@dataclass(frozen=True)
class Seen:
    """A strong access by a block, and what its warps had done until then."""

    block: int
    num_instructions: int
    what: str
    where: str

    def is_of(self, what: str, flags: str) -> bool:
        return self.what.startswith(what) and self.where.startswith(flags)


@dataclass(frozen=True)
class Bar:
    """What a block does in so many instructions of its warps."""

    block: int
    begin: int
    end: int
    message: int  # that it deals with, from 0; -1: it sets up
    waits: bool = False


def record(program: Path, ptx: Path) -> list[Seen]:
    """Return a round's accesses: the first one that is an allreduce in one piece per chunk."""
    for start in range(100):
        said = run(program, ptx, "--trace", "--only", "ring-picture", "--from-round", start).stdout
        lines = [line.split("\t")[1:] for line in said.splitlines() if line.startswith("seen\t")]
        seen = [Seen(int(block), int(n), what, where) for block, n, what, where, _ in lines]
        sent = sum(one.is_of("st.relaxed", "flags of rank") for one in seen)
        if sent == RANKS * 2 * (RANKS - 1):
            return seen
    raise RuntimeError("no round of a hundred is an allreduce in one piece per chunk")


def program_of(accesses: Sequence[Seen]) -> Iterator[tuple[str, int]]:
    """Yield what one block does: "send", "wait" or "free", after so many instructions of its own.

    Looking at a flag again is waiting, and no work.
    """
    begun = 0
    is_waiting = False
    for seen in accesses[1:]:
        looks = seen.is_of("ld.acquire", "flags of rank")
        if looks and not is_waiting:
            yield "wait", seen.num_instructions - begun
        is_waiting = looks or (is_waiting and seen.where.startswith("patience"))
        if is_waiting:
            begun = seen.num_instructions
        for name, flags in (("send", "flags of rank"), ("free", "taken flags of rank")):
            if seen.is_of("st.relaxed", flags):
                yield name, seen.num_instructions - begun
                begun = seen.num_instructions


def follow(accesses: Sequence[Seen]) -> tuple[list[Bar], dict[tuple[int, int], int]]:
    """Run all blocks at once, each on a multiprocessor of its own that does one thing at a time.

    Returns:
        What blocks do, and when a block has sent a message: by block and message.
    """
    programs = [list(program_of([s for s in accesses if s.block == b])) for b in range(RANKS)]
    now, at, received, sent = ([0] * RANKS for _ in range(4))
    sent_at: dict[tuple[int, int], int] = {}
    bars: list[Bar] = []
    while any(at[b] < len(programs[b]) for b in range(RANKS)):
        for block, steps in enumerate(programs):
            while at[block] < len(steps):
                name, work = steps[at[block]]
                begin = now[block]
                message = received[block] - 1
                if name == "wait":
                    came = sent_at.get(((block - 1) % RANKS, received[block]))
                    if came is None:
                        break
                    now[block] = max(begin + work, came)
                    if now[block] > begin + work:
                        bars.append(Bar(block, begin + work, now[block], received[block], True))
                    received[block] += 1
                else:
                    now[block] += work
                    bars.append(Bar(block, begin, now[block], message))
                if name == "send":
                    sent_at[block, sent[block]] = now[block]
                    sent[block] += 1
                at[block] += 1
    return bars, sent_at


def draw(bars: Sequence[Bar], sent_at: dict[tuple[int, int], int]) -> Picture:
    """Draw a row for each block; colours are those of chunks."""
    figure = Figure(figsize=(9.5, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    arriving = {
        (step, move.dst): move for step, moves in enumerate(ring_schedule(RANKS)) for move in moves
    }
    for bar in bars:
        color, label = SETS_UP, ""
        if bar.waits:
            color = WAITS
        elif bar.message >= 0:
            move = arriving[bar.message, bar.block]
            what = "adds" if move.is_reduction else "copies"
            color, label = COLORS[move.chunk], "adds the last" if bar.message == RANKS - 2 else what
        width = (bar.end - bar.begin) / 1000
        axes.barh(bar.block, width, left=bar.begin / 1000, color=color, height=0.5)
        if width > 1.5:
            middle = (bar.begin + bar.end) / 2000
            axes.text(middle, bar.block, label, ha="center", va="center", fontsize=7)
    begins: dict[tuple[int, int], int] = {}
    for bar in bars:
        if not bar.waits:
            begins.setdefault((bar.block, bar.message), bar.begin)
    for (source, message), at in sent_at.items():
        block = (source + 1) % RANKS
        _draw_arrow(axes, (at, source), (begins[block, message], block))
    axes.set_yticks(range(RANKS), [f"block {b}: rank {b}" for b in range(RANKS)], fontsize=9)
    axes.invert_yaxis()
    axes.set_xlabel("thousand instructions of the block's warps", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    named = [(f"chunk {c}", COLORS[c]) for c in range(RANKS)]
    for name, color in [*named, ("sets up, sends its own part", SETS_UP), ("waits", WAITS)]:
        axes.barh(0, 0, color=color, label=name)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.17), ncols=6, frameon=False, fontsize=8)
    return Picture(figure)


def _draw_arrow(axes: Any, source: tuple[int, int], target: tuple[int, int]) -> None:
    """Draw a message, from where it is sent to where it is used; across the picture it is faint."""
    faint = 0.25 if target[1] < source[1] else 1
    style = {"arrowstyle": "->", "lw": 0.8, "color": "#333333", "alpha": faint}
    at, other = ((x / 1000, y) for x, y in (target, source))
    axes.annotate("", at, other, arrowprops=style, zorder=4)


def put_into_chapter(png: bytes) -> None:
    notebook = nbformat.read(run_chapter.CHAPTER, as_version=4)
    cell = next(cell for cell in notebook.cells if f"attachment:{PICTURE}" in cell.source)
    shrunk = run_chapter.shrink(base64.b64encode(png).decode())
    cell["attachments"] = {PICTURE: {"image/png": shrunk}}
    nbformat.write(notebook, run_chapter.CHAPTER)


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        program = build(Path(scratch))
        seen = record(program, write_ptx(Path(scratch)))
    put_into_chapter(draw(*follow(seen))._repr_png_())


if __name__ == "__main__":
    main()
