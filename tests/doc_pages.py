"""The code on a page of documentation: what it is, and how a reader would run it.

A page holds, in fenced blocks:

    python      run in order, in one namespace; one that begins with ``# name.py`` is that file
    sh          commands, run where the page's files are
    text        what the block before it prints; ``...`` stands for anything
    diff        a change of the page's first file. Commands that follow run with it; where none do,
                the page's first command does, and must print what it printed before

A block after a line ``<!-- not run: REASON -->`` is left out.
``python doc_pages.py PAGE`` runs a page's python blocks.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import itertools
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(
    r"^(?P<skip><!-- not run: .+ -->\n+)?```(?P<kind>\w+)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_FILE = re.compile(r"# (\w+\.py)\n")
_AS_PRINTED = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass(frozen=True)
class Block:
    """One fenced block; ``line`` is that of its first line of code."""

    kind: str
    code: str
    line: int
    printed: str | None  # what the page says it prints

    @property
    def file_name(self) -> str | None:
        """The file that the block is, if it is one."""
        named = _FILE.match(self.code) if self.kind == "python" else None
        return named[1] if named else None


@dataclass(frozen=True)
class Command:
    """One command of a page, with the files that are there when it runs."""

    code: str
    line: int
    files: dict[str, str]
    printed: str | None
    prints_as_before: bool = False  # as the page's first command


def blocks_of(page: Path) -> list[Block]:
    """All blocks of a page that are run, in order, each with the text that follows it."""
    text = page.read_text()
    found = [m for m in _FENCE.finditer(text) if m["skip"] is None]
    blocks = []
    for match, following in itertools.zip_longest(found, found[1:]):
        has_text = following is not None and following["kind"] == "text"
        line = text.count("\n", 0, match.start("code")) + 1
        printed = following["code"] if has_text else None
        blocks.append(Block(match["kind"], match["code"], line, printed))
    return [block for block in blocks if block.kind != "text"]


def commands_of(page: Path) -> Iterator[Command]:
    """The commands of a page, those that its diffs stand for included."""
    blocks = blocks_of(page)
    files: dict[str, str] = {}
    original, first = "", None
    for i, block in enumerate(blocks):
        if block.file_name:
            original = original or block.code
            files = {**files, block.file_name: block.code}
        elif block.kind == "diff":
            files = {**files, next(iter(files)): changed(original, block.code)}
            following = next((b for b in blocks[i + 1 :] if b.kind in ("sh", "diff")), None)
            if first is not None and (following is None or following.kind == "diff"):
                yield Command(first.code, block.line, files, None, prints_as_before=True)
        elif block.kind == "sh":
            first = first or block
            yield Command(block.code, block.line, files, block.printed)


def changed(code: str, diff: str) -> str:
    """``code`` after a diff without line numbers.

    Its lines are looked for in order; what it leaves out stays.
    """
    rest, done = code.splitlines(), []
    for line in diff.splitlines():
        mark, text = line[:1] or " ", line[1:]
        if mark == "+":
            done.append(text)
            continue
        if text not in rest:
            raise ValueError(f"the diff has {text!r}, which does not follow in the file")
        at = rest.index(text)
        done += rest[: at + (mark == " ")]
        del rest[: at + 1]
    return "\n".join(done + rest) + "\n"


def check_printed(page: Path, line: int, expected: str | None, printed: str) -> None:
    """Raise unless what was printed is what the page says, if it says anything."""
    if expected is None:
        return
    if not doctest.OutputChecker().check_output(expected, printed, _AS_PRINTED):
        raise AssertionError(
            f"{page.name}:{line}: the page says that this prints\n\n{expected}\nbut it printed\n\n"
            f"{printed}"
        )


def run_python(page: Path) -> None:
    """Run the python blocks of a page, and compare what they print with what the page says."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in blocks_of(page):
        if block.kind != "python" or block.file_name:
            continue
        # Blank lines before, so that a traceback has the page's line numbers.
        code = compile("\n" * (block.line - 1) + block.code, str(page), "exec")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, namespace)
        check_printed(page, block.line, block.printed, printed.getvalue())


if __name__ == "__main__":
    run_python(Path(sys.argv[1]))
