"""Replay of `vae_decode` and `vae_encode` goldens: free from inputs, staged module by module."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from runtime.checkpoints import open_checkpoint
from runtime.h3.video_decode import DECODE_STAGE
from runtime.h3.video_decoder import DecoderBlock
from runtime.h3.video_encoder import Level
from runtime.h3.video_tiles import (
    CLIP_TOKENS,
    OVERLAP_FRAMES,
    OVERLAP_TOKENS,
    PIXELS_PER_TOKEN,
    blend,
    join_clips,
    num_chunks,
    split,
)
from runtime.h3.video_vae import ENCODE_STAGE, VideoVAE, load_vae_attention, load_video_vae
from runtime.kernels.attention import AttentionOptions
from runtime.parity.golden import Golden
from runtime.parity.metrics import Comparison, Unsupported, compare
from runtime.parity.settings import vae_attention
from runtime.parity.setup import Setup

DTYPES = {"torch.float32": torch.float32, "torch.float16": torch.float16}


def replay(golden: Golden, checkpoints: Path, setup: Setup) -> list[Comparison]:
    """Every stored output and tap, free, then (on the CPU) every stage from the stored ones before.

    Header facts (tiles, decoder calls) are compared as `header/...`.
    """
    vae = load_golden_vae(golden, checkpoints, setup)
    with torch.no_grad():
        encode = golden.kind == "vae_encode"
        free = list(_encode(vae, golden) if encode else _decode(vae, golden, setup))
        if not setup.staged:
            return free
        return free + list(_staged_encode(vae, golden) if encode else _staged_decode(vae, golden))


def load_golden_vae(golden: Golden, checkpoints: Path, setup: Setup) -> VideoVAE:
    """The golden's VAE in its dtype; torch's attention, eager, tile by tile, or as the plan."""
    dtype = golden.header["vae_dtype"]
    if dtype not in DTYPES:
        raise Unsupported(f"video VAE dtype {dtype}")
    checkpoint = open_checkpoint(checkpoints / f"{golden.params['vvae']}.safetensors", "video_vae")
    name, options = vae_attention(golden, setup), AttentionOptions()
    attend = load_vae_attention(name, setup.device, DTYPES[dtype], options)
    return load_video_vae(
        checkpoint,
        device=setup.device,
        dtype=DTYPES[dtype],
        attend=attend,
        elementwise=setup.plan.elementwise if setup.plan else "eager",
        tiles=setup.plan.vae_tiles if setup.plan else 1,
    )[0]


class _Taps:
    """Keeps the first tensor of each name that the golden stores."""

    def __init__(self, golden: Golden) -> None:
        self.golden = golden
        self.tensors: dict[str, Tensor] = {}

    def __call__(self, name: str, x: Tensor) -> None:
        if name in self.golden and name not in self.tensors:
            self.tensors[name] = x

    def compared(self, stage: str) -> Iterator[Comparison]:
        """All of them against the golden, in the order in which they were computed."""
        for name, x in self.tensors.items():
            yield compare(name, x, self.golden.tensor(name), run="free", stage=stage)


def _stored(golden: Golden, name: str, got: Tensor, stage: str) -> Iterator[Comparison]:
    if name in golden:
        yield compare(name, got, golden.tensor(name), run="staged", stage=stage)


# ---- decode


def _decode(vae: VideoVAE, golden: Golden, setup: Setup) -> Iterator[Comparison]:
    taps = _Taps(golden)
    calls: list[int] = []
    latent = golden.tensor("in/latent")
    frames = vae.decode(
        latent,
        tiling=_tiling(golden),
        on_tile=lambda done, total: calls.append(total),
        on_tap=taps,
    )
    taps("out/video", frames.unsqueeze(0))
    if setup.on_frames and "out/video" in golden:
        setup.on_frames("out/video", golden.tensor("out/video")[0], frames)
    yield from taps.compared(DECODE_STAGE)
    yield from _fact(golden, "clips", [len(calls)], [len(golden.header.get("clips", []))])
    for axis, tokens in (("h", latent.shape[3]), ("w", latent.shape[4])):
        tiles = split(tokens * PIXELS_PER_TOKEN)
        want = golden.header.get("split_tiles", {}).get(axis, [])
        got = [*tiles.starts, *tiles.sizes, *tiles.overlaps]
        yield from _fact(golden, "split_tiles", got, [n for part in want for n in part], f"/{axis}")


def _fact(
    golden: Golden, key: str, got: list[int], want: list[int], suffix: str = ""
) -> Iterator[Comparison]:
    if key in golden.header:
        yield compare(
            f"header/{key}{suffix}",
            torch.tensor(got),
            torch.tensor(want),
            run="free",
            stage=DECODE_STAGE,
        )


def _tiling(golden: Golden) -> bool:
    return bool(golden.params.get("tiling", True))


def _staged_decode(vae: VideoVAE, golden: Golden) -> Iterator[Comparison]:
    if "mod/post_quant_conv" in golden:
        yield from _staged_embedding(vae, golden)
    yield from _staged_blocks(vae, golden)
    if "clip_0/z" in golden and "clip_0/pixels_raw" in golden:
        raw = vae.decoder(vae.post_quant_conv(golden.tensor("clip_0/z")))
        yield from _stored(golden, "clip_0/pixels_raw", raw, DECODE_STAGE)
    yield from _staged_joins(golden)
    if "mod/norm_out" in golden and _single_call(golden):
        yield from _staged_pixels(vae, golden)


def _staged_embedding(vae: VideoVAE, golden: Golden) -> Iterator[Comparison]:
    z = golden.tensor("mod/post_quant_conv")
    embedded = vae.decoder.x_embedder(z.flatten(2).transpose(1, 2))
    yield from _stored(golden, "mod/x_embedder", embedded, DECODE_STAGE)


def _staged_blocks(vae: VideoVAE, golden: Golden) -> Iterator[Comparison]:
    """Each block's attention, feed-forward and sum from the stored tensors that lead to them."""
    if "mod/x_embedder" not in golden or "mod/rope_table" not in golden:
        return
    table = golden.tensor("mod/rope_table")
    x = vae.decoder.with_suffix(golden.tensor("mod/x_embedder"))
    for i, block in enumerate(vae.decoder.transformer_blocks):
        name = f"mod/block_{i}"
        if not all(part in golden for part in (name, f"{name}.attn", f"{name}.ff")):
            return
        assert isinstance(block, DecoderBlock)
        attended, fed = golden.tensor(f"{name}.attn"), golden.tensor(f"{name}.ff")
        yield from _stored(golden, f"{name}.attn", block.attn(block.norm1(x), table), DECODE_STAGE)
        x = x.addcmul(attended, block.scale1)
        yield from _stored(golden, f"{name}.ff", block.ff(block.norm2(x)), DECODE_STAGE)
        yield from _stored(golden, name, x.addcmul(fed, block.scale2), DECODE_STAGE)
        x = golden.tensor(name)
    yield from _stored(golden, "mod/norm_out", vae.decoder.norm_out(x), DECODE_STAGE)


def _staged_joins(golden: Golden) -> Iterator[Comparison]:
    for name in sorted(golden.names):
        if not (match := re.fullmatch(r"(join_\d+)/blended", name)):
            continue
        operands = (f"{match[1]}/prev_tail", f"{match[1]}/next_head")
        if all(operand in golden for operand in operands):
            tail, head = (golden.tensor(operand) for operand in operands)
            blended = blend(tail, head, OVERLAP_FRAMES, -3)
            yield from _stored(golden, name, blended, DECODE_STAGE)


def _single_call(golden: Golden) -> bool:
    """One chunk, one tile: the stored modules lead to the whole video."""
    num_tokens, *sides = golden.tensor("in/latent").shape[2:]
    tiles = [len(split(n * PIXELS_PER_TOKEN)) for n in sides] if _tiling(golden) else [1, 1]
    return num_chunks(num_tokens) == 1 and tiles == [1, 1]


def _staged_pixels(vae: VideoVAE, golden: Golden) -> Iterator[Comparison]:
    num_tokens, height, width = golden.tensor("in/latent").shape[2:]
    clip_tokens = 1 if num_tokens == 1 else CLIP_TOKENS + OVERLAP_TOKENS
    raw = vae.decoder.to_pixels(golden.tensor("mod/norm_out"), (clip_tokens, height, width))
    parts = [vae.to_frames(part) for part in join_clips(lambda start, count: raw, num_tokens)]
    yield from _stored(golden, "out/video", torch.cat(parts).unsqueeze(0), DECODE_STAGE)


# ---- encode


def _encode(vae: VideoVAE, golden: Golden) -> Iterator[Comparison]:
    """Modules were recorded during the first clip's first call."""
    taps = _Taps(golden)
    for k in _clips(golden):
        frames = golden.tensor(f"in/{k}/frames").float() / 255
        taps(f"out/{k}/latent", vae.encode(frames, on_tap=taps))
    yield from taps.compared(ENCODE_STAGE)


def _clips(golden: Golden) -> list[int]:
    found = (re.fullmatch(r"in/(\d+)/frames", name) for name in golden.names)
    return sorted(int(match[1]) for match in found if match)


def _staged_encode(vae: VideoVAE, golden: Golden) -> Iterator[Comparison]:
    source = "mod/conv_in"
    for i, level in enumerate(vae.encoder.down):
        assert isinstance(level, Level)
        name = f"mod/down_{i}"
        if source not in golden or name not in golden:
            return
        yield from _stored(golden, name, level.blocks(golden.tensor(source)), ENCODE_STAGE)
        source = name
        if f"{name}.downsample" in golden:
            source = f"{name}.downsample"
            yield from _stored(golden, source, level.downsample(golden.tensor(name)), ENCODE_STAGE)
    out = vae.encoder.tail(golden.tensor(source))
    yield from _stored(golden, "mod/encoder_out", out, ENCODE_STAGE)
    if "mod/encoder_out" not in golden:
        return
    moments = vae.quant_conv(golden.tensor("mod/encoder_out"))
    yield from _stored(golden, "mod/quant_conv", moments, ENCODE_STAGE)
    if "mod/quant_conv" in golden and _single_frame(golden):
        latent = vae.to_latent(golden.tensor("mod/quant_conv"))
        yield from _stored(golden, "out/0/latent", latent, ENCODE_STAGE)


def _single_frame(golden: Golden) -> bool:
    """The first clip is one frame of one tile: its stored moments lead to its latent."""
    frames, height, width = golden.tensor("in/0/frames").shape[:3]
    return frames == 1 and len(split(height)) == 1 and len(split(width)) == 1
