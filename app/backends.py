"""The probe of this machine: asked in a child process, kept in <runs>/backends.json."""

from __future__ import annotations

import importlib.metadata
import json
import threading
import time
from pathlib import Path
from typing import Any, Protocol

from app.children import run_child
from runtime.media.files import write_json_atomic

SECONDS = 240.0  # torch's first import on a cold disk, then a trial of every backend per device
PACKAGES = (
    *("torch", "comfy-kitchen", "sageattention", "triton", "sageattn3", "flash-attn-4"),
    *("flashinfer-python", "sol-attn", "quack-kernels", "nvidia-cutlass-dsl"),
)
_NAME = "backends.json"
_USED = {"attention": ("attention", "vae_attention"), "elementwise": ("elementwise",)}


class Publisher(Protocol):
    """The hub, as far as it is needed here."""

    def publish(self, kind: str, data: dict[str, Any], owner: str = "") -> None:
        """Sends an event to whoever listens."""


class Probe:
    """One probe at a time; a stored one counts while machine and versions are the same."""

    def __init__(self, root: Path, hub: Publisher) -> None:
        self._file, self._hub = root / _NAME, hub
        self._lock = threading.Lock()
        self._running = False
        self._reason = ""

    def stored(self, machine: str) -> dict[str, Any] | None:
        """What the last probe of this machine and these versions found."""
        try:
            kept = json.loads(self._file.read_text(encoding="utf-8"))
            found: dict[str, Any] = kept["found"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return found if kept.get("key") == _key(machine) else None

    @property
    def running(self) -> bool:
        """A child is at work."""
        return self._running

    @property
    def reason(self) -> str:
        """Why the last one failed; "" if it did not."""
        return self._reason

    def start(self, machine: str) -> None:
        """Probes in a thread, unless one does; an event "backends" tells when it has ended."""
        with self._lock:
            if self._running:
                return
            self._running = True
        threading.Thread(target=self._work, args=(machine,), name="probe", daemon=True).start()

    def _work(self, machine: str) -> None:
        reason = ""
        try:
            said = run_child(
                "runtime.probe", what="the probe of this machine", seconds=SECONDS, memory_bytes=0
            )
            found = {**json.loads(said), "probed": time.time()}
            write_json_atomic(self._file, {"key": _key(machine), "found": found})
        except (ValueError, OSError) as error:
            reason = str(error)
        with self._lock:
            self._running, self._reason = False, reason
        self._hub.publish("backends", {"reason": reason})


def unavailable(found: dict[str, Any] | None, plan: dict[str, Any]) -> tuple[str, ...]:
    """Sentences: which backends of the plan (as JSON) the probe says cannot run on its device.

    Only attention and the elementwise steps are known to be used; linears depend on the files.
    """
    said = []
    place = "cuda:0" if plan["device"] == "cuda" else "cpu"
    for section, named in _USED.items():
        asked = {plan[field] for field in named}
        for backend in (found or {}).get(section, ()):
            for support in backend["devices"]:
                used = backend["name"] in asked and support["device"] == place
                if used and not support["available"]:
                    said.append(f"{backend['name']} cannot run here: {support['reason']}.")
    return tuple(said)


def _key(machine: str) -> str:
    """What a probe is good for: it changes with the GPUs, the driver and the packages."""
    return "; ".join([machine, *(f"{name} {_version(name)}" for name in PACKAGES)])


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "-"
