"""The text encoder that streams its parts: ComfyUI's bits, little memory, stops between layers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from runtime.cancel import Cancelled
from runtime.checkpoints import open_checkpoint
from runtime.checkpoints.base import CheckpointError
from runtime.checkpoints.demo import random_checkpoint
from runtime.checkpoints.load import LoadReport
from runtime.h3.text import TextEncoder, TextImage, TextVideo, presentation_tokens
from runtime.h3.text_layers import NUM_LAYERS
from runtime.h3.text_streamed import LayeredTextEncoder
from runtime.h3.tokenizer import Tokenizer
from runtime.parity.golden import Golden
from runtime.parity.replay import te
from runtime.parity.setup import Setup
from tests.denoiser_parts import demo_plan

GOLDENS = Path(__file__).parents[1] / "goldens"
TAPS = (0, 1, 2)
ITEMS = (
    TextImage(pixels=torch.rand(64, 96, 3, generator=torch.Generator().manual_seed(1))),
    TextVideo(
        frames=torch.rand(2, 64, 64, 3, generator=torch.Generator().manual_seed(2)),
        timestamps=(0.0, 0.5),
    ),
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(None)


def layered(format: str = "bf16", **given: Any) -> LayeredTextEncoder:
    checkpoint = random_checkpoint("text_encoder", size="tiny", format=format, seed=3)
    return LayeredTextEncoder(checkpoint, device="cpu", deepstack_layers=TAPS, **given)


def parameters(encoder: LayeredTextEncoder) -> list[str]:
    """Names of the tensors whose values it holds now, packed ones included."""
    held = [n for n, p in encoder.modules.named_parameters() if not p.is_meta]
    packed = [n for n, m in encoder.modules.named_modules() if hasattr(m, "packed")]
    return held + packed


@pytest.mark.parametrize("format", ["bf16", "nvfp4_awq"])
def test_it_gives_the_bits_of_the_resident_encoder(format: str, tokenizer: Tokenizer) -> None:
    checkpoint = random_checkpoint("text_encoder", size="tiny", format=format, seed=3)
    resident = TextEncoder(checkpoint, device="cpu", deepstack_layers=TAPS)
    encoder = layered(format)
    for items in (ITEMS, ()):
        tokens = presentation_tokens(items, "a calm sea", tokenizer)
        want, got = resident.encode(tokens), encoder.encode(tokens)
        assert torch.equal(got.context, want.context)
        assert torch.equal(got.token_tags, want.token_tags)


@pytest.mark.parametrize("name", ["te_bf16", "te_nvfp4_awq"])
def test_parity_of_a_plan_with_layers_replays_the_goldens_with_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[str] = []
    load = LayeredTextEncoder._load

    def counted(self: LayeredTextEncoder, *given: Any) -> LoadReport:
        built.append(type(self).__name__)
        return load(self, *given)

    monkeypatch.setattr(LayeredTextEncoder, "_load", counted)
    golden = Golden(GOLDENS / f"{name}.safetensors")
    setup = Setup(plan=demo_plan(text_encoder="layers"))
    found = te.replay(golden, GOLDENS / "checkpoints", setup)
    assert built == ["LayeredTextEncoder"]
    assert len(found) >= 40
    assert [c.name for c in found if not c.equal] == []


def test_between_requests_it_holds_nothing(tokenizer: Tokenizer) -> None:
    encoder = layered()
    assert parameters(encoder) == []
    encoder.encode(presentation_tokens(ITEMS, "a calm sea", tokenizer))
    assert parameters(encoder) == []


@pytest.mark.parametrize("format", ["bf16", "nvfp4_awq"])
def test_at_most_two_layers_are_held_and_nothing_beside_them(
    format: str, tokenizer: Tokenizer
) -> None:
    encoder = layered(format)
    held: list[set[str]] = []

    def look(name: str, tensor: Tensor) -> None:
        if name.startswith("layer_"):
            held.append({".".join(p.split(".")[:3]) for p in parameters(encoder)})

    encoder.encode(presentation_tokens(ITEMS, "a calm sea", tokenizer), on_layer=look)
    assert len(held) == NUM_LAYERS
    for index, parts in enumerate(held):
        assert f"model.layers.{index}" in parts
        assert parts <= {f"model.layers.{index}", f"model.layers.{index + 1}"}


def test_it_tells_each_layer(tokenizer: Tokenizer) -> None:
    told: list[tuple[int, int]] = []
    encoder = layered(progress=lambda done, total: told.append((done, total)))
    encoder.encode(presentation_tokens((), "a calm sea", tokenizer))
    assert told == [(index + 1, NUM_LAYERS) for index in range(NUM_LAYERS)]


def test_a_cancelled_encode_stops_before_the_next_layer_and_can_be_repeated(
    tokenizer: Tokenizer,
) -> None:
    stop, seen = [True], []

    def progress(done: int, total: int) -> None:
        seen.append(done)
        if done == 3 and stop:
            raise Cancelled

    encoder = layered(progress=progress)
    tokens = presentation_tokens((), "a calm sea", tokenizer)
    with pytest.raises(Cancelled):
        encoder.encode(tokens)
    assert seen == [1, 2, 3]
    assert parameters(encoder) == []
    stop.clear()
    assert torch.equal(encoder.encode(tokens).context, layered().encode(tokens).context)


def test_a_file_that_does_not_fit_is_refused_before_it_is_read() -> None:
    checkpoint = random_checkpoint("text_encoder", size="tiny", format="bf16")
    names = [name for name in checkpoint.names() if name != "model.layers.7.mlp.up_proj.weight"]
    checkpoint.names = lambda: tuple(names)  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match=r"1 tensors missing: model\.layers\.7\.mlp\.up_proj"):
        LayeredTextEncoder(checkpoint, device="cpu", deepstack_layers=TAPS)


def test_a_damaged_layer_is_named_when_it_is_read(
    damaged_layer: Callable[[str], Path], tokenizer: Tokenizer
) -> None:
    path = damaged_layer("model.layers.9.self_attn.q_proj.weight")
    checkpoint = open_checkpoint(path, "text_encoder")
    encoder = LayeredTextEncoder(checkpoint, device="cpu", deepstack_layers=TAPS)
    with pytest.raises(CheckpointError, match=r"model\.layers\.9\.self_attn\.q_proj\.weight holds"):
        encoder.encode(presentation_tokens((), "a calm sea", tokenizer))


@pytest.fixture
def damaged_layer(tmp_path: Path) -> Callable[[str], Path]:
    """The demo encoder's file with NaN in one tensor."""

    def make(name: str) -> Path:
        demo = Path(__file__).parents[2] / "presets" / "demo" / "qwen3vl_tiny_bf16.safetensors"
        tensors = load_file(str(demo))
        stored = next(key for key in tensors if key.endswith(name))
        tensors[stored][0] = float("nan")
        save_file(tensors, str(tmp_path / "damaged.safetensors"))
        return tmp_path / "damaged.safetensors"

    return make
