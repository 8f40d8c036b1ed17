"""The straight line: checkpoints to a resident pipeline, a request to latents, frames, an mp4."""

from __future__ import annotations

import importlib.metadata
import json
import resource
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import comfy_kitchen
import torch
from torch import Tensor

from runtime.agreement import agree, fingerprints
from runtime.cancel import Cancelled
from runtime.checkpoints.file import IndexedCheckpoint, open_file
from runtime.checkpoints.header import CheckpointError
from runtime.checkpoints.load import LoadReport
from runtime.checkpoints.modes import mode_of
from runtime.clock import AUDIO_VAE_DECODE, DENOISE, MUX, VIDEO_VAE_DECODE, StageClock
from runtime.h3.audio_vae import load_audio_vae, loudness_guard
from runtime.h3.cached import CachedModel, route, summary
from runtime.h3.conditioning import (
    Conditioning,
    ConditioningInputs,
    EncodeCache,
    Encoders,
    build_conditioning,
    negative_inputs,
)
from runtime.h3.denoise import Latents, Shifts, Side, StepResult, draw_noise, sample
from runtime.h3.graphed import pool_bytes
from runtime.h3.linears import routes as linear_routes
from runtime.h3.load import DTYPES, attention_options, exchanges, load_denoiser
from runtime.h3.packing import LATENTS, TargetShape, target_of
from runtime.h3.parallelize import window_bytes
from runtime.h3.preview import Previews
from runtime.h3.references import ReferenceMedia, encoding_notes, to_canvas
from runtime.h3.rows import check_rows
from runtime.h3.schedule import sigmas_for
from runtime.h3.sizes import SAMPLE_RATE
from runtime.h3.text import TextEncoder
from runtime.h3.text_streamed import encoder_of
from runtime.h3.tokenizer import Tokenizer
from runtime.h3.video_ranks import Conductor, tell_times
from runtime.h3.video_vae import load_vae_attention, load_video_vae
from runtime.job import Job
from runtime.kernels.attention import attention_backend
from runtime.kernels.elementwise import elementwise_backend
from runtime.layouts import Layout, check_guidance, guided, parts_of
from runtime.machine import driver
from runtime.media.frames import write_frames
from runtime.media.tensors import read_pair, write_safetensors_atomic
from runtime.messages import (
    CachedStep,
    Event,
    Plan,
    Preview,
    Ref2VARequest,
    Reference,
    Result,
    plain,
)
from runtime.meter import StepMeter
from runtime.parallel.mesh import mesh_of
from runtime.parallel.sides import Sides
from runtime.team import ALONE, Team

CACHE_BYTES = 4 << 30  # encoded references and contexts kept on the host

LoadProgress = Callable[[str, int, int], None]


def load(plan: Plan, *, progress: LoadProgress, team: Team = ALONE) -> Pipeline:
    """Open every file, then load what stays resident; each is checked whole before it is read."""
    return Pipeline(plan, progress, team=team)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job(Job):
    """cached: steps that a step cache answered."""

    cached: list[CachedStep] = field(default_factory=list)


class Pipeline:
    """Everything resident of one plan on one device."""

    def __init__(
        self,
        plan: Plan,
        progress: LoadProgress,
        opened: Callable[[Path, str], IndexedCheckpoint] = open_file,
        team: Team = ALONE,
    ) -> None:
        """opened: gives the checkpoint of a path and a role; a benchmark's has random weights."""
        self.plan, self.device, self.team = plan, torch.device(plan.device), team
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError("the plan asks for device cuda, but torch sees no CUDA device")
        self.mesh = mesh_of(Layout.parse(plan.layout))
        started = time.perf_counter()
        files = plan.models
        dit = opened(files.dit, "dit")
        text = opened(files.text_encoder, "text_encoder")
        video = opened(files.video_vae, "video_vae")
        audio = opened(files.audio_vae, "audio_vae")
        options, vae_dtype = attention_options(plan), DTYPES[plan.video_vae_dtype]
        attend = load_vae_attention(plan.vae_attention, self.device, vae_dtype, options)
        self.tokenizer = Tokenizer(files.tokenizer)
        self.mode = mode_of(dit.header)
        self.dit_layers = dit.layers
        self.meter = StepMeter(self.device) if plan.kernel_times else None
        reports: list[LoadReport] = []

        def tell(part: str) -> Callable[[int, int], None]:
            return lambda done, total: progress(f"load {part}", done, total)

        with _naming(files.dit):
            self.model, report = load_denoiser(
                dit, plan, self.device, tell("denoiser"), self.meter, self.mesh
            )
        reports.append(report)
        with _naming(files.video_vae):
            self.video_vae, report = load_video_vae(
                video,
                device=self.device,
                dtype=DTYPES[plan.video_vae_dtype],
                attend=attend,
                int8=plan.int8,
                elementwise=plan.elementwise,
                tiles=plan.vae_tiles,
                progress=tell("video VAE"),
            )
        reports.append(report)
        with _naming(files.audio_vae):
            self.audio_vae, report = load_audio_vae(
                audio, device=self.device, progress=tell("audio VAE")
            )
        reports.append(report)

        def text_encoder(check: Callable[[], None]) -> TextEncoder:
            told = tell("text encoder")

            def progress(done: int, total: int) -> None:
                check()
                told(done, total)

            with _naming(files.text_encoder):
                return encoder_of(plan)(
                    text,
                    device=self.device,
                    deepstack_layers=files.deepstack_layers,
                    progress=progress,
                )

        # `check` raises Cancelled: a request that streams the encoder stops between two parts
        self._text_encoder: Callable[[Callable[[], None]], TextEncoder] = text_encoder
        if plan.text_encoder == "resident" and not team.rank:  # rank 0 encodes for all
            resident = text_encoder(lambda: None)
            reports.append(resident.load)
            self._text_encoder = lambda check: resident
        self.cache = EncodeCache(CACHE_BYTES)
        self.load_seconds = time.perf_counter() - started
        loading = sum(r.seconds for r in reports)
        self.load_gib_per_s = sum(r.bytes for r in reports) / 2**30 / max(loading, 1e-9)
        self.resolved = self._resolve()

    # ---- one request

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
        """Latents always; with `media` an mp4 (needs PyAV), else float frames in out/frames.

        With `preview` out/preview.webp is written anew after each step.
        """
        job = _Job(id=request.id, emit=emit, cancelled=cancelled, clock=clock)
        check_guidance(self.plan.layout, request.cfg)
        sigmas = sigmas_for(request.scheduler, request.steps, request.shift_video)
        agree(self.team, fingerprints(self.plan, request, sigmas))
        target = target_of(request)
        with torch.inference_mode():
            positive, negative = self.team.share(lambda: self._encoded(request, job))
            if self.team.rank:
                return self._assist(request, target, positive, negative, out, job)
            with _previews(out, job) if preview else nullcontext() as previews:
                latents = self._sample(request, target, positive, negative, previews, job)
                # the latents and the last preview are written while the frames are decoded
                with ThreadPoolExecutor(max_workers=1) as beside:
                    writing = beside.submit(self._write_latents, latents, request, out)
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
        """A latents file (tensors "video" and "audio") to the mp4 `out`."""
        job = _Job(id=request_id, emit=emit, cancelled=cancelled, clock=clock)
        pair, request = self.team.share(lambda: _read_latents(latents))
        if self.team.rank:
            self._help_decode(pair, job)
            return self._result(None, latents, out.parent, job)
        record = {"request": request, **self._record(), "latents": str(latents)}
        with torch.inference_mode():
            self._write_mp4(pair, out, record, job)
        return self._result(out, latents, out.parent, job)

    def denoise(
        self,
        request: Ref2VARequest,
        positive: Conditioning,
        negative: Conditioning | None = None,
        *,
        emit: Callable[[Event], None],
        cancelled: Callable[[], bool],
        clock: StageClock,
    ) -> Latents:
        """Sampling alone, under conditioning that was made elsewhere; cfg 1 has no negative one."""
        job = _Job(id=request.id, emit=emit, cancelled=cancelled, clock=clock)
        check_guidance(self.plan.layout, request.cfg)
        assert guided(request.cfg) == (negative is not None)
        with torch.inference_mode():
            return self._sample(request, target_of(request), positive, negative, None, job)

    def play(
        self,
        latents: Latents,
        *,
        emit: Callable[[Event], None],
        cancelled: Callable[[], bool],
        clock: StageClock,
    ) -> int:
        """Decoding alone: bytes and wave reach the host and are dropped; the number of frames."""
        job = _Job(id="play", emit=emit, cancelled=cancelled, clock=clock)
        if self.team.rank:
            self._help_decode(latents, job)
            return 0
        with torch.inference_mode(), self._conducting(job) as conductor:
            frames = self._frames(latents.video, job, conductor, as_bytes=True)
            count = sum(len(chunk) for chunk in frames)
            self._wave(latents.audio, job)
        return count

    # ---- several ranks

    def _encoded(
        self, request: Ref2VARequest, job: _Job
    ) -> tuple[Conditioning, Conditioning | None]:
        return self._conditioning(request, self._inputs(request, job), job)

    def _assist(
        self,
        request: Ref2VARequest,
        target: TargetShape,
        positive: Conditioning,
        negative: Conditioning | None,
        out: Path,
        job: _Job,
    ) -> Result:
        """What another rank than 0 does of a request: all steps, and its share of the tiles."""
        latents = self._sample(request, target, positive, negative, None, job)
        self._help_decode(latents, job)
        return self._result(None, out / "latents.safetensors", out, job)

    def _help_decode(self, latents: Latents, job: _Job) -> None:
        def timed() -> AbstractContextManager[None]:
            return job.clock.stage(VIDEO_VAE_DECODE)

        self.video_vae.help_decode(latents.video, self.team, timed)
        tell_times(self.team, job.clock)

    def _conducting(self, job: _Job) -> AbstractContextManager[Conductor | None]:
        """Rank 0 decodes with the others inside."""
        return Conductor(self.team, job.clock) if self.team.ranks > 1 else nullcontext()

    def _tell_peaks(self, job: _Job) -> None:
        """A note on the memory of every rank so far; all have come to the same point."""
        if self.team.ranks > 1:
            peaks = self.team.collect(self.peak_bytes(job.clock))
            told = ", ".join(f"{bytes / 2**30:.2f}" for bytes in peaks)
            job.note(f"most memory of each rank up to the last step: {told} GiB")

    # ---- the steps of a request

    def _inputs(self, request: Ref2VARequest, job: _Job) -> ConditioningInputs:
        media = tuple(self._load_reference(r, request, job) for r in request.references)
        if media and self.mode == "fl2va":
            text = f"{self.plan.models.dit.name} is known as FL2VA, but the request has references"
            job.note(text, warning=True)
        elif media and self.mode == "unknown":
            text = (
                f"mode of {self.plan.models.dit.name} unknown: if it is not a Ref2VA file the "
                f"result is wrong without an error (launch.py inspect --learn names it)"
            )
            job.note(text)
        return ConditioningInputs(
            prompt=request.prompt,
            width=request.width,
            height=request.height,
            frames=request.frames,
            media=media,
            ref_image_size=request.ref_image_size,
        )

    def _load_reference(
        self, reference: Reference, request: Ref2VARequest, job: _Job
    ) -> ReferenceMedia:
        # PyAV is needed for references and mp4 only: a machine without it still writes latents.
        from runtime.media.references import LoadOptions, load_reference

        options = LoadOptions(max_frames=request.frames, resize=to_canvas, model_rate=SAMPLE_RATE)
        loaded = load_reference(reference, options)
        for note in loaded.notes:
            job.note(f"{reference.path.name}: {note}")
        try:
            media = ReferenceMedia(
                kind=reference.kind,
                pixels=loaded.pixels,
                wave=loaded.wave,
                sample_rate=loaded.rate,
                content_hash=loaded.content_hash,
                on_canvas=reference.kind == "video",
            )
        except ValueError as error:  # a sound of too few samples
            raise ValueError(f"{reference.soundtrack or reference.path}: {error}") from error
        size = request.width, request.height
        for note in encoding_notes(
            media, mode=request.ref_image_size, target=size, target_frames=request.frames
        ):
            job.note(f"{reference.path.name}: {note}")
        return media

    def _conditioning(
        self,
        request: Ref2VARequest,
        inputs: ConditioningInputs,
        job: _Job,
    ) -> tuple[Conditioning, Conditioning | None]:
        plan, files = self.plan, self.plan.models
        encoders = Encoders(
            tokenizer=self.tokenizer,
            text=partial(self._text_encoder, job.check),
            text_identity=str(files.text_encoder),
            video_vae=self.video_vae,
            video_vae_identity=f"{files.video_vae} {plan.video_vae_dtype}",
            audio_vae=self.audio_vae,
            audio_vae_identity=str(files.audio_vae),
        )

        sides = [inputs]
        if guided(request.cfg):
            references = request.negative_references
            sides.append(negative_inputs(inputs, request.negative_prompt, references=references))
        attention, parts = attention_backend(plan.attention), self.mesh.rows.size
        split = parts_of(plan.row_split)
        check_rows(sides, target_of(request), self.tokenizer, attention, parts, split)

        def stage(name: str) -> AbstractContextManager[None]:
            job.progress(name, 0, 1)
            return job.clock.stage(name)

        def build(side: ConditioningInputs) -> Conditioning:
            return build_conditioning(
                side, encoders, self.cache, stage=stage, cancelled=job.cancelled
            )

        positive, *negative = (build(side) for side in sides)
        return positive, negative[0] if negative else None

    def _sample(
        self,
        request: Ref2VARequest,
        target: TargetShape,
        positive: Conditioning,
        negative: Conditioning | None,
        previews: Previews | None,
        job: _Job,
    ) -> Latents:
        shifts = Shifts(video=request.shift_video, audio=request.shift_audio)
        sigmas = sigmas_for(request.scheduler, request.steps, shifts.video)
        total = len(sigmas) - 1
        sides = Sides.of(self.mesh, self.meter)

        caches: list[CachedModel] = []

        def side(conditioning: Conditioning, name: str) -> Side:
            made = Side(
                self.model,
                conditioning,
                target,
                seed=request.seed,
                shifts=shifts,
                device=self.device,
            )
            if self.plan.cache != "off":
                caches.append(CachedModel(self.model, self.plan, total, name))
                made.evaluate = caches[-1]
            return made

        def timed(step: int) -> AbstractContextManager[None]:
            if self.team.share(job.cancelled):  # all ranks stop before the same step
                raise Cancelled
            return job.clock.stage(DENOISE, step=step, meter=self.meter)

        def on_step(result: StepResult) -> None:
            job.progress(DENOISE, result.step + 1, total)
            if previews is not None:
                previews.show(result.step, result.denoised.video)

        first = side(positive, "positive")
        job.note(f"{first.layout.num_rows} packed rows")
        job.progress(DENOISE, 0, total)
        latents = sample(
            first,
            None if negative is None else side(negative, "negative"),
            cfg=request.cfg,
            sampler=request.sampler,
            sigmas=sigmas,
            noise=draw_noise(target, request.seed),
            start=None,
            on_step=on_step,
            timed=timed,
            sides=sides,
        )
        answered = [cache.steps for cache in caches]
        if answered and sides.shared:  # each rank has seen its own side's
            answered = self.team.collect(answered[sides.own])
        for steps in answered:
            job.note(summary(self.plan.cache, steps))
            job.cached.extend(steps)
        self._tell_peaks(job)
        return latents

    def _write_latents(self, latents: Latents, request: Ref2VARequest, out: Path) -> Path:
        path = out / "latents.safetensors"
        tensors = {"video": latents.video, "audio": latents.audio}
        write_safetensors_atomic(path, tensors, {LATENTS.key: json.dumps(plain(request))})
        return path

    def _render(
        self, request: Ref2VARequest, latents: Latents, out: Path, media: bool, job: _Job
    ) -> Path | None:
        if media:
            path = out / "result.mp4"
            record = {"request": plain(request), **self._record(), "notes": job.notes}
            self._write_mp4(latents, path, record, job)
            return path
        with job.clock.stage(MUX, exclusive=True), self._conducting(job) as conductor:
            frames = self._frames(latents.video, job, conductor, as_bytes=False)
            write_frames(out / "frames", frames)
        wave = self._wave(latents.audio, job)
        write_safetensors_atomic(
            out / "audio.safetensors", {"wave": wave}, {"rate": str(SAMPLE_RATE)}
        )
        return None

    def _write_mp4(
        self, latents: Latents, path: Path, record: dict[str, object], job: _Job
    ) -> None:
        from runtime.media.mp4 import Mp4Options, write_mp4  # PyAV: see _load_reference

        with job.clock.stage(MUX, exclusive=True), self._conducting(job) as conductor:
            written = write_mp4(
                path,
                self._frames(latents.video, job, conductor, as_bytes=True),
                lambda: self._wave(latents.audio, job)[0],
                record,
                Mp4Options(sample_rate=SAMPLE_RATE),
                job.check,
            )
        for note in written.notes:
            job.note(note)
        job.note(
            f"mp4 encoded for {written.encoding_seconds:.2f} s beside the decoders, "
            f"which waited for it {written.exposed_seconds:.2f} s"
        )

    def _frames(
        self, latent: Tensor, job: _Job, conductor: Conductor | None, *, as_bytes: bool
    ) -> Iterator[Tensor]:
        """Chunks of finished frames; only the decoding counts as the VAE's time."""
        chunks = self.video_vae.decode_stream(
            latent,
            as_bytes=as_bytes,
            cancelled=job.cancelled,
            on_tile=partial(job.progress, VIDEO_VAE_DECODE),
            conductor=conductor,
        )
        return job.clock.each(VIDEO_VAE_DECODE, chunks)

    def _wave(self, latent: Tensor, job: _Job) -> Tensor:
        """[1, 2, L] fp32 on the CPU, with ComfyUI's loudness guard (contract 7)."""
        job.progress(AUDIO_VAE_DECODE, 0, 1)
        with job.clock.stage(AUDIO_VAE_DECODE):
            wave = loudness_guard(self.audio_vae.decode(latent, cancelled=job.cancelled)).cpu()
        job.progress(AUDIO_VAE_DECODE, 1, 1)
        return wave

    # ---- records

    def peak_bytes(self, clock: StageClock) -> int:
        """Bytes: of the request on a GPU; on the CPU of the process since it started.

        Graphs: the pool that replays use is added, so a request that captures counts it twice; no
        GPU has confirmed the sum, only stand-ins in tests. Copy engines: the windows are added.
        """
        if self.device.type == "cuda":
            return clock.peak_bytes() + pool_bytes(self.model) + window_bytes(self.model)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def _result(self, video: Path | None, latents: Path, out: Path, job: _Job) -> Result:
        return Result(
            request_id=job.id,
            video=video,
            latents=latents,
            stages=(),  # the worker fills them in, end to end included
            peak_memory_bytes=self.peak_bytes(job.clock),
            record=out / "run.json",
            cached_steps=tuple(job.cached),
        )

    def _record(self) -> dict[str, object]:
        return {"plan": plain(self.plan), "resolved": self.resolved}

    def _resolve(self) -> dict[str, str]:
        """The plan as it will really run: kernel routes, versions, device."""
        plan, device = self.plan, self.device
        options = attention_options(plan)
        resolved = {
            "torch": str(torch.__version__),  # its own type would load torch where it is unpickled
            "comfy-kitchen": importlib.metadata.version("comfy-kitchen"),
            "kitchen backends": ", ".join(
                name for name, s in comfy_kitchen.list_backends().items() if s.get("available")
            ),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "cuda": str(torch.version.cuda),
            "driver": (driver() or "not reported") if device.type == "cuda" else "none",
            "threads": str(torch.get_num_threads()),
            "dtype": plan.dtype,
            "weights": plan.weights,
            "island rounding": plan.island_rounding,
            "video VAE dtype": plan.video_vae_dtype,
            "mode": self.mode,
            "attention": attention_backend(plan.attention).route(device, options),
            "vae_attention": attention_backend(plan.vae_attention).route(device, options),
            "elementwise": elementwise_backend(plan.elementwise).route(device),
        }
        if plan.cache != "off":
            resolved["step cache"] = route(plan)
        if self.team.ranks > 1:
            told = (plan.layout, self.mesh.backend, *exchanges(plan, self.mesh))
            resolved["layout"] = ", ".join(told)
        return resolved | linear_routes(self.model, self.dit_layers, plan, device)


def _previews(out: Path, job: _Job) -> AbstractContextManager[Previews]:
    return closing(
        Previews(
            out / "preview.webp",
            lambda step, path: job.emit(Preview(request_id=job.id, step=step, path=path)),
            lambda reason: job.note(f"no more previews: {reason}", warning=True),
        )
    )


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Says which of the four files a CheckpointError is about."""
    try:
        yield
    except CheckpointError as error:
        if str(file) in str(error):
            raise
        raise CheckpointError(f"{file}: {error}") from error


def _read_latents(path: Path) -> tuple[Latents, dict[str, object] | None]:
    """The latents, and the request they came from when the file tells it."""
    video, audio, request = read_pair(path, LATENTS)
    return Latents(video=video, audio=audio), request
