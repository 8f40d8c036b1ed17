"""Model families by name: one line per family, imported on demand by a rank."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from runtime.messages import Plan

FAMILIES: Mapping[str, str] = MappingProxyType(
    {"h3": "runtime.h3.pipeline", "ltx": "runtime.ltx.pipeline"}
)


def need_h3(plan: Plan, what: str) -> None:
    """ValueError unless the plan is one of H3, which `what` knows alone."""
    if plan.family != "h3":
        raise ValueError(
            f"{what} knows plans of family h3 alone, and plan {plan.name} is of family "
            f"{plan.family}; choose one of h3"
        )
