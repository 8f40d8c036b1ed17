"""What a linear backend is: it turns one packed layer into a module, or says why it cannot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from runtime.checkpoints.base import PackedWeight


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearBackend:
    """One file of this folder: `build` makes the module, `reason` tells why it cannot run."""

    name: str
    formats: tuple[str, ...]  # stored formats it executes (LayerQuant.format)
    build: Callable[[PackedWeight], nn.Module]
    reason: Callable[[torch.device], str]  # "" when it can run on that device
    route: Callable[[torch.device], str]
    # Its arithmetic on any CPU, (packed, x [...,K]) -> [...,N]; None: `build` gives it there
    reference: Callable[[PackedWeight, Tensor], Tensor] | None = None
    requirement: str = "any device"  # in words, for a person who chooses
    package: str = "torch"  # whose version it depends on
    scales_all_rows: bool = False  # activations by their largest: groups of rows round otherwise
    whole_inputs: bool = False  # scales by all of a row: input features cannot be shared by ranks
    narrows: bool = False  # rounds weights again: for the layers that a model allows it only
