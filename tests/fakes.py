"""A model family without a model: it obeys the prompt's first word and renders a real small mp4.

Registered through the engine's `families` argument: {"fake": "tests.fakes"}.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import av
import numpy as np
from numpy.typing import NDArray

from app import families
from runtime.cancel import Cancelled
from runtime.messages import (
    Event,
    ModelFiles,
    Note,
    Plan,
    Preview,
    Progress,
    Ref2VARequest,
    Result,
)

if TYPE_CHECKING:
    from torch import Tensor

    from runtime.clock import StageClock
    from runtime.team import Team

FAMILIES = {"fake": "tests.fakes"}
families.bring("fake", families.H3)
RATE = 32000


def plan(name: str = "fake", *, models: str = "none.safetensors", layout: str = "single") -> Plan:
    """A plan of the fake family; `name` "broken" cannot be loaded, "long load" takes a minute."""
    file = Path(models)
    files = ModelFiles(dit=file, text_encoder=file, video_vae=file, audio_vae=file)
    return Plan(
        name=name,
        models=files,
        family="fake",
        device="cpu",
        layout=layout,
        dtype="fp32",
        threads=1,
    )


def request(prompt: str = "a calm sea", id: str = "r1", **fields: object) -> Ref2VARequest:
    """A request small enough for a test; the prompt's first word is the fake's order."""
    small = {"width": 64, "height": 64, "frames": 22, "steps": 4}
    return Ref2VARequest(id=id, prompt=prompt, **(small | fields))  # type: ignore[arg-type]


def load(plan: Plan, *, progress: Callable[[str, int, int], None], team: Team) -> FakePipeline:
    """The family's entry."""
    for done in range(3):
        progress("load", done, 2)
    if plan.name == "long load":
        time.sleep(60)
    if plan.name == "broken":
        raise ValueError("dit.safetensors is truncated: 12 bytes are missing; download it again")
    return FakePipeline(plan, team)


class FakePipeline:
    """Steps that sleep, then stripes and a tone."""

    def __init__(self, plan: Plan, team: Team) -> None:
        self.team = team
        self.resolved = {"plan": plan.name, "attention": plan.attention, "pid": str(os.getpid())}
        self.load_seconds = 0.1
        self.load_gib_per_s = 1.0
        self._last_tensor: Callable[[], object] = lambda: None
        self._kernel_times = plan.kernel_times

    def generate(
        self,
        request: Ref2VARequest,
        *,
        out: Path,
        media: bool,
        preview: bool,
        emit: Callable[[Event], None],
        cancelled: Callable[[], bool],
        clock: StageClock,
    ) -> Result:
        """Obeys: fail, crash, full (disk), slow, latents; anything else just runs."""
        import torch

        from runtime.h3.preview import shown_milliseconds, write_webp
        from runtime.meter import ATTENTION, GEMM, StepMeter

        meter = StepMeter("cpu")
        attend, multiply = meter.wrap(ATTENTION, _sleep), meter.wrap(GEMM, _sleep)
        order = (request.prompt.split() or [""])[0]
        emit(Note(request_id=request.id, text=f"{len(request.references)} references"))
        left = "alive" if self._last_tensor() is not None else "freed"
        emit(Note(request_id=request.id, text=f"tensor of the last request: {left}"))
        x = torch.zeros(1024)
        self._last_tensor = weakref.ref(x)
        with clock.stage("text encode"):
            emit(Progress(request_id=request.id, stage="text encode", done=1, total=1))
        for step in range(request.steps):
            if self.team.share(cancelled):  # all ranks stop before the same step
                raise Cancelled
            with clock.stage("denoise", step=step, meter=meter if self._kernel_times else None):
                seconds = 0.5 if order == "slow" else 0.03
                attend(torch.tensor(seconds / 2))
                multiply(torch.tensor(seconds / 3))
                time.sleep(seconds / 6)
                if order == "fail" and step == 1:
                    raise FloatingPointError("video velocity at step 2 has 3 non-finite values")
                if order == "memory" and step == 1 and self.team.rank == 1:
                    raise torch.OutOfMemoryError("CUDA out of memory")
                if order == "alone" and step == 1 and self.team.rank == 1:
                    raise FloatingPointError("rank 1 saw what rank 0 did not")
                if order == "crash" and step == 1:
                    raise RuntimeError("matrix sizes do not match\nsecond line")
            emit(
                Progress(request_id=request.id, stage="denoise", done=step + 1, total=request.steps)
            )
            if preview:
                shown = shown_milliseconds((request.frames - 5) // 17 * 5 + 2)
                write_webp(out / "preview.webp", shades(request, step, len(shown)), shown)
                emit(Preview(request_id=request.id, step=step, path=out / "preview.webp"))
        with clock.stage("mux"):
            if order == "full":
                Path("/dev/full").write_bytes(b"x")
            video = stripes(request, out / "result.mp4") if media else None
        latents = out / "latents.safetensors" if order == "latents" else None
        if latents is not None:
            latents.write_bytes(b"latents")
        return Result(
            request_id=request.id,
            video=video,
            latents=latents,
            stages=(),
            peak_memory_bytes=0,
            record=out / "record.json",
        )


def _sleep(seconds: Tensor) -> Tensor:
    time.sleep(float(seconds))
    return seconds


def shades(request: Ref2VARequest, step: int, latents: int) -> NDArray[np.uint8]:
    """[latents, height/16, width/16, 3]: one grey per frame, brighter with every step."""
    greys = np.arange(latents, dtype=np.uint8) + np.uint8(255 * step // request.steps)
    size = (latents, request.height // 16, request.width // 16, 3)
    return np.ascontiguousarray(np.broadcast_to(greys[:, None, None, None], size))


def stripes(request: Ref2VARequest, path: Path) -> Path:
    """Encodes moving stripes and a 440 Hz stereo tone of the request's size and length."""
    with av.open(str(path), "w", format="mp4", options={"movflags": "+faststart"}) as file:
        video = file.add_stream("libx264", rate=24, options={"preset": "ultrafast"})
        video.width, video.height, video.pix_fmt = request.width, request.height, "yuv420p"
        audio = file.add_stream("aac", rate=RATE, layout="stereo")
        x = np.arange(request.width)[None, :] + np.arange(request.height)[:, None]
        for n in range(request.frames):
            shade = ((x * 4 + n * 8 + request.seed % 255) % 256).astype(np.uint8)
            frame = av.VideoFrame.from_ndarray(
                np.stack([shade, 255 - shade, np.full_like(shade, 120)], axis=-1), format="rgb24"
            )
            frame.pts, frame.time_base = n, Fraction(1, 24)
            file.mux(video.encode(frame))
        file.mux(video.encode(None))
        t = np.arange(request.frames * RATE // 24) / RATE
        tone = np.sin(t * 2 * np.pi * 440, dtype=np.float32) * np.float32(0.2)
        sound = av.AudioFrame.from_ndarray(np.stack([tone, tone]), format="fltp", layout="stereo")
        sound.sample_rate, sound.pts, sound.time_base = RATE, 0, Fraction(1, RATE)
        file.mux(audio.encode(sound))
        file.mux(audio.encode(None))
    return path
