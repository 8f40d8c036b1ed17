"""Runs a module under limits, for files that nobody vouches for: python -m runtime.limited ...

Arguments: CPU seconds, bytes of address space (0: unlimited), module, its arguments.
"""

from __future__ import annotations

import os
import resource
import runpy
import sys
from collections.abc import Sequence

from runtime.lifeline import die_with_parent


def main(arguments: Sequence[str]) -> None:
    """Limits this process, ties it to its parent's life, and becomes the module."""
    seconds, size, module, *rest = arguments
    _limit(resource.RLIMIT_CPU, int(seconds))
    _limit(resource.RLIMIT_CORE, 0)
    if int(size):
        _limit(resource.RLIMIT_AS, int(size))
    die_with_parent(os.getppid())
    sys.argv = [module, *rest]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _limit(what: int, most: int) -> None:
    hard = resource.getrlimit(what)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(what, (most, most))


if __name__ == "__main__":
    main(sys.argv[1:])
