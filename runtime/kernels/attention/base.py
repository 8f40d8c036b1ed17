"""What an attention backend is: a callable over full packed rows, and when it may be used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

# q, k, v [B, H, S, d], transposed views whose last axis is contiguous -> [B, S, H*d]; no mask,
# scale 1/sqrt(d). B is 1 in the denoiser; in the video VAE it is the tiles decoded together. Cross
# attention (LTX alone) has other rows in k and v than in q: sdpa, sdpa_math, sdpa_cudnn and sage2
# take that, nobody has tried the others.
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(slots=True, kw_only=True)
class PackedRows:
    """What the rows of the running evaluation are; the model sets it before its blocks run.

    Mutable and shared: attention is loaded once, conditioning differs between requests and sides.
    """

    conditioning: int = 0  # the first n rows are text and references; 0 for the text refiner


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions:
    """What a plan says about attention besides the backend's name; a backend takes what it knows.

    The values are the plan's fields of the same names and were validated there.
    """

    sol_tau: float = 1.0
    sol_sinks: str = "conditioning"  # conditioning | none
    kj_mode: str = "auto"
    rows: PackedRows = field(default_factory=PackedRows)


def any_rows(rows: int) -> None:
    """It takes any number of rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBackend:
    """One file of this folder. `load` raises Unavailable with the reason."""

    name: str
    load: Callable[[torch.device, AttentionOptions], Attend]
    # the kernel that will run, with its version and those options that it takes
    route: Callable[[torch.device, AttentionOptions], str]
    requirement: str = "any device"  # in words, for a person who chooses
    package: str = "torch"  # whose version it depends on
    rows_multiple: int = 1  # it refuses other numbers of rows
    # Unavailable for a number of rows that its calls would refuse: before anything is encoded
    check_rows: Callable[[int], None] = any_rows
    head_dims: tuple[int, ...] = ()  # it refuses others; (): it takes any
    # It is no slower on a V that is a view of the fused QKV: the denoiser then copies none, unless
    # the view's offsets pass 32 bits (own_v.py)
    strided_v: bool = False
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)  # of q, k, v
