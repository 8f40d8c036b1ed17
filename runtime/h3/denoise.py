"""Sampling one request: noise, the packed pair carried on one schedule, guidance (contract 2, 3).

The sampler works on a flat fp32 pack [1, 1, N] of video then audio, audio in carried scale.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.h3.conditioning import Conditioning, Keyframe, ReferenceBlock
from runtime.h3.config import NUM_MODALITIES
from runtime.h3.model import (
    H3Model,
    PackedInputs,
    RowSpan,
    StepRows,
    pack_audio,
    patchify,
    unpack_audio,
    unpatchify,
)
from runtime.h3.packing import BlockShape, KeyframeShape, PackedLayout, TargetShape, pack
from runtime.h3.schedule import MIN_SIGMA, map_sigma
from runtime.kernels.rope import rope_table
from runtime.nonfinite import require_finite
from runtime.parallel.sides import IN_TURN, Sides
from runtime.solvers import SAMPLERS

VISUAL_CONDITION_TIME = 0.999  # condition pictures are 0.1 % noise and say so
AUDIO_CONDITION_TIME = 1.0
MODALITY_ROW = {
    "video": 0, "cond": 0, "ref_img": 0, "audio": 2, "cond_audio": 2, "ref_audio": 2,
}  # fmt: skip  # text rows carry their own tags

# As H3Model.forward: rows of the targets to data-ward velocities
Evaluate = Callable[[Tensor, Tensor, PackedInputs, StepRows], tuple[Tensor, Tensor]]
Tap = Callable[[str, Tensor], None]  # (name as in the goldens, tensor); clone what you keep


@dataclass(frozen=True, slots=True, kw_only=True)
class Shifts:
    """Sigma shifts of the two streams; the carried audio scale is their ratio."""

    video: float = 12.0
    audio: float = 3.0

    @property
    def audio_scale(self) -> float:
        """How much larger the carried audio's clean end point is (contract 2.5)."""
        return self.video / self.audio


@dataclass(frozen=True, slots=True, kw_only=True)
class Latents:
    """The pair of latents: video [1, 24, T, h, w], audio [1, 32, 2, Ta]."""

    video: Tensor
    audio: Tensor

    def packed(self) -> Tensor:
        """[1, 1, N], video first."""
        return torch.cat([self.video.reshape(1, 1, -1), self.audio.reshape(1, 1, -1)], dim=-1)

    def unpack(self, x: Tensor) -> Latents:
        """Views of a pack of this pair's shapes."""
        split = self.video.numel()
        return Latents(
            video=x[..., :split].reshape(self.video.shape),
            audio=x[..., split:].reshape(self.audio.shape),
        )


def draw_noise(target: TargetShape, seed: int) -> Latents:
    """fp32 CPU noise: one generator, video drawn first, audio continuing it (contract 3.4)."""
    generator = torch.Generator().manual_seed(seed)
    video = torch.randn(
        (1, 24, target.latent_t, target.latent_h, target.latent_w), generator=generator
    )
    audio = torch.randn((1, 32, 2, target.audio_t), generator=generator)
    return Latents(video=video, audio=audio)


def layout_of(conditioning: Conditioning, target: TargetShape) -> PackedLayout:
    """The packed rows of one side of a request."""
    references = [
        BlockShape(
            kind=block.kind,
            latent_t=block.latent.shape[2] if block.latent is not None else 1,
            latent_h=block.latent.shape[3] if block.latent is not None else 0,
            latent_w=block.latent.shape[4] if block.latent is not None else 0,
            audio_t=block.audio_latent.shape[3] if block.audio_latent is not None else 0,
        )
        for block in conditioning.references
    ]
    keyframes = [
        KeyframeShape(
            frame_index=keyframe.frame_index,
            latent_t=keyframe.latent.shape[2] if keyframe.latent is not None else 0,
            audio_t=keyframe.audio_latent.shape[3] if keyframe.audio_latent is not None else 0,
        )
        for keyframe in conditioning.keyframes
    ]
    text_len = conditioning.context.context.shape[1]
    return pack(text_len=text_len, target=target, references=references, keyframes=keyframes)


class Side:
    """One conditioned velocity field (positive or negative): everything constant over the steps."""

    def __init__(
        self,
        model: H3Model,
        conditioning: Conditioning,
        target: TargetShape,
        *,
        seed: int,
        shifts: Shifts,
        device: torch.device,
    ) -> None:
        self.model, self.shifts, self.device = model, shifts, device
        self.evaluate: Evaluate = model  # or what wraps it for this side of this request
        self.layout = layout_of(conditioning, target)
        self.text_tags = conditioning.context.token_tags
        positions = torch.from_numpy(self.layout.positions_S3).to(device)
        self.inputs = PackedInputs(
            context_LD=model.refine(conditioning.context.context[0].to(device)),
            rope=rope_table(model.rope(positions), model.dtype),
            condition_video=condition_video(conditioning, seed, device),
            condition_audio=condition_audio(conditioning, device),
            segments=tuple((s.start, s.stop, s.kind) for s in self.layout.segments),
        )

    def velocity(self, x: Latents, sigma: Tensor, tap: Tap | None = None) -> Latents:
        """Noise-ward velocities of the sampler's variable at 0-dim fp32 sigma (contract 2.5).

        x and the result have the model's dtype; audio is carried in and out.
        """
        sigma_v, sigma_a = self._sigmas(sigma)
        scale = self.shifts.audio_scale
        audio = x.audio
        if scale != 1:
            audio = audio * (sigma_a / sigma_v).to(audio.dtype)
        rows = step_rows(self.inputs.segments, self.text_tags, sigma_v, sigma_a)
        self.model.packed_rows.conditioning = self.inputs.segments[-2][0]  # targets come last
        video_rows, audio_rows = self.evaluate(
            patchify(x.video.to(torch.float32)), pack_audio(audio.to(torch.float32)),
            self.inputs, rows,
        )  # fmt: skip
        v_video = -unpatchify(video_rows, x.video.shape).to(x.video.dtype)
        v_audio = -unpack_audio(audio_rows, x.audio.shape).to(x.audio.dtype)
        if tap is not None:
            tap("audio_in", audio)
            tap("v_video", v_video)
            tap("v_audio", v_audio)
        if scale != 1:
            factor = (1 + (scale - 1) * sigma_a).to(audio.dtype)
            v_audio = (1 - scale) * audio + factor * v_audio
        return Latents(video=v_video, audio=v_audio)

    def times(self, sigma: Tensor) -> Tensor:
        """The distinct times [M] of the evaluation at 0-dim sigma, fp32 on the CPU."""
        return step_rows(self.inputs.segments, self.text_tags, *self._sigmas(sigma)).times_M

    def build_tables(self, sigmas: Tensor, others: Sequence[Side]) -> None:
        """AdaLN tables for an evaluation of this side, then of the others, at each sigma."""
        sides = (self, *others)
        self.model.tables.plan([side.times(s) for s in sigmas for side in sides], self.model)

    def _sigmas(self, sigma: Tensor) -> tuple[Tensor, Tensor]:
        sigma_v = (sigma * 1000 / 1000).clamp(min=MIN_SIGMA)  # the fp32 round trip is Comfy's
        return sigma_v, map_sigma(sigma_v, self.shifts.video, self.shifts.audio)

    def denoised(self, x: Tensor, sigma: Tensor, like: Latents, tap: Tap | None = None) -> Tensor:
        """x - velocity * sigma on the fp32 pack; the model sees x rounded to its dtype."""
        velocity = self.velocity(like.unpack(x.to(self.model.dtype)), sigma, tap)
        return x - velocity.packed().float() * sigma


def step_rows(
    segments: tuple[tuple[int, int, str], ...],
    text_tags: Tensor,
    sigma_v: Tensor,
    sigma_a: Tensor,
) -> StepRows:
    """Distinct times and the AdaLN row of every span (contract 1.8). Sigmas are 0-dim fp32."""
    t_v, t_a = float(1 - sigma_v), float(1 - sigma_a)
    time_of = {
        "text": t_v, "video": t_v, "audio": t_a,
        "cond": max(t_v, VISUAL_CONDITION_TIME), "ref_img": max(t_v, VISUAL_CONDITION_TIME),
        "cond_audio": max(t_a, AUDIO_CONDITION_TIME), "ref_audio": max(t_a, AUDIO_CONDITION_TIME),
    }  # fmt: skip
    times = sorted({t_v, t_a, *(time_of[kind] for _, _, kind in segments)})
    spans: list[RowSpan] = []
    for start, stop, kind in segments:
        base = times.index(time_of[kind]) * NUM_MODALITIES
        if kind != "text":
            spans.append(RowSpan(start, stop, base + MODALITY_ROW[kind]))
            continue
        for tag, run in itertools.groupby(text_tags.tolist()):  # vision tokens are tagged 0
            stop = start + len(list(run))
            spans.append(RowSpan(start, stop, base + tag))
            start = stop
    return StepRows(
        times_M=torch.tensor(times, dtype=torch.float32),
        spans=tuple(spans),
        video_time=times.index(t_v),
        audio_time=times.index(t_a),
    )


def _conditions(conditioning: Conditioning) -> list[Keyframe | ReferenceBlock]:
    """In the order of their rows."""
    return [*conditioning.keyframes, *conditioning.references]


def condition_video(conditioning: Conditioning, seed: int, device: torch.device) -> Tensor | None:
    """[rows, 96] fp32 of keyframes, then references, with their noise; None without pictures."""
    latents = [c.latent for c in _conditions(conditioning)]
    rows = [_with_noise(patchify(z.float()), seed) for z in latents if z is not None]
    return torch.cat(rows).to(device) if rows else None


def _with_noise(rows: Tensor, seed: int) -> Tensor:
    # A fresh generator for every latent: each condition repeats the start of the video noise.
    noise = torch.randn(rows.shape, generator=torch.Generator().manual_seed(seed))
    return VISUAL_CONDITION_TIME * rows + (1 - VISUAL_CONDITION_TIME) * noise


def condition_audio(conditioning: Conditioning, device: torch.device) -> Tensor | None:
    """[rows, 32] fp32 of keyframes, then references; None without sounds."""
    latents = [c.audio_latent for c in _conditions(conditioning)]
    rows = [pack_audio(z.float()) for z in latents if z is not None]
    return torch.cat(rows).to(device) if rows else None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What the sampler had at one step: state before the update and the guided prediction."""

    step: int
    sigma: float
    x: Latents
    denoised: Latents


def sample(
    positive: Side,
    negative: Side | None,
    *,
    cfg: float,
    sampler: str,
    sigmas: Tensor,
    noise: Latents,
    start: Latents | None,
    on_step: Callable[[StepResult], None],
    timed: Callable[[int], AbstractContextManager[None]] = lambda step: nullcontext(),
    tap: Tap | None = None,
    sides: Sides = IN_TURN,
) -> Latents:
    """Run the sampler; returns the clean pair, audio back in its own scale (fp32, on the device).

    sigmas [steps+1] fp32 CPU. noise and start are fp32; start None means empty latents.
    `on_step` may raise to cancel; `timed(step)` encloses a step's evaluations. NonFinite names step
    and stream. sides: where they are shared this rank evaluates its own one, and taps only that.
    """
    assert negative is not None or not sides.shared, "check_guidance comes first"
    device, scale = positive.device, positive.shifts.audio_scale
    noise_pack = noise.packed().to(device)
    latent_pack = torch.zeros_like(noise_pack)
    if start is not None:
        audio = start.audio * scale if bool(start.audio.any()) else start.audio
        latent_pack = Latents(video=start.video, audio=audio).packed().to(device)
    like = Latents(video=noise.video, audio=noise.audio)
    x = sigmas[0] * noise_pack + (1 - sigmas[0]) * latent_pack

    def denoise(x: Tensor, sigma: Tensor, step: int) -> Tensor:
        with timed(step):
            denoised = predicted(positive, negative, cfg, x, sigma, like, step, tap, sides)
        pair = like.unpack(denoised)
        _require_finite(denoised, pair, step)
        on_step(StepResult(step=step, sigma=float(sigma), x=like.unpack(x), denoised=pair))
        return denoised

    here = [side for side in (positive, negative) if side is not None]
    first, *others = [here[sides.own]] if sides.shared else here
    first.build_tables(sigmas[:-1], others)
    end = like.unpack(SAMPLERS[sampler](denoise, x, sigmas))
    return Latents(video=end.video, audio=end.audio * (1 / scale))


def _require_finite(pack: Tensor, pair: Latents, step: int) -> None:
    """The step's one wait for the GPU; the streams apart only once something is wrong."""
    if not bool(torch.isfinite(pack).all()):
        stage = f"denoise step {step + 1}"
        require_finite(pair.video, stage=stage, tensor="the video latent")
        require_finite(pair.audio, stage=stage, tensor="the audio latent")


def predicted(
    positive: Side,
    negative: Side | None,
    cfg: float,
    x: Tensor,
    sigma: Tensor,
    like: Latents,
    step: int,
    tap: Tap | None,
    sides: Sides,
) -> Tensor:
    """What a step predicts of the clean pack x, guided; like: the pair that the pack is of."""

    def side_tap(side: str) -> Tap | None:
        if tap is None:
            return None
        return lambda name, value: tap(f"step_{step:02d}/net_{side}/{name}", value)

    if negative is None:
        return positive.denoised(x, sigma, like, side_tap("pos"))
    if sides.shared:
        own, name = (negative, "neg") if sides.own else (positive, "pos")
        conditional, unconditional = sides.both(own.denoised(x, sigma, like, side_tap(name)))
    else:
        conditional = positive.denoised(x, sigma, like, side_tap("pos"))
        unconditional = negative.denoised(x, sigma, like, side_tap("neg"))
    if tap is not None:
        for side, value in (("pos", conditional), ("neg", unconditional)):
            tap(f"step_{step:02d}/{side}_denoised_video", like.unpack(value).video)
            tap(f"step_{step:02d}/{side}_denoised_audio", like.unpack(value).audio)
    return unconditional + (conditional - unconditional) * cfg
