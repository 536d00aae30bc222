"""Is the engine loaded once, and do the commands that build and describe it say what is there?"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from tiny_engine import REPO, needs_compiler

from pyringar.cli import main
from pyringar.engine import build, load
from pyringar.errors import BuildError

# --- loading ---


@needs_compiler
def test_threads_load_one_engine(cache, tiny, unloaded, monkeypatch):
    built, calls = build.ensure_engine(tiny), []
    assert load.loaded_engine() is None

    def slow_ensure(recipe: build.Recipe) -> build.Engine:
        calls.append(1)
        time.sleep(0.05)
        return built

    monkeypatch.setattr(build, "ensure_engine", slow_ensure)
    with ThreadPoolExecutor(8) as pool:
        modules = list(pool.map(lambda _: load.engine(), range(8)))
    assert len(calls) == 1
    assert all(module is load.loaded_engine() for module in modules)


@needs_compiler
def test_unloadable_engine_says_what_to_do(cache, tiny, unloaded, monkeypatch):
    built = build.ensure_engine(tiny)
    built.path.write_bytes(b"no machine code")
    monkeypatch.setattr(build, "ensure_engine", lambda recipe: built)
    with pytest.raises(BuildError, match="pyringar build --force") as caught:
        load.engine()
    assert isinstance(caught.value.__cause__, ImportError)
    assert str(built.path) in str(caught.value)
    assert load.loaded_engine() is None


def test_import_neither_builds_nor_loads(cache):
    code = (
        "import sys, time, torch; t = time.process_time(); import pyringar; "
        "print(time.process_time() - t, 'pyringar._engine' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=True
    )
    seconds, loaded = done.stdout.split()
    assert loaded == "False"
    assert not cache.exists()
    assert float(seconds) < 0.3


# --- the command line ---


def test_info_builds_nothing(cache, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["info"]) == 0
    report = capsys.readouterr().out
    assert all(told in report for told in ("CompilerNotFoundError", "not built yet", str(cache)))
    assert main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["environment"]["PYRINGAR_CACHE_DIR"] == str(cache)
    assert facts["versions"]["python"]
    assert not cache.exists()


def test_info_lists_gpus_and_links(cache, monkeypatch, capsys):
    gpu = SimpleNamespace(
        name="Example GPU", major=9, minor=0, total_memory=80 * 2**30, multi_processor_count=132
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: (a, b) == (0, 1))
    assert main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["devices"]["cuda:1"].startswith("Example GPU, compute capability 9.0, 80.0 GiB")
    assert facts["peers"]["cuda:0"] == {"cuda:0": "self", "cuda:1": "yes"}
    assert facts["peers"]["cuda:1"] == {"cuda:0": "no", "cuda:1": "self"}


@needs_compiler
def test_build_command(cache, tiny, unloaded, monkeypatch, capsys, caplog):
    monkeypatch.setattr(build.Recipe, "root", lambda self: self.source_root or tiny.source_root)
    caplog.set_level(logging.INFO)

    def told(*options: str, status: int = 0) -> str:
        assert main(["build", "--no-cuda", *options]) == status
        return "".join(capsys.readouterr())

    first = told("--verbose")
    assert str(cache) in first
    assert "compiler" in first
    assert "module.cpp" in caplog.text
    assert "it was there (cache)" in told()
    assert "it was there" not in told("--force")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert told("--force", status=1).endswith("or name yours in CXX.\n")
