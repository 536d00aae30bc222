"""Can another user make this one load code: folders, links, swaps during a load, no home folder?"""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from cases import mostly_slow
from tiny_engine import (
    needs_compiler,
    refusal,
    run_alone,
    set_value,
    wait_for,
)

from pyringar.engine import build, files, load
from pyringar.errors import BuildError

NOBODY = 65534
is_root = hasattr(os, "geteuid") and os.geteuid() == 0
needs_root = pytest.mark.skipif(not is_root, reason="only root can act as another user")


@pytest.fixture
def shared(cache, monkeypatch):
    """A folder that every user can reach, with the cache in it; pytest's are closed to others."""
    with tempfile.TemporaryDirectory(prefix="pyringar-test-") as folder:
        Path(folder).chmod(0o755)
        monkeypatch.setenv("PYRINGAR_CACHE_DIR", f"{folder}/cache")
        yield Path(folder)


# --- which folders ---


def make(folder: Path, mode: int, owner: int | None = None) -> Path:
    folder.mkdir(mode=0o700)
    folder.chmod(mode)
    if owner is not None:
        os.chown(folder, owner, owner)
    return folder


def refuses(path: Path, told: str) -> None:
    with pytest.raises(files.NotPrivateError, match=told):
        files.private_path(path)


@pytest.mark.parametrize("mode", [0o777, 0o757, 0o702])
def test_a_folder_above_that_others_can_write_is_refused(tmp_path, mode):
    make(tmp_path / "above", mode)
    refuses(tmp_path / "above/cache/key", rf"above can be written.*{mode:04o}")


@needs_root
def test_a_folder_or_link_of_another_user_is_refused(tmp_path):
    make(tmp_path / "theirs", 0o755, NOBODY)
    refuses(tmp_path / "theirs/cache/key", rf"theirs belongs to user {NOBODY}")
    make(tmp_path / "tmp", 0o1777)
    (tmp_path / "tmp/link").symlink_to(make(tmp_path / "mine", 0o700))
    os.lchown(tmp_path / "tmp/link", NOBODY, NOBODY)
    refuses(tmp_path / "tmp/link/key", rf"link belongs to user {NOBODY}")


def test_a_sticky_folder_may_be_above_and_not_the_cache_itself(tmp_path):
    make(tmp_path / "tmp", 0o1777)
    make(tmp_path / "tmp/cache", 0o755)
    found = files.private_path(tmp_path / "tmp/cache/not/there")
    assert found == (tmp_path / "tmp/cache/not/there").resolve()
    refuses(tmp_path / "tmp", "can be written by other users")


@pytest.mark.parametrize(
    ("members", "primary", "users", "is_own"),
    [
        ([], 5000, [], True),
        (["me"], 5000, [], True),
        (["me", "you"], 5000, [], False),
        ([], 100, [], False),
        ([], 5000, ["you"], False),
    ],
)
def test_a_group_of_its_owner_alone_may_write(
    tmp_path, monkeypatch, members, primary, users, is_own
):
    """With umask 002 every folder of a user can be written by a group: by one of the user's own."""
    import grp
    import pwd

    folder = make(tmp_path / "home", 0o775)
    me = SimpleNamespace(pw_name="me", pw_uid=os.geteuid(), pw_gid=primary)
    you = [SimpleNamespace(pw_name=name, pw_uid=4999, pw_gid=primary) for name in users]
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: me)
    monkeypatch.setattr(pwd, "getpwall", lambda: [me, *you])
    monkeypatch.setattr(grp, "getgrgid", lambda gid: SimpleNamespace(gr_mem=members))
    lstat, changed = os.lstat, list(os.lstat(folder))
    changed[stat.ST_GID] = 5000
    monkeypatch.setattr(
        os, "lstat", lambda path: os.stat_result(changed) if path == folder else lstat(path)
    )
    if is_own:
        assert files.private_path(folder / "cache") == folder / "cache"
    else:
        refuses(folder / "cache", r"home can be written .*group 5000")


def test_links_are_followed_and_end(tmp_path):
    real = make(tmp_path / "real", 0o700)
    (tmp_path / "a").symlink_to("b/../b")
    (tmp_path / "b").symlink_to(tmp_path / "c")
    (tmp_path / "c").symlink_to("./real")
    assert files.private_path(tmp_path / "a/key") == real.resolve() / "key"
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="40 symbolic links"):
        files.private_path(tmp_path / "loop/key")


def test_only_regular_files_are_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe", 0o600)  # opening it would wait
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/null")):
        with pytest.raises((OSError, files.NotPrivateError)):
            files.open_private(path)
    (tmp_path / "file").write_text("mine")
    os.close(files.open_private(tmp_path / "file"))
    (tmp_path / "file").chmod(0o666)
    with pytest.raises(files.NotPrivateError, match="file can be written"):
        files.open_private(tmp_path / "file")


@needs_compiler
def test_everything_that_is_made_is_its_owners_alone(cache, tiny, monkeypatch):
    monkeypatch.setenv("PYRINGAR_CACHE_DIR", str(cache / "a/b"))
    before = os.umask(0)
    try:
        built = build.ensure_engine(tiny)
    finally:
        os.umask(before)
    assert load.load(built).value() == 42
    assert cache.stat().st_mode & 0o777 == 0o700
    for path in cache.rglob("*"):
        others = 0o055 if path.name in (built.path.name, "build.json") else 0
        assert path.stat().st_mode & 0o077 == others, path


# --- between the check and the load ---

# Linux: exchanges two names again and again. Arguments: the user to be, the names.
SWAP = """
import ctypes, os, sys, time
libc = ctypes.CDLL(None, use_errno=True)
a, b = (os.fsencode(name) for name in sys.argv[2:])
os.setgid(int(sys.argv[1]))
os.setuid(int(sys.argv[1]))
end = time.monotonic() + 300
while time.monotonic() < end:
    if libc.renameat2(-100, a, -100, b, 2) != 0:
        raise OSError(ctypes.get_errno(), "renameat2")
    time.sleep(50e-6)
"""
# Loads again and again, in a fresh process each, and counts what became of it.
VICTIM = """
from pyringar.errors import BuildError
recipe = build.Recipe(Path(sys.argv[2]))
for _ in range(int(sys.argv[3])):
    child = os.fork()
    if child == 0:
        code = 3
        try:
            engine = build.find_engine(recipe)
            code = 2 if engine is None else 0 if load.load(engine).value() == 42 else 3
        except BuildError:
            code = 1
        finally:
            os._exit(code)
    outcome = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print({0: "loaded", 1: "refused", 2: "none"}.get(outcome, "foreign"))
"""


def plant_foreign_engine(tiny: build.Recipe, good: Path, evil: Path) -> None:
    """Make a cache that looks like the good one, of another user's, whose engine says 666."""
    built = build.ensure_engine(tiny)
    shutil.copytree(good, evil)
    set_value(tiny, 666)
    foreign = build.ensure_engine(tiny)
    set_value(tiny, 42)
    shutil.copy(foreign.path, evil / built.path.relative_to(good))
    for path in (evil, *evil.rglob("*")):
        os.chown(path, NOBODY, NOBODY)
        path.chmod(0o755)


@needs_root
@needs_compiler
@pytest.mark.skipif(sys.platform != "linux", reason="renameat2 is Linux's")
@pytest.mark.parametrize("swapper", mostly_slow(["nobody", "root"], "nobody"))
@pytest.mark.parametrize("loads", [40, pytest.param(500, marks=pytest.mark.thorough)])
def test_folders_that_change_during_a_load_run_no_foreign_code(shared, tiny, swapper, loads):
    """Another user exchanges them, who may write the folder above; then root, who always may.

    From root the folders above protect nobody: what is checked is the file that is loaded.
    """
    good, evil = shared / "cache", shared / "evil"
    plant_foreign_engine(tiny, good, evil)
    if swapper == "nobody":
        shared.chmod(0o777)
    user = str(NOBODY if swapper == "nobody" else 0)
    swap = [sys.executable, "-c", SWAP, user, str(good), str(evil)]
    with subprocess.Popen(swap, stderr=subprocess.PIPE, text=True) as attack:
        try:
            wait_for(lambda: attack.poll() is not None or good.stat().st_uid == NOBODY)
            outcomes = Counter(run_alone(VICTIM, tiny.source_root, loads).split())
            assert attack.poll() is None, attack.communicate()
        finally:
            attack.kill()
    assert outcomes.total() == loads
    assert outcomes["foreign"] == 0, outcomes
    assert outcomes["refused"] > 0, outcomes


# --- loading through a descriptor ---


@needs_compiler
@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="no /proc")
def test_what_was_checked_is_what_is_loaded(cache, tiny, monkeypatch):
    """A file that takes the engine's place after it was opened is not loaded."""
    built = build.ensure_engine(tiny)
    checked = build.open_engine

    def swap_after(engine: build.Engine) -> int:
        fd = checked(engine)
        engine.path.unlink()
        engine.path.write_bytes(b"foreign")
        return fd

    monkeypatch.setattr(build, "open_engine", swap_after)
    module = load.load(built)
    assert module.value() == 42
    assert (module.__file__, module.__spec__.origin) == (str(built.path),) * 2


@needs_compiler
def test_without_proc_an_engine_is_loaded_by_its_path(cache, tiny, monkeypatch):
    built = build.ensure_engine(tiny)
    monkeypatch.setattr(os.path, "samestat", lambda a, b: False)
    assert load._path_of(build.open_engine(built), built.path) == str(built.path)
    assert load.load(built).value() == 42


@needs_compiler
def test_two_engines_are_never_taken_for_each_other(cache, tiny):
    """Not even where somebody closes all descriptors, as daemons do, so that numbers serve again.

    In a process of its own, because it closes what is not its own.
    """
    first = build.ensure_engine(tiny)
    set_value(tiny, 43)
    second = build.ensure_engine(tiny)
    for between in ("", "os.closerange(3, 99)"):
        code = f"""
def value(path):
    return load.load(build.Engine(Path(path), "cache", {{}}))
a = value(sys.argv[2])
{between}
b = value(sys.argv[3])
print(a.value(), b.value(), value(sys.argv[2]).value())
"""
        assert run_alone(code, first.path, second.path).split() == ["42", "43", "42"]


# --- no home folder ---


@pytest.fixture
def homeless(cache, tmp_path, monkeypatch):
    """``homeless(home)``: name no cache, set HOME; return the cache for want of a better one."""
    temporary = make(tmp_path / "tmp", 0o1777)
    for name in ("PYRINGAR_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr("tempfile.tempdir", None)
    build._warn_of_temporary.cache_clear()

    def move(home: str) -> Path:
        monkeypatch.setenv("HOME", home)
        return temporary / f"pyringar-{os.geteuid()}"

    return move


@needs_compiler
@pytest.mark.parametrize("home", ["/dev/null", "/proc/none", "open", "theirs"])
def test_without_a_home_of_ones_own_a_temporary_folder_serves(
    homeless, tiny, tmp_path, caplog, home
):
    if home == "theirs":
        if not is_root:
            pytest.skip("only root can give a folder away")
        home = str(make(tmp_path / "theirs", 0o755, NOBODY))
    elif home == "open":
        home = str(make(tmp_path / "open", 0o777))
    folder = homeless(home)
    built = build.ensure_engine(tiny)
    assert built.path.parent.parent == folder
    assert folder.stat().st_mode & 0o777 == 0o700
    assert load.load(built).value() == 42
    found = build.ensure_engine(tiny)
    assert (found.origin, found.path) == ("cache", built.path), "it is used again"
    warned = [record.message for record in caplog.records if "may not last" in record.message]
    assert len(warned) == 1, "once"
    words = (str(folder), "PYRINGAR_CACHE_DIR", home)
    assert [word for word in words if word not in warned[0]] == []


@needs_compiler
@needs_root
def test_a_temporary_folder_of_somebody_else_is_refused_or_passed_over(homeless, tiny, tmp_path):
    folder = homeless("/dev/null")
    make(folder, 0o755, NOBODY)
    assert re.search(rf"pyringar-0 belongs to user {NOBODY}.*is not loaded", refusal(tiny))
    # Whoever has a home need not care.
    assert homeless(str(tmp_path)) == folder
    built = build.ensure_engine(tiny)
    assert built.path.is_relative_to(tmp_path / ".cache/pyringar")
    theirs = make(folder / built.path.parent.name, 0o755, NOBODY)
    shutil.copy(built.path, theirs)
    shutil.copy(built.path.parent / "build.json", theirs)
    shutil.rmtree(tmp_path / ".cache")
    assert build.ensure_engine(tiny).origin == "built"


@needs_compiler
def test_an_engine_in_a_cache_that_cannot_be_written_is_used(
    homeless, tiny, tmp_path, monkeypatch, caplog
):
    """An image with a read-only root: what was built into it serves, what is new goes elsewhere."""
    folder = homeless(str(tmp_path))
    built = build.ensure_engine(tiny)
    access = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: ".cache" not in str(path) and access(path, mode)
    )
    assert build.ensure_engine(tiny).path == built.path
    set_value(tiny, 43)
    fresh = build.ensure_engine(tiny)
    assert fresh.path.parent.parent == folder
    assert "Permission denied" in caplog.text
    assert build.ensure_engine(tiny).path == fresh.path


def test_a_cache_in_no_home_is_refused(cache, monkeypatch):
    assert "no home folder" in build._why_unusable(Path("~/.cache/pyringar"))
    monkeypatch.setenv("PYRINGAR_CACHE_DIR", "~no-such-user/cache")
    with pytest.raises(BuildError, match="PYRINGAR_CACHE_DIR is '~no-such-user/cache'"):
        build.find_engine()
