"""How a process ends: with the one that started it, or as a rank that is done."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from contextlib import suppress
from typing import NoReturn

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Asks the kernel to kill this process when the thread that started it ends.

    parent: its process id, as seen before this process was started or as early as possible in it.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before prctl
        os._exit(1)


def leave(status: int) -> NoReturn:
    """Ends a rank that is done, what it printed included, and nothing else of it.

    A thread of gloo that ends while Python is taken down has aborted such a rank.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, AttributeError):  # closed at the other end, or from the start
            stream.flush()
    os._exit(status)
