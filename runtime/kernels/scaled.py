"""FP8 codes beside their scales: what a quantiser makes and an FP8 linear takes."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

E4M3_MAX = 448.0
AMAX_FLOOR = 1e-30  # a row of zeros: 448 / amax stays finite


class Scaled(NamedTuple):
    """x is about codes * scale: codes e4m3 [M,K], scale fp32 [M,1] (a row's) or [] (all of x's)."""

    codes: Tensor
    scale: Tensor
