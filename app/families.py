"""What the console has to know of a model family: one entry each, asked by all else.

A request tells its family; what every request tells (`references`, `steps`, `cfg` ...) is asked of
the request itself (runtime/messages.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from runtime.messages import LTXRequest, Plan, Ref2VARequest, Request
from runtime.quoted import quoted


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What app asks of a family.

    files, folders: roles of [models] that a plan must name. parts: what `launch.py inspect` calls
    the model of a file, where that is not its role. make: how those of its demo plan are made.
    fixed: what its recipe decides, of the settings that a request of H3 chooses.
    alike: requests for which it gives the same value take about as long and as much memory.
    even: every step takes about as long, so that the first ones tell how long the others will.
    least_side: pixels that a picture must have, each way.
    """

    name: str
    title: str
    request: type[Any]
    files: tuple[str, ...]
    folders: tuple[str, ...] = ()
    parts: Mapping[str, str] = field(default_factory=dict)
    make: str = ""
    alike: Callable[[Any], Hashable]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    even: bool = True
    least_side: int = 1

    @property
    def roles(self) -> tuple[str, ...]:
        """Of all models, the denoiser first."""
        return (*self.files, *self.folders)

    @property
    def choices(self) -> tuple[str, ...]:
        """Fields of a request that a person sets."""
        return tuple(f.name for f in fields(self.request) if f.name not in ("id", "family"))


def _h3_alike(request: Ref2VARequest) -> Hashable:
    kinds = Counter(r.kind for r in request.references)
    shape = (request.width, request.height, request.frames, request.steps)
    way = (request.sampler, request.cfg != 1.0, request.negative_references, request.ref_image_size)
    return (shape, way, tuple(sorted(kinds.items())))


def _ltx_alike(request: LTXRequest) -> Hashable:
    shape = (request.width, request.height, request.frames, request.fps)
    return ("ltx", shape, request.image is not None)


H3 = Family(
    name="h3",
    title="MiniMax H3",
    request=Ref2VARequest,
    files=("dit", "text_encoder", "video_vae", "audio_vae"),
    alike=_h3_alike,
)
LTX = Family(
    name="ltx",
    title="LTX-2.5",
    request=LTXRequest,
    files=("dit",),
    parts={"dit": "ltx_dit"},
    folders=("text_encoder", "video_vae", "audio_vae", "vocoder", "upsampler"),
    make="launch.py make-demo --family ltx --size tiny --out models/ltx_demo writes random ones",
    alike=_ltx_alike,
    fixed={name: getattr(LTXRequest, name) for name in ("steps", "sampler", "scheduler", "cfg")},
    least_side=2,  # the first frame is compressed, two by two pixels
    even=False,  # those of the second stage are of four times as many tokens
)
_FAMILIES: Mapping[str, Family] = {family.name: family for family in (H3, LTX)}
_BROUGHT: dict[str, Family] = {}


def named(name: Any) -> Family:
    """The family of a name; ValueError lists them."""
    if not isinstance(name, str) or name not in _FAMILIES:  # of JSON it may be anything
        raise ValueError(f"family must be one of {', '.join(_FAMILIES)}, got {quoted(name)}")
    return _FAMILIES[name]


def bring(name: str, like: Family) -> None:
    """Plans of family `name`, which a caller gives the engine itself, run requests of `like`."""
    _BROUGHT[name] = like


def of_request(request: Request) -> Family:
    """The family whose request this is."""
    return _FAMILIES[request.family]


def of_plan(plan: Plan) -> Family:
    """The family whose requests the plan runs; ValueError lists those that there are."""
    return _BROUGHT[plan.family] if plan.family in _BROUGHT else named(plan.family)


def check_choices(family: Family, names: Iterable[str]) -> None:
    """ValueError unless a request of the family has all these fields."""
    unknown = [name for name in names if name not in family.choices]
    if unknown:
        raise ValueError(
            f"{' and '.join(unknown)} cannot be given for {family.title}; a request of family "
            f"{family.name} has {', '.join(family.choices)}"
        )


def check_pair(request: Request, plan: Plan) -> None:
    """ValueError unless the plan runs requests of this kind."""
    asked, runs = of_request(request), of_plan(plan)
    if asked is not runs:
        raise ValueError(
            f"the request is for {asked.title} and plan {plan.name} runs {runs.title}; choose a "
            f"plan of family {asked.name}, or a request of family {runs.name}"
        )


def paths(plan: Plan) -> dict[str, Path | None]:
    """Every model by its role; None for one that the plan does not name."""
    return {role: getattr(plan.models, role) for role in of_plan(plan).roles}
