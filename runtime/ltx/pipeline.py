"""Family ltx: checkpoints to a resident pipeline, a request to latents, frames, an mp4."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from runtime.checkpoints.load import LoadReport
from runtime.clock import DENOISE, UPSAMPLE, StageClock
from runtime.encode_cache import EncodeCache
from runtime.kernels.linear.packed import PackedLinear
from runtime.ltx.attention import load_ltx_attention
from runtime.ltx.audio_vae import load_audio_decoder
from runtime.ltx.conditioning import Conditioning, Encoders, FirstFrame, build_conditioning
from runtime.ltx.denoise import Evaluate, StepResult, Velocity
from runtime.ltx.facts import provenance, record_notes, resolve
from runtime.ltx.forms import FORMS
from runtime.ltx.job import Job
from runtime.ltx.load import LTXCheckpoint, load_denoiser, open_denoiser
from runtime.ltx.recipe import Latents, Stage, generate_latents, two_stages
from runtime.ltx.rendering import Renderer, read_latents, write_latents
from runtime.ltx.sizes import LTXShape
from runtime.ltx.text_side import TextSide
from runtime.ltx.upsampler import load_upsampler
from runtime.ltx.video_vae import load_video_vae
from runtime.messages import Event, LTXRequest, Plan, Reference, Request, Result
from runtime.meter import ATTENTION, GEMM, StepMeter
from runtime.team import ALONE, Team

CACHE_BYTES = 4 << 30  # contexts and encoded first frames kept on the host
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}

LoadProgress = Callable[[str, int, int], None]


def load(plan: Plan, *, progress: LoadProgress, team: Team = ALONE) -> Pipeline:
    """Open every file, then load what stays resident; each is checked whole before it is read."""
    assert team.ranks == 1, "the plan allows one rank"
    return Pipeline(plan, progress)


class Pipeline:
    """Everything resident of one plan on one device."""

    def __init__(
        self,
        plan: Plan,
        progress: LoadProgress,
        opened: Callable[[Path, str], LTXCheckpoint] = open_denoiser,
    ) -> None:
        """opened: gives the denoiser of a path and an NVFP4 order; a benchmark's is random."""
        self.plan, self.device = plan, torch.device(plan.device)
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError("the plan asks for device cuda, but torch sees no CUDA device")
        files, dtype = plan.models, DTYPES[plan.dtype]
        if files.vocoder is None or files.upsampler is None:
            raise ValueError("a plan of family ltx names a vocoder and an upsampler in [models]")
        started = time.perf_counter()
        checkpoint = opened(files.dit, plan.ltx_nvfp4_order)
        self.census, self.config = checkpoint.census, checkpoint.census.config
        self.meter = StepMeter(self.device) if plan.kernel_times else None
        attend = load_ltx_attention(plan.attention, self.config, self.device, dtype)
        if self.meter is not None:
            attend = self.meter.wrap(ATTENTION, attend)
        self.text = TextSide(plan, checkpoint, self.device, dtype, progress)
        self.model, of_denoiser = load_denoiser(
            checkpoint,
            attend,
            device=self.device,
            dtype=dtype,
            nvfp4=plan.nvfp4,
            tables="comfy" if plan.ltx_tables == "comfy" else "fp32",
            cached=plan.weights == "cached",
            form=FORMS[plan.ltx_rounding],
            progress=lambda done, total: progress("load denoiser", done, total),
        )
        self._measure_linears()
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
        stages = two_stages(
            LTXShape(
                frames=request.frames, height=request.height, width=request.width, fps=request.fps
            )
        )
        for text, warning in record_notes(self.census, self.text.version_note):
            job.note(text, warning=warning)
        if preview:
            job.note("no preview of steps: there is none for LTX")
        with torch.inference_mode():
            conditioning = self._conditioning(request, stages, job)
            latents = self._sample(request, stages, conditioning, job)
            # the latents are written while the frames are decoded
            with ThreadPoolExecutor(max_workers=1) as beside:
                writing = beside.submit(write_latents, latents, _plain(request), out)
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
        self, request: LTXRequest, stages: tuple[Stage, Stage], job: Job
    ) -> Conditioning:
        picture = None if request.image is None else _first_frame(request.image, job)
        if picture is not None and (note := picture.note(stages[-1].shape)):
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
                [stage.shape for stage in stages],
                encoders,
                self.cache,
                stage=job.stage,
                cancelled=job.cancelled,
            )
        finally:
            self.text.release()

    def _sample(
        self,
        request: LTXRequest,
        stages: tuple[Stage, Stage],
        conditioning: Conditioning,
        job: Job,
    ) -> Latents:
        total, names = sum(stage.steps for stage in stages), []
        for number, stage in enumerate(stages, 1):
            text = f"stage {number}, {stage.shape.width}x{stage.shape.height}"
            names += [text] * stage.steps
        latent = stages[-1].shape.latent
        tokens = latent.video_tokens + latent.audio
        job.note(
            f"{tokens} tokens at full size: {latent.video_tokens} of video, {latent.audio} of sound"
        )

        def velocity(stage: Stage) -> Evaluate:
            return Velocity(
                self.model,
                conditioning.contexts,
                stage.shape.latent,
                stage.shape.fps,
                seconds="multiply" if self.plan.ltx_rope_seconds == "multiply" else "divide",
                v2a_source="post_a2v" if self.plan.v2a_source == "post_a2v" else "pre_a2v",
                rope_dtype=self.model.rope_dtype,
            )

        @contextmanager
        def timed(step: int) -> Iterator[None]:
            job.check()
            with job.clock.stage(DENOISE, step=step, meter=self.meter):
                yield

        @contextmanager
        def doubling() -> Iterator[None]:
            job.check()
            job.progress(UPSAMPLE, 0, 1)
            with job.clock.stage(UPSAMPLE):
                yield
            job.progress(DENOISE, stages[0].steps, total, names[stages[0].steps])

        def on_step(result: StepResult) -> None:
            job.progress(DENOISE, result.step + 1, total, names[result.step])

        job.progress(DENOISE, 0, total, names[0])
        return generate_latents(
            stages,
            velocity,
            conditioning,
            self.upsampler,
            self.config,
            seed=request.seed,
            device=self.device,
            on_step=on_step,
            timed=timed,
            doubling=doubling,
        )

    def _render(
        self, request: LTXRequest, latents: Latents, out: Path, media: bool, job: Job
    ) -> Path | None:
        if not media:
            self.renderer.files(latents, request.fps, out, job)
            return None
        path = out / "result.mp4"
        record = {"request": _plain(request), **self._record(), "notes": job.notes}
        self.renderer.mp4(latents, request.fps, path, record, job)
        return path

    def _measure_linears(self) -> None:
        if self.meter is None:
            return
        for module in self.model.modules():
            linear: Any = module
            if isinstance(module, nn.Linear | PackedLinear):
                linear.forward = self.meter.wrap(GEMM, linear.forward)

    # ---- records

    def _record(self) -> dict[str, Any]:
        return {"plan": _plain(self.plan), "resolved": self.resolved}

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


def _plain(data: LTXRequest | Plan) -> dict[str, Any]:
    """What JSON knows of a dataclass; paths become text."""
    plain: dict[str, Any] = json.loads(json.dumps(asdict(data), default=str))
    return plain
