"""Bytes on the device by phase of a run: the formulas, and where their constants come from.

Weights are the bytes that the loader makes of each tensor (header, plan). Activations are counted
from the code of runtime/h3: which tensors live at the worst moment of each phase, which
tests/unit/test_planner_memory.py checks by running those modules on torch's meta device. They agree
with the peak of the one full-size run on a GPU (docs/benchmarks, 35.73 GiB at 20,342 rows) to 0.6%;
the rest, WORKSPACE_BYTES, is what torch's libraries take. Expect 5 % at other shapes on the same
kernels; other kernels, and clips of reference videos, have not been measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from app.estimate import Phase
from runtime.checkpoints.classify import Part, Residence
from runtime.messages import Plan, Ref2VARequest

BENCHMARK = "docs/benchmarks/h200x1_nvfp4_dequant_ref2va_960x544_124f_202611.md"
WORKSPACE_BYTES = 220_000_000  # measured minus counted at the benchmark's shape
CONTEXT_BYTES = 600_000_000  # CUDA context and kernels, outside torch's count; not measured
ERROR = 0.05

_ITEM = {"bf16": 2, "fp16": 2, "fp32": 4}
# Hidden widths of the MLP alive at once: fc1's two halves, silu(gate), the product; INT8 adds the
# rotated rows, their quotients and codes, FP8 the quotients.
_MLP_WIDTHS = {"int8_convrot": 5.5, "fp8_native": 4.5}
_ROPE = 192  # rotation matrices of a row: 48 pairs of 2 x 2
_TIMES = 4  # distinct times of a step: text, conditions, target video, target audio
_VISION_BYTES = 64_000  # per patch of 16 x 16 pixels, fp32 (width 1152, ffn 4304)
_CLIP_TILE = {"fp16": 2_040_000_000, "fp32": 4_080_000_000}  # encoder, 17 frames of 256 x 256
_IMAGE_TILE = {"fp16": 101_000_000, "fp32": 202_000_000}  # encoder, one frame of 256 x 256
_CLIP_PIXEL = {"fp16": 612, "fp32": 816}  # per pixel of 17 frames while they are normalised
_DECODE_TILE = {"fp16": 148_000_000, "fp32": 296_000_000}  # decoder, 7 latents of 256 x 256
_DECODE_PIXEL = {"fp16": 708, "fp32": 1008}  # per pixel: raw clip, faded head, tail, fp32 frames
_SOUND_ENCODE, _SOUND_DECODE = 2_055_000, 581_000  # per audio latent (25 ms), fp32


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What the activations depend on; see runtime/h3/measure.py."""

    rows: int  # packed, of the longer side
    text_rows: int
    vision_tokens: int  # of the largest picture; a token is four patches
    images: bool
    video_pixels: int  # of the largest reference video's frame; 0 without one
    sound_latents: int  # of the longest reference sound; 0 without one
    audio_latents: int  # generated


def weights(parts: Mapping[str, Part], plan: Plan) -> dict[str, int]:
    """Resident bytes by role: every tensor in the type that the loader gives it."""
    return {role: resident(part, plan) for role, part in parts.items()}


def resident(part: Part, plan: Plan) -> int:
    """Bytes of one model on the device."""
    rule = Residence(
        role=part.role,
        pruned=part.pruned,
        compute=_ITEM[plan.dtype],
        vae=_ITEM[plan.video_vae_dtype],
    )
    return sum(
        rule.bytes(
            tensor.role,
            tensor.name,
            numel=prod(tensor.shape),
            stored=tensor.bytes,
            packed=tensor.quant != "",
        )
        for tensor in part.tensors
    )


def phases(
    parts: Mapping[str, Part], plan: Plan, request: Ref2VARequest, shape: Shape
) -> tuple[Phase, ...]:
    """What each phase holds on the device at its worst moment, in the order of a run.

    parts: by role, all four. A streamed text encoder lies there during "text encode" only.
    """
    held = weights(parts, plan)
    text = held.pop("text_encoder")
    base = sum(held.values()) + (text if plan.text_encoder == "resident" else 0)
    base += WORKSPACE_BYTES if plan.device == "cuda" else 0
    context = CONTEXT_BYTES if plan.device == "cuda" else 0
    streamed = text if plan.text_encoder == "stream" else 0
    return (
        Phase(name="weights", bytes=base + context),
        Phase(
            name="text encode",
            bytes=base + context + streamed + text_encode(parts["text_encoder"], shape),
        ),
        Phase(name="reference encode", bytes=base + context + reference_encode(plan, shape)),
        Phase(name="denoise", bytes=base + context + denoise(parts["dit"], plan, shape.rows)),
        Phase(
            name="video VAE decode",
            bytes=base + context + video_decode(plan, request.width, request.height),
        ),
        Phase(name="audio VAE decode", bytes=base + context + audio_decode(shape.audio_latents)),
    )


def denoise(dit: Part, plan: Plan, rows: int) -> int:
    """item * S * (2 hidden + n ffn + 192) + modulation tables; the MLP of a block is the peak."""
    hidden, ffn, blocks = dit.dims["hidden"], dit.dims["ffn"], dit.dims["blocks"]
    by_format = {"nvfp4": plan.nvfp4, "int8_tensorwise": plan.int8}
    used = [by_format.get(quant.format, plan.fp8) for quant in dit.quantised]
    widths = max([_MLP_WIDTHS.get(name, 4.0) for name in used], default=4.0)
    item = _ITEM[plan.dtype]
    table = _TIMES * 3 * 6 * hidden * blocks * (4 if dit.pruned else item)
    return int(item * rows * (2 * hidden + widths * ffn + _ROPE)) + table


def text_encode(encoder: Part, shape: Shape) -> int:
    """fp32: an MLP over all text rows beside one widened weight, or the vision tower before it."""
    width, ffn = encoder.dims["hidden"], encoder.dims["ffn"]
    rows = shape.text_rows
    without_weight = 4 * rows * (3 * width + 3 * ffn)
    with_weight = 4 * width * ffn + 4 * rows * (3 * width + 2 * ffn)
    vision = 4 * shape.vision_tokens * _VISION_BYTES
    return max(without_weight, with_weight, vision)


def reference_encode(plan: Plan, shape: Shape) -> int:
    """The largest of: a tile of a picture, a clip of a video, a whole sound; 0 without any."""
    dtype = plan.video_vae_dtype
    picture = _IMAGE_TILE[dtype] if shape.images else 0
    clip = 0
    if shape.video_pixels:
        held = _ITEM[dtype] * 3 * 17 * shape.video_pixels
        clip = max(_CLIP_TILE[dtype] + held, _CLIP_PIXEL[dtype] * shape.video_pixels)
    return max(picture, clip, _SOUND_ENCODE * shape.sound_latents)


def video_decode(plan: Plan, width: int, height: int) -> int:
    """A tile of the decoder, and the clip that the tiles are joined to."""
    dtype = plan.video_vae_dtype
    return _DECODE_TILE[dtype] + _DECODE_PIXEL[dtype] * width * height


def audio_decode(latents: int) -> int:
    """The whole sound at once."""
    return _SOUND_DECODE * latents
