"""Checks that two programs are not taken for each other: each is one comparison of a yes."""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.parity.metrics import Comparison, compare

APART = 1e-3  # relative maximum that another program must exceed (goldens_ltx/README.md)


def apart_by(name: str, other: Tensor, want: Tensor) -> Comparison:
    """The golden `name` is further than APART from what another program gives."""
    return _yes(name, _relative_max(other, want) > APART)


def nearer(name: str, got: Tensor, other: Tensor, want: Tensor) -> Comparison:
    """The golden `name` is at most half as far from our replay as from another program's."""
    return _yes(name, 2 * _relative_max(got, want) < _relative_max(other, want))


def nearer_overall(name: str, got: Tensor, other: Tensor, want: Tensor) -> Comparison:
    """The golden `name` is nearer to our replay than to another arithmetic's, in relative L2.

    Flipped codes make single values of the same arithmetic differ as much as another one's.
    """
    return _yes(name, _relative_l2(got, want) < _relative_l2(other, want))


def _relative_max(got: Tensor, want: Tensor) -> float:
    got, want = got.detach().cpu().double(), want.double()
    return float((got - want).abs().max() / want.abs().max())


def _relative_l2(got: Tensor, want: Tensor) -> float:
    got, want = got.detach().cpu().double(), want.double()
    return float((got - want).norm() / want.norm())


def _yes(name: str, yes: bool) -> Comparison:
    got, want = torch.tensor([int(yes)]), torch.tensor([1])
    return compare(f"told apart: {name}", got, want, run="free", stage="told apart")
