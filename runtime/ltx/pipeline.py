"""Family ltx: checkpoints to a resident pipeline, a request to latents, frames, an mp4."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from runtime.checkpoints.load import LoadReport
from runtime.clock import StageClock
from runtime.encode_cache import EncodeCache
from runtime.job import Job
from runtime.ltx.audio_vae import load_audio_decoder
from runtime.ltx.conditioning import Conditioning, Encoders, FirstFrame, build_conditioning
from runtime.ltx.denoiser import DTYPES, Denoiser, stages_of
from runtime.ltx.facts import provenance, record_notes, resolve
from runtime.ltx.load import open_denoiser
from runtime.ltx.recipe import Latents
from runtime.ltx.rendering import Renderer, read_latents, write_latents
from runtime.ltx.sizes import LTXShape
from runtime.ltx.text_side import TextSide
from runtime.ltx.upsampler import load_upsampler
from runtime.ltx.video_vae import load_video_vae
from runtime.messages import Event, LTXRequest, Plan, Reference, Request, Result, plain
from runtime.team import ALONE, Team

CACHE_BYTES = 4 << 30  # contexts and encoded first frames kept on the host

LoadProgress = Callable[[str, int, int], None]


def load(plan: Plan, *, progress: LoadProgress, team: Team = ALONE) -> Pipeline:
    """Open every file, then load what stays resident; each is checked whole before it is read."""
    assert team.ranks == 1, "the plan allows one rank"
    return Pipeline(plan, progress)


class Pipeline:
    """Everything resident of one plan on one device."""

    def __init__(self, plan: Plan, progress: LoadProgress) -> None:
        self.plan, self.device = plan, torch.device(plan.device)
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError("the plan asks for device cuda, but torch sees no CUDA device")
        files, dtype = plan.models, DTYPES[plan.dtype]
        if files.vocoder is None or files.upsampler is None:
            raise ValueError("a plan of family ltx names a vocoder and an upsampler in [models]")
        started = time.perf_counter()
        checkpoint = open_denoiser(files.dit, plan.ltx_nvfp4_order)
        self.census, self.config = checkpoint.census, checkpoint.census.config
        self.denoiser = Denoiser(plan, self.config, self.device)
        self.text = TextSide(plan, checkpoint, self.device, dtype, progress)
        of_denoiser = self.denoiser.load(checkpoint, partial(progress, "load denoiser"))
        vae_dtype = DTYPES[plan.video_vae_dtype]
        with _told(progress, "load video VAE"):
            self.video_vae, of_video = load_video_vae(
                files.video_vae,
                channels=self.config.in_channels,
                device=self.device,
                dtype=vae_dtype,
            )
        with _told(progress, "load upsampler"):
            self.upsampler, of_upsampler = load_upsampler(
                files.upsampler, self.video_vae, dtype=vae_dtype
            )
        with _told(progress, "load audio VAE"):
            audio, of_audio = load_audio_decoder(files.audio_vae, files.vocoder, device=self.device)
        self.renderer = Renderer(
            video_vae=self.video_vae, audio=audio, tags=provenance(self.census)
        )
        self.cache = EncodeCache(CACHE_BYTES)
        reports: list[LoadReport] = [of_denoiser, of_video, of_upsampler, of_audio]
        reports += self.text.reports
        self.load_seconds = time.perf_counter() - started
        loading = sum(report.seconds for report in reports)
        self.load_gib_per_s = sum(r.bytes for r in reports) / 2**30 / max(loading, 1e-9)
        self.resolved = resolve(plan, checkpoint, self.device)

    # ---- one request

    def generate(
        self,
        request: Request,
        *,
        out: Path,
        media: bool,
        preview: bool,
        emit: Callable[[Event], None],
        cancelled: Callable[[], bool],
        clock: StageClock,
    ) -> Result:
        """Latents always; with `media` an mp4 (needs PyAV), else float frames in out/frames."""
        if not isinstance(request, LTXRequest):
            raise ValueError(f"a plan of family ltx cannot run a request of {request.family}")
        job = Job(id=request.id, emit=emit, cancelled=cancelled, clock=clock)
        shapes = [stage.shape for stage in stages_of(request)]
        for text, warning in record_notes(self.census, self.text.version_note):
            job.note(text, warning=warning)
        if preview:
            job.note("no preview of steps: there is none for LTX")
        with torch.inference_mode():
            conditioning = self._conditioning(request, shapes, job)
            latents = self.denoiser.sample(request, conditioning, self.upsampler, job)
            # the latents are written while the frames are decoded
            with ThreadPoolExecutor(max_workers=1) as beside:
                writing = beside.submit(write_latents, latents, plain(request), out)
                video = self._render(request, latents, out, media, job)
            path = writing.result()
        return self._result(video, path, out, job)

    def decode(
        self,
        request_id: str,
        latents: Path,
        *,
        out: Path,
        emit: Callable[[Event], None],
        cancelled: Callable[[], bool],
        clock: StageClock,
    ) -> Result:
        """A latents file of a run to the mp4 `out`."""
        job = Job(id=request_id, emit=emit, cancelled=cancelled, clock=clock)
        found, request = read_latents(latents, self.config.in_channels)
        record = {"request": request, **self._record(), "latents": str(latents)}
        with torch.inference_mode():
            self.renderer.mp4(found, request["fps"], out, record, job)
        return self._result(out, latents, out.parent, job)

    # ---- the steps of a request

    def _conditioning(
        self, request: LTXRequest, shapes: Sequence[LTXShape], job: Job
    ) -> Conditioning:
        picture = None if request.image is None else _first_frame(request.image, job)
        if picture is not None and (note := picture.note(shapes[-1])):
            job.note(note)
        files, plan = self.plan.models, self.plan
        encoders = Encoders(
            text=lambda: self.text.tower(job.check),
            connectors=self.text.connect,
            text_identity=f"{files.text_encoder} {files.dit} {plan.dtype}",
            video_vae=self.video_vae,
            video_vae_identity=f"{files.video_vae} {plan.video_vae_dtype}",
        )
        try:
            return build_conditioning(
                request.prompt,
                picture,
                shapes,
                encoders,
                self.cache,
                stage=job.stage,
                cancelled=job.cancelled,
            )
        finally:
            self.text.release()

    def _render(
        self, request: LTXRequest, latents: Latents, out: Path, media: bool, job: Job
    ) -> Path | None:
        if not media:
            self.renderer.files(latents, request.fps, out, job)
            return None
        path = out / "result.mp4"
        record = {"request": plain(request), **self._record(), "notes": job.notes}
        self.renderer.mp4(latents, request.fps, path, record, job)
        return path

    # ---- records

    def _record(self) -> dict[str, Any]:
        return {"plan": plain(self.plan), "resolved": self.resolved}

    def _result(self, video: Path | None, latents: Path, out: Path, job: Job) -> Result:
        on_gpu = self.device.type == "cuda"
        on_cpu = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return Result(
            request_id=job.id,
            video=video,
            latents=latents,
            stages=(),  # the worker fills them in, end to end included
            peak_memory_bytes=job.clock.peak_bytes() if on_gpu else on_cpu,
            record=out / "run.json",
        )


def _first_frame(path: Path, job: Job) -> FirstFrame:
    # PyAV, which reads other references too: a run without a picture does not need it
    from runtime.media.references import LoadOptions, load_reference

    loaded = load_reference(Reference(kind="image", path=path), LoadOptions(max_frames=1))
    for note in loaded.notes:
        job.note(f"{path.name}: {note}")
    assert loaded.pixels is not None, "an image has pixels"
    bytes_HWC = (loaded.pixels[0] * 255 + 0.5).to(torch.uint8).numpy()
    return FirstFrame(pixels_HWC=bytes_HWC, content_hash=loaded.content_hash)


@contextmanager
def _told(progress: LoadProgress, part: str) -> Iterator[None]:
    """For what is loaded in one piece."""
    progress(part, 0, 1)
    yield
    progress(part, 1, 1)
