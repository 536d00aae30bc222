"""End a script as others of a pipeline expect."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable
from typing import NoReturn

_NO_READER = 141  # as shells name the end by SIGPIPE: 128 and its number


def exit_with(main: Callable[[], int]) -> NoReturn:
    """Run ``main`` and exit with its status; quietly, with 141, when stdout's reader has enough."""
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:
        if not _has_no_reader():  # some other pipe broke: a failure
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = _NO_READER
    sys.exit(status)


def _has_no_reader() -> bool:
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))
