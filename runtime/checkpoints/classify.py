"""Says what a checkpoint holds, tensor by tensor, from its header (no torch)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from runtime.checkpoints import FORMATS
from runtime.checkpoints.header import CheckpointError, Header, TensorInfo
from runtime.checkpoints.index import LEGACY, MARKER, build_index
from runtime.checkpoints.layer import LayerQuant
from runtime.checkpoints.modes import KNOWN_MODELS, Mode, mode_of
from runtime.checkpoints.roles import ROLES, own_names, present

__all__ = ["Part", "QuantisedLayers", "Report", "Residence", "TensorReport", "classify", "mode_of"]

_SCALES = (
    *("weight_scale", "weight_scale_2", "input_scale", "pre_quant_scale"),
    *("scale_weight", "scale_input"),  # legacy scaled_fp8
)
# Per role of a file: pattern -> what the tensor is for; the first match counts.
_RULES: Mapping[str, tuple[tuple[str, str], ...]] = {
    "dit": (
        (r"(video|audio)_patch_proj\.(weight|bias)$", "island"),
        (r"final_layer\.(video|audio)_out\.(weight|bias)$", "island"),
        (r"(rope\.inv_freq|adaln_t_table)$", "table"),
        (r"time_embedder\.proj_(in|out)\.(weight|bias)$", "time"),
        (r"condition_proj\.(weight|bias)$", "text"),
        (r"token_refiner\.(blocks\.\d+\.(norm|attn|mlp)|final_norm)", "refiner"),
        (r"blocks\.\d+\.(norm[12]|attn\.[qk]_norm)\.weight$", "norm"),
        (r"final_layer\.norm\.weight$", "norm"),
        (r"blocks\.\d+\.attn\.(qkv|out)_proj\.", "attention"),
        (r"blocks\.\d+\.mlp\.fc[12]\.", "mlp"),
        (r"(blocks\.\d+|final_layer)\.adaln_proj\.linear\.(weight|bias)$", "adaln"),
    ),
    "text_encoder": (
        (r"model\.embed_tokens\.weight$", "embedding"),
        (r"model\.layers\.\d+\.(\w+_layernorm|self_attn\.[qk]_norm)\.weight$", "norm"),
        (r"model\.layers\.\d+\.self_attn\.[qkvo]_proj\.", "attention"),
        (r"model\.layers\.\d+\.mlp\.", "mlp"),
        (r"visual\.", "vision"),
    ),
    "video_vae": (
        (r"latents_(mean|std)$", "table"),
        (r"(post_)?quant_conv\.|encoder\.", "encoder"),
        (r"decoder\.transformer_blocks\.\d+\.(norm[12]\.weight|scale[12])$", "norm"),
        (r"decoder\.transformer_blocks\.\d+\.attn\.", "attention"),
        (r"decoder\.transformer_blocks\.\d+\.ff\.", "mlp"),
        (r"decoder\.", "decoder"),
    ),
    "audio_vae": (
        (r"latents_(mean|std)$|.*\.filter$", "table"),
        (r"encoder\.|pre_block\.|mean_proj\.|logs_proj\.", "encoder"),
        (r"decoder\.|dec_in_proj\.", "decoder"),
    ),
    "ltx_dit": (
        (r"(audio_)?patchify_proj\.|(audio_)?proj_out\.", "projection"),
        (r"keyframes_abs_pos_embedding$", "keyframes"),
        (
            r"((transformer_blocks\.\d+\.)?(audio_|prompt_|audio_prompt_)?scale_shift_table)",
            "table",
        ),
        (r"\w*adaln_single\.", "adaln"),
        (r"transformer_blocks\.\d+\.\w*attn[12]?\.[qk]_norm\.weight$", "norm"),
        (r"transformer_blocks\.\d+\.\w*attn[12]?\.", "attention"),
        (r"transformer_blocks\.\d+\.(audio_)?ff\.", "mlp"),
        (r"(video|audio)_embeddings_connector\.", "connector"),
    ),
}
_LAYOUTS = {
    ("nvfp4", "weight"): "2 x e2m1 per byte, even column high",
    ("nvfp4", "weight_scale"): "e4m3 per 16 columns, 128x4 swizzle",
    ("int8_tensorwise", "weight_scale"): "fp32 per row",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorReport:
    """One tensor: what it is for, how it is stored, what it weighs here and on a GPU."""

    name: str
    role: str  # island, norm, attention ... scale, marker, unknown
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    gpu_bytes: int
    quant: str = ""  # format of the quantised layer it belongs to
    full_precision: bool = False  # that layer is dequantised whatever a plan names
    layout: str = ""
    padding: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisedLayers:
    """Layers that share a format and its options."""

    format: str
    layers: int
    full_precision: bool
    convrot_group: int
    input_scale: int  # layers that store one
    pre_quant_scale: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One model of the file (an all-in-one file has several)."""

    role: str  # dit | text_encoder | video_vae | audio_vae | ltx_dit | unknown
    family: str
    prefix: str
    mode: Mode
    pruned: bool
    dims: Mapping[str, int]
    quantised: tuple[QuantisedLayers, ...]
    tensors: tuple[TensorReport, ...]
    problem: str = ""  # why the runtime refuses it, "" when it can be loaded


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What `launch.py inspect` prints."""

    path: str
    file_bytes: int
    header_bytes: int
    tensors: int
    metadata: Mapping[str, str]
    parts: tuple[Part, ...]

    @property
    def gpu_bytes(self) -> int:
        return sum(tensor.gpu_bytes for part in self.parts for tensor in part.tensors)


def classify(header: Header, known: Path = KNOWN_MODELS) -> Report:
    """Classify every tensor of a file; refusals become the `problem` of their part.

    known: the list of learnt weights that tells the mode (modes.py).
    """
    roles = present(header.tensors.keys())
    parts = tuple(_part(header, role, prefix, known) for role, prefix in roles.items())
    return Report(
        path=str(header.path),
        file_bytes=header.file_bytes,
        header_bytes=header.header_bytes,
        tensors=len(header.tensors),
        metadata=header.metadata,
        parts=parts or (_unknown(header),),
    )


def _part(header: Header, role: str, prefix: str, known: Path) -> Part:
    layers: Mapping[str, LayerQuant] = {}
    shapes: Mapping[str, tuple[int, int]] = {}
    problem = ""
    names = own_names(header.tensors.keys(), role, header.path)
    try:
        index = build_index(header, role)
        layers, shapes = index.layers, index.shapes
    except CheckpointError as error:
        problem = str(error)
    infos = {name: header.tensors[stored] for name, stored in names.items()}
    pruned = role == "dit" and "adaln_t_table" in infos
    dtypes = Residence(role=role, pruned=pruned)
    tensors = tuple(_tensor(n, info, layers, shapes, dtypes) for n, info in infos.items())
    strangers = [tensor.name for tensor in tensors if tensor.role == "unknown"]
    if strangers and not problem:
        some = ", ".join(strangers[:5])
        problem = f"{header.path}: {len(strangers)} tensors are unexpected: {some}"
    return Part(
        role=role,
        family=ROLES[role].title,
        prefix=prefix,
        mode=mode_of(header, known) if role == "dit" else "unknown",
        pruned=pruned,
        dims=_dims(role, infos),
        quantised=_quantised(layers, infos),
        tensors=tensors,
        problem=problem,
    )


def _unknown(header: Header) -> Part:
    tensors = tuple(
        TensorReport(
            name=name,
            role="unknown",
            dtype=info.dtype,
            shape=info.shape,
            bytes=info.nbytes,
            gpu_bytes=info.nbytes,
        )
        for name, info in header.tensors.items()
    )
    some = ", ".join(list(header.tensors)[:3]) or "no tensors"
    return Part(
        role="unknown",
        family="unknown",
        prefix="",
        mode="unknown",
        pruned=False,
        dims={},
        quantised=(),
        tensors=tensors,
        problem=f"{header.path} holds no model this runtime knows (it begins with {some})",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Residence:
    """Bytes of a tensor once it is loaded: the rules of the loaders (contract 1.4, 5.7, 6.6).

    role: of the part. compute, vae: bytes of one number of the denoiser and of the video VAE.
    """

    role: str
    pruned: bool
    compute: int = 2  # bf16
    vae: int = 2  # fp16

    def bytes(self, kind: str, name: str, *, numel: int, stored: int, packed: bool) -> int:
        """kind: role of the tensor. Packed weights and their scales stay as they are stored."""
        if kind == "marker":
            return 0
        if packed:
            return stored
        if self.role == "dit":  # rounded islands are fp32 again afterwards
            wide = kind in ("island", "time", "table") or (kind == "adaln" and self.pruned)
            return numel * (4 if wide else self.compute)
        if self.role == "ltx_dit":
            return numel * (4 if kind == "table" else self.compute)
        if self.role == "text_encoder":
            widened = kind == "vision" and not name.endswith("pos_embed.weight")
            return 4 * numel if widened else stored
        return numel * (self.vae if self.role == "video_vae" else 4)


def _tensor(
    name: str,
    info: TensorInfo,
    layers: Mapping[str, LayerQuant],
    shapes: Mapping[str, tuple[int, int]],
    residence: Residence,
) -> TensorReport:
    layer, _, suffix = name.rpartition(".")
    kind = _kind(residence.role, name, suffix)
    quant = layers.get(layer)
    packed = quant is not None and suffix in FORMATS[quant.format].suffixes
    return TensorReport(
        name=name,
        role=kind,
        dtype=info.dtype,
        shape=info.shape,
        bytes=info.nbytes,
        gpu_bytes=residence.bytes(kind, name, numel=info.numel, stored=info.nbytes, packed=packed),
        quant=quant.format if quant else "",
        full_precision=quant is not None and quant.full_precision,
        layout=_layout(quant, suffix) if quant else "",
        padding=_padding(info, shapes[layer]) if quant and _tiled(quant, suffix) else "",
    )


def _kind(role: str, name: str, suffix: str) -> str:
    if suffix == MARKER or name == LEGACY:
        return "marker"
    if suffix in _SCALES:
        return "scale"
    return next((kind for pattern, kind in _RULES[role] if re.match(pattern, name)), "unknown")


def _tiled(quant: LayerQuant, suffix: str) -> bool:
    return quant.format == "nvfp4" and suffix == "weight_scale"


def _layout(quant: LayerQuant, suffix: str) -> str:
    if suffix == "weight" and quant.convrot_group:
        return f"rotated in groups of {quant.convrot_group}"
    return _LAYOUTS.get((quant.format, suffix), "")


def _padding(info: TensorInfo, shape: tuple[int, int]) -> str:
    used, stored = (shape[0], shape[1] // 16), info.shape
    if used == stored:
        return "none"
    return f"{used[0]}x{used[1]} of {stored[0]}x{stored[1]} used"


def _quantised(
    layers: Mapping[str, LayerQuant], infos: Mapping[str, TensorInfo]
) -> tuple[QuantisedLayers, ...]:
    groups: dict[LayerQuant, list[str]] = {}
    for layer, quant in layers.items():
        groups.setdefault(quant, []).append(layer)
    return tuple(
        QuantisedLayers(
            format=quant.format,
            layers=len(names),
            full_precision=quant.full_precision,
            convrot_group=quant.convrot_group,
            input_scale=sum(
                f"{n}.input_scale" in infos or f"{n}.scale_input" in infos for n in names
            ),
            pre_quant_scale=sum(f"{n}.pre_quant_scale" in infos for n in names),
        )
        for quant, names in groups.items()
    )


def _dims(role: str, infos: Mapping[str, TensorInfo]) -> dict[str, int]:
    """Derived numbers (contract 1.2, 5.1, 6.2, 7); what cannot be derived is left out."""

    def size(name: str, axis: int = 0) -> int:
        shape = infos[name].shape if name in infos else ()
        return shape[axis] if axis < len(shape) else 0

    def count(pattern: str) -> int:
        found = {int(m[1]) for name in infos if (m := re.match(pattern, name))}
        return next(n for n in range(len(found) + 1) if n not in found)

    if role == "dit":
        head = size("blocks.0.attn.q_norm.weight")
        dims = {
            "hidden": size("video_patch_proj.weight"),
            "blocks": count(r"blocks\.(\d+)\."),
            "refiner blocks": count(r"token_refiner\.blocks\.(\d+)\."),
            "heads": size("blocks.0.attn.qkv_proj.weight") // (3 * head) if head else 0,
            "head dim": head,
            "ffn": size("blocks.0.mlp.fc1.weight") // 2,
            "text": size("condition_proj.weight", 1),
            "video channels": size("final_layer.video_out.weight") // 4,
            "audio channels": size("final_layer.audio_out.weight"),
            "grid": size("adaln_t_table"),
            "rank": size("adaln_t_table", 1),
            "time": size("time_embedder.proj_out.weight"),
        }
    elif role == "text_encoder":
        dims = {
            "hidden": size("model.layers.0.input_layernorm.weight"),
            "layers": count(r"model\.layers\.(\d+)\."),
            "head dim": size("model.layers.0.self_attn.q_norm.weight"),
            "ffn": size("model.layers.0.mlp.gate_proj.weight"),
            "vocabulary": size("model.embed_tokens.weight"),
            "vision hidden": size("visual.patch_embed.proj.weight"),
            "vision blocks": count(r"visual\.blocks\.(\d+)\."),
        }
    elif role == "video_vae":
        dims = {
            "latent channels": size("post_quant_conv.weight"),
            "decoder width": size("decoder.x_embedder.weight"),
            "decoder blocks": count(r"decoder\.transformer_blocks\.(\d+)\."),
            "encoder channels": size("encoder.norm_out.weight"),
        }
    elif role == "ltx_dit":
        dims = {
            "video": size("patchify_proj.weight"),
            "audio": size("audio_patchify_proj.weight"),
            "blocks": count(r"transformer_blocks\.(\d+)\."),
            "video heads": size("transformer_blocks.0.attn1.to_gate_logits.bias"),
            "audio heads": size("transformer_blocks.0.audio_attn1.to_gate_logits.bias"),
            "connector blocks": count(
                r"video_embeddings_connector\.transformer_1d_blocks\.(\d+)\."
            ),
            "video channels": size("proj_out.weight"),
            "audio channels": size("audio_proj_out.weight"),
        }
    else:
        dims = {
            "latent channels": size("latents_mean"),
            "width": size("dec_in_proj.weight"),
            "decoder channels": size("decoder.conv_pre.weight"),
        }
    return {name: value for name, value in dims.items() if value}


def totals(tensors: tuple[TensorReport, ...], by: str) -> dict[str, tuple[int, int, int]]:
    """Tensor count, bytes and GPU bytes per `by` ("role" or "dtype"), heaviest first."""
    counts: Counter[str] = Counter()
    stored: Counter[str] = Counter()
    resident: Counter[str] = Counter()
    for tensor in tensors:
        key = str(getattr(tensor, by))
        counts[key] += 1
        stored[key] += tensor.bytes
        resident[key] += tensor.gpu_bytes
    return {key: (counts[key], size, resident[key]) for key, size in stored.most_common()}
