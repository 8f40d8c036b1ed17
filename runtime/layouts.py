"""How the ranks of a plan share a request: tensor parallel groups of Ulysses ranks, by name."""

from __future__ import annotations

import re
from dataclasses import dataclass

SINGLE = "single"
LAYOUTS = (
    SINGLE,
    *(f"U{n}" for n in range(2, 9)),
    *("TP2", "TP4", "TP8", "TP2xU2", "TP2xU3", "TP2xU4", "TP4xU2"),
)
_NAME = re.compile(r"(?:TP(\d+))?x?(?:U(\d+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """tensor: ranks that share each weight; ulysses: ranks that share the rows and the heads.

    Rank r is number r % tensor of the ones that share a weight and r // tensor of those that share
    rows: neighbours, on the fastest links, share weights.
    """

    tensor: int = 1
    ulysses: int = 1

    @classmethod
    def parse(cls, name: str) -> Layout:
        """The layout of one of LAYOUTS; ValueError lists them."""
        if name not in LAYOUTS:
            raise ValueError(f"plan field layout must be one of {', '.join(LAYOUTS)}, got {name!r}")
        found = None if name == SINGLE else _NAME.fullmatch(name)
        tensor, ulysses = found.groups() if found else (None, None)
        return cls(tensor=int(tensor or 1), ulysses=int(ulysses or 1))

    @property
    def ranks(self) -> int:
        """Processes; on a GPU each has its own."""
        return self.tensor * self.ulysses

    @property
    def name(self) -> str:
        """The inverse of `parse`."""
        parts = (("TP", self.tensor), ("U", self.ulysses))
        return "x".join(f"{word}{n}" for word, n in parts if n > 1) or SINGLE
