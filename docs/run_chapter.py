"""Run the chapter from top to bottom and write its outputs: ``python docs/run_chapter.py``.

Writes docs/chapter.ipynb, which is committed with its outputs. Pictures are stored with a palette,
which takes a third of the bytes. Each cell of code stores a hash of itself and of all code before
it, by which tests/test_chapter.py knows that the outputs belong to the code.

Takes minutes. Reads the images of PYRINGAR_TEST_DATA, if that is set, else those of the user.
"""

from __future__ import annotations

import argparse
import base64
import getpass
import hashlib
import io
import os
import re
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat

CHAPTER = Path(__file__).with_name("chapter.ipynb")
FINGERPRINT = "ran"  # the key in a cell's metadata
CELL_TIMEOUT_S = 1200
COLORS = 64  # of a picture's palette


def fingerprints(notebook: Any) -> Iterator[tuple[Any, str]]:
    """Yield every cell of code, and a hash of its source and of all before it."""
    so_far = hashlib.sha256()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            so_far.update(cell.source.encode() + b"\0")
            yield cell, so_far.hexdigest()[:16]


def private_words() -> list[str]:
    """Return the names and folders of this machine, which no output may contain."""
    folders = [str(Path.home()), str(CHAPTER.parents[1]), tempfile.gettempdir()]
    names = [socket.gethostname(), getpass.getuser(), os.environ.get("PYRINGAR_TEST_DATA", "")]
    return [word for word in folders + names if len(word) > 2 and word != "root"]


def execute(notebook: Any) -> None:
    """Run all cells in a new kernel, in the chapter's folder."""
    from nbclient import NotebookClient

    where = {"metadata": {"path": str(CHAPTER.parent)}}
    NotebookClient(notebook, timeout=CELL_TIMEOUT_S, record_timing=False, resources=where).execute()


def tidy(notebook: Any) -> None:
    """Make the outputs small, refuse warnings and names of this machine, and store the hashes."""
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for cell, fingerprint in fingerprints(notebook):
        cell.metadata = {FINGERPRINT: fingerprint}
        cell.outputs = _merge_streams(cell.outputs)
        for output in cell.outputs:
            _refuse_noise(cell.id, output)
            data = output.get("data", {})
            if "image/png" in data:
                data["image/png"] = shrink(data["image/png"])
                output.metadata = {}


def _merge_streams(outputs: list[Any]) -> list[Any]:
    """Join text that was printed in several writes."""
    merged: list[Any] = []
    for output in outputs:
        last = merged[-1] if merged else {}
        if output.output_type == "stream" and last.get("name") == output.get("name"):
            last["text"] += output.text
        else:
            merged.append(output)
    return merged


def _refuse_noise(cell_id: str, output: Any) -> None:
    if output.output_type == "error" or output.get("name") == "stderr":
        raise RuntimeError(f"cell {cell_id} has written to stderr:\n{output}")
    texts = [output.get("text", ""), *output.get("data", {}).values()]
    for word in private_words():
        if any(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", str(text)) for text in texts):
            raise RuntimeError(f"cell {cell_id} names this machine: {word!r}")


def shrink(png: str) -> str:
    """Store a picture, which is in base64, with a palette."""
    from PIL import Image  # comes with matplotlib

    with Image.open(io.BytesIO(base64.b64decode(png))) as image:
        flat = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    file = io.BytesIO()
    flat.convert("RGB").quantize(COLORS, dither=Image.Dither.NONE).save(file, "PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode()


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=CHAPTER, help="where the notebook is written")
    out = parser.parse_args().out
    if out.is_dir() or not out.parent.is_dir():
        parser.error(f"--out is '{out}', expected a file in a folder that is there")
    notebook = nbformat.read(CHAPTER, as_version=4)
    execute(notebook)
    tidy(notebook)
    nbformat.write(notebook, out)
    print(f"{out}: {out.stat().st_size / 1e3:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
