"""Bytes on the device by phase of a run: the formulas, and where their constants come from.

Weights are the bytes that the loader makes of each tensor (header, plan). Activations are counted
from the code of runtime/h3: which tensors live at the worst moment of each phase, which
tests/unit/test_planner_memory.py checks by running those modules on torch's meta device. They agree
with the peak of the one full-size run on a GPU (docs/benchmarks, 35.73 GiB at 20,342 rows) to 0.6%;
the rest, WORKSPACE_BYTES, is what torch's libraries take. Expect 5 % at other shapes on the same
kernels; other kernels, and clips of reference videos, have not been measured.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from math import ceil, prod

from app.estimate import Phase
from app.linear_bytes import SHARED, converted
from runtime.checkpoints.classify import Part, Residence, TensorReport
from runtime.layouts import Layout, guided, parts_of
from runtime.messages import Plan, Ref2VARequest

BENCHMARK = "docs/benchmarks/h200x1_nvfp4_dequant_ref2va_960x544_124f_202611.md"
WORKSPACE_BYTES = 220_000_000  # measured minus counted at the benchmark's shape
CONTEXT_BYTES = 600_000_000  # CUDA context and kernels, outside torch's count; not measured
ERROR = 0.05

_ITEM = {"bf16": 2, "fp16": 2, "fp32": 4}
# Hidden widths of the MLP alive at once: fc1's two halves, silu(gate), the product; INT8 adds the
# rotated rows, their quotients and codes, FP8 the quotients.
_MLP_WIDTHS = {"int8_convrot": 5.5, "fp8_native": 4.5}
LOW_GROUP_ROWS = 4096  # of an MLP with memory = low
_TILE = 128  # features of an MLP that stay together
_ROPE = 192  # rotation matrices of a row: 48 pairs of 2 x 2
_PACKED_VALUE = 9 / 16  # bytes of an NVFP4 value with its share of a scale
_TIMES = 4  # distinct times of a step: text, conditions, target video, target audio
_KEPT_TABLES = 2 << 30  # KEPT_BYTES of runtime/h3/modulation.py
_VISION_BYTES = 64_000  # per patch of 16 x 16 pixels, fp32 (width 1152, ffn 4304)
_CLIP_TILE = {"fp16": 2_040_000_000, "fp32": 4_080_000_000}  # encoder, 17 frames of 256 x 256
_IMAGE_TILE = {"fp16": 101_000_000, "fp32": 202_000_000}  # encoder, one frame of 256 x 256
_CLIP_PIXEL = {"fp16": 612, "fp32": 816}  # per pixel of 17 frames while they are normalised
_DECODE_TILE = {"fp16": 148_000_000, "fp32": 296_000_000}  # decoder, 7 latents of 256 x 256
_RAW_TILE = {"fp16": 11_100_000, "fp32": 22_100_000}  # 28 frames of 256 x 256
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
    return sum(size for _, size in _sizes(part, plan))


def _sizes(part: Part, plan: Plan) -> Iterator[tuple[TensorReport, int]]:
    """Every tensor and its bytes on the device."""
    rule = Residence(
        role=part.role,
        pruned=part.pruned,
        compute=_ITEM[plan.dtype],
        vae=_ITEM[plan.video_vae_dtype],
    )
    for tensor in part.tensors:
        if plan.adaln == "offloaded" and "adaln_proj" in tensor.name.split("."):
            yield tensor, 0
            continue
        share = 1.0
        if part.role == "dit" and SHARED.match(tensor.name):
            kind = "qkv" if ".qkv_proj." in tensor.name else "attn"
            share = _most_of(part, plan)[kind if ".attn." in tensor.name else "mlp"]
        size = converted(tensor, plan, rule)
        if size is None:
            size = rule.bytes(
                tensor.role,
                tensor.name,
                numel=prod(tensor.shape),
                stored=tensor.bytes,
                packed=tensor.quant != "",
            )
        yield tensor, ceil(size * share)


def _most_of(dit: Part, plan: Plan) -> Mapping[str, float]:
    """The shares of a block's heads and MLP features of the rank that has most: the first.

    As runtime/parallel/shares.py deals them: 56 heads on 6 are 10, 14336 features 19 tiles of 112.
    attn: the heads whose weights it holds, but of QKV ("qkv") with packed rows gathered, where it
    holds those that it attends over alone ("here").
    """
    layout = Layout.parse(plan.layout)
    heads, tiles = dit.dims["heads"], max(layout.tensor, dit.dims["ffn"] // _TILE)
    held = -(-heads // layout.tensor)
    here = -(-held // layout.ulysses)
    return {
        "attn": held / heads,
        "here": here / heads,
        "qkv": (here if plan.gather == "packed_nvfp4" else held) / heads,
        "mlp": -(-tiles // layout.tensor) / tiles,
    }


def phases(
    parts: Mapping[str, Part], plan: Plan, request: Ref2VARequest, shape: Shape
) -> tuple[Phase, ...]:
    """What each phase holds on the device at its worst moment, in the order of a run.

    parts: by role, all four. A text encoder that is not resident lies there during "text encode"
    only.
    """
    held = weights(parts, plan)
    text = held.pop("text_encoder")
    base = sum(held.values()) + (text if plan.text_encoder == "resident" else 0)
    base += WORKSPACE_BYTES + CONTEXT_BYTES if plan.device == "cuda" else 0
    dit, encoder = parts["dit"], parts["text_encoder"]
    denoising = denoise(dit, plan, shape.rows) + step_cache(dit, plan, request, shape.rows)
    added = {
        "text encode": text_phase(encoder, plan, shape),
        "reference encode": reference_encode(plan, shape),
        "denoise": denoising,
        "video VAE decode": video_decode(plan, request),
        "audio VAE decode": audio_decode(shape.audio_latents),
    }
    if plan.graphs:  # their memory stays with them: all other stages run beside it
        buffers = graph_buffers(dit, plan, request, shape.rows)
        pool = denoise(dit, plan, shape.rows)
        added = {
            name: more + buffers + (0 if name == "denoise" else pool)
            for name, more in added.items()
        }
    if lasting := windows(dit, plan, shape.rows):  # these stay too, of both sides
        sides = _sides(plan, request)
        added = {
            name: more + lasting * (sides - (name == "denoise")) for name, more in added.items()
        }
    # The tables outlive their request: the next one encodes beside them.
    base_later = base + tables(dit, plan, request)
    later = (Phase(name=name, bytes=base_later + more) for name, more in added.items())
    return (Phase(name="weights", bytes=base), *later)


def tables(dit: Part, plan: Plan, request: Ref2VARequest) -> int:
    """AdaLN tables of all evaluations of a schedule, or of as many as are kept at once."""
    one = _step_tables(dit, plan)
    sides = _sides(plan, request)
    return one * max(1, min(request.steps * sides, _KEPT_TABLES // one))


def _sides(plan: Plan, request: Ref2VARequest) -> int:
    """Of guidance, on one device."""
    both = guided(request.cfg) and Layout.parse(plan.layout).guidance == 1
    return 2 if both else 1


def _step_tables(dit: Part, plan: Plan) -> int:
    number = 4 if dit.pruned else _ITEM[plan.dtype]
    return _TIMES * (3 * 6 * dit.dims["blocks"] + 2) * dit.dims["hidden"] * number


def graph_buffers(dit: Part, plan: Plan, request: Ref2VARequest, rows: int) -> int:
    """Tables and rotation matrices of a side's graphs: the first step's and the others'."""
    sides = _sides(plan, request)
    return 2 * sides * (_step_tables(dit, plan) + _ITEM[plan.dtype] * rows * _ROPE)


def denoise(dit: Part, plan: Plan, rows: int) -> int:
    """item * S * (2 hidden + n ffn + 192); the MLP of a block is the peak.

    With memory = low it is another moment, see _low; with several ranks the exchange, see _shared.
    """
    hidden, ffn = dit.dims["hidden"], dit.dims["ffn"]
    by_format = {"nvfp4": plan.nvfp4, "int8_tensorwise": plan.int8}
    used = [by_format.get(quant.format, plan.fp8) for quant in dit.quantised]
    widths = max([_MLP_WIDTHS.get(name, 4.0) for name in used], default=4.0)
    item = _ITEM[plan.dtype]
    if Layout.parse(plan.layout).of_a_side > 1:
        return int(item * (_shared(dit, plan, rows, widths) + rows * _ROPE))
    if plan.memory == "low":
        return int(item * (_low(dit, plan, rows, used, widths) + rows * _ROPE))
    return int(item * rows * (2 * hidden + widths * ffn + _ROPE))


def _shared(dit: Part, plan: Plan, rows: int, widths: float) -> float:
    """Elements of a block of one rank: the MLP, or the exchange of attention if that is more.

    S rows, R own rows, H heads of this rank's weights, h heads that it attends over, of d each;
    the residual and its norm are 2 R hidden at both. Counted by the test on the block itself:

    - gather heads: R H d of QKV (3), as sent (3), of the output as sent back and as joined (2),
      S h d of QKV as received (3) and of the output as computed (1): 8 R H d + 4 S h d.
    - gather packed_nvfp4: QKV comes of all rows, then V's copy and the output beside it: 5 S h d.
      What travels, 9/16 byte a value as sent, received and laid anew (runtime/parallel/
      packed_rows.py), is less: S h d after it; S hidden before it, which on seven and eight ranks
      is more than that, and less than the MLP.
    - transport copy_engine: R H d of QKV (3), S h d of V's copy and of the output as computed (2);
      what is received lies in `windows`, which stay.
    - no rows shared: the same, of R and H.
    """
    layout = Layout.parse(plan.layout)
    hidden, inner = dit.dims["hidden"], dit.dims["heads"] * dit.dims["head dim"]
    most = _most_of(dit, plan)
    own = _most_rows(plan, rows)
    here, held = rows * inner * most["here"], own * inner * most["attn"]
    lasting = windows(dit, plan, rows) / _ITEM[plan.dtype]
    if layout.ulysses == 1 or plan.gather == "packed_nvfp4":
        exchange = 5 * here
    else:
        exchange = 3 * held + 2 * here if lasting else 8 * held + 4 * here
    mlp = own * widths * dit.dims["ffn"] * most["mlp"]
    embedded = rows * hidden  # before the first block, of all rows
    return lasting + max(own * 2 * hidden + max(mlp, exchange), own * hidden + embedded)


def _most_rows(plan: Plan, rows: int) -> int:
    """Of the rank that has most of these rows, or one more."""
    ranks, split = Layout.parse(plan.layout).ulysses, parts_of(plan.row_split)
    return ceil(rows * max(split) / sum(split)) if split and ranks > 1 else -(-rows // ranks)


def windows(dit: Part, plan: Plan, rows: int) -> int:
    """Bytes of what a rank receives by copy engines of one side of a request.

    3 S h d of QKV and R H d of the output; 9/16 byte a value of packed rows, S hidden and R H d.
    The other side's rows have windows of their own, and so have earlier requests', which are not
    counted: sixteen windows stay at most, the ones that were used last.
    """
    layout = Layout.parse(plan.layout)
    if layout.ulysses == 1 or plan.transport != "copy_engine":
        return 0
    hidden, inner = dit.dims["hidden"], dit.dims["heads"] * dit.dims["head dim"]
    most, own = _most_of(dit, plan), _most_rows(plan, rows)
    here, held = rows * inner * most["here"], own * inner * most["attn"]
    if plan.gather == "packed_nvfp4":
        return int(_PACKED_VALUE * (rows * hidden + held))
    return int(_ITEM[plan.dtype] * (3 * here + held))


def _low(dit: Part, plan: Plan, rows: int, used: Collection[str], widths: float) -> float:
    """Elements of a block in runtime/h3/lifetime.py at the worst of its moments."""
    hidden, ffn = dit.dims["hidden"], dit.dims["ffn"]
    inner = dit.dims["heads"] * dit.dims["head dim"]
    group = min(rows, LOW_GROUP_ROWS)
    copies = 2 if "int8_convrot" in used else 1  # INT8 joins its groups of rows
    widened = plan.weights == "packed" and any(name.endswith("_dequant") for name in used)
    return max(
        rows * (2 * hidden + copies * 3 * inner) + widened * 3 * inner * hidden,  # projection
        rows * (hidden + 3 * inner) + group * 3 * inner,  # rotation, step by step
        rows * (hidden + 4 * inner),  # heads joined beside QKV
        2 * rows * hidden + group * 2 * ffn + widened * 2 * ffn * hidden,  # fc1
        2 * rows * hidden + group * (widths * ffn),  # SwiGLU
    )


def step_cache(dit: Part, plan: Plan, request: Ref2VARequest, rows: int) -> int:
    """Copies of the target rows that a step cache keeps of each side, and while a step runs."""
    sides = _sides(plan, request)
    copies = {"h3_cache": 2 * sides + 2, "spectrum": 6 * sides}.get(plan.cache, 0)
    return copies * _ITEM[plan.dtype] * rows * dit.dims["hidden"]


def text_phase(encoder: Part, plan: Plan, shape: Shape) -> int:
    """What the text encoder adds while it runs: weights unless they are resident, activations."""
    if plan.text_encoder == "resident":
        return text_encode(encoder, shape)
    if plan.text_encoder == "stream":
        return resident(encoder, plan) + text_encode(encoder, shape)
    parts: Counter[str] = Counter()
    for tensor, size in _sizes(encoder, plan):
        layer = re.search(r"layers\.\d+\.", tensor.name)
        parts[layer[0] if layer else tensor.role] += size
    two_layers = 2 * max(size for name, size in parts.items() if name.startswith("layers."))
    return max(
        parts["vision"] + _vision(shape), parts["embedding"], two_layers + _language(encoder, shape)
    )


def text_encode(encoder: Part, shape: Shape) -> int:
    """Activations, fp32: of the language model, or of the vision tower before it."""
    return max(_language(encoder, shape), _vision(shape))


def _vision(shape: Shape) -> int:
    return 4 * shape.vision_tokens * _VISION_BYTES


def _language(encoder: Part, shape: Shape) -> int:
    """An MLP over all text rows beside one widened weight."""
    width, ffn = encoder.dims["hidden"], encoder.dims["ffn"]
    rows = shape.text_rows
    without_weight = 4 * rows * (3 * width + 3 * ffn)
    with_weight = 4 * width * ffn + 4 * rows * (3 * width + 2 * ffn)
    return max(without_weight, with_weight)


def reference_encode(plan: Plan, shape: Shape) -> int:
    """The largest of: a tile of a picture, a clip of a video, a whole sound; 0 without any."""
    dtype = plan.video_vae_dtype
    picture = _IMAGE_TILE[dtype] if shape.images else 0
    clip = 0
    if shape.video_pixels:
        held = _ITEM[dtype] * 3 * 17 * shape.video_pixels
        clip = max(_CLIP_TILE[dtype] + held, _CLIP_PIXEL[dtype] * shape.video_pixels)
    return max(picture, clip, _SOUND_ENCODE * shape.sound_latents)


def video_decode(plan: Plan, request: Ref2VARequest) -> int:
    """A batch of tiles in the decoder, the raw tiles before it, and the clip they are joined to."""
    dtype = plan.video_vae_dtype
    tiles = min(plan.vae_tiles, decoder_tiles(request))
    before = (tiles - 1) * _RAW_TILE[dtype]  # of a single one, the clip's constant has it
    pixels = _DECODE_PIXEL[dtype] * request.width * request.height
    return tiles * _DECODE_TILE[dtype] + before + pixels


def decoder_tiles(request: Ref2VARequest) -> int:
    """All tiles of a decode: 256 pixels wide, 64 shared; a clip for every 17 frames."""
    rows, columns = (max(1, -(-(side - 64) // 192)) for side in (request.height, request.width))
    return rows * columns * max(1, request.frames // 17)


def audio_decode(latents: int) -> int:
    """The whole sound at once."""
    return _SOUND_DECODE * latents
