"""Pins the CPU code paths the goldens were captured on, so that bit equality can be asked for.

The goldens come from an AMD Zen processor (AVX2, no AVX-512, 512 KiB of L2), one thread. torch's
CPU libraries choose other kernels or other blockings on other processors, and sums move by an ulp:
- ATen and oneDNN choose by instruction set: two environment variables hold them at AVX2;
- MKL chooses by vendor (it asks itself "is this Intel?", "is this Zen?"): small GEMMs, log and exp;
- oneDNN blocks its GEMM convolutions by the size of the L2 cache.
MKL and oneDNN offer no switch for theirs, so the four functions that answer are overwritten in this
process' memory with the answers of that machine. This is measurement equipment for the CPU parity
process: nothing outside runtime/parity and the tests calls it, and a run never does.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import platform
import struct
import sys
from pathlib import Path

import numpy as np

ENVIRONMENT = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
_CACHE_SIZE = "_ZN4dnnl4impl3cpu8platform23get_per_core_cache_sizeEi"
_L1, _L2, _L3 = 32 << 10, 512 << 10, 16 << 20  # bytes per core of that machine
_PAGE = mmap.PAGESIZE
_READ_EXECUTE, _READ_WRITE_EXECUTE = 5, 7


@functools.cache
def pin() -> str:
    """Pin this process and return "pinned", or "unpinned: <reason>" where that cannot be done.

    Call it before anything imports torch: ATen reads its variable when it is loaded. Later calls
    return the first answer.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"unpinned: {sys.platform} on {platform.machine()}, the goldens are x86-64 Linux"
    flags = Path("/proc/cpuinfo").read_text()
    if " avx2" not in flags or " fma" not in flags:
        return "unpinned: this processor has no AVX2 and FMA"
    if "torch" in sys.modules:
        return "unpinned: torch was imported before the pins"
    for name in ("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS"):
        os.environ.pop(name, None)
    os.environ.update(ENVIRONMENT)
    import torch

    torch.set_num_threads(1)
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    return _patch(library)


def _patch(path: Path) -> str:
    library = ctypes.CDLL(str(path))
    if not hasattr(library, "mkl_serv_cpuiszen"):
        return f"unpinned: {path.name} of this torch build has no MKL"
    answers = {
        _address(library, "mkl_serv_intel_cpu_true"): _returning(0),
        _address(library, "mkl_serv_intel_cpu"): _returning(0),
        _address(library, "mkl_serv_cpuiszen"): _returning(1),
    }
    offset = _local_symbol(path, _CACHE_SIZE)
    if offset is not None:
        answers[_base(path) + offset] = _by_level(_L1, _L2, _L3)
    for address, code in answers.items():
        if not _overwrite(address, code):
            return "unpinned: this system does not let a process change its own code"
    if offset is None:
        return (
            f"unpinned: oneDNN's L2 answer only ({path.name} has no symbol table), audio may differ"
        )
    return "pinned"


def _returning(value: int) -> bytes:
    """x86-64: mov eax, value; ret."""
    return b"\xb8" + struct.pack("<I", value) + b"\xc3"


def _by_level(first: int, second: int, third: int) -> bytes:
    """x86-64: the first argument (edi) is a cache level; 1 and 2 jump to their answers."""
    jump_if_1 = b"\x83\xff\x01\x74\x0b"
    jump_if_2 = b"\x83\xff\x02\x74\x0c"
    return jump_if_1 + jump_if_2 + _returning(third) + _returning(first) + _returning(second)


def _address(library: ctypes.CDLL, name: str) -> int:
    address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    assert address is not None
    return address


def _base(path: Path) -> int:
    """Where the library is mapped in this process."""
    starts = [
        int(line.split("-")[0], 16)
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.endswith((str(path.resolve()), str(path)))
    ]
    return min(starts)


def _overwrite(address: int, code: bytes) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    page = address // _PAGE * _PAGE
    length = ctypes.c_size_t(2 * _PAGE)
    if libc.mprotect(ctypes.c_void_p(page), length, _READ_WRITE_EXECUTE):
        return False
    ctypes.memmove(address, code, len(code))
    return libc.mprotect(ctypes.c_void_p(page), length, _READ_EXECUTE) == 0


def _local_symbol(path: Path, name: str) -> int | None:
    """Offset of a symbol that is not exported, from the ELF .symtab; None if stripped."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as image:
        section_offset = struct.unpack_from("<Q", image, 0x28)[0]
        entry_size, count = struct.unpack_from("<HH", image, 0x3A)
        sections = [
            struct.unpack_from("<IIQQQQIIQQ", image, section_offset + i * entry_size)
            for i in range(count)
        ]
        symtab = next((s for s in sections if s[1] == 2), None)  # SHT_SYMTAB
        if symtab is None:
            return None
        strings = sections[symtab[6]]
        at = image.find(b"\0" + name.encode() + b"\0", strings[4], strings[4] + strings[5])
        if at < 0:
            return None
        kind = np.dtype([("name", "<u4"), ("rest", "<u4"), ("value", "<u8"), ("size", "<u8")])
        symbols = np.frombuffer(image[symtab[4] : symtab[4] + symtab[5]], dtype=kind)
        found = symbols["value"][symbols["name"] == at + 1 - strings[4]]
        return int(found[0]) if len(found) else None
