"""Conditioning with encoders that count their calls: order, labels, keyframes, cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from runtime.cancel import Cancelled
from runtime.h3.conditioning import (
    Conditioning,
    ConditioningInputs,
    EncodeCache,
    Encoders,
    build_conditioning,
    negative_inputs,
)
from runtime.h3.references import Guide, ReferenceMedia
from runtime.h3.text import PresentationToken, TextContext, VisionBlock
from runtime.nonfinite import NonFinite

MIB = 2**20


class Letters:
    """A tokenizer whose ids are letters, so that presentations can be read back."""

    def encode(self, text: str) -> list[int]:
        return [ord(c) for c in text]


@dataclass
class Fakes:
    """Three encoders and what they were asked."""

    text: list[str] = field(default_factory=list)
    frames: list[tuple[int, ...]] = field(default_factory=list)
    waves: list[int] = field(default_factory=list)
    loads: int = 0
    stages: list[str] = field(default_factory=list)
    cancel_at: str = ""

    def encoders(self, identity: str = "a") -> Encoders:
        def load() -> FakeText:
            self.loads += 1
            return FakeText(self)

        return Encoders(
            tokenizer=Letters(),  # type: ignore[arg-type]
            text=load,
            text_identity=identity,
            video_vae=FakeVideo(self),
            video_vae_identity=identity,
            audio_vae=FakeAudio(self),
            audio_vae_identity=identity,
        )

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self.stages.append(name)
        yield

    def counts(self) -> tuple[int, int, int]:
        return len(self.text), len(self.frames), len(self.waves)


@dataclass
class FakeText:
    log: Fakes

    def encode(
        self, tokens: tuple[PresentationToken, ...], *, cancelled: Callable[[], bool]
    ) -> TextContext:
        read = ""
        for token in tokens:
            if isinstance(token, VisionBlock):
                frames, height, width = token.frames.shape[:3]
                read += f"{frames}x{width}x{height}"
            else:
                read += {151652: "[", 151653: "]"}.get(token) or chr(token)
        self.log.text.append(read)
        value = float("nan") if "broken" in read else float(len(self.log.text))
        return TextContext(
            context=torch.full((1, len(tokens), 4), value),
            token_tags=torch.ones(len(tokens), dtype=torch.int64),
            tokens=tokens,
        )


@dataclass
class FakeVideo:
    log: Fakes

    def encode(self, frames: Tensor, *, cancelled: Callable[[], bool]) -> Tensor:
        if cancelled():
            raise Cancelled
        self.log.frames.append(tuple(frames.shape[:3]))
        count, height, width = frames.shape[:3]
        latents = 1 if count == 1 else (count - 5) // 17 * 5 + 2
        return torch.full((1, 24, latents, height // 16, width // 16), float(frames.mean()))


@dataclass
class FakeAudio:
    log: Fakes

    def encode(self, wave_CL: Tensor, *, cancelled: Callable[[], bool]) -> Tensor:
        self.log.waves.append(wave_CL.shape[-1])
        return torch.arange(wave_CL.shape[-1] // 800.0).expand(1, 32, 2, -1)


@pytest.fixture
def fakes() -> Fakes:
    return Fakes()


def image(name: str, width: int = 64, height: int = 64) -> ReferenceMedia:
    pixels = torch.rand(1, height, width, 3)
    return ReferenceMedia(kind="image", pixels=pixels, wave=None, sample_rate=0, content_hash=name)


def sound(name: str, seconds: float = 1.0) -> ReferenceMedia:
    wave = torch.zeros(1, 2, int(32000 * seconds))
    return ReferenceMedia(
        kind="audio", pixels=None, wave=wave, sample_rate=32000, content_hash=name
    )


def video(name: str, frames: int = 24, seconds: float = 0.0) -> ReferenceMedia:
    return ReferenceMedia(
        kind="video",
        pixels=torch.rand(frames, 32, 64, 3),
        wave=torch.zeros(1, 2, int(32000 * seconds)) if seconds else None,
        sample_rate=32000 if seconds else 0,
        content_hash=name,
    )


def inputs(*media: ReferenceMedia, **fields: object) -> ConditioningInputs:
    plain = ConditioningInputs(prompt="go", width=64, height=64, frames=22, media=media)
    return replace(plain, **fields)  # type: ignore[arg-type]


def build(
    fakes: Fakes, wanted: ConditioningInputs, cache: EncodeCache | None = None, identity: str = "a"
) -> Conditioning:
    cache = cache or EncodeCache(MIB)
    return build_conditioning(wanted, fakes.encoders(identity), cache, stage=fakes.stage)


MIXED = (sound("s"), video("v", seconds=3.0), image("i1"), image("i2", 200, 100))


def test_references_stand_as_images_then_videos_then_sounds(fakes: Fakes) -> None:
    blocks = build(fakes, inputs(*MIXED)).references
    assert [b.kind for b in blocks] == ["image", "image", "video_audio", "audio"]
    assert [tuple(b.latent.shape) for b in blocks if b.latent is not None] == [
        (1, 24, 1, 4, 4), (1, 24, 1, 2, 6), (1, 24, 7, 2, 4),
    ]  # fmt: skip


def test_a_context_that_is_not_finite_stops_the_run_and_is_not_kept(fakes: Fakes) -> None:
    cache = EncodeCache(MIB)
    for _ in range(2):
        with pytest.raises(NonFinite, match=r"^text encode produced non-finite .* in the context"):
            build(fakes, inputs(prompt="broken"), cache)
    assert fakes.text == ["broken"] * 2


def test_labels_count_by_kind_and_a_soundtrack_stands_before_its_video(fakes: Fakes) -> None:
    build(fakes, inputs(*MIXED))
    assert fakes.text == [
        "<Picture 1>: [1x64x64]<Picture 2>: [1x96x32]<Audio 1>: "
        "<Video 1>: <0.2 seconds>[2x64x32]<Audio 2>: go"
    ]


def test_two_videos_share_one_audio_counter_with_the_sounds(fakes: Fakes) -> None:
    build(fakes, inputs(sound("s"), video("v1"), video("v2", seconds=1.0)))
    pair = "<0.2 seconds>[2x64x32]"
    assert fakes.text == [f"<Video 1>: {pair}<Audio 1>: <Video 2>: {pair}<Audio 2>: go"]


def test_six_labelled_pairs_of_a_124_frame_video(fakes: Fakes) -> None:
    build(fakes, inputs(video("v", frames=130), frames=124))
    seconds = ["0.2", "1.2", "2.2", "3.2", "4.2", "5.0"]
    pairs = "".join(f"<{s} seconds>[2x64x32]" for s in seconds)
    assert fakes.text == [f"<Video 1>: {pairs}go"]


def test_a_soundtrack_longer_than_its_video_is_encoded_whole(fakes: Fakes) -> None:
    (block,) = build(fakes, inputs(video("v", seconds=3.0))).references
    assert fakes.waves == [96000]
    assert block.audio_latent is not None
    assert block.audio_latent.shape == (1, 32, 2, 120)


def test_sounds_of_another_rate_reach_the_vae_at_32_khz(fakes: Fakes) -> None:
    wave = torch.zeros(1, 1, 44100)
    other = ReferenceMedia(
        kind="audio", pixels=None, wave=wave, sample_rate=44100, content_hash="s"
    )
    build(fakes, inputs(other))
    assert fakes.waves == [32000]


def test_a_silent_video_is_a_video_block(fakes: Fakes) -> None:
    (block,) = build(fakes, inputs(video("v"))).references
    assert (block.kind, block.audio_latent) == ("video", None)


# ---- keyframes


def test_first_and_last_frame_are_keyframes_and_pictures(fakes: Fakes) -> None:
    wanted = inputs(first_frame=image("f", 100, 80), last_frame=image("l", 70, 90))
    built = build(fakes, wanted)
    assert [k.frame_index for k in built.keyframes] == [0, 21]
    assert [k.latent.shape for k in built.keyframes if k.latent is not None] == [
        (1, 24, 1, 4, 4)
    ] * 2
    assert fakes.text == ["<Picture 1>: [1x64x64]<Picture 2>: [1x64x64]go"]
    assert built.references == ()


def test_a_last_frame_alone_is_the_first_picture(fakes: Fakes) -> None:
    built = build(fakes, inputs(last_frame=image("l")))
    assert [k.frame_index for k in built.keyframes] == [21]
    assert fakes.text == ["<Picture 1>: [1x64x64]go"]


def test_one_picture_as_first_and_last_frame_is_prepared_twice(fakes: Fakes) -> None:
    one = image("same", 100, 60)
    first, last = build(fakes, inputs(first_frame=one, last_frame=one)).keyframes
    assert fakes.frames == [(1, 64, 64)] * 2
    assert first.latent is not None and last.latent is not None
    assert not torch.equal(first.latent, last.latent)  # stretched, cropped


def test_guides_are_keyframes_that_the_text_encoder_does_not_see(fakes: Fakes) -> None:
    guides = (
        Guide(frame_index=10, pixels=torch.rand(7, 40, 70, 3), content_hash="g"),
        Guide(frame_index=-1, pixels=torch.rand(1, 32, 64, 3), content_hash="h"),
        Guide(frame_index=18, wave=torch.zeros(1, 2, 32000), sample_rate=32000, content_hash="a"),
    )
    built = build(fakes, inputs(image("i"), guides=guides))
    assert fakes.text == ["<Picture 1>: [1x64x64]go"]
    assert [k.frame_index for k in built.keyframes] == [10, 21, 18]
    assert fakes.frames[1:] == [(5, 64, 64), (1, 64, 64)]
    audio = built.keyframes[2].audio_latent
    assert audio is not None and audio.shape[-1] == 7  # floor(37 - 5/3 * 18): cut to the target
    assert audio[0, 0, 0].tolist() == [0, 1, 2, 3, 4, 5, 6]


def test_first_frames_and_references_exclude_each_other() -> None:
    with pytest.raises(ValueError, match=r"cannot be combined with references, got 1"):
        inputs(image("i"), first_frame=image("f"))


def test_keyframes_need_a_target_in_multiples_of_32() -> None:
    with pytest.raises(ValueError, match="multiples of 32, got 80x48"):
        inputs(first_frame=image("f"), width=80, height=48)


def test_too_few_frames_are_told_before_anything_is_encoded() -> None:
    with pytest.raises(ValueError, match=r"at least 5 frames at 24 fps, got 4"):
        inputs(video("v", frames=4))


# ---- negative side


def test_a_plain_negative_carries_no_references(fakes: Fakes) -> None:
    negative = negative_inputs(inputs(*MIXED), "blurry", references=False)
    built = build(fakes, negative)
    assert fakes.text == ["blurry"]
    assert built.references == built.keyframes == ()
    assert fakes.counts() == (1, 0, 0)


def test_a_negative_with_references_encodes_only_its_text_again(fakes: Fakes) -> None:
    cache = EncodeCache(MIB)
    positive = inputs(*MIXED)
    built = build(fakes, positive, cache)
    before = fakes.counts()
    negative = build(fakes, negative_inputs(positive, "blurry", references=True), cache)
    assert fakes.counts() == (before[0] + 1, *before[1:])
    assert fakes.text[1] == fakes.text[0][:-2] + "blurry"
    assert [b.kind for b in negative.references] == [b.kind for b in built.references]


# ---- cache


def test_the_same_request_again_encodes_nothing_and_loads_nothing(fakes: Fakes) -> None:
    cache = EncodeCache(MIB)
    first = build(fakes, inputs(*MIXED), cache)
    counts = fakes.counts()
    assert counts == (1, 3, 2)
    second = build(fakes, inputs(*MIXED), cache)
    assert fakes.counts() == counts
    assert fakes.loads == 1
    assert torch.equal(first.context.context, second.context.context)
    for a, b in zip(first.references, second.references, strict=True):
        assert a.kind == b.kind
        assert a.latent is b.latent
        assert a.audio_latent is b.audio_latent


@pytest.mark.parametrize(
    ("changes", "more"),
    [
        ({"prompt": "stop"}, (1, 0, 0)),
        ({"frames": 5}, (1, 1, 0)),  # the video is cut shorter
        ({"frames": 39}, (0, 0, 0)),  # the video has only 24 frames
        ({"width": 32, "height": 32}, (1, 2, 0)),  # the images shrink, the video does not
        ({"ref_image_size": "max"}, (1, 1, 0)),  # only the large image changes
        ({"media": MIXED[1:]}, (1, 0, 0)),
        ({"media": (*MIXED[:3], image("i3", 200, 100))}, (1, 1, 0)),
    ],
)  # fmt: skip
def test_a_change_encodes_only_what_depends_on_it(
    fakes: Fakes, changes: dict[str, object], more: tuple[int, int, int]
) -> None:
    cache = EncodeCache(MIB)
    build(fakes, inputs(*MIXED), cache)
    before = fakes.counts()
    build(fakes, inputs(*MIXED, **changes) if "media" not in changes else inputs(**changes), cache)
    assert tuple(b - a for a, b in zip(before, fakes.counts(), strict=True)) == more


def test_other_checkpoints_share_nothing(fakes: Fakes) -> None:
    cache = EncodeCache(MIB)
    build(fakes, inputs(*MIXED), cache, identity="a")
    build(fakes, inputs(*MIXED), cache, identity="b")
    assert fakes.counts() == (2, 6, 4)


def test_the_least_recently_used_result_leaves_first() -> None:
    cache, computed = EncodeCache(100), []

    def ask(name: str, nbytes: int = 40) -> None:
        def compute() -> str:
            computed.append(name)
            return name

        assert cache.recall((name,), compute, lambda value: nbytes) == name

    ask("a")
    ask("b")
    ask("a")  # now b is the older one
    ask("c")
    assert cache.used_bytes == 80
    ask("a")
    assert computed == ["a", "b", "c"]
    ask("b")
    assert computed == ["a", "b", "c", "b"]


def test_a_result_above_the_budget_is_used_but_not_kept() -> None:
    cache = EncodeCache(10)
    for _ in range(2):
        assert cache.recall(("x",), lambda: "big", lambda value: 11) == "big"
    assert cache.used_bytes == 0


def test_the_cache_keeps_no_pictures_of_the_text_side(fakes: Fakes) -> None:
    cache = EncodeCache(MIB)
    context = build(fakes, inputs(image("i", 64, 32)), cache).context
    (block,) = [t for t in context.tokens if isinstance(t, VisionBlock)]
    assert block.frames.is_meta
    assert block.frames.shape == (1, 32, 64, 3)
    latent_bytes = 24 * 2 * 4 * 4
    assert cache.used_bytes == latent_bytes + len(context.tokens) * (4 * 4 + 8)


# ---- stages and cancelling


def test_text_and_references_are_timed_apart(fakes: Fakes) -> None:
    build(fakes, inputs(image("i")))
    assert fakes.stages == ["text encode", "reference encode"]


def test_a_request_without_references_has_no_reference_stage(fakes: Fakes) -> None:
    built = build(fakes, inputs())
    assert fakes.stages == ["text encode"]
    assert fakes.text == ["go"]
    assert built.references == built.keyframes == ()


def test_a_cancelled_encode_leaves_nothing_in_the_cache(fakes: Fakes) -> None:
    cache = EncodeCache(MIB)
    wanted = inputs(image("i"))
    with pytest.raises(Cancelled):
        build_conditioning(
            wanted, fakes.encoders(), cache, stage=fakes.stage, cancelled=lambda: True
        )
    build(fakes, wanted, cache)
    assert fakes.frames == [(1, 64, 64)]
