"""The rows that are counted before anything is encoded are those that are packed afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from runtime.h3.conditioning import ConditioningInputs, EncodeCache, build_conditioning
from runtime.h3.denoise import layout_of
from runtime.h3.packing import TargetShape
from runtime.h3.references import Guide
from runtime.h3.rows import check_rows, count_rows
from runtime.h3.sizes import audio_latents_of_frames, latent_frames, vision_tokens
from runtime.h3.text import VisionBlock
from runtime.kernels.attention import attention_backend
from tests.unit.test_conditioning import Fakes, Letters, image, sound, video

FRAMES, WIDTH, HEIGHT = 39, 96, 64
TARGET = TargetShape(
    latent_t=latent_frames(FRAMES),
    latent_h=HEIGHT // 16,
    latent_w=WIDTH // 16,
    audio_t=audio_latents_of_frames(FRAMES),
)


def guide(name: str, frame: int, frames: int = 0, seconds: float = 0.0) -> Guide:
    return Guide(
        frame_index=frame,
        pixels=torch.rand(frames, 48, 64, 3) if frames else None,
        wave=torch.zeros(1, 2, int(32000 * seconds)) if seconds else None,
        sample_rate=32000,
        content_hash=name,
    )


REQUESTS: dict[str, dict[str, Any]] = {
    "words": {},
    "nothing at all": {"prompt": ""},
    "pictures": {"media": (image("a", 64, 48), image("b", 200, 40))},
    "largest pictures": {"media": (image("a", 64, 48),), "ref_image_size": "max"},
    "all kinds": {
        "media": (sound("s", 0.7), video("v", 30, 1.2), image("a"), video("mute", 24), sound("t"))
    },
    "ends": {"first_frame": image("f", 50, 50), "last_frame": image("l", 40, 90)},
    "guides": {
        "guides": (guide("g", 0, 1), guide("h", 5, 24), guide("s", 4, seconds=0.4),
                   guide("long", -5, seconds=3.0)),
    },
}  # fmt: skip


@pytest.mark.parametrize("name", REQUESTS)
def test_rows_are_counted_as_they_are_packed(name: str) -> None:
    given = {"prompt": "a sea", "width": WIDTH, "height": HEIGHT, "frames": FRAMES}
    inputs = ConditioningInputs(**given | REQUESTS[name])
    fakes = Fakes()
    counted = count_rows(inputs, TARGET, fakes.encoders().tokenizer)
    assert fakes.counts() == (0, 0, 0)
    made = build_conditioning(inputs, fakes.encoders(), EncodeCache(1 << 30), stage=fakes.stage)
    tokens = made.context.tokens
    # the fake text encoder gives a row per token; the real one a row per 32x32 of a picture
    seen = sum(
        vision_tokens(*t.frames.shape[1:3]) - 1 for t in tokens if isinstance(t, VisionBlock)
    )
    assert counted.text == len(tokens) + seen
    assert counted.packed == layout_of(made, TARGET).num_rows + seen


def refused(prompt: str, attention: str, parts: int = 1) -> str:
    inputs = ConditioningInputs(prompt=prompt, width=WIDTH, height=HEIGHT, frames=FRAMES)
    with pytest.raises(ValueError, match="rows") as error:
        check_rows([inputs], TARGET, Letters(), attention_backend(attention), parts)  # type: ignore[arg-type]
    return str(error.value)


def test_the_rows_of_text_and_all_rows_are_refused_by_what_cannot_take_them() -> None:
    assert "7 rows are no multiple of 64" in refused("a" * 7, "sage1")
    rows = count_rows(
        ConditioningInputs(prompt="a" * 64, width=WIDTH, height=HEIGHT, frames=FRAMES),
        TARGET,
        Letters(),  # type: ignore[arg-type]
    )
    assert rows.text == 64
    assert f"{rows.packed} rows are no multiple of 64" in refused("a" * 64, "sage1")
    assert "at most 26754 rows, got 30000" in refused("a" * 30_000, "sdpa_math")
    assert "too few for 5000 ranks" in refused("a" * 64, "sdpa", parts=5000)


def test_what_fits_is_not_refused() -> None:
    inputs = ConditioningInputs(prompt="a" * 99, width=WIDTH, height=HEIGHT, frames=FRAMES)
    for name in ("sdpa", "sdpa_math", "sage2"):
        check_rows([inputs], TARGET, Letters(), attention_backend(name), 8)  # type: ignore[arg-type]
