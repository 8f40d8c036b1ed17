"""What an attention backend is: a callable over full packed rows, and when it may be used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# q, k, v [1, H, S, d], transposed views whose last axis is contiguous -> [1, S, H*d]; no mask,
# scale 1/sqrt(d)
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBackend:
    """One file of this folder. `load` raises Unavailable with the reason."""

    name: str
    load: Callable[[torch.device], Attend]
    route: Callable[[torch.device], str]  # the kernel that will run, with its version
    requirement: str = "any device"  # in words, for a person who chooses
    package: str = "torch"  # whose version it depends on
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)  # of q, k, v
