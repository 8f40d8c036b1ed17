"""How many rows a request will have, before anything of it is encoded: what cannot run is refused.

Only shapes are looked at: pictures and latents are tensors on the meta device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.h3.conditioning import ConditioningInputs, presentation_order
from runtime.h3.packing import BlockShape, KeyframeShape, TargetShape, pack
from runtime.h3.references import Guide, ReferenceMedia, guide_place, image_size, video_size
from runtime.h3.sizes import (
    PIXELS_PER_LATENT,
    Size,
    audio_latents_of_samples,
    kept_frames,
    latent_frames,
    text_frames,
    vision_tokens,
)
from runtime.h3.text import (
    TextAudio,
    TextImage,
    TextItem,
    TextVideo,
    VisionBlock,
    presentation_tokens,
)
from runtime.h3.tokenizer import Tokenizer
from runtime.kernels.attention.base import AttentionBackend
from runtime.parallel.shares import row_shares


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """text: L, which the text refiner attends over; packed: S, which the blocks attend over."""

    text: int
    packed: int


def check_rows(
    sides: Sequence[ConditioningInputs],
    target: TargetShape,
    tokenizer: Tokenizer,
    attention: AttentionBackend,
    parts: int,
    split: Sequence[float] = (),
) -> None:
    """Refuses the rows of a request: Unavailable of its attention, ValueError of its layout.

    parts: how many ranks share the packed rows; split: in which proportion.
    """
    for side in sides:
        rows = count_rows(side, target, tokenizer)
        attention.check_rows(rows.text)
        attention.check_rows(rows.packed)
        row_shares(rows.packed, parts, split)


def count_rows(inputs: ConditioningInputs, target: TargetShape, tokenizer: Tokenizer) -> Rows:
    """L and S of one side, as `build_conditioning` and `layout_of` will find them."""
    tokens = presentation_tokens(tuple(_items(inputs)), inputs.prompt, tokenizer)
    text = sum(
        vision_tokens(*t.frames.shape[1:3]) if isinstance(t, VisionBlock) else 1 for t in tokens
    )
    layout = pack(
        text_len=text,
        target=target,
        references=[_block(media, inputs) for media in presentation_order(inputs.media)],
        keyframes=list(_keyframes(inputs)),
    )
    return Rows(text=text, packed=layout.num_rows)


def _items(inputs: ConditioningInputs) -> Iterator[TextItem]:
    for end in (inputs.first_frame, inputs.last_frame):
        if end is not None:
            yield TextImage(pixels=_pictures(inputs.target)[0])
    for media in presentation_order(inputs.media):
        if media.kind == "image":
            yield TextImage(pixels=_pictures(_image_size(media, inputs))[0])
        if media.wave is not None:
            yield TextAudio()
        if media.kind == "video":
            seen = len(text_frames(_kept(media, inputs)))
            yield TextVideo(
                frames=_pictures(video_size(media), seen),
                timestamps=tuple(i / 2 for i in range(seen)),
            )


def _block(media: ReferenceMedia, inputs: ConditioningInputs) -> BlockShape:
    sound = 0 if media.wave is None else _sound(media)
    if media.kind == "audio":
        return BlockShape(kind="audio", audio_t=sound)
    image = media.kind == "image"
    width, height = _image_size(media, inputs) if image else video_size(media)
    return BlockShape(
        kind="image" if image else "video_audio" if sound else "video",
        latent_t=1 if image else latent_frames(_kept(media, inputs)),
        latent_h=height // PIXELS_PER_LATENT,
        latent_w=width // PIXELS_PER_LATENT,
        audio_t=sound,
    )


def _keyframes(inputs: ConditioningInputs) -> Iterator[KeyframeShape]:
    if inputs.first_frame is not None:
        yield KeyframeShape(frame_index=0, latent_t=1)
    if inputs.last_frame is not None:
        yield KeyframeShape(frame_index=inputs.frames - 1, latent_t=1)
    for guide in inputs.guides:
        index, count = guide_place(guide, target_frames=inputs.frames)
        if guide.wave is not None:
            yield KeyframeShape(frame_index=index, audio_t=min(count, _sound(guide)))
        else:
            latents = 1 if count == 1 else latent_frames(count)
            yield KeyframeShape(frame_index=index, latent_t=latents)


def _image_size(media: ReferenceMedia, inputs: ConditioningInputs) -> Size:
    return image_size(media, mode=inputs.ref_image_size, target=inputs.target)


def _kept(media: ReferenceMedia, inputs: ConditioningInputs) -> int:
    assert media.pixels is not None
    return kept_frames(len(media.pixels), inputs.frames)


def _sound(source: ReferenceMedia | Guide) -> int:
    assert source.wave is not None
    return audio_latents_of_samples(source.wave.shape[-1], source.sample_rate)


def _pictures(size: Size, count: int = 1) -> Tensor:
    """[F,H,W,3] without bytes."""
    return torch.empty((count, size[1], size[0], 3), device="meta")
