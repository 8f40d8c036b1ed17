"""The checkpoint that an LTX golden names, and the denoiser it was captured on."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path

import torch

from runtime.kernels.attention.base import Attend
from runtime.ltx.attention import load_ltx_attention
from runtime.ltx.forms import COMFY, MODEL, Form
from runtime.ltx.load import LTXCheckpoint, load_denoiser, open_denoiser
from runtime.ltx.model import LTXModel, V2ASource
from runtime.ltx.orders import PUBLISHED
from runtime.ltx.packing import RopeTables, Seconds, rope_tables
from runtime.ltx.sizes import LatentShape
from runtime.parity.golden import Golden
from runtime.parity.metrics import Unsupported
from runtime.parity.setup import Setup

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """In which dtype an oracle ran, and with which backend for NVFP4 layers."""

    dtype: torch.dtype
    nvfp4: str = "nvfp4_dequant"


# What stands before the form in a tensor's name
ARITHMETIC = {
    "dequant_fp32": Arithmetic(dtype=torch.float32),
    "comfy_loader_w4a16_bf16": Arithmetic(dtype=torch.bfloat16),
    "comfy_loader_w4a4_bf16": Arithmetic(dtype=torch.bfloat16, nvfp4="nvfp4_native"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Whose forward it is: order of rounding, seconds of its rotation, video that V2A reads."""

    form: Form
    seconds: Seconds
    v2a_source: V2ASource

    def rope_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """ComfyUI rounds its tables to the latents' dtype, diffusers keeps fp32."""
        return dtype if self.form.rounded_rope else torch.float32


PROGRAMS = {
    "model_pre_a2v": Program(form=MODEL, seconds="divide", v2a_source="pre_a2v"),
    "comfy_pre_a2v": Program(form=COMFY, seconds="multiply", v2a_source="pre_a2v"),
    "comfy_post_a2v": Program(form=COMFY, seconds="multiply", v2a_source="post_a2v"),
}


def arithmetic_of(golden: Golden, lead: str) -> Arithmetic:
    """Of tensors whose names begin with `lead`, "" for those that begin with the form."""
    if lead:
        if lead not in ARITHMETIC:
            raise Unsupported(f"arithmetic {lead!r}; known: {', '.join(ARITHMETIC)}")
        return ARITHMETIC[lead]
    dtype = golden.params.get("dtype", "float32")
    if dtype not in DTYPES:
        raise Unsupported(f"dtype {dtype!r}; known: {', '.join(DTYPES)}")
    return Arithmetic(dtype=DTYPES[dtype])


def open_named(golden: Golden, checkpoints: Path) -> LTXCheckpoint:
    """The golden's checkpoint; ValueError where another file has its name.

    Files of an LTX golden are packed in the published order whether or not they have markers.
    """
    named = golden.header.get("checkpoint")
    file, wanted = (named.get("file"), named.get("sha256")) if isinstance(named, dict) else (0, 0)
    if not isinstance(file, str) or not isinstance(wanted, str) or Path(file).name != file:
        raise ValueError(
            f"the golden's header must have checkpoint with a file's name and its sha256, got "
            f"{named!r:.60}"
        )
    path = checkpoints / file
    if not path.is_file():
        raise ValueError(f"{path} is missing; name the folder of the LTX checkpoints")
    with path.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    if digest != wanted:
        raise ValueError(
            f"{path} is not the file that the golden was made with (sha256 {digest[:12]}, wanted "
            f"{wanted[:12]})"
        )
    return open_denoiser(path, PUBLISHED)


class Denoisers:
    """The golden's denoiser in every arithmetic and form that its tensors were made in."""

    def __init__(self, golden: Golden, checkpoints: Path, setup: Setup) -> None:
        self.checkpoint = open_named(golden, checkpoints)
        self.setup = setup
        self._models: dict[tuple[Arithmetic, Form], LTXModel] = {}

    def attend(self, dtype: torch.dtype) -> Attend:
        """The plan's attention, else SDPA."""
        name = self.setup.plan.attention if self.setup.plan else "sdpa"
        return load_ltx_attention(name, self.checkpoint.census.config, self.setup.device, dtype)

    def get(self, arithmetic: Arithmetic, form: Form) -> LTXModel:
        """Tables are rounded as both oracles had them in half types (README, surprise 5)."""
        key = arithmetic, form
        if key not in self._models:
            self._models[key], _ = load_denoiser(
                self.checkpoint,
                self.attend(arithmetic.dtype),
                device=self.setup.device,
                dtype=arithmetic.dtype,
                nvfp4=arithmetic.nvfp4,
                tables="comfy",
                form=form,
            )
        return self._models[key]

    def rope(
        self, shape: LatentShape, fps: float, program: Program, dtype: torch.dtype
    ) -> RopeTables:
        """The tables of a clip as that program has them."""
        return rope_tables(
            self.checkpoint.census.config,
            shape,
            fps,
            seconds=program.seconds,
            device=self.setup.device,
            dtype=program.rope_dtype(dtype),
        )


def shape_of(golden: Golden) -> LatentShape:
    """The latent sizes in a golden's parameters; ValueError where they are no sizes."""
    given = [golden.params.get(name) for name in ("F", "H", "W", "A")]
    sizes = [size for size in given if type(size) is int and size > 0]
    if len(sizes) < len(given):
        raise ValueError(
            f"the golden's params must have F, H, W and A, whole numbers of at least 1, got {given}"
        )
    frames, height, width, audio = sizes
    return LatentShape(frames=frames, height=height, width=width, audio=audio)


def fps_of(golden: Golden) -> float:
    """Frames a second of the clip; ValueError where there is no such number."""
    fps = golden.params.get("fps")
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps < math.inf:
        raise ValueError(f"the golden's params must have fps, a number above 0, got {fps!r:.40}")
    return float(fps)
