"""Unquantised weights by QuACK's GEMM (quack-kernels), bf16 on Hopper: the bits of `dense` there.

Its tiles of 256 rows by 192 or 208 features move less through shared memory and L2 than those that
cuBLAS chooses (128 by 256), and a card at its power cap turns that into clocks: figures in
docs/experiments.md. Kernels are compiled at their first call, about 1.5 s each.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.checkpoints.base import UNQUANTISED, PackedWeight
from runtime.kernels.linear.base import LinearBackend
from runtime.kernels.linear.packed import PackedLinear
from runtime.kernels.packages import installed
from runtime.kernels.unavailable import Unavailable

NAME, DISTRIBUTION = "quack", "quack-kernels"
CAPABILITY = (9, 0)  # the tiles were chosen there; the package has kernels for others too
MULTIPLE = 8  # of K and N: TMA wants rows that begin at 16 bytes
ROWS = 256  # of a tile
# Features of a tile: what two warpgroups of 128 rows have registers for. SwiGLU works on pairs of
# features, for which the package has no 208.
WIDTHS, WIDTHS_OF_PAIRS = (192, 208), (192,)
_KERNELS = "runtime.kernels.linear.quack_kernels"


class QuackLinear(PackedLinear):
    """y = round(acc), acc in fp32 in the order of K; without a bias, which no block of H3 has."""

    def __init__(self, packed: PackedWeight) -> None:
        if "bias" in packed.tensors:
            raise Unavailable(NAME, f"layer {packed.layer} has a bias, which it does not add")
        if any(size % MULTIPLE for size in packed.shape):
            raise Unavailable(
                NAME,
                f"layer {packed.layer} is {packed.shape[0]}x{packed.shape[1]}, and both must be "
                f"multiples of {MULTIPLE}",
            )
        super().__init__(packed)
        kernels = importlib.import_module(_KERNELS)
        self._product, self._swiglu = kernels.product, kernels.swiglu
        self.gated = False  # SwiGLU of the halves of its features as well, rounded as Triton's step

    def forward(self, x: Tensor) -> Tensor:
        """bf16 x [...,K] -> [...,N]; gated [...,N/2]."""
        x_MK = self.scaled_input(x).reshape(-1, self.in_features)
        y: Tensor = (self._swiglu if self.gated else self._product)(x_MK, self.weight)
        return y.reshape(*x.shape[:-1], -1)


def width(rows: int, features: int, processors: int, widths: Sequence[int]) -> int:
    """Of those tile widths the one whose rounds over the processors are shortest, counted in
    features: `out_proj` and `fc2` for 10,047 rows take eight of 208 for nine of 192."""

    def length(width: int) -> int:
        return -(-(-(-rows // ROWS) * -(-features // width)) // processors) * width

    return min(widths, key=length)


def reference(packed: PackedWeight, x: Tensor) -> Tensor:
    """The same product on any device: x [...,K] -> [...,N]."""
    return F.linear(x, packed.tensors["weight"].to(x.dtype))


def reason(device: torch.device) -> str:
    """Why it cannot run on that device; "" if it can."""
    wanted = ".".join(map(str, CAPABILITY))
    if device.type != "cuda":
        return f"it needs a CUDA GPU of compute capability {wanted} (Hopper), got {device}"
    if (got := torch.cuda.get_device_capability(device)) != CAPABILITY:
        has = ".".join(map(str, got))
        return f"its tiles are for compute capability {wanted} (Hopper), this GPU has {has}"
    try:
        installed(NAME, DISTRIBUTION, _KERNELS, extra="quack")
    except Unavailable as missing:
        return missing.reason
    return ""


def route(device: torch.device) -> str:
    """Versions of the package and of its compiler."""
    del device
    package, dsl = map(importlib.metadata.version, (DISTRIBUTION, "nvidia-cutlass-dsl"))
    return f"{DISTRIBUTION} {package}, tiles of {ROWS} rows (nvidia-cutlass-dsl {dsl})"


BACKEND = LinearBackend(
    name=NAME,
    formats=(UNQUANTISED,),
    build=QuackLinear,
    reason=reason,
    route=route,
    reference=reference,
    requirement="a CUDA GPU of compute capability 9.0 (Hopper) and quack-kernels",
    package=DISTRIBUTION,
)
