"""Replay of `e2e` goldens: a whole request, free from prompt and media, then stage by stage.

Free: everything chains from `in/*` and the prompt. Staged: each stage gets the stored tensors
before it, so that the first wrong stage is named even when errors add up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runtime.checkpoints import open_checkpoint
from runtime.h3.audio_vae import AudioVAE, load_audio_vae, loudness_guard
from runtime.h3.conditioning import (
    Conditioning,
    ConditioningInputs,
    EncodeCache,
    Encoders,
    Keyframe,
    ReferenceBlock,
    build_conditioning,
    negative_inputs,
)
from runtime.h3.denoise import Latents, Shifts, Side, StepResult, draw_noise, sample
from runtime.h3.load import load_denoiser
from runtime.h3.packing import AUDIO_KINDS, VIDEO_KINDS, TargetShape
from runtime.h3.references import Guide, ReferenceMedia
from runtime.h3.schedule import SCHEDULERS, sigmas_for
from runtime.h3.sizes import audio_latents_of_frames, latent_frames
from runtime.h3.text import PresentationToken, TextContext
from runtime.h3.tokenizer import Tokenizer
from runtime.h3.video_vae import VideoVAE, load_video_vae
from runtime.kernels.attention import AttentionOptions, attention_backend
from runtime.messages import frame_count
from runtime.parallel.sides import Sides
from runtime.parity.golden import Golden
from runtime.parity.metrics import Comparison, Unsupported, compare
from runtime.parity.replay.modules import staged_modules
from runtime.parity.replay.te import compare_text, load_text_encoder, staged_text
from runtime.parity.settings import denoiser, plan_of
from runtime.parity.setup import Setup
from runtime.parity.taps import Captured, module_taps, refiner_taps
from runtime.solvers import SAMPLERS

LATENT = 16
DEFAULT_VIDEO_VAE, DEFAULT_AUDIO_VAE = "h3_tiny_video_vae_fp16", "h3_tiny_audio_vae_fp32"
DTYPES = {"torch.float32": torch.float32, "torch.float16": torch.float16}
MODES = ("t2va", "ref2va", "fl2va", "guide")


def replay(golden: Golden, checkpoints: Path, setup: Setup) -> list[Comparison]:
    """Free, then (on the CPU) staged. Unsupported names a mode, sampler or schedule."""
    case = Case(golden, checkpoints, setup)
    return [*case.free(), *(case.staged() if setup.staged else ())]


class Case:
    """One golden with its models: the tiny checkpoints that it names."""

    def __init__(self, golden: Golden, checkpoints: Path, setup: Setup) -> None:
        self.golden, self.params, self.setup = golden, golden.params, setup
        self.device = setup.device
        _require("mode", self.params["mode"], MODES)
        _require("sampler", self.params["sampler"], SAMPLERS)
        self._load(checkpoints)
        self.frames = frame_count(self.params["length"])
        self.target = TargetShape(
            latent_t=latent_frames(self.frames),
            latent_h=self.params["height"] // LATENT,
            latent_w=self.params["width"] // LATENT,
            audio_t=audio_latents_of_frames(self.frames),
        )
        video, audio = self.params.get("shift", (12.0, 3.0))
        self.shifts = Shifts(video=float(video), audio=float(audio))
        self.seed: int = self.params["seed"]
        self.cfg = float(self.params.get("cfg", 1.0))

    def _load(self, checkpoints: Path) -> None:
        golden, device = self.golden, self.device
        checkpoint = denoiser(golden, checkpoints)
        plan = plan_of(golden, checkpoint, self.setup)
        self.model, _ = load_denoiser(checkpoint, plan, device, mesh=self.setup.mesh)
        self.text = load_text_encoder(golden, checkpoints, self.setup)
        self.video_vae = self._video_vae(checkpoints)
        self.audio_vae = _audio_vae(checkpoints, self.params, device)

    # ---- free

    def free(self) -> Iterator[Comparison]:
        """Prompt and media in, every stored tensor out."""
        conditionings: dict[str, Conditioning] = {}
        sides: dict[str, Side] = {}
        for side, inputs in self._inputs():
            conditionings[side], context, taps = self._encode(inputs)
            yield from compare_text(self.golden, side, context, taps)
            yield from self._conditions(side, conditionings[side])
            yield from self._side("free", side, conditionings[side], sides)
        yield from self._sampling(sides)

    def _inputs(self) -> Iterator[tuple[str, ConditioningInputs]]:
        params = self.params
        positive = ConditioningInputs(
            prompt=params["prompt"],
            width=params["width"],
            height=params["height"],
            frames=self.frames,
            media=self._media(),
            ref_image_size=params.get("ref_image_size", "match"),
            first_frame=self._image("in/first_frame"),
            last_frame=self._image("in/last_frame"),
            guides=self._guides(),
        )
        yield "pos", positive
        if self.cfg != 1.0:
            with_references = params.get("negative_mode", "text") == "ref"
            negative = negative_inputs(
                positive, params.get("negative", ""), references=with_references
            )
            yield "neg", negative

    def _encode(
        self, inputs: ConditioningInputs
    ) -> tuple[Conditioning, TextContext, dict[str, Tensor]]:
        taps: dict[str, Tensor] = {}
        contexts: list[TextContext] = []
        text = self.text

        class Tapped:
            def encode(
                self, tokens: tuple[PresentationToken, ...], *, cancelled: Callable[[], bool]
            ) -> TextContext:
                contexts.append(text.encode(tokens, on_layer=taps.__setitem__))
                return contexts[-1]

        encoders = Encoders(
            tokenizer=Tokenizer(None),
            text=Tapped,
            text_identity="text",
            video_vae=self.video_vae,
            video_vae_identity="video",
            audio_vae=self.audio_vae,
            audio_vae_identity="audio",
        )
        built = build_conditioning(
            inputs, encoders, EncodeCache(0), stage=lambda name: nullcontext()
        )
        return built, contexts[0], taps

    def _conditions(self, side: str, built: Conditioning) -> Iterator[Comparison]:
        for kind, blocks in (("ref", built.references), ("keyframe", built.keyframes)):
            for i, block in enumerate(blocks):
                for name in ("latent", "audio_latent"):
                    value = getattr(block, name)
                    if value is not None:
                        full = f"cond/{side}/{kind}_{i}/{name}"
                        yield from self._stored("free", "reference encode", full, value)

    def _side(
        self, run: str, side: str, conditioning: Conditioning, sides: dict[str, Side]
    ) -> Iterator[Comparison]:
        with refiner_taps(self.model) as captured:
            built = Side(
                self.model,
                conditioning,
                self.target,
                seed=self.seed,
                shifts=self.shifts,
                device=self.device,
            )
        sides[side] = built
        for name, value in captured.items():
            yield from self._stored(run, "text refiner", f"refine/{side}/{name}", value)
        layout = built.layout
        found = {
            "context_refined": built.inputs.context_LD[None],
            "position_ids": torch.from_numpy(layout.positions_S3),
            "img_pos": torch.from_numpy(layout.rows_of(VIDEO_KINDS)),
            "img_update": torch.from_numpy(layout.is_target(VIDEO_KINDS)),
            "audio_pos": torch.from_numpy(layout.rows_of(AUDIO_KINDS)),
            "audio_update": torch.from_numpy(layout.is_target(AUDIO_KINDS)),
        }
        for name, value in found.items():
            stage = "text refiner" if name == "context_refined" else "layout"
            yield from self._stored(run, stage, f"layout/{side}/{name}", value)
        if "layout" not in self.golden.header:  # a capture cannot see it
            return
        want = self.golden.header["layout"][side]["segments"]
        got = [[s.start, s.stop, s.kind] for s in layout.segments]
        yield compare(
            f"header/layout/{side}/segments",
            torch.tensor(int(got == want)),
            torch.tensor(1),
            run=run,
            stage="layout",
        )

    def _sampling(self, sides: Mapping[str, Side]) -> Iterator[Comparison]:
        params = self.params
        noise = draw_noise(self.target, self.seed)
        yield from self._pair("free", "noise", "noise", noise)
        sigmas = self._sigmas()
        yield from self._stored("free", "schedule", "sigmas", sigmas)
        found: dict[str, Tensor] = {}
        modules = _ModuleTaps(self)
        last: list[Latents] = []

        def on_step(step: StepResult) -> None:
            for name, pair in (("x", step.x), ("denoised", step.denoised)):
                found[f"step_{step.step:02d}/{name}_video"] = pair.video.clone()
                found[f"step_{step.step:02d}/{name}_audio"] = pair.audio.clone()
            last[:] = [step.denoised]
            self.setup.on_step("free", step.step + 1, len(sigmas) - 1)

        def tap(name: str, value: Tensor) -> None:
            found[name] = value.clone()
            modules.see(name, found)

        final = sample(
            sides["pos"],
            sides.get("neg"),
            cfg=self.cfg,
            sampler=params["sampler"],
            sigmas=sigmas,
            noise=noise,
            start=self._start(),
            on_step=on_step,
            timed=modules.around,
            tap=tap,
            sides=Sides.of(self.setup.mesh),
        )
        for name in sorted(found):
            stage = "denoiser modules" if name.startswith("mod/") else name.split("/")[0]
            yield from self._stored("free", stage, name, found[name])
        yield from self._pair("free", "final", "final", final)
        x0 = replace(last[0], audio=last[0].audio * (1 / self.shifts.audio_scale))
        yield from self._pair("free", "final", "final_x0", x0)
        yield from self._decode("free", final)

    def _sigmas(self) -> Tensor:
        params = self.params
        _require("scheduler", params["scheduler"], SCHEDULERS)
        denoise = float(params.get("denoise", 1.0))
        return sigmas_for(params["scheduler"], params["steps"], self.shifts.video, denoise)

    def _start(self) -> Latents | None:
        if "init_latent/video" not in self.golden:
            return None
        return Latents(
            video=self.golden.tensor("init_latent/video"),
            audio=self.golden.tensor("init_latent/audio"),
        )

    def _decode(self, run: str, latents: Latents) -> Iterator[Comparison]:
        if "decode/video" in self.golden:
            frames = self.video_vae.decode(latents.video)
            yield from self._stored(run, "video VAE decode", "decode/video", frames)
            if run == "free" and self.setup.on_frames:
                want = self.golden.tensor("decode/video")
                self.setup.on_frames("decode/video", want, frames)
        elif run == "free" and self.setup.on_frames and "final/video" in self.golden:
            want = self.video_vae.decode(self.golden.tensor("final/video"))
            frames = self.video_vae.decode(latents.video)
            self.setup.on_frames("final/video, decoded here", want, frames)
        if "decode/audio" in self.golden or "decode/audio_raw" in self.golden:
            raw = self.audio_vae.decode(latents.audio)
            yield from self._stored(run, "audio VAE decode", "decode/audio_raw", raw)
            guarded = loudness_guard(raw)
            yield from self._stored(run, "audio VAE decode", "decode/audio", guarded)

    # ---- staged

    def staged(self) -> Iterator[Comparison]:
        """Each stage from the stored tensors before it."""
        sides: dict[str, Side] = {}
        for side in ("pos", "neg"):
            if f"cond/{side}/context" in self.golden:
                yield from self._staged_text(side)
                yield from self._side("staged", side, stored_conditioning(self.golden, side), sides)
        yield from self._staged_steps(sides)
        if "final/video" in self.golden:
            final = self._stored_pair("final")
            yield from self._decode("staged", final)
        start = self._start()
        if start is not None:
            yield from self._pair("staged", "start", "init_latent", start)

    def _staged_text(self, side: str) -> Iterator[Comparison]:
        yield from staged_text(self.golden, side, self.text)

    def _staged_steps(self, sides: Mapping[str, Side]) -> Iterator[Comparison]:
        sigmas = self.golden.tensor("sigmas")
        total = len(sigmas) - 1
        recorded = [k for k in range(total) if f"step_{k:02d}/x_video" in self.golden]
        yield from staged_modules(self.golden, self.model)  # first: they name the wrong linear
        for number, k in enumerate(recorded):
            yield from self._staged_step(k, sigmas[k], sides)
            self.setup.on_step("staged", number + 1, len(recorded))
        yield from self._staged_solver(sigmas, recorded)

    def _staged_step(
        self, step: int, sigma: Tensor, sides: Mapping[str, Side]
    ) -> Iterator[Comparison]:
        x = self._stored_pair(f"step_{step:02d}/x", "_")
        found: dict[str, Tensor] = {}
        denoised: dict[str, Tensor] = {}
        for name, side in sides.items():
            record = name == "pos" and step == self.params.get("module_step")
            taps: AbstractContextManager[Captured] = (
                module_taps(self.model) if record else nullcontext({})
            )
            with taps as captured:
                prefix = f"step_{step:02d}/net_{name}/"
                denoised[name] = side.denoised(x.packed(), sigma, x, _keeper(found, prefix))
            found.update({f"mod/{name}/{path}": value for path, value in captured.items()})
        guided = denoised["pos"]
        if "neg" in denoised:
            for name in sides:
                pair = x.unpack(denoised[name])
                found[f"step_{step:02d}/{name}_denoised_video"] = pair.video
                found[f"step_{step:02d}/{name}_denoised_audio"] = pair.audio
            guided = denoised["neg"] + (denoised["pos"] - denoised["neg"]) * self.cfg
        pair = x.unpack(guided)
        found[f"step_{step:02d}/denoised_video"] = pair.video
        found[f"step_{step:02d}/denoised_audio"] = pair.audio
        for name, value in found.items():
            stage = "denoiser modules" if name.startswith("mod/") else f"step_{step:02d}"
            yield from self._stored("staged", stage, name, value)

    def _staged_solver(self, sigmas: Tensor, recorded: list[int]) -> Iterator[Comparison]:
        """The sampler alone, fed with the stored predictions as far as they are in a row."""
        row = next((k for k in range(len(recorded)) if recorded[k] != k), len(recorded))
        if row < 2:
            return
        like = self._stored_pair("step_00/x", "_")
        states: list[Tensor] = []

        def denoise(x: Tensor, sigma: Tensor, step: int) -> Tensor:
            del sigma
            states.append(x)
            return self._stored_pair(f"step_{step:02d}/denoised", "_").packed()

        SAMPLERS[self.params["sampler"]](denoise, like.packed(), sigmas[: row + 1])
        for k in range(1, row):
            pair = like.unpack(states[k])
            yield from self._pair("staged", "solver", f"step_{k:02d}/x", pair, "_")

    # ---- stored things

    def _stored_pair(self, prefix: str, joint: str = "/") -> Latents:
        return Latents(
            video=self.golden.tensor(f"{prefix}{joint}video"),
            audio=self.golden.tensor(f"{prefix}{joint}audio"),
        )

    def _pair(
        self, run: str, stage: str, prefix: str, pair: Latents, joint: str = "/"
    ) -> Iterator[Comparison]:
        for name, value in (("video", pair.video), ("audio", pair.audio)):
            yield from self._stored(run, stage, f"{prefix}{joint}{name}", value)

    def _stored(self, run: str, stage: str, name: str, value: Tensor) -> Iterator[Comparison]:
        if name in self.golden:
            yield compare(name, value, self.golden.tensor(name), run=run, stage=stage)

    def _image(self, name: str) -> ReferenceMedia | None:
        if name not in self.golden:
            return None
        return _picture("image", self.golden.tensor(name), name)

    def _media(self) -> tuple[ReferenceMedia, ...]:
        golden, media = self.golden, []
        for i in range(len(self.params.get("ref_images", ()))):
            name = f"in/ref_image_{i}"
            media.append(_picture("image", golden.tensor(name), name))
        for i, spec in enumerate(self.params.get("ref_videos", ())):
            name, sound = f"in/ref_video_{i}", f"in/ref_video_audio_{i}"
            video = _picture("video", golden.tensor(name), name)
            if sound in golden:
                rate = spec["audio"]["sr"]
                video = replace(video, wave=golden.tensor(sound), sample_rate=rate)
            media.append(video)
        for i, spec in enumerate(self.params.get("ref_audios", ())):
            name = f"in/ref_audio_{i}"
            media.append(
                ReferenceMedia(
                    kind="audio",
                    pixels=None,
                    wave=golden.tensor(name),
                    sample_rate=spec["sr"],
                    content_hash=name,
                )
            )
        return tuple(media)

    def _guides(self) -> tuple[Guide, ...]:
        guides: list[Guide] = []
        for i, spec in enumerate(self.params.get("guides", ())):
            pictures, sound = f"in/guide_{i}", f"in/guide_audio_{i}"
            index: int = spec["frame_idx"]
            if pictures in self.golden:
                pixels = _pixels(self.golden.tensor(pictures))
                guides.append(Guide(frame_index=index, pixels=pixels, content_hash=pictures))
            if sound in self.golden:
                guides.append(
                    Guide(
                        frame_index=index,
                        wave=self.golden.tensor(sound),
                        sample_rate=spec["audio"]["sr"],
                        content_hash=sound,
                    )
                )
        return tuple(guides)

    def _video_vae(self, checkpoints: Path) -> VideoVAE:
        name = self.params.get("vvae", DEFAULT_VIDEO_VAE)
        dtype = self.golden.header["vae_dtype"]["video"]
        if dtype not in DTYPES:
            raise Unsupported(f"video VAE dtype {dtype}")
        checkpoint = open_checkpoint(checkpoints / f"{name}.safetensors", "video_vae")
        attend = attention_backend("sdpa").load(self.device, AttentionOptions())
        return load_video_vae(checkpoint, device=self.device, dtype=DTYPES[dtype], attend=attend)[0]


def stored_conditioning(golden: Golden, side: str) -> Conditioning:
    """What one side of an end-to-end golden was conditioned on, as it is stored."""
    header = golden.header["conditioning"][side]

    def stored(name: str) -> Tensor | None:
        full = f"cond/{side}/{name}"
        return golden.tensor(full) if full in golden else None

    return Conditioning(
        context=TextContext(
            context=golden.tensor(f"cond/{side}/context"),
            token_tags=golden.tensor(f"cond/{side}/token_tags"),
            tokens=(),
        ),
        references=tuple(
            ReferenceBlock(
                kind=ref["kind"],
                latent=stored(f"ref_{i}/latent"),
                audio_latent=stored(f"ref_{i}/audio_latent"),
            )
            for i, ref in enumerate(header["refs"])
        ),
        keyframes=tuple(
            Keyframe(
                frame_index=keyframe["resolved_frame_index"],
                latent=stored(f"keyframe_{i}/latent"),
                audio_latent=stored(f"keyframe_{i}/audio_latent"),
            )
            for i, keyframe in enumerate(header["keyframes"])
        ),
    )


class _ModuleTaps:
    """Captures the denoiser's modules in the positive evaluation of the golden's module step."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.step = case.params.get("module_step", -1) if case.setup.whole else -1
        self._captured: Captured = {}

    def around(self, step: int) -> AbstractContextManager[None]:
        if step != self.step:
            return nullcontext()
        return self._capturing()

    @contextmanager
    def _capturing(self) -> Iterator[None]:
        with module_taps(self.case.model) as captured:
            self._captured = captured
            yield

    def see(self, name: str, found: dict[str, Tensor]) -> None:
        """After that step's positive side: its captures, before the negative overwrites them."""
        if name == f"step_{self.step:02d}/net_pos/v_audio":
            found.update({f"mod/pos/{path}": value for path, value in self._captured.items()})


def _keeper(found: dict[str, Tensor], prefix: str) -> Callable[[str, Tensor], None]:
    def keep(name: str, value: Tensor) -> None:
        found[prefix + name] = value.clone()

    return keep


def _require(what: str, got: str, known: object) -> None:
    if got not in known:  # type: ignore[operator]
        raise Unsupported(f"{what} {got!r}")


def _pixels(stored: Tensor) -> Tensor:
    return stored.float() / 255  # uint8 [F,H,W,3]: ComfyUI saw value/255


def _picture(kind: Any, stored: Tensor, name: str) -> ReferenceMedia:
    return ReferenceMedia(
        kind=kind, pixels=_pixels(stored), wave=None, sample_rate=0, content_hash=name
    )


def _audio_vae(checkpoints: Path, params: Mapping[str, Any], device: torch.device) -> AudioVAE:
    name = params.get("avae", DEFAULT_AUDIO_VAE)
    checkpoint = open_checkpoint(checkpoints / f"{name}.safetensors", "audio_vae")
    return load_audio_vae(checkpoint, device=device)[0]
