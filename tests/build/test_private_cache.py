"""Engines that another user could have written are not loaded."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from tiny_engine import needs_compiler, refusal

from pyringar.engine import build
from pyringar.errors import BuildError

NOBODY = 65534
is_root = os.geteuid() == 0
needs_root = pytest.mark.skipif(not is_root, reason="only root can change the owner of a file")


def make(folder: Path, mode: int, owner: int | None = None) -> Path:
    folder.mkdir(mode=0o700)
    folder.chmod(mode)
    if owner is not None:
        os.chown(folder, owner, owner)
    return folder


# --- files that other users can write ---


@pytest.mark.parametrize("mode", [0o1777, 0o702, 0o720])
@needs_compiler
def test_writable_cache_is_refused(cache, tiny, mode):
    make(cache, mode)
    text = refusal(tiny)
    assert f"{cache} can be written by other users (mode {mode:04o})" in text
    assert f"chmod go-w {cache}" in text
    assert list(cache.iterdir()) == []


@needs_compiler
@pytest.mark.parametrize("fault", ["writable", pytest.param("foreign", marks=needs_root)])
@pytest.mark.parametrize("which", ["cache", "folder", "engine"])
def test_engine_of_other_user_is_ignored(cache, tiny, caplog, which, fault):
    built = build.ensure_engine(tiny)
    path = {"cache": cache, "folder": built.path.parent, "engine": built.path}[which]
    if fault == "foreign":
        os.chown(path, NOBODY, NOBODY)
    else:
        path.chmod(0o777)
    assert build.find_engine(tiny) is None
    reason = f"belongs to user {NOBODY}" if fault == "foreign" else "can be written by other users"
    assert f"is not loaded: {path} {reason}" in caplog.text
    if which == "engine":  # the folder is private, so a new engine can replace this engine
        assert build.ensure_engine(tiny).origin == "built"
        assert build.ensure_engine(tiny).origin == "cache"
    else:
        assert str(path) in refusal(tiny)


@needs_compiler
def test_symlinked_engine_is_not_loaded(cache, tiny, tmp_path):
    built = build.ensure_engine(tiny)
    elsewhere = tmp_path / "elsewhere"
    shutil.move(built.path.parent, elsewhere)
    built.path.parent.symlink_to(elsewhere)
    assert build.find_engine(tiny) is None
    built.path.parent.unlink()
    shutil.move(elsewhere, built.path.parent)
    assert build.find_engine(tiny) == build.Engine(built.path, "cache", built.record)


@needs_compiler
def test_new_cache_is_private_despite_umask(cache, tiny):
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
def test_error_names_unusable_cache(tmp_path, cache, tiny, monkeypatch, place):
    (tmp_path / "file").write_text("a file")
    monkeypatch.setenv("PYRINGAR_CACHE_DIR", str(tmp_path / place))
    text = refusal(tiny)
    assert "PYRINGAR_CACHE_DIR" in text
    assert str(tmp_path / place) in text


def test_error_names_cache_in_unknown_home(cache, monkeypatch):
    monkeypatch.setenv("PYRINGAR_CACHE_DIR", "~no-such-user/cache")
    with pytest.raises(BuildError, match="PYRINGAR_CACHE_DIR is '~no-such-user/cache'"):
        build.find_engine(build.Recipe())
