"""The denoiser of a plan on its device, with its meter: contexts to the latents of a clip."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from runtime.checkpoints.load import LoadReport
from runtime.clock import DENOISE, UPSAMPLE
from runtime.job import Job
from runtime.kernels.linear.packed import PackedLinear
from runtime.ltx.attention import load_ltx_attention
from runtime.ltx.conditioning import Conditioning
from runtime.ltx.config import LTXConfig
from runtime.ltx.denoise import Evaluate, StepResult, Velocity
from runtime.ltx.forms import FORMS
from runtime.ltx.load import LTXCheckpoint, load_denoiser
from runtime.ltx.model import LTXModel
from runtime.ltx.recipe import Doubles, Latents, Stage, generate_latents, two_stages
from runtime.ltx.sizes import LTXShape
from runtime.messages import LTXRequest, Plan
from runtime.meter import ATTENTION, GEMM, StepMeter

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def stages_of(request: LTXRequest) -> tuple[Stage, Stage]:
    """Both stages of a request's clip."""
    return two_stages(
        LTXShape(frames=request.frames, height=request.height, width=request.width, fps=request.fps)
    )


class Denoiser:
    """Made first, so that what cannot run is said before anything is read; then loaded."""

    model: LTXModel

    def __init__(self, plan: Plan, config: LTXConfig, device: torch.device) -> None:
        """Unavailable or ValueError for an attention that cannot run here."""
        self.plan, self.config, self.device = plan, config, device
        self.dtype = DTYPES[plan.dtype]
        self.meter = StepMeter(device) if plan.kernel_times else None
        attend = load_ltx_attention(plan.attention, config, device, self.dtype)
        self._attend = attend if self.meter is None else self.meter.wrap(ATTENTION, attend)

    def load(self, checkpoint: LTXCheckpoint, progress: Callable[[int, int], None]) -> LoadReport:
        """The weights of a checkpoint of that config onto the device; as load_denoiser."""
        plan = self.plan
        self.model, report = load_denoiser(
            checkpoint,
            self._attend,
            device=self.device,
            dtype=self.dtype,
            nvfp4=plan.nvfp4,
            tables="comfy" if plan.ltx_tables == "comfy" else "fp32",
            cached=plan.weights == "cached",
            form=FORMS[plan.ltx_rounding],
            progress=progress,
        )
        self._measure_linears()
        return report

    def sample(
        self, request: LTXRequest, conditioning: Conditioning, upsampler: Doubles, job: Job
    ) -> Latents:
        """Both stages; Cancelled before a step once the user has asked to stop."""
        stages = stages_of(request)
        total, names = sum(stage.steps for stage in stages), []
        for number, stage in enumerate(stages, 1):
            text = f"stage {number}, {stage.shape.width}x{stage.shape.height}"
            names += [text] * stage.steps
        latent = stages[-1].shape.latent
        tokens = latent.video_tokens + latent.audio
        job.note(
            f"{tokens} tokens at full size: {latent.video_tokens} of video, {latent.audio} of sound"
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
            lambda stage: self._velocity(stage, conditioning),
            conditioning,
            upsampler,
            self.config,
            seed=request.seed,
            device=self.device,
            on_step=on_step,
            timed=timed,
            doubling=doubling,
        )

    def _velocity(self, stage: Stage, conditioning: Conditioning) -> Evaluate:
        return Velocity(
            self.model,
            conditioning.contexts,
            stage.shape.latent,
            stage.shape.fps,
            seconds="multiply" if self.plan.ltx_rope_seconds == "multiply" else "divide",
            v2a_source="post_a2v" if self.plan.v2a_source == "post_a2v" else "pre_a2v",
            rope_dtype=self.model.rope_dtype,
        )

    def _measure_linears(self) -> None:
        if self.meter is None:
            return
        for module in self.model.modules():
            linear: Any = module
            if isinstance(module, nn.Linear | PackedLinear):
                linear.forward = self.meter.wrap(GEMM, linear.forward)
