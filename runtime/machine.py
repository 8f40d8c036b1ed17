"""What the machine says of itself: processor, GPUs, driver, versions (NVML is the console's)."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device that a plan can name."""

    device: str  # cpu, cuda:0 ...
    name: str
    capability: str  # "9.0"; "" for the CPU
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Versions and the processor; "" is what could not be read."""

    cpu: str
    cores: int
    system: str
    python: str
    torch: str
    cuda: str
    cudnn: str
    driver: str
    no_cuda: str  # why there is no CUDA device; "" if there is


def machine() -> Machine:
    """Of this process; loads torch's CUDA part."""
    return Machine(
        cpu=processor(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0,
        system=platform.platform(),
        python=platform.python_version(),
        torch=torch.__version__,
        cuda=torch.version.cuda or "",
        cudnn=str(torch.backends.cudnn.version() or ""),
        driver=driver(),
        no_cuda=_no_cuda(),
    )


def devices() -> tuple[Device, ...]:
    """The CPU, then every CUDA device that torch sees."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cpu = Device(device="cpu", name=processor(), capability="", memory_bytes=memory)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return (cpu, *(_gpu(number) for number in range(count)))


def processor() -> str:
    """The processor's model name."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def driver() -> str:
    """The NVIDIA driver's own line."""
    version = Path("/proc/driver/nvidia/version")
    lines = version.read_text(encoding="utf-8").splitlines() if version.is_file() else []
    return lines[0] if lines else ""


def _gpu(number: int) -> Device:
    facts = torch.cuda.get_device_properties(number)
    return Device(
        device=f"cuda:{number}",
        name=facts.name,
        capability=f"{facts.major}.{facts.minor}",
        memory_bytes=facts.total_memory,
    )


def _no_cuda() -> str:
    if torch.cuda.is_available():
        return ""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA"
    if not driver():
        return "no NVIDIA driver is loaded"
    return f"torch {torch.__version__} (CUDA {torch.version.cuda}) sees no device"
