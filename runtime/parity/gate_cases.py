"""What a gate evaluates: the Ref2VA requests of goldens, or one randomly conditioned request."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from torch import Tensor

from runtime.checkpoints import open_checkpoint
from runtime.checkpoints.base import Checkpoint
from runtime.checkpoints.demo import random_checkpoint
from runtime.checkpoints.published import FORMATS
from runtime.h3.conditioning import Conditioning
from runtime.h3.config import H3Config
from runtime.h3.denoise import Latents, Shifts
from runtime.h3.packing import TargetShape, target_of
from runtime.h3.schedule import sigmas_for
from runtime.h3.synthetic import synthetic_sides
from runtime.messages import Ref2VARequest, frame_count
from runtime.parity.golden import Golden
from runtime.parity.plans import expanded
from runtime.parity.replay.e2e import stored_conditioning

REQUESTS = Path(__file__).parents[2] / "presets" / "requests"
TINY = "tiny golden checkpoints: says whether the maths is right, nothing about pictures"
RANDOM = "full-size random weights and random conditioning: says nothing about pictures"
OWN = "the plan's own weights, random conditioning: says nothing about pictures"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One request, conditioned: everything but the denoiser. `open` opens its checkpoint."""

    name: str
    label: str  # what weights these are, and what the figures say
    open: Callable[[], Checkpoint]
    positive: Conditioning
    negative: Conditioning | None
    target: TargetShape
    seed: int
    shifts: Shifts
    cfg: float
    sampler: str
    sigmas: Tensor
    start: Latents | None = None

    @property
    def num_steps(self) -> int:
        """Evaluations (of each side)."""
        return len(self.sigmas) - 1


def golden_cases(folder: Path, steps: int) -> list[Case]:
    """Every Ref2VA request of a folder (or of one file), with its stored conditioning.

    steps: 0 for the golden's own count. ValueError when there is none.
    """
    if not folder.exists():
        raise ValueError(f"{folder} does not exist; give golden files or a folder of them")
    files = [folder] if folder.is_file() else sorted(folder.glob("*.safetensors"))
    goldens = [Golden(file) for file in files]
    found = [
        _of_golden(golden, golden.path.parent / "checkpoints", steps)
        for golden in goldens
        if golden.kind == "e2e" and golden.params["mode"] == "ref2va"
    ]
    if not found:
        raise ValueError(f"there is no Ref2VA golden in {folder}; name a folder of goldens")
    return found


def _of_golden(golden: Golden, checkpoints: Path, steps: int) -> Case:
    params = golden.params
    dit = checkpoints / f"{params['dit']}.safetensors"
    if not dit.is_file():
        raise ValueError(
            f"{dit} is missing; `python -m runtime.parity.tiny_checkpoints {checkpoints}` makes it"
        )
    request = Ref2VARequest(
        id=golden.case,
        prompt="",
        width=params["width"],
        height=params["height"],
        frames=frame_count(params["length"]),
    )
    video, audio = params.get("shift", (12.0, 3.0))
    cfg = float(params.get("cfg", 1.0))
    return Case(
        name=golden.case,
        label=TINY,
        open=partial(open_checkpoint, dit, "dit"),
        positive=stored_conditioning(golden, "pos"),
        negative=None if math.isclose(cfg, 1.0) else stored_conditioning(golden, "neg"),
        target=target_of(request),
        seed=params["seed"],
        shifts=Shifts(video=float(video), audio=float(audio)),
        cfg=cfg,
        sampler=params["sampler"],
        sigmas=sigmas_for(params["scheduler"], steps or params["steps"], float(video)),
    )


def random_case(
    request: Ref2VARequest, text_rows: int, open_dit: Callable[[], Checkpoint], label: str
) -> Case:
    """A request with random words and one random reference picture, of both sides if guided."""
    text_dim = H3Config.from_checkpoint(open_dit()).text_dim
    positive, negative = synthetic_sides(request, text_rows, text_dim)
    return Case(
        name=f"{request.width}x{request.height}, {request.frames} frames, {text_rows} text rows",
        label=label,
        open=open_dit,
        positive=positive,
        negative=negative,
        target=target_of(request),
        seed=request.seed,
        shifts=Shifts(video=request.shift_video, audio=request.shift_audio),
        cfg=request.cfg,
        sampler=request.sampler,
        sigmas=sigmas_for(request.scheduler, request.steps, request.shift_video),
    )


def random_denoiser(format: str) -> Callable[[], Checkpoint]:
    """A full-size denoiser of that format whose weights are random; ValueError lists the known."""
    known = FORMATS["full"]["dit"]
    if format not in known:
        raise ValueError(f"--random must be one of {', '.join(known)}, got {format!r}")
    return partial(random_checkpoint, "dit", size="full", format=format)


def aligned_case(dit: Path) -> Case:
    """The demo denoiser over 64 words and 128 rows in all: what a kernel without a tail mask takes.

    Rows of words and rows in all are multiples of 64, which no golden's are.
    """
    request = Ref2VARequest(id="gate", prompt="", width=128, height=128, frames=5)
    found = random_case(request, 64, partial(open_checkpoint, dit, "dit"), TINY)
    return replace(found, name="demo denoiser, 128 rows")


def read_request(name: str, changes: dict[str, object]) -> Ref2VARequest:
    """A request without references, of a TOML file or of a name in presets/requests."""
    path = expanded(name)
    if path.suffix != ".toml":
        path = REQUESTS / f"{name}.toml"
    if not path.is_file():
        known: Sequence[str] = sorted(p.stem for p in REQUESTS.glob("*.toml"))
        raise ValueError(f"there is no request {name}; give a TOML file or one of {known}")
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from error
    table.pop("references", None)  # a random picture stands for them
    try:
        return Ref2VARequest(id="gate", **{"prompt": "", **table, **changes})
    except TypeError as error:
        raise ValueError(f"{path.name} is not a request: {error}") from error
