"""PCIe rates of GPUs without byte counters: a call that blocks 20 ms a direction, in a thread."""

from __future__ import annotations

import threading
import time
from typing import Any

import pynvml

_KIB = 1024  # nvmlDeviceGetPcieThroughput answers in KiB/s
_PERIOD_SECONDS = 1.0  # 1.8 ms of CPU a GPU


class PcieThread:
    """Measures one GPU a second, of those it was once asked for, in turn; idle until then."""

    def __init__(self, library: Any) -> None:
        self._nvml = library
        self.spent = 0.0  # CPU seconds so far
        self._handles: dict[str, Any] = {}
        self._rates: dict[str, tuple[int | None, int | None]] = {}
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def rates(self, uuid: str, handle: Any) -> tuple[int | None, int | None]:
        """Bytes/s sent and received of the last measurement; None until there is one."""
        self._handles[uuid] = handle
        if self._thread is None:
            self._stopped.clear()
            self._thread = threading.Thread(target=self._measure, name="pcie", daemon=True)
            self._thread.start()
        return self._rates.get(uuid, (None, None))

    def stop(self) -> None:
        """Ends the thread and forgets the GPUs; rates() begins anew."""
        if self._thread is not None:
            self._stopped.set()
            self._thread.join()
            self._thread = None
        self._handles.clear()
        self._rates.clear()

    def _measure(self) -> None:
        place, before = 0, self.spent
        while not self._stopped.wait(_PERIOD_SECONDS):
            waiting = list(self._handles.items())
            uuid, handle = waiting[place % len(waiting)]
            self._rates[uuid] = (
                self._rate(handle, pynvml.NVML_PCIE_UTIL_TX_BYTES),
                self._rate(handle, pynvml.NVML_PCIE_UTIL_RX_BYTES),
            )
            place += 1
            self.spent = before + time.thread_time()

    def _rate(self, handle: Any, way: int) -> int | None:
        try:
            return int(self._nvml.nvmlDeviceGetPcieThroughput(handle, way)) * _KIB
        except pynvml.NVMLError:  # not supported, or lost: the sampler's own calls say which
            return None
