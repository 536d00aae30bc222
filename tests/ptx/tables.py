"""Writes the tables of tests/ptx/README.md: litmus tests, planted faults, speed.

``python tests/ptx/tables.py``: it needs nvcc and two minutes.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from build_ptx import FAULTS, PARTS, build, run, write_ptx

README = Path(__file__).parent / "README.md"


def with_table(text: str, name: str, table: str) -> str:
    """Put a table between the lines that mark its place."""
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    before, _, rest = text.partition(begin)
    assert end in rest, f"{README.name} has no place for {name}"
    return before + begin + table + rest[rest.index(end) :]


def litmus_table(program: Path) -> str:
    said = run(program, Path(), "--only", "litmus").stdout
    return "".join(line + "\n" for line in said.splitlines() if line.startswith("|"))


def fault_table(program: Path, good: Path, folder: Path) -> str:
    rows = "| fault | found by | what is said first |\n|---|---|---|\n"
    for i, fault in enumerate(FAULTS):
        ptx = fault.plant(folder / str(i), good)
        said = run(program, ptx, "--only", fault.part, "--rounds", 400).stdout
        again = re.search(r"again: (.*) --rounds 1", said)
        assert again, said
        first = said.splitlines()[0].split("failed: ")[-1].rstrip(":")
        where = re.search(r" at (\w+\.\w+:\d+)", said.split("again")[0])
        at = f", `{where[1]}`" if where and "race" in first else ""
        rows += f"| {fault.name} | `{again[1]}` | {first}{at} |\n"
    return rows


def report(program: Path, good: Path, folder: Path) -> str:
    """A fault as it is told."""
    fault = next(fault for fault in FAULTS if fault.name.startswith("fence narrowed"))
    said = run(program, fault.plant(folder, good), "--only", fault.part, "--rounds", 400).stdout
    return f"```text\n{said.strip()}\n```\n"


def speed_table(program: Path, ptx: Path) -> str:
    rows = (
        "| part | rounds | s | million instructions of warps | a second |\n|---|--:|--:|--:|--:|\n"
    )
    for part in PARTS:
        said = run(program, ptx, "--only", part, "--rounds", 300).stdout
        rounds, seconds = re.search(rf"^{part} +(\d+) rounds +(\S+) s", said, re.MULTILINE).groups()
        millions, rate = re.search(r"^(\S+) million .*, (\S+) million", said, re.MULTILINE).groups()
        rows += f"| {part} | {rounds} | {seconds} | {millions} | {rate} |\n"
    return rows


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folders = [Path(scratch, name) for name in ("program", "ptx", "faults")]
        for folder in folders:
            folder.mkdir()
        program = build(folders[0])
        ptx = write_ptx(folders[1])
        text = with_table(README.read_text(), "litmus", litmus_table(program))
        text = with_table(text, "faults", fault_table(program, ptx, folders[2]))
        text = with_table(text, "report", report(program, ptx, folders[2] / "told"))
        README.write_text(with_table(text, "speed", speed_table(program, ptx)))


if __name__ == "__main__":
    main()
