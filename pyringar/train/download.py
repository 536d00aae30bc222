"""Download Fashion-MNIST through torchvision, which knows where it is and what its hashes are."""

from __future__ import annotations

import fcntl
import gzip
import logging
import os
import queue
import shutil
import socket
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any

import torch

from pyringar.comm.threads import start_thread
from pyringar.errors import RingarError, UnsupportedError

__all__ = ["download_fashion_mnist"]

logger = logging.getLogger(__name__)

_REACHABLE_WITHIN_S = 4.0
_STALLED_AFTER_S = 20.0
_ABANDONED_AFTER_S = 60.0
_TEMPORARY = ".download-"


def download_fashion_mnist(folder: Path) -> None:
    """Download Fashion-MNIST's four files, with a bar on stderr, and unpack them.

    All four appear at once, after their hashes were found right: a download that fails or is broken
    off leaves nothing that looks like a data set; what one that was killed has left is removed by
    the next. Processes that download at the same time do not disturb each other.

    Args:
        folder: Where the files go; not there yet, or empty.

    Raises:
        UnsupportedError: torchvision cannot be imported; says why and how to mend it.
        RingarError: The network cannot be reached, a hash is wrong, or a file cannot be written.

    An unreachable network is noticed within 5 seconds, a download that stalls within 20.
    """
    source, download_url = _import_torchvision()
    mirror = source.mirrors[0]
    reason = _why_unreachable(mirror + source.resources[1][0], _REACHABLE_WITHIN_S)
    if reason:
        raise RingarError(f"{mirror} cannot be reached ({reason})")
    logger.info("downloading Fashion-MNIST (30 MB) from %s into '%s'", mirror, folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(folder.parent)
        with (
            tempfile.TemporaryDirectory(dir=folder.parent, prefix=_TEMPORARY) as temporary,
            _locked(Path(temporary)),
        ):
            unpacked = Path(temporary, "unpacked")
            unpacked.mkdir()
            for name, md5 in source.resources:
                with _socket_timeout(_STALLED_AFTER_S):
                    download_url(mirror + name, temporary, md5=md5)
                target = unpacked / Path(name).stem
                with gzip.open(Path(temporary, name)) as packed, target.open("xb") as file:
                    shutil.copyfileobj(packed, file)
            _put_in_place(unpacked, folder)
    # No room, no permission, connection lost, wrong hash.
    except (OSError, RuntimeError, HTTPException) as error:
        raise RingarError(
            f"the download from {mirror} into '{folder}' failed ({type(error).__name__}: {error})"
        ) from error


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Say that a folder is in use.

    Raises:
        BlockingIOError: It is in use already.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _remove_abandoned(parent: Path) -> None:
    """Remove what downloads that were killed have left."""
    for folder in parent.glob(f"{_TEMPORARY}*"):
        with suppress(OSError):  # another process downloads there, or has just removed it
            if time.time() - folder.stat().st_mtime > _ABANDONED_AFTER_S:  # or not yet locked
                with _locked(folder):
                    shutil.rmtree(folder)


def _put_in_place(unpacked: Path, folder: Path) -> None:
    """Rename a folder, unless another process was faster and the same files are there by now."""
    try:
        unpacked.rename(folder)
    except OSError:
        if not all((folder / file.name).is_file() for file in unpacked.iterdir()):
            raise


def _import_torchvision() -> tuple[Any, Any]:
    """Return the data set's class and ``download_url``; torchvision is imported nowhere else."""
    try:
        from torchvision.datasets import FashionMNIST
        from torchvision.datasets.utils import download_url
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"torchvision, which downloads it, cannot be imported ({error}); install it with "
            "`pip install torchvision`"
        ) from error
    # A build for another torch fails with any of these, deep in its own registrations.
    except (ImportError, RuntimeError, OSError) as error:
        raise UnsupportedError(
            f"torchvision, which downloads it, cannot be imported ({type(error).__name__}: "
            f"{error}): it was probably built for another torch than the {torch.__version__} here; "
            f"install the two together with `{_install_command()}`"
        ) from error
    return FashionMNIST, download_url


def _install_command() -> str:
    """Return the pip command for a torchvision that goes with the torch that is installed."""
    version, _, variant = torch.__version__.partition("+")
    command = f"pip install --force-reinstall torch=={version} torchvision"
    if variant == "cpu" or variant.startswith(("cu", "rocm", "xpu")):
        command += f" --index-url https://download.pytorch.org/whl/{variant}"
    return command


def _why_unreachable(url: str, timeout_s: float) -> str | None:
    """Ask a server for one header; the reason why that failed, or None.

    In a thread, because looking up a host's name has no timeout of its own. A thread that is still
    at it when the time is up ends by itself when the lookup does.
    """
    answer: queue.Queue[str | None] = queue.Queue()

    def ask() -> None:
        try:
            request = urllib.request.Request(url, method="HEAD")
            with urllib.request.urlopen(request, timeout=timeout_s):
                answer.put(None)
        except (OSError, ValueError, HTTPException) as error:
            answer.put(str(error.reason if type(error) is urllib.error.URLError else error))

    try:
        start_thread("reachable", ask)
    except RingarError as error:
        return str(error)
    try:
        return answer.get(timeout=timeout_s + 0.5)
    except queue.Empty:
        return f"no answer within {timeout_s:g} s"


@contextmanager
def _socket_timeout(seconds: float) -> Iterator[None]:
    """Set a timeout for sockets opened inside: torchvision opens its own without any."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
