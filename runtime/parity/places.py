"""Where in a run a stored tensor belongs, told from its name: step, video or audio, quantity."""

from __future__ import annotations

import re
from dataclasses import dataclass

_STEP = re.compile(r"step_(\d+)/(.+)")
_NETWORK = re.compile(r"net_(pos|neg)/v_(video|audio)")
_LTX_STEP = re.compile(r".+\.step\.(\d+)\.(x0|x|velocity|noise)\.(video|audio)")
_SAMPLER = re.compile(r"(x|denoised|pos_denoised|neg_denoised)_(video|audio)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """step: -1 outside the steps. part: "video", "audio" or "". quantity: "" outside the steps."""

    step: int = -1
    part: str = ""
    quantity: str = ""


def place_of(name: str, stage: str) -> Place:
    """Of `step_03/net_pos/v_audio`: step 3, audio, "velocity"; the negative side is named."""
    if ltx := _LTX_STEP.fullmatch(name):
        quantity = "denoised" if ltx[2] == "x0" else ltx[2]
        return Place(step=int(ltx[1]), part=ltx[3], quantity=quantity)
    found = _STEP.fullmatch(name)
    if not found:
        return Place(part=_part(name, stage))
    step, rest = int(found[1]), found[2]
    if network := _NETWORK.fullmatch(rest):
        side = "" if network[1] == "pos" else " (negative)"
        return Place(step=step, part=network[2], quantity=f"velocity{side}")
    if sampler := _SAMPLER.fullmatch(rest):
        side, _, quantity = sampler[1].rpartition("_")
        words = {"pos": " (positive)", "neg": " (negative)", "": ""}
        return Place(step=step, part=sampler[2], quantity=f"{quantity}{words[side]}")
    return Place(step=step, part="audio" if "audio" in rest else "", quantity=rest)


def _part(name: str, stage: str) -> str:
    last = name.rsplit("/", 1)[-1]
    if "audio" in last or stage.startswith("audio VAE"):
        return "audio"
    return "video" if "video" in last or stage.startswith("video VAE") else ""
