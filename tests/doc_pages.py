"""Run the code on a documentation page: python doc_pages.py PAGE runs its python blocks.

Fenced blocks of a page:

    python      runs in order in one namespace; ``# name.py`` as first line: the block is that file
    sh          commands, run in the folder that holds the page's files
    text        output of the block before it; ``...`` matches any text
    diff        a change of the page's first file. The next command runs with the change. Without a
                command before the next diff, the page's first command runs with the change

A block after a line ``<!-- not run: REASON -->`` is not run.
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
    kind: str
    code: str
    line: int
    printed: str | None  # the text block after this block

    @property
    def file_name(self) -> str | None:
        named = _FILE.match(self.code) if self.kind == "python" else None
        return named[1] if named else None


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    found = [match for match in _FENCE.finditer(text) if match["skip"] is None]
    blocks = []
    for match, following in itertools.zip_longest(found, found[1:]):
        has_text = following is not None and following["kind"] == "text"
        line = text.count("\n", 0, match.start("code")) + 1
        printed = following["code"] if has_text else None
        blocks.append(Block(match["kind"], match["code"], line, printed))
    return [block for block in blocks if block.kind != "text"]


def commands_of(page: Path) -> Iterator[tuple[Block, dict[str, str]]]:
    blocks = blocks_of(page)
    files: dict[str, str] = {}
    commands = [block for block in blocks if block.kind == "sh"]
    original = next((block.code for block in blocks if block.file_name), "")
    for block, following in itertools.zip_longest(blocks, blocks[1:]):
        if block.file_name:
            files = {**files, block.file_name: block.code}
        elif block.kind == "diff":
            files = {**files, next(iter(files)): changed(original, block.code)}
            if following is None or following.kind != "sh":
                yield commands[0], files
        elif block.kind == "sh":
            yield block, files


def changed(code: str, diff: str) -> str:
    """Apply a diff without line numbers, which may omit unchanged lines."""
    rest, done = code.splitlines(), []
    for line in diff.splitlines():
        mark, text = line[:1] or " ", line[1:]
        if mark == "+":
            done.append(text)
            continue
        if text not in rest:
            raise ValueError(
                f"the diff has the line {text!r}, which the rest of the file does not have"
            )
        at = rest.index(text)
        done += rest[: at + (mark == " ")]
        del rest[: at + 1]
    return "\n".join(done + rest) + "\n"


def check_printed(page: Path, block: Block, printed: str) -> None:
    expected = block.printed
    if expected and not doctest.OutputChecker().check_output(expected, printed, _AS_PRINTED):
        raise AssertionError(
            f"{page.name}:{block.line}: expected output\n\n{expected}\nprinted output\n\n{printed}"
        )


def run_python(page: Path) -> None:
    """Run the python blocks of a page, and compare their output with the page."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in blocks_of(page):
        if block.kind != "python" or block.file_name:
            continue
        # Blank lines give tracebacks the line numbers of the page.
        code = compile("\n" * (block.line - 1) + block.code, str(page), "exec")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, namespace)
        check_printed(page, block, printed.getvalue())


if __name__ == "__main__":
    run_python(Path(sys.argv[1]))
