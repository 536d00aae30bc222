"""Write the API reference as HTML, from the docstrings: ``python docs/build_api.py --out DIR``.

A warning of pdoc's is an error: a name that does not resolve, an annotation that cannot be read.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import pdoc

# The public packages, then the modules whose types their calls return. A page holds what its
# module's __all__ names.
MODULES = (
    "pyringar",
    "pyringar.distributed",
    "pyringar.train",
    "pyringar.predict",
    "pyringar.parallel.bucketer",
    "pyringar.grading.grader",
    "pyringar.parallel.optimizer",
    "pyringar.train.trace",
)


def build(out: Path, modules: Sequence[str] = MODULES) -> None:
    """Write one page per module and an index.

    Args:
        out: The folder; made if need be.
        modules: Names of what can be imported.

    Raises:
        RuntimeError: Names what pdoc warned of.
    """
    for name in modules:
        importlib.import_module(name)  # what other packages warn of is not our pages' fault
    pdoc.render.configure(docformat="google", show_source=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # In a checkout, with pyringar installed: it is the installed one that is documented.
        warnings.filterwarnings("ignore", ".* may refer to either the installed Python module")
        pdoc.pdoc(*modules, output_directory=out)
    if caught:
        raise RuntimeError("\n".join(f"pdoc: {warning.message}" for warning in caught))


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the folder to write into")
    out = parser.parse_args().out
    build(out)
    print(f"{len(MODULES)} pages: {out / 'index.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
