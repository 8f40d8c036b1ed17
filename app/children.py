"""Short-lived processes of the console: for untrusted media, and for what needs torch or PyAV."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
BAD_INPUT = 2  # exit status of a child whose last line on stderr is a sentence for a person


class ChildFailed(ValueError):
    """A child was stopped by its limits, died, or crashed; the message is one sentence."""


def run_child(
    module: str,
    arguments: Sequence[str | Path] = (),
    *,
    what: str,
    seconds: float = 60.0,
    memory_bytes: int = 4 << 30,
    stdin: bytes = b"",
) -> str:
    """What `python -m module arguments` prints; waits for it, at most `seconds`.

    what: the subject of the sentence of a failure ("cat.mp4"). memory_bytes: of address space; 0
    for modules that load torch. Raises ValueError with the child's own sentence (exit status 2),
    and ChildFailed when it ran too long, took too much memory or died.
    """
    command = [sys.executable, "-m", "runtime.limited", str(int(seconds) + 1), str(memory_bytes)]
    with subprocess.Popen(
        [*command, module, *map(str, arguments)],
        cwd=ROOT,
        env=_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C of the console ends it, not the terminal's
    ) as child:
        try:
            out, err = child.communicate(stdin, timeout=seconds)
        except subprocess.TimeoutExpired as error:
            _kill(child)
            raise ChildFailed(f"{what} took more than {seconds:g} s and was given up") from error
        except BaseException:
            _kill(child)
            raise
    return _outcome(child.returncode, out, err.decode(errors="replace").strip(), what)


def _outcome(status: int, out: bytes, err: str, what: str) -> str:
    last = err.splitlines()[-1] if err else "it said nothing"
    if status == 0:
        return out.decode()
    if status == BAD_INPUT:
        raise ValueError(last)
    if status in (-signal.SIGXCPU, -signal.SIGKILL):
        raise ChildFailed(f"{what} took too much time or memory and was given up")
    if "MemoryError" in last or "Cannot allocate memory" in last:
        raise ChildFailed(f"{what} needs more memory than is allowed; make it smaller")
    raise ChildFailed(f"{what} failed: its process ended with status {status} ({last[:300]})")


def _kill(child: subprocess.Popen[bytes]) -> None:
    """With whatever it has started itself."""
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _environment() -> dict[str, str]:
    """One thread each and small arenas: several children may run beside a generation."""
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
    return {**os.environ, **threads}
