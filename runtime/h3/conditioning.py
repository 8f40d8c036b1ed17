"""Prompt and references to what the denoiser is conditioned on, each encoded once (contract 4)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, Protocol

from torch import Tensor

from runtime.encode_cache import EncodeCache as EncodeCache
from runtime.encode_cache import Key
from runtime.h3.audio_vae import resample
from runtime.h3.references import (
    Guide,
    ReferenceMedia,
    guide_place,
    image_size,
    prepare_first_frame,
    prepare_guide,
    prepare_image,
    prepare_last_frame,
    prepare_text_frames,
    prepare_video,
    video_size,
)
from runtime.h3.sizes import SAMPLE_RATE, Size, kept_frames
from runtime.h3.text import (
    PresentationToken,
    TextAudio,
    TextContext,
    TextImage,
    TextItem,
    TextVideo,
    VisionBlock,
    presentation_tokens,
)
from runtime.h3.tokenizer import Tokenizer
from runtime.messages import SIZE_MULTIPLE
from runtime.nonfinite import require_finite

TEXT_STAGE = "text encode"
REFERENCE_STAGE = "reference encode"

Stage = Callable[[str], AbstractContextManager[None]]


class EncodesText(Protocol):
    """The text encoder's seam (runtime/h3/text.py)."""

    def encode(
        self, tokens: tuple[PresentationToken, ...], *, cancelled: Callable[[], bool]
    ) -> TextContext: ...


class EncodesFrames(Protocol):
    """The video VAE's seam: frames [F,H,W,3] in [0,1] -> [1,24,T,h,w]."""

    def encode(self, frames: Tensor, *, cancelled: Callable[[], bool]) -> Tensor: ...


class EncodesWave(Protocol):
    """The audio VAE's seam: wave [1,C,L] at 32 kHz -> [1,32,2,T]."""

    def encode(self, wave_CL: Tensor, *, cancelled: Callable[[], bool]) -> Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoders:
    """The three encoders; `text` is called only when its output is not in the cache.

    An identity names checkpoint and compute dtype: equal identities encode equally.
    """

    tokenizer: Tokenizer
    text: Callable[[], EncodesText]
    text_identity: str
    video_vae: EncodesFrames
    video_vae_identity: str
    audio_vae: EncodesWave
    audio_vae_identity: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceBlock:
    """One reference in the packed sequence: float32 on the CPU, read only (the cache shares it)."""

    kind: Literal["image", "audio", "video", "video_audio"]
    latent: Tensor | None = None  # [1,24,t,h,w]
    audio_latent: Tensor | None = None  # [1,32,2,T]


@dataclass(frozen=True, slots=True, kw_only=True)
class Keyframe:
    """Latents that hold a place of the target: at its spatial size, or its sound."""

    frame_index: int  # resolved, 0 is the first frame
    latent: Tensor | None = None  # [1,24,t,h,w]
    audio_latent: Tensor | None = None  # [1,32,2,T]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditioning:
    """Everything that one side (positive or negative) hands to the denoiser."""

    context: TextContext
    references: tuple[ReferenceBlock, ...] = ()
    keyframes: tuple[Keyframe, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditioningInputs:
    """One side of a request: prompt, media in request order, and the target's sizes.

    first_frame and last_frame (fl2va) are images that the text encoder sees too, unlike guides.
    Raises ValueError for a video with fewer than 5 frames and for a guide that does not fit.
    """

    prompt: str
    width: int
    height: int
    frames: int
    media: tuple[ReferenceMedia, ...] = ()
    ref_image_size: str = "match"
    first_frame: ReferenceMedia | None = None
    last_frame: ReferenceMedia | None = None
    guides: tuple[Guide, ...] = ()

    def __post_init__(self) -> None:
        if self.media and (self.first_frame or self.last_frame):
            raise ValueError(
                f"a first or last frame cannot be combined with references, got "
                f"{len(self.media)}; drop them or use a guide"
            )
        pictures = any(guide.pixels is not None for guide in self.guides)
        pinned = self.first_frame or self.last_frame or pictures
        if pinned and (self.width % SIZE_MULTIPLE or self.height % SIZE_MULTIPLE):
            raise ValueError(
                f"first, last and guide frames need a target in multiples of {SIZE_MULTIPLE}, "
                f"got {self.width}x{self.height}"
            )
        for guide in self.guides:
            guide_place(guide, target_frames=self.frames)
        for media in self.media:
            if media.pixels is not None and media.kind == "video":
                kept_frames(len(media.pixels), self.frames)

    @property
    def target(self) -> Size:
        """Width and height in pixels."""
        return self.width, self.height


def negative_inputs(
    positive: ConditioningInputs, prompt: str, *, references: bool
) -> ConditioningInputs:
    """The negative side: the prompt alone, or with everything the positive side refers to."""
    if references:
        return replace(positive, prompt=prompt)
    return ConditioningInputs(
        prompt=prompt, width=positive.width, height=positive.height, frames=positive.frames
    )


def presentation_order(media: Sequence[ReferenceMedia]) -> tuple[ReferenceMedia, ...]:
    """All images, then all videos, then stand-alone sounds, each kind in request order."""
    order = ("image", "video", "audio")
    return tuple(sorted(media, key=lambda m: order.index(m.kind)))


def never() -> bool:
    """The cancel check of a call that nobody can cancel."""
    return False


def build_conditioning(
    inputs: ConditioningInputs,
    encoders: Encoders,
    cache: EncodeCache,
    *,
    stage: Stage,
    cancelled: Callable[[], bool] = never,
) -> Conditioning:
    """Encode one side of a request in ComfyUI's fixed order (contract 4).

    stage("text encode") and stage("reference encode") enclose the two halves for timing. What the
    cache knows is neither resized nor encoded again. Raises Cancelled once `cancelled()` is true.
    """
    encode = _Encode(inputs, encoders, cache, cancelled)
    with stage(TEXT_STAGE):
        context = encode.context()
    if not (inputs.media or inputs.first_frame or inputs.last_frame or inputs.guides):
        return Conditioning(context=context)
    with stage(REFERENCE_STAGE):
        return Conditioning(
            context=context,
            references=tuple(encode.block(m) for m in presentation_order(inputs.media)),
            keyframes=tuple(encode.keyframes()),
        )


class _Encode:
    """One call of build_conditioning: inputs, encoders and cache together."""

    def __init__(
        self,
        inputs: ConditioningInputs,
        encoders: Encoders,
        cache: EncodeCache,
        cancelled: Callable[[], bool],
    ) -> None:
        self.inputs, self.encoders, self.cache = inputs, encoders, cache
        self.cancelled = cancelled

    # ---- text

    def context(self) -> TextContext:
        """Prompt and everything the text encoder sees, as one key and one encode."""
        items = list(self.text_items())
        key = ("text", self.encoders.text_identity, self.inputs.prompt, [k for k, _ in items])

        def compute() -> TextContext:
            made = tuple(make() for _, make in items)
            tokens = presentation_tokens(made, self.inputs.prompt, self.encoders.tokenizer)
            found = self.encoders.text().encode(tokens, cancelled=self.cancelled)
            require_finite(found.context, stage=TEXT_STAGE, tensor="the context")
            return _without_pictures(found)

        return self.cache.recall(key, compute, _context_bytes)

    def text_items(self) -> Iterator[tuple[Key, Callable[[], TextItem]]]:
        """Key and maker of each item, in presentation order."""
        for _, key, pixels in self.end_frames():
            yield key, partial(_text_image, pixels)
        for media in presentation_order(self.inputs.media):
            if media.kind == "image":
                pixels = partial(self.image_pixels, media)
                yield self.image_key(media), partial(_text_image, pixels)
            if media.wave is not None:  # a soundtrack stands before its video
                yield ("audio",), TextAudio
            if media.kind == "video":
                yield self.video_key(media), partial(self.text_video, media)

    def text_video(self, media: ReferenceMedia) -> TextVideo:
        frames, timestamps = prepare_text_frames(media, target_frames=self.inputs.frames)
        return TextVideo(frames=frames, timestamps=timestamps)

    # ---- references

    def block(self, media: ReferenceMedia) -> ReferenceBlock:
        """The block of one reference."""
        if media.kind == "image":
            latent = self.frames(self.image_key(media), lambda: self.image_pixels(media))
            return ReferenceBlock(kind="image", latent=latent)
        sound = self.sound(media) if media.wave is not None else None
        if media.kind == "audio":
            return ReferenceBlock(kind="audio", audio_latent=sound)
        latent = self.frames(
            self.video_key(media), lambda: prepare_video(media, target_frames=self.inputs.frames)
        )
        kind: Literal["video", "video_audio"] = "video" if sound is None else "video_audio"
        return ReferenceBlock(kind=kind, latent=latent, audio_latent=sound)

    def image_key(self, media: ReferenceMedia) -> Key:
        size = image_size(media, mode=self.inputs.ref_image_size, target=self.inputs.target)
        return ("image", media.content_hash, size)

    def image_pixels(self, media: ReferenceMedia) -> Tensor:
        return prepare_image(media, mode=self.inputs.ref_image_size, target=self.inputs.target)

    def video_key(self, media: ReferenceMedia) -> Key:
        assert media.pixels is not None
        kept = kept_frames(len(media.pixels), self.inputs.frames)
        return ("video", media.content_hash, video_size(media), kept)

    # ---- keyframes

    def keyframes(self) -> Iterator[Keyframe]:
        """First and last frame, then the guides in order."""
        for index, key, pixels in self.end_frames():
            yield Keyframe(frame_index=index, latent=self.frames(key, pixels))
        for guide in self.inputs.guides:
            yield self.guide(guide)

    def end_frames(self) -> Iterator[tuple[int, Key, Callable[[], Tensor]]]:
        """Index, key and pixels of the first and the last frame, where given."""
        inputs = self.inputs
        for name, index, media, prepare in (
            ("first", 0, inputs.first_frame, prepare_first_frame),
            ("last", inputs.frames - 1, inputs.last_frame, prepare_last_frame),
        ):
            if media is not None:
                assert media.pixels is not None
                key = (name, media.content_hash, inputs.target)
                yield index, key, partial(prepare, media.pixels, inputs.target)

    def guide(self, guide: Guide) -> Keyframe:
        """Pictures at the target's size, or as much of a sound as fits."""
        index, count = guide_place(guide, target_frames=self.inputs.frames)
        if guide.wave is not None:
            return Keyframe(frame_index=index, audio_latent=self.sound(guide)[..., :count])
        target = self.inputs.target
        pixels = partial(prepare_guide, guide, target=target, kept=count)
        key = ("guide", guide.content_hash, target, count)
        return Keyframe(frame_index=index, latent=self.frames(key, pixels))

    # ---- encoders behind the cache

    def frames(self, key: Key, pixels: Callable[[], Tensor]) -> Tensor:
        def compute() -> Tensor:
            return self.encoders.video_vae.encode(pixels(), cancelled=self.cancelled).cpu()

        return self.cache.recall((*key, self.encoders.video_vae_identity), compute, _tensor_bytes)

    def sound(self, source: ReferenceMedia | Guide) -> Tensor:
        """The whole sound: a soundtrack is not cut to its pictures."""
        assert source.wave is not None
        wave, rate = source.wave, source.sample_rate

        def compute() -> Tensor:
            wave_CL = resample(wave, rate, SAMPLE_RATE)
            return self.encoders.audio_vae.encode(wave_CL, cancelled=self.cancelled).cpu()

        key = ("audio", source.content_hash, rate, self.encoders.audio_vae_identity)
        return self.cache.recall(key, compute, _tensor_bytes)


def _text_image(pixels: Callable[[], Tensor]) -> TextImage:
    return TextImage(pixels=pixels()[0])


def _without_pictures(context: TextContext) -> TextContext:
    """The context with shapes in place of its pictures, which would fill the cache."""
    tokens = tuple(
        replace(t, frames=t.frames.to("meta")) if isinstance(t, VisionBlock) else t
        for t in context.tokens
    )
    return replace(context, tokens=tokens)


def _tensor_bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _context_bytes(context: TextContext) -> int:
    return _tensor_bytes(context.context) + _tensor_bytes(context.token_tags)
