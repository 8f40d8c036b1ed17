"""How the ranks of a plan share a request: sides of guidance, rows and heads, weights; by name."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from runtime.quoted import cut, quoted

SINGLE = "single"
LAYOUTS = (
    SINGLE,
    *(f"U{n}" for n in range(2, 9)),
    *("TP2", "TP3", "TP4", "TP6", "TP8", "TP2xU2", "TP2xU3", "TP2xU4", "TP4xU2"),
    *("CFG2", "CFG2xU2", "CFG2xU3", "CFG2xU4", "CFG2xTP2", "CFG2xTP4", "CFG2xTP2xU2"),
)
_SPLIT = re.compile(r"\d{1,9}(\.\d{1,9})?(:\d{1,9}(\.\d{1,9})?){1,63}", re.ASCII)
_NAME = re.compile(r"(?:CFG(\d+))?x?(?:TP(\d+))?x?(?:U(\d+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """tensor: ranks that share each weight; ulysses: ranks that share the rows and the heads.

    guidance: 2 gives the positive side of a request to the first half of the ranks and the negative
    one to the other; they exchange what they predict, once a step.

    Of its side, rank r is number r % tensor of the ones that share a weight and r // tensor of
    those that share rows: neighbours, on the fastest links, share weights.
    """

    tensor: int = 1
    ulysses: int = 1
    guidance: int = 1

    @classmethod
    def parse(cls, name: str) -> Layout:
        """The layout of one of LAYOUTS; ValueError lists them."""
        if name not in LAYOUTS:
            raise ValueError(
                f"plan field layout must be one of {', '.join(LAYOUTS)}, got {quoted(name)}"
            )
        found = None if name == SINGLE else _NAME.fullmatch(name)
        guidance, tensor, ulysses = found.groups() if found else (None, None, None)
        return cls(tensor=int(tensor or 1), ulysses=int(ulysses or 1), guidance=int(guidance or 1))

    @property
    def ranks(self) -> int:
        """Processes; on a GPU each has its own."""
        return self.guidance * self.of_a_side

    @property
    def of_a_side(self) -> int:
        """The ranks that compute one evaluation together."""
        return self.tensor * self.ulysses

    @property
    def name(self) -> str:
        """The inverse of `parse`."""
        parts = (("CFG", self.guidance), ("TP", self.tensor), ("U", self.ulysses))
        return "x".join(f"{word}{n}" for word, n in parts if n > 1) or SINGLE


def parts_of(split: str) -> tuple[float, ...]:
    """Of plan field row_split: "9984:10110" or "0.49:0.51" by rank, () for ""; ValueError else."""
    if split == "":
        return ()
    told = type(split) is str and _SPLIT.fullmatch(split)  # a stored plan may hold anything
    parts = tuple(float(part) for part in split.split(":")) if told else ()
    if not parts or min(parts) <= 0:
        raise ValueError(
            f"plan field row_split must be numbers above 0, one for each rank that shares rows, "
            f"like 9984:10110 or 0.49:0.51, or empty for equal parts; got {quoted(split)}"
        )
    return parts


def check_split(layout: Layout, split: str) -> None:
    """ValueError without a part for each rank that shares rows; one with all of them needs none."""
    parts, ranks = parts_of(split), layout.ulysses
    if parts and ranks not in (1, len(parts)):
        raise ValueError(
            f"plan field row_split has {len(parts)} parts, {cut(split)}, and layout {layout.name} "
            f"shares rows among {ranks} ranks; give it {ranks} parts, or none"
        )


def check_heads(layout: Layout, heads: int) -> None:
    """ValueError for a layout that cuts attention into more parts than the model has heads."""
    if layout.of_a_side > heads:
        raise ValueError(
            f"layout {layout.name} shares attention among {layout.of_a_side} ranks, and the model "
            f"has {heads} heads, too few for one each; choose a layout of at most {heads} ranks"
        )


def check_guidance(layout: str, cfg: float) -> None:
    """ValueError for a layout with ranks for a negative side that the request does not have."""
    if Layout.parse(layout).guidance > 1 and not guided(cfg):
        raise ValueError(
            f"layout {layout} gives half of its ranks the negative side, and the request's cfg is "
            f"{cfg}, which has none; choose a layout without CFG2, or another cfg"
        )


def guided(cfg: float) -> bool:
    """Is there a negative side? As ComfyUI decides it (contract 3.5)."""
    return not math.isclose(cfg, 1.0)
