"""The package `sageattention` as 1.x and 2.x have it: its version, and operands it can address."""

from __future__ import annotations

import importlib
import importlib.metadata
from types import ModuleType

import torch
from torch import Tensor

from runtime.kernels.unavailable import Unavailable

DTYPES = (torch.bfloat16, torch.float16)
INT32_ELEMENTS = 2**31  # its kernels address an operand with 32-bit element offsets


def installed(name: str) -> tuple[ModuleType, str]:
    """(module, version) for the backend of that name; Unavailable if it cannot be imported."""
    try:
        version = importlib.metadata.version("sageattention")
        module = importlib.import_module("sageattention")
    except Exception as error:  # a package that loads compiled kernels may raise anything
        raise Unavailable(name, f"sageattention cannot be imported ({error})") from error
    return module, version


def release(version: str) -> tuple[int, ...]:
    """(2, 2) of "2.2.0+cu130"."""
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())


def check(name: str, q_BHSd: Tensor, head_dims: tuple[int, ...]) -> None:
    """Unavailable for what the kernels do not compute, or cannot address even when packed."""
    if q_BHSd.dtype not in DTYPES:
        raise Unavailable(name, f"it computes bf16 and fp16 only, got {q_BHSd.dtype}")
    rows, dim = q_BHSd.shape[2:]
    if dim not in head_dims:
        known = " and ".join(map(str, head_dims))
        raise Unavailable(name, f"its kernels take head dims {known}, got {dim}")
    if q_BHSd.numel() >= INT32_ELEMENTS:
        raise Unavailable(name, f"{rows} rows overflow its 32-bit offsets; shorten the clip")


def rows_first(x_BHSd: Tensor) -> Tensor:
    """[1, S, H, d], the package's NHD: a view, copied only where its offsets pass 32 bits.

    NHD is how the model's projection lies in memory, and its output is [1, S, H*d] without a copy.
    A view of the fused QKV passes 2**31 elements at 99,866 rows, the packed copy at 299,594.
    """
    x_BSHd = x_BHSd.transpose(1, 2)
    sizes = zip(x_BSHd.shape, x_BSHd.stride(), strict=True)
    farthest = sum((size - 1) * stride for size, stride in sizes)
    return x_BSHd if farthest < INT32_ELEMENTS else x_BSHd.contiguous()
