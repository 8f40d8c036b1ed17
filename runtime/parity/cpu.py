"""Pins the CPU code paths the goldens were captured on, so that bit equality can be asked for.

The goldens come from an AMD Zen processor (AVX2, no AVX-512), one thread. torch's CPU libraries choose
other kernels on other processors, and results move by an ulp:
- ATen and oneDNN by instruction set: ATEN_CPU_CAPABILITY and ONEDNN_MAX_CPU_ISA hold them at AVX2;
- MKL by vendor: it asks `mkl_serv_intel_cpu_true` and `mkl_serv_cpuiszen`. A preloaded library answers
  both as that machine did. Without it, small GEMMs and log/exp differ on Intel.
The pins change which kernels run, nothing else: they are measurement equipment, not part of a run.

    python -m runtime.parity.cpu -m pytest      # run anything under the pins
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

MARK = "H3_PARITY_CPU"  # set in a process that runs under the pins; its value says how

_SHIM_SOURCE = """
int mkl_serv_intel_cpu_true(void) { return 0; }
int mkl_serv_intel_cpu(void) { return 0; }
int mkl_serv_cpuiszen(void) { return 1; }
"""


def state() -> str:
    """How this process is pinned: "pinned", "unpinned: <reason>", or "" before anybody asked."""
    return os.environ.get(MARK, "")


def run_pinned(arguments: list[str]) -> None:
    """Replace this process by `python arguments` under the pins; returns only if already done."""
    if state():
        return
    environment = dict(os.environ)
    environment.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    reason = _cannot_pin()
    if reason:
        environment[MARK] = f"unpinned: {reason}"
    else:
        environment.pop("MKL_CBWR", None)
        environment.pop("MKL_ENABLE_INSTRUCTIONS", None)
        environment.update(ATEN_CPU_CAPABILITY="avx2", ONEDNN_MAX_CPU_ISA="AVX2")
        preload = [str(_shim()), *environment.get("LD_PRELOAD", "").split()]
        environment["LD_PRELOAD"] = " ".join(preload)
        environment[MARK] = "pinned"
    os.execve(sys.executable, [sys.executable, *arguments], environment)


def _cannot_pin() -> str:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"{sys.platform} on {platform.machine()} has no such code path, x86-64 Linux has"
    cpuinfo = Path("/proc/cpuinfo").read_text()
    if " avx2" not in cpuinfo or " fma" not in cpuinfo:
        return "this processor has no AVX2 and FMA"
    if _compiler() is None:
        return "no C compiler (cc, gcc or clang) to build the MKL vendor shim; install one"
    return ""


def _compiler() -> str | None:
    return next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)


def _shim() -> Path:
    folder = Path(tempfile.gettempdir()) / f"h3-parity-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise ValueError(f"{folder} belongs to somebody else; remove it")
    library = folder / "mkl_vendor.so"
    if library.exists():
        return library
    compiler = _compiler()
    assert compiler is not None  # _cannot_pin asked already
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        source, built = Path(scratch) / "shim.c", Path(scratch) / "shim.so"
        source.write_text(_SHIM_SOURCE)
        command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(built), str(source)]
        subprocess.run(command, check=True, capture_output=True)
        os.replace(built, library)
    return library


if __name__ == "__main__":
    run_pinned(["-m", "runtime.parity.cpu", *sys.argv[1:]])
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
