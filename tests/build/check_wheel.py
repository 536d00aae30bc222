"""Load the engine of an installed wheel without torch and without a compiler."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pyringar
from pyringar.engine import build, load

with tempfile.TemporaryDirectory() as folder:
    os.environ |= {"PATH": folder, "PYRINGAR_CACHE_DIR": f"{folder}/cache"}
    os.environ.pop("CXX", None)
    engine = build.ensure_engine()
    info = load.load(engine).build_info()
    print(engine.origin, engine.path, info)
    assert engine.origin == "wheel"
    assert Path(pyringar.__path__[0]) in engine.path.parents
    assert os.listdir(folder) == [], "a file was written"
