"""Prompt and first frame to what the denoiser is conditioned on, each encoded once (sections 4, 5).

The picture is compressed as training pictures were (H.264, CRF 18), cut to the clip's aspect and
encoded at the size of every stage; it holds the first latent frame.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from runtime.clock import REFERENCE_ENCODE, TEXT_ENCODE
from runtime.encode_cache import EncodeCache, Key
from runtime.ltx.components import library
from runtime.ltx.denoise import Clean
from runtime.ltx.model import Contexts
from runtime.ltx.packing import video_tokens
from runtime.ltx.sizes import LatentShape, LTXShape
from runtime.ltx.text_tower import TextFeatures
from runtime.ltx.video_vae import never
from runtime.nonfinite import require_finite

IMAGE_CRF = 18  # of LTX-2.5's training pictures; earlier versions have 33

Stage = Callable[[str], AbstractContextManager[None]]
Bytes = NDArray[np.uint8]


class EncodesText(Protocol):
    """The text tower's seam (text_tower.py)."""

    def encode(self, prompt: str, *, cancelled: Callable[[], bool]) -> TextFeatures: ...


class Connects(Protocol):
    """The connectors' seam (text.py)."""

    def __call__(self, video_BSD: Tensor, audio_BSD: Tensor, mask_BS: Tensor, /) -> Contexts: ...


class EncodesFrames(Protocol):
    """The video VAE's seam: frames [8k+1, H, W, 3] in [0, 1] -> normalised [1, C, k+1, h, w]."""

    def encode(self, frames_FHWC: Tensor, *, cancelled: Callable[[], bool]) -> Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoders:
    """`text` is called only when its output is not in the cache.

    An identity names files and compute dtype: equal identities encode equally. That of the text
    covers tower, projection and connectors.
    """

    text: Callable[[], EncodesText]
    connectors: Connects
    text_identity: str
    video_vae: EncodesFrames
    video_vae_identity: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstFrame:
    """The picture that the clip starts from: uint8 [H, W, 3], and a hash of its bytes."""

    pixels_HWC: Bytes
    content_hash: str

    def __post_init__(self) -> None:
        shape = self.pixels_HWC.shape
        if len(shape) != 3 or shape[2] != 3 or min(shape) < 2 or self.pixels_HWC.dtype != np.uint8:
            raise ValueError(
                f"the first frame must be uint8 [height, width, 3] of 2 pixels or more a side, got "
                f"{self.pixels_HWC.dtype} {list(shape)}"
            )

    def note(self, shape: LTXShape) -> str | None:
        """What is cut off for this clip, for the user; None if nothing is."""
        height, width, _ = self.pixels_HWC.shape
        left, top, right, bottom = _crop(width, height, shape)
        if (right - left, bottom - top) == (width, height):
            return None
        return (
            f"the first frame, {width}x{height}, is cut to its middle {right - left}x"
            f"{bottom - top}, the aspect of {shape.width}x{shape.height}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditioning:
    """What the denoiser is given: all on the CPU and read only (the cache shares it)."""

    contexts: Contexts
    first_frames: tuple[Tensor, ...] = ()  # per stage [1, C, 1, h, w] fp32; empty without a picture


def build_conditioning(
    prompt: str,
    picture: FirstFrame | None,
    shapes: Sequence[LTXShape],
    encoders: Encoders,
    cache: EncodeCache,
    *,
    stage: Stage,
    cancelled: Callable[[], bool] = never,
) -> Conditioning:
    """Encode a prompt, and a picture at the size of each of `shapes`.

    stage("text encode") and stage("reference encode") enclose the halves for timing. What the cache
    knows is not encoded again. Raises Cancelled once `cancelled()` is true.
    """
    with stage(TEXT_ENCODE):
        contexts = _contexts(prompt, encoders, cache, cancelled)
    if picture is None:
        return Conditioning(contexts=contexts)
    with stage(REFERENCE_ENCODE):
        frames = [_latent(picture, shape, encoders, cache, cancelled) for shape in shapes]
    return Conditioning(contexts=contexts, first_frames=tuple(frames))


def clean_tokens(first_frame: Tensor | None, shape: LatentShape, channels: int) -> Clean:
    """The frozen tokens of a stage: the first latent frame if there is a picture, else none."""
    tokens_BNC = torch.zeros(1, shape.video_tokens, channels)
    live_BN = torch.ones(1, shape.video_tokens, dtype=torch.bool)
    if first_frame is not None:
        tokens_BNC[:, : shape.frame_tokens] = video_tokens(first_frame)
        live_BN[:, : shape.frame_tokens] = False
    return Clean(tokens_BNC=tokens_BNC, live_BN=live_BN)


def prepare(picture: FirstFrame, shape: LTXShape) -> Tensor:
    """[1, H, W, 3] fp32 in [0, 1] at the clip's size: compressed, cut, resized (Lanczos)."""
    library("av")
    compress = library("diffusers.pipelines.ltx2.utils").apply_image_conditioning_crf
    image = Image.fromarray(compress(picture.pixels_HWC, IMAGE_CRF))  # even sides: cuts one pixel
    image = image.crop(_crop(image.width, image.height, shape))
    image = image.resize((shape.width, shape.height), Image.Resampling.LANCZOS)
    return torch.from_numpy(np.asarray(image).astype(np.float32) / np.float32(255))[None]


def _crop(width: int, height: int, shape: LTXShape) -> tuple[int, int, int, int]:
    """The largest box in the middle with the clip's aspect: left, top, right, bottom."""
    kept_width = min(width, max(1, round(height * shape.width / shape.height)))
    kept_height = min(height, max(1, round(width * shape.height / shape.width)))
    left, top = (width - kept_width) // 2, (height - kept_height) // 2
    return left, top, left + kept_width, top + kept_height


def _contexts(
    prompt: str, encoders: Encoders, cache: EncodeCache, cancelled: Callable[[], bool]
) -> Contexts:
    def compute() -> Contexts:
        found = encoders.text().encode(prompt, cancelled=cancelled)
        made = encoders.connectors(found.video_BSD, found.audio_BSD, found.mask_BS)
        require_finite(made.video_BLD, stage=TEXT_ENCODE, tensor="the video context")
        require_finite(made.audio_BLD, stage=TEXT_ENCODE, tensor="the audio context")
        return Contexts(video_BLD=made.video_BLD.cpu(), audio_BLD=made.audio_BLD.cpu())

    key = ("ltx text", encoders.text_identity, prompt.strip())
    return cache.recall(key, compute, lambda c: _bytes(c.video_BLD) + _bytes(c.audio_BLD))


def _latent(
    picture: FirstFrame,
    shape: LTXShape,
    encoders: Encoders,
    cache: EncodeCache,
    cancelled: Callable[[], bool],
) -> Tensor:
    def compute() -> Tensor:
        return encoders.video_vae.encode(prepare(picture, shape), cancelled=cancelled).cpu()

    size = (shape.width, shape.height)
    key: Key = ("ltx first frame", encoders.video_vae_identity, picture.content_hash, size)
    return cache.recall(key, compute, _bytes)


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()
