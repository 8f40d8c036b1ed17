"""Replay of `te` goldens, and of the text encoder's part of every other golden that stores it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runtime.checkpoints import open_checkpoint
from runtime.h3.text import (
    Sequence,
    TextAudio,
    TextContext,
    TextEncoder,
    TextImage,
    TextItem,
    TextVideo,
    VisionBlock,
    add_features,
    lay_out,
    presentation_tokens,
)
from runtime.h3.text_layers import NUM_LAYERS
from runtime.h3.text_streamed import encoder_of
from runtime.h3.tokenizer import Tokenizer
from runtime.parity.golden import Golden
from runtime.parity.metrics import Comparison, Unsupported, compare
from runtime.parity.setup import Setup

TINY_DEEPSTACK = (0, 1, 2)  # of the tiny checkpoints; shapes do not show it (contract 0.1.10)
SECONDS_PER_FRAME = 0.5  # stored video frames are already sampled at 2 fps
TOKENS, VISION, EMBEDS, LAYERS = "text tokens", "vision tower", "text embeds", "text layers"


def replay(golden: Golden, checkpoints: Path, setup: Setup) -> list[Comparison]:
    """Every stored tensor of every prompt, free from `in/*`, then stage by stage as stored."""
    encoder = load_text_encoder(golden, checkpoints, setup)
    tokenizer = Tokenizer(None)
    out: list[Comparison] = []
    for index, item in enumerate(golden.params["items"]):
        side = str(index)
        tokens = presentation_tokens(_items(golden, side, item), item["prompt"], tokenizer)
        taps: dict[str, Tensor] = {}
        context = encoder.encode(tokens, on_layer=taps.__setitem__)
        out += compare_text(golden, side, context, taps)
        if setup.staged:
            out += staged_text(golden, side, encoder)
    return out


def load_text_encoder(golden: Golden, checkpoints: Path, setup: Setup) -> TextEncoder:
    """The tiny encoder a golden names (end-to-end cases always use the bf16 one).

    A plan says whether it lies on the device whole or a part at a time.
    """
    kind = TextEncoder if setup.plan is None else encoder_of(setup.plan)
    name = golden.params.get("te", "qwen3vl_tiny_bf16")
    checkpoint = open_checkpoint(checkpoints / f"{name}.safetensors", "text_encoder")
    return kind(checkpoint, device=setup.device, deepstack_layers=TINY_DEEPSTACK)


def compare_text(
    golden: Golden, side: str, context: TextContext, taps: Mapping[str, Tensor]
) -> list[Comparison]:
    """te/<side>/*, cond/<side>/{context,token_tags} and the header's tokens against a free run.

    taps: what TextEncoder.encode handed to on_layer, by name.
    """
    got = {f"te/{side}/{name}": tensor for name, tensor in taps.items()}
    got[f"cond/{side}/context"] = context.context
    got[f"cond/{side}/token_tags"] = context.token_tags
    want = golden.names & got.keys()
    found = [
        compare(name, got[name], golden.tensor(name), run="free", stage=_stage(name))
        for name in sorted(want, key=_order)
    ]
    if "tokens" not in golden.header:  # a capture cannot see them
        return found
    tokens = compare(
        f"tokens/{side}",
        _as_numbers([_described(t) for t in context.tokens]),
        _as_numbers(golden.header["tokens"][side]),
        run="free",
        stage=TOKENS,
    )
    return [tokens, *found]


def staged_text(golden: Golden, side: str, encoder: TextEncoder) -> list[Comparison]:
    """Each stored stage from the stored tensors before it: vision, splice, then layer by layer."""
    blocks = _numbers(golden, rf"te/{side}/vision_(\d+)/merged")
    grids = [_grid(golden, side, k) for k in blocks]
    sequence = lay_out(_header_tokens(golden, side), grids, encoder.device)
    out: list[Comparison] = []
    for k, grid in zip(blocks, grids, strict=True):
        out += _staged_vision(golden, f"te/{side}/vision_{k}", grid, encoder)
    merged = [golden.tensor(f"te/{side}/vision_{k}/merged") for k in blocks]
    out += _staged(golden, f"te/{side}/embeds", encoder.embed(sequence, merged), EMBEDS)
    out += _staged(golden, f"te/{side}/mrope_position_ids", sequence.positions, EMBEDS)
    out += _staged(golden, f"cond/{side}/token_tags", sequence.tags, EMBEDS)
    return out + list(_staged_layers(golden, side, sequence, encoder))


def _staged_vision(
    golden: Golden, prefix: str, grid: tuple[int, int], encoder: TextEncoder
) -> Iterator[Comparison]:
    if f"{prefix}/patches" not in golden:
        return
    merged, features = encoder.look(golden.tensor(f"{prefix}/patches"), grid)
    for j, feature in enumerate(features):
        yield from _staged(golden, f"{prefix}/deepstack_{j}", feature, VISION)
    yield from _staged(golden, f"{prefix}/merged", merged, VISION)


def _staged_layers(
    golden: Golden, side: str, sequence: Sequence, encoder: TextEncoder
) -> Iterator[Comparison]:
    """From the embeddings and each stored layer to the next stored one; the last is context."""
    blocks = _numbers(golden, rf"te/{side}/vision_(\d+)/merged")
    features = [
        torch.cat([golden.tensor(f"te/{side}/vision_{k}/deepstack_{j}") for k in blocks])
        for j in range(len(TINY_DEEPSTACK) if blocks else 0)
    ]
    stored = _numbers(golden, rf"te/{side}/layer_(\d+)")
    if f"te/{side}/embeds" not in golden:
        return
    x, done = golden.tensor(f"te/{side}/embeds"), -1
    for last in [*stored, NUM_LAYERS - 1]:
        taps: dict[str, Tensor] = {}
        encoder.run_layers(
            x, sequence, features, tap=taps.__setitem__, layers=range(done + 1, last + 1)
        )
        name, tap = f"te/{side}/layer_{last:02d}", f"layer_{last:02d}"
        if name in golden:
            yield from _staged(golden, name, taps[tap], LAYERS)
            x, done = golden.tensor(name), last
            if last < len(features):
                x = add_features(x, sequence, features[last])
        if last == NUM_LAYERS - 1:
            got = x if done == last else taps[tap]
            yield from _staged(golden, f"cond/{side}/context", got, LAYERS)
            return


def _items(golden: Golden, side: str, item: dict[str, Any]) -> tuple[TextItem, ...]:
    """What the prompt of one golden item refers to; stored pictures are uint8 [F,H,W,3]."""
    items: list[TextItem] = []
    for i, reference in enumerate(item.get("refs", ())):
        kind = reference["type"]
        if kind == "audio":
            items.append(TextAudio())
            continue
        if kind not in ("image", "video"):
            raise Unsupported(f"reference type {kind}")
        frames = _pictures(golden, f"in/{side}/ref_{i}")
        if kind == "image":
            items.append(TextImage(pixels=frames[0]))
        else:
            times = tuple(k * SECONDS_PER_FRAME for k in range(len(frames)))
            items.append(TextVideo(frames=frames, timestamps=times))
    for i in range(len(item.get("images", ()))):
        items.append(TextImage(pixels=_pictures(golden, f"in/{side}/image_{i}")[0]))
    return tuple(items)


def _pictures(golden: Golden, name: str) -> Tensor:
    if name not in golden:
        raise Unsupported(f"a golden without its media {name}")
    return golden.tensor(name).float() / 255


def _described(token: int | VisionBlock) -> int | dict[str, Any]:
    """A token as the golden header writes it."""
    if isinstance(token, int):
        return token
    return {"video_block": token.is_video, "vision": list(token.frames.shape)}


def _as_numbers(tokens: list[int | dict[str, Any]]) -> Tensor:
    """Header tokens in one row; a vision block becomes -1, its kind and its four sides."""
    numbers: list[int] = []
    for token in tokens:
        if isinstance(token, int):
            numbers.append(token)
        else:
            numbers += [-1, int(token["video_block"]), *token["vision"]]
    return torch.tensor(numbers)


def _header_tokens(golden: Golden, side: str) -> tuple[int | VisionBlock, ...]:
    """Stored tokens with empty pictures: enough to lay the sequence out."""
    return tuple(
        token
        if isinstance(token, int)
        else VisionBlock(frames=torch.empty(token["vision"]), is_video=token["video_block"])
        for token in golden.header["tokens"][side]
    )


def _grid(golden: Golden, side: str, k: int) -> tuple[int, int]:
    _, rows, columns = golden.tensor(f"te/{side}/vision_{k}/grid_thw")[0].tolist()
    return rows, columns


def _numbers(golden: Golden, pattern: str) -> list[int]:
    found = (re.fullmatch(pattern, name) for name in golden.names)
    return sorted(int(match[1]) for match in found if match)


def _staged(golden: Golden, name: str, got: Tensor, stage: str) -> Iterator[Comparison]:
    if name in golden:
        yield compare(name, got, golden.tensor(name), run="staged", stage=stage)


def _stage(name: str) -> str:
    if "/vision_" in name:
        return VISION
    if name.endswith(("/embeds", "/mrope_position_ids", "/token_tags")):
        return EMBEDS
    return LAYERS


def _order(name: str) -> tuple[int, str]:
    """In order of computation, so that the first unequal tensor is the first wrong one."""
    stages = (VISION, EMBEDS, LAYERS)
    in_vision = ("patches", "grid_thw", "deepstack", "merged")
    within = next((i for i, part in enumerate(in_vision) if f"/{part}" in name), 0)
    key = re.sub(r"vision_(\d+)/.*", lambda m: f"vision_{int(m[1]):03d}/{within}", name)
    return stages.index(_stage(name)), f"1{key}" if name.startswith("cond/") else f"0{key}{name}"
