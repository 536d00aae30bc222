"""Which folders are caches, and is machine code loaded that another user could have written?"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from tiny_engine import needs_compiler, refusal, set_value, value_of

from pyringar.engine import build
from pyringar.engine.load import load

NOBODY = 65534
is_root = os.geteuid() == 0
needs_root = pytest.mark.skipif(not is_root, reason="only root can give a file away")


def make(folder: Path, mode: int, owner: int | None = None) -> Path:
    folder.mkdir(mode=0o700)
    folder.chmod(mode)
    if owner is not None:
        os.chown(folder, owner, owner)
    return folder


# --- what others can write is not loaded ---


@pytest.mark.parametrize("mode", [0o1777, 0o702, 0o720])
@needs_compiler
def test_writable_cache_is_refused(cache, tiny, mode):
    make(cache, mode)
    told = refusal(tiny)
    assert f"{cache} can be written by other users (mode {mode:04o})" in told
    assert f"chmod go-w {cache}" in told
    assert list(cache.iterdir()) == []


@needs_compiler
@pytest.mark.parametrize("how", ["writable", pytest.param("foreign", marks=needs_root)])
@pytest.mark.parametrize("which", ["cache", "folder", "engine"])
def test_engine_of_others_is_not_found(cache, tiny, caplog, which, how):
    built = build.ensure_engine(tiny)
    path = {"cache": cache, "folder": built.path.parent, "engine": built.path}[which]
    if how == "foreign":
        os.chown(path, NOBODY, NOBODY)
    else:
        path.chmod(0o777)
    assert build.find_engine(tiny) is None
    fault = f"belongs to user {NOBODY}" if how == "foreign" else "can be written by other users"
    assert f"is not loaded: {path} {fault}" in caplog.text
    if which == "engine":  # its folder is private: a new one replaces it
        assert build.ensure_engine(tiny).origin == "built"
        assert build.ensure_engine(tiny).origin == "cache"
    else:
        assert str(path) in refusal(tiny)


@needs_compiler
def test_links_are_not_followed(cache, tiny, tmp_path):
    built = build.ensure_engine(tiny)
    elsewhere = tmp_path / "elsewhere"
    shutil.move(built.path.parent, elsewhere)
    built.path.parent.symlink_to(elsewhere)
    assert build.find_engine(tiny) is None
    built.path.parent.unlink()
    shutil.move(elsewhere, built.path.parent)
    assert build.find_engine(tiny) == build.Engine(built.path, "cache", built.record)


@needs_compiler
def test_new_cache_is_private_under_any_umask(cache, tiny):
    before = os.umask(0)
    try:
        built = build.ensure_engine(tiny)
    finally:
        os.umask(before)
    for path, mode in ((cache, 0o700), (built.path.parent, 0o700), (built.path, 0o755)):
        assert path.stat().st_mode & 0o777 == mode, path


# --- a cache that cannot be used ---


@pytest.mark.parametrize("place", ["file", "/proc/pyringar"])
@needs_compiler
def test_impossible_cache_is_named(tmp_path, cache, tiny, monkeypatch, place):
    (tmp_path / "file").write_text("a file")
    monkeypatch.setenv("PYRINGAR_CACHE_DIR", str(tmp_path / place))
    told = refusal(tiny)
    assert "PYRINGAR_CACHE_DIR" in told
    assert str(tmp_path / place) in told


# --- the folder for temporary files ---


@pytest.fixture
def temporary(cache, tmp_path, monkeypatch):
    """``temporary(home)``: name no cache, set HOME; return the cache that serves instead."""
    shared = make(tmp_path / "tmp", 0o1777)
    for name in ("PYRINGAR_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TMPDIR", str(shared))
    monkeypatch.setattr("tempfile.tempdir", None)

    def move(home: str | Path) -> Path:
        monkeypatch.setenv("HOME", str(home))
        return shared / f"pyringar-{os.geteuid()}"

    return move


@needs_compiler
@pytest.mark.parametrize("home", ["/dev/null", "writable", "foreign"])
def test_temporary_folder_serves(temporary, tiny, tmp_path, caplog, home):
    if home == "foreign" and not is_root:
        pytest.skip("only root can give a folder away")
    told = home
    if home in ("writable", "foreign"):
        (tmp_path / "home/.cache").mkdir(parents=True)
        mode, owner = (0o777, None) if home == "writable" else (0o755, NOBODY)
        told = str(make(tmp_path / "home/.cache/pyringar", mode, owner))
        home = str(tmp_path / "home")
    folder = temporary(home)
    built = build.ensure_engine(tiny)
    assert built.path.parent.parent == folder
    assert folder.stat().st_mode & 0o777 == 0o700
    assert load(built).value() == 42
    warned = [record.message for record in caplog.records if "may not last" in record.message]
    assert len(warned) == 1
    assert [word for word in (str(folder), told) if word not in warned[0]] == []
    assert build.find_engine(tiny).path == built.path


@needs_compiler
@needs_root
def test_foreign_temporary_folder_is_refused(temporary, tiny, tmp_path):
    folder = temporary("/dev/null")
    make(folder, 0o755, NOBODY)
    assert f"{folder} belongs to user {NOBODY}" in refusal(tiny)
    temporary(tmp_path)
    built = build.ensure_engine(tiny)
    assert built.path.is_relative_to(tmp_path / ".cache/pyringar")
    shutil.copytree(built.path.parent, folder / built.path.parent.name)
    shutil.rmtree(tmp_path / ".cache")
    assert build.ensure_engine(tiny).origin == "built"


@needs_compiler
def test_read_only_image_uses_its_engine(temporary, tiny, tmp_path, monkeypatch, caplog):
    """What was built into it serves, a new engine goes to the folder for temporary files."""
    folder = temporary(tmp_path)
    built = build.ensure_engine(tiny)
    access = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: ".cache" not in str(path) and access(path, mode)
    )
    assert build.ensure_engine(tiny).path == built.path
    set_value(tiny, 43)
    fresh = build.ensure_engine(tiny)
    assert fresh.path.parent.parent == folder
    assert "cannot be written" in caplog.text
    assert value_of(build.ensure_engine(tiny)) == "43"
