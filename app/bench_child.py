"""A subject of a benchmark as a process: it is asked over JSON lines and waits while others run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from app.children import ROOT

_ENDING_SECONDS = 20.0


class BenchFailed(RuntimeError):
    """A subject could not go on, for no fault of what the user asked; one sentence."""


class Child:
    """`python -m runtime.bench`; load() must be the first question, close() ends it.

    As a context it is not waited for when the block is left by an exception, Ctrl-C for one. gpu:
    the number, among those that this process sees, of its only one; 0: it sees them all.

    fault: once it is closed, in one sentence what went wrong after its last answer; "": nothing.
    """

    def __init__(self, name: str, setup: dict[str, Any], gpu: int = 0) -> None:
        self.name, self.fault = name, ""
        self._told = False  # why it ends in another way than close() asks for
        # Ours to remove: a process that is killed leaves its own behind.
        self._scratch = tempfile.TemporaryDirectory(prefix="h3-bench-", ignore_cleanup_errors=True)
        self._setup = {**setup, "scratch": self._scratch.name}
        self._said = tempfile.TemporaryFile()  # what it prints beside its answers  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "runtime.bench"],
            cwd=ROOT,
            env={**os.environ, **_only_gpu(gpu)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            start_new_session=True,  # Ctrl-C is ours to hear
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.kill()
        self.close()

    def load(self) -> dict[str, Any]:
        """{"ready": facts, "rows": S} once everything is on the device."""
        return self._ask(self._setup)

    def ask(self, command: str) -> dict[str, Any]:
        """What a "turn" or a "profile" told; ValueError and BenchFailed are one sentence."""
        return self._ask({"do": command})

    def close(self) -> None:
        """Ends it and gives its memory back; may be called again.

        What it answered stands whatever its status is; `fault` tells of one that is not 0.
        """
        if self._process.stdin is not None:
            # What a dead child did not take is still in the buffer, and is written once more.
            with suppress(BrokenPipeError):
                self._process.stdin.close()
        what = ""
        try:
            if self._process.wait(_ENDING_SECONDS) and not self._told:
                what = f"failed ({self._last_words()})"
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            what = f"did not end within {_ENDING_SECONDS:.0f} s and was killed"
        if what and not self._told:
            self._told = True
            self.fault = f"{self.name}: after its last answer its process {what}"
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._said.close()
        self._scratch.cleanup()

    def kill(self) -> None:
        """Ends it in the middle of a turn."""
        self._told = True
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = b""
        if not line:
            self._told = True
            raise BenchFailed(f"{self.name}: its process ended ({self._last_words()})")
        answer: dict[str, Any] = json.loads(line)
        if "error" not in answer:
            return answer
        self._told = True
        failure = ValueError if answer["bad_input"] else BenchFailed
        raise failure(f"{self.name}: {answer['error']}")

    def _last_words(self) -> str:
        status = self._process.wait()
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        return f"status {status}: {lines[-1][:300]}" if lines else f"status {status}"


def _only_gpu(gpu: int) -> dict[str, str]:
    """What makes that GPU the only one of a process."""
    if gpu == 0:
        return {}
    seen = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    return {"CUDA_VISIBLE_DEVICES": seen[gpu] if len(seen) > gpu else str(gpu)}
