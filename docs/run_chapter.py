"""Run the chapter from top to bottom and write its outputs: ``python docs/run_chapter.py``.

Writes docs/chapter.ipynb with outputs. Pictures are stored with a palette, which takes a third of
the bytes. Each code cell stores a hash of its source and of all code cells before it.
tests/test_chapter.py compares the hashes to detect outdated outputs.

Takes minutes. Reads the images in PYRINGAR_TEST_DATA if it is set, else in the user's data folder.
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
FINGERPRINT = "ran"  # metadata key of a cell's hash
CELL_TIMEOUT_S = 1200
COLORS = 64  # size of a picture's palette


def fingerprints(notebook: Any) -> Iterator[tuple[Any, str]]:
    """Yield every code cell, and a hash of its source and of all code cells before it."""
    digest = hashlib.sha256()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            digest.update(cell.source.encode() + b"\0")
            yield cell, digest.hexdigest()[:16]


def private_words() -> list[str]:
    """Return names and folders of this machine, which outputs must not contain."""
    folders = [str(Path.home()), str(CHAPTER.parents[1]), tempfile.gettempdir()]
    names = [socket.gethostname(), getpass.getuser(), os.environ.get("PYRINGAR_TEST_DATA", "")]
    return [word for word in folders + names if len(word) > 2 and word != "root"]


def execute(notebook: Any) -> None:
    """Run all cells in a new kernel, in the folder of the chapter."""
    from nbclient import NotebookClient

    folder = {"metadata": {"path": str(CHAPTER.parent)}}
    client = NotebookClient(notebook, timeout=CELL_TIMEOUT_S, resources=folder, record_timing=False)
    client.execute()


def tidy(notebook: Any) -> None:
    """Shrink the outputs, store the hashes, and raise for warnings and names of this machine."""
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
    """Join consecutive outputs of the same stream."""
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
        raise RuntimeError(f"cell {cell_id} wrote to stderr:\n{output}")
    texts = [output.get("text", ""), *output.get("data", {}).values()]
    for word in private_words():
        if any(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", str(text)) for text in texts):
            raise RuntimeError(f"output of cell {cell_id} has a name of this machine: {word!r}")


def shrink(png: str) -> str:
    """Return a base64 PNG with a palette."""
    from PIL import Image  # comes with matplotlib

    with Image.open(io.BytesIO(base64.b64decode(png))) as image:
        flat = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    file = io.BytesIO()
    flat.convert("RGB").quantize(COLORS, dither=Image.Dither.NONE).save(file, "PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode()


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=CHAPTER, help="default: docs/chapter.ipynb")
    out = parser.parse_args().out
    if out.is_dir() or not out.parent.is_dir():
        parser.error(f"--out is '{out}', expected a file in an existing folder")
    notebook = nbformat.read(CHAPTER, as_version=4)
    execute(notebook)
    tidy(notebook)
    nbformat.write(notebook, out)
    print(f"{out}: {out.stat().st_size / 1e3:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
