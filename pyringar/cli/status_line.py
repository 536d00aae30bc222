"""Show progress on one line of the terminal, and log messages on lines above it."""

from __future__ import annotations

import contextlib
import logging
import shutil
import sys
import threading
import time
from collections.abc import Iterator

from pyringar.cli.parser import paragraph
from pyringar.engine import load
from pyringar.engine.compile import CPU, EngineKind

logger = logging.getLogger(__name__)

_DRAW_EVERY_S = 0.2
_LOG_EVERY_S = 10.0
_ERASE_LINE = "\r\x1b[K"


class StatusLine:
    """A line of stderr that each text replaces; without a terminal, a log line every 10 s.

    Several threads may use it at once.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._shown = ""
        self._last_s = 0.0

    def start(self) -> None:
        """Restart the 10 s interval after which `show` logs the next text."""
        self._last_s = time.monotonic()

    def show(self, text: str) -> None:
        now_s, is_terminal = time.monotonic(), sys.stderr.isatty()
        if now_s - self._last_s < (_DRAW_EVERY_S if is_terminal else _LOG_EVERY_S):
            return
        self._last_s = now_s
        if not is_terminal:
            logger.info("%s", text)
            return
        with self.lock:
            self._shown = text[: shutil.get_terminal_size().columns - 1]
            print(f"{_ERASE_LINE}{self._shown}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Erase the line, so that other output begins in the first column."""
        with self.lock:
            if self._shown:
                self._shown = ""
                print(_ERASE_LINE, end="", file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def elapsed(self, text: str) -> Iterator[None]:
        """Show a text and the elapsed seconds while the ``with`` block runs."""
        done, begin_s = threading.Event(), time.monotonic()

        def draw() -> None:
            while not done.wait(1.0):
                self.show(f"{text}, {time.monotonic() - begin_s:.0f} s so far")

        self.start()
        thread = threading.Thread(target=draw, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
            self.clear()


STATUS = StatusLine()


class LogHandler(logging.Handler):
    """Write log records to stderr, on separate lines that are wrapped at words."""

    def __init__(self, *, is_verbose: bool) -> None:
        super().__init__()
        self._is_verbose = is_verbose

    def emit(self, record: logging.LogRecord) -> None:
        try:
            is_build = record.module == "compile"  # its warnings only announce a compilation
            if is_build and record.levelno < logging.WARNING and not self._is_verbose:
                return
            is_warning = record.levelno >= logging.WARNING and not is_build
            label = "pyringar: WARNING:" if is_warning else "pyringar:"
            first, *more = record.getMessage().splitlines() or [""]
            text = "\n".join([paragraph(f"{label} {first}"), *(paragraph(f"  {m}") for m in more)])
            with STATUS.lock:
                STATUS.clear()
                print(text, file=sys.stderr, flush=True)
        except (OSError, TypeError, ValueError):  # stderr is closed, or the arguments do not fit
            self.handleError(record)


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"


def compiling_text(kind: EngineKind) -> str:
    usual = "some minutes" if kind.cuda else "about half a minute"
    return f"compiling {kind.title}: {usual}, once"


def load_engine() -> None:
    """Load the engine for CPUs; show progress if it must be compiled."""
    with STATUS.elapsed(compiling_text(CPU)):
        load.engine()
