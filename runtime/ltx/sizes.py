"""Integer rules of LTX, without torch: latent sizes, token counts (ltx25.md section 2)."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.media.latents import LatentsForm
from runtime.messages import LTX_FPS

PIXELS_PER_LATENT = 32  # of height and width
FRAMES_PER_LATENT = 8  # frames 8k+1 <-> latents k+1
SIZE_MULTIPLE = 64  # of two stages: the first runs at half the size
AUDIO_LATENTS_PER_SECOND = 25  # mel at 16 kHz, hop 160, four mel frames a latent
AUDIO_CHANNELS, AUDIO_BINS = 8, 16  # of an audio latent; a token holds both, channels first
LATENTS_KEY = "ltx_request"  # in the metadata of a latents file
CONTEXT_ROWS = 1024  # of the text, which the connectors fill up


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentShape:
    """Latents of one evaluation: video [B, C, frames, height, width], audio [B, 8, audio, 16]."""

    frames: int
    height: int
    width: int
    audio: int

    @property
    def frame_tokens(self) -> int:
        """Video tokens of one latent frame."""
        return self.height * self.width

    @property
    def video_tokens(self) -> int:
        """Video tokens in all, ordered (frame, row, column)."""
        return self.frames * self.frame_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class LTXShape:
    """A clip: frames, pixels, frames a second. ValueError for a size that has no latents."""

    frames: int
    height: int
    width: int
    fps: float

    def __post_init__(self) -> None:
        if self.frames < 1 or self.frames % FRAMES_PER_LATENT != 1:
            raise ValueError(f"frames must be 8k+1 (as 121), got {self.frames}")
        for name, side in (("height", self.height), ("width", self.width)):
            if side < PIXELS_PER_LATENT or side % PIXELS_PER_LATENT:
                raise ValueError(f"{name} must be a multiple of {PIXELS_PER_LATENT}, got {side}")
        if not self.fps > 0:
            raise ValueError(f"fps must be above 0, got {self.fps}")
        if self.latent.audio < 1:
            raise ValueError(
                f"{self.frames} frames at {self.fps:g} fps are too short for one audio latent "
                f"(1/{AUDIO_LATENTS_PER_SECOND} s); take more frames or fewer a second"
            )

    @property
    def latent(self) -> LatentShape:
        """Sizes of the latents that the denoiser sees."""
        return LatentShape(
            frames=latent_frames(self.frames),
            height=self.height // PIXELS_PER_LATENT,
            width=self.width // PIXELS_PER_LATENT,
            audio=audio_latents(self.frames, self.fps),
        )

    @property
    def half(self) -> LTXShape:
        """The first of two stages; ValueError unless both sides are multiples of 64."""
        for name, side in (("height", self.height), ("width", self.width)):
            if side % SIZE_MULTIPLE:
                raise ValueError(
                    f"{name} must be a multiple of {SIZE_MULTIPLE} for two stages, got {side}"
                )
        return LTXShape(
            frames=self.frames, height=self.height // 2, width=self.width // 2, fps=self.fps
        )


def latents_form(channels: int) -> LatentsForm:
    """What a latents file holds, of a denoiser of so many video channels."""
    return LatentsForm(
        video=(1, channels, 0, 0, 0),
        audio=(1, AUDIO_CHANNELS, 0, AUDIO_BINS),
        words=(f"[1,{channels},F,h,w]", f"[1,{AUDIO_CHANNELS},A,{AUDIO_BINS}]"),
        key=LATENTS_KEY,
        fps=LTX_FPS,
    )


def latent_frames(frames: int) -> int:
    """Video latents of 8k+1 frames: k+1."""
    return (frames - 1) // FRAMES_PER_LATENT + 1


def audio_latents(frames: int, fps: float) -> int:
    """Audio latents of a clip: 25 a second, halves to even."""
    return round(frames / fps * AUDIO_LATENTS_PER_SECOND)
