"""Open files only where no other user could have written them.

A library that is loaded is run. So what `open_private` opens can be replaced by nobody but this
user and root, from the root of the file system down to the file, as sshd's StrictModes demands of
keys. JSON is read with limits: whatever a file holds, it is content or a ValueError.
"""

from __future__ import annotations

import json
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = [
    "NotPrivateError",
    "make_private_dir",
    "open_for_owner",
    "open_private",
    "private_path",
    "read_json",
]

_MAX_LINKS = 40  # as Linux follows


class NotPrivateError(Exception):
    """Another user could replace what a path leads to; says which part of it, and why."""


def private_path(path: Path) -> Path:
    """Return ``path`` without symbolic links, if nobody else can make it lead elsewhere.

    Walks from / down: a name in a folder that others cannot change cannot be exchanged once it was
    looked at. Missing parts at the end are kept; all others must belong to this user or root.
    Others may write to no folder on the way but a sticky one (/tmp), where what belongs to this
    user or root is safe from them.

    Raises:
        NotPrivateError: Somebody else can.
        OSError: It cannot be followed.
    """
    here, links = Path("/"), 0
    ahead = list(reversed(path.absolute().parts[1:]))
    while ahead:
        _refuse_if_others_can_change(here, os.lstat(here), may_be_sticky=True)
        name = ahead.pop()
        if name == "..":
            here = here.parent
            continue
        step = here / name
        try:
            status = os.lstat(step)
        except FileNotFoundError:
            return step.joinpath(*reversed(ahead))
        if not stat.S_ISLNK(status.st_mode):
            here = step
            continue
        _refuse_if_anothers(step, status)
        links += 1
        if links > _MAX_LINKS:
            raise OSError(f"{path} goes through more than {_MAX_LINKS} symbolic links")
        target = Path(os.readlink(step))
        if target.is_absolute():
            here, target = Path("/"), target.relative_to("/")
        ahead += reversed(target.parts)
    _refuse_if_others_can_change(here, os.lstat(here), may_be_sticky=False)
    return here


def open_private(path: Path) -> int:
    """Open a regular file that nobody else could have written or can replace; return a descriptor.

    Raises:
        NotPrivateError: Somebody else can.
        OSError: It cannot be opened, or is not a regular file.
    """
    fd = _open_regular(private_path(path), os.O_NOFOLLOW)
    try:
        _refuse_if_others_can_change(path, os.fstat(fd), may_be_sticky=False)
    except NotPrivateError:
        os.close(fd)
        raise
    return fd


def make_private_dir(path: Path) -> None:
    """Make a folder, and missing ones above it, for this user alone."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        with suppress(FileExistsError):  # another process was quicker
            folder.mkdir(mode=0o700)


def open_for_owner(path: str, flags: int) -> int:
    """Open a file, as an ``opener`` of ``open``; a new one is this user's alone."""
    return os.open(path, flags, 0o600)


def read_json(path: Path, max_bytes: int) -> Any:
    """Read a JSON file of at most ``max_bytes``.

    Raises:
        OSError: It cannot be read, or is not a regular file.
        ValueError: It is too long, not UTF-8, not JSON, or nested too deeply for Python.
    """
    with open(_open_regular(path), "rb") as file:
        nbytes = os.fstat(file.fileno()).st_size
        if nbytes > max_bytes:
            raise ValueError(f"it has {nbytes} bytes, expected at most {max_bytes}")
        try:
            return json.loads(file.read(nbytes).decode())
        except RecursionError:
            raise ValueError("it is nested too deeply") from None


def _open_regular(path: Path, flags: int = 0) -> int:
    # O_NONBLOCK: opening a pipe would wait for its other end.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(f"{path} is not a regular file")
    return fd


def _refuse_if_anothers(path: Path, status: os.stat_result) -> None:
    # Whoever owns / can replace everything; in a user namespace that need not be user 0.
    if status.st_uid not in (os.geteuid(), 0, os.lstat("/").st_uid):
        raise NotPrivateError(
            f"{path} belongs to user {status.st_uid}, neither to you ({os.geteuid()}) nor to root"
        )


def _refuse_if_others_can_change(
    path: Path, status: os.stat_result, *, may_be_sticky: bool
) -> None:
    _refuse_if_anothers(path, status)
    mode = stat.S_IMODE(status.st_mode)
    if may_be_sticky and mode & stat.S_ISVTX:
        return
    by_all = mode & stat.S_IWOTH
    if by_all or (mode & stat.S_IWGRP and not _is_private_group(status.st_gid, status.st_uid)):
        who = "everybody" if by_all else f"group {status.st_gid}"
        raise NotPrivateError(f"{path} can be written by other users ({who}; mode {mode:04o})")


def _is_private_group(gid: int, uid: int) -> bool:
    """Return whether a group is a user's own, as systems with umask 002 give one to everybody."""
    import grp
    import pwd

    try:
        owner, members = pwd.getpwuid(uid), grp.getgrgid(gid).gr_mem
    except KeyError:
        return False
    if owner.pw_gid != gid or not {owner.pw_name}.issuperset(members):
        return False
    return all(user.pw_uid == uid for user in pwd.getpwall() if user.pw_gid == gid)
