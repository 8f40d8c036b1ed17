"""What a plan can be changed in: every field with its allowed values and one line of help."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from runtime.layouts import LAYOUTS
from runtime.messages import KJ_MODES, STEP_CACHES, Plan

Choice = Literal["attention", "linear", "elementwise", ""]
Kind = Literal["choice", "whole number", "number", "switch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanField:
    """values: allowed ones, () for a number or a backend.

    section: of the probe that lists the backends; backends: the field that it lists them under.
    """

    name: str
    title: str
    help: str
    values: tuple[str, ...] = ()
    section: Choice = ""
    backends: str = ""
    kind: Kind = "choice"
    default: Any = None


def plan_fields() -> tuple[PlanField, ...]:
    """In the order of an editor; model files and the name are apart."""
    defaults = {field.name: field.default for field in fields(Plan)}
    return tuple(
        PlanField(
            name=name,
            title=title,
            help=help,
            values=values,
            section=section,
            backends=_LISTED_AS.get(name, name) if section else "",
            kind=kind,
            default=defaults[name],
        )
        for name, title, values, section, kind, help in _FIELDS
    )


_Row = tuple[str, str, tuple[str, ...], Choice, Kind, str]
_LISTED_AS = {"vae_attention": "attention"}
_FIELDS: tuple[_Row, ...] = (
    ("device", "Device", ("cuda", "cpu"), "", "choice", "Where the models run."),
    (
        "layout",
        "Layout",
        LAYOUTS,
        "",
        "choice",
        "U4: four GPUs share the rows and heads; TP2: two share each weight, which saves memory.",
    ),
    (
        "dtype",
        "Compute type",
        ("bf16", "fp32"),
        "",
        "choice",
        "Of the denoiser; fp32 takes twice the memory.",
    ),
    ("attention", "Attention", (), "attention", "choice", "Of the denoiser."),
    ("vae_attention", "VAE attention", (), "attention", "choice", "Of the video VAE."),
    (
        "kj_mode",
        "KJ Sage mode",
        KJ_MODES,
        "",
        "choice",
        "Of attention kj: which SageAttention kernel runs; auto as sage2.",
    ),
    (
        "sol_tau",
        "Sol threshold",
        (),
        "",
        "number",
        "Of attention sol and sol_nvlabs: higher computes fewer key blocks exactly.",
    ),
    (
        "sol_sinks",
        "Sol sinks",
        ("conditioning", "none"),
        "",
        "choice",
        "conditioning: rows of text and references are always attended to exactly.",
    ),
    (
        "memory",
        "Activations",
        ("plain", "low"),
        "",
        "choice",
        "low: given back as soon as they are used, the MLP in groups of rows; less memory.",
    ),
    (
        "dense",
        "Unquantised layers",
        (),
        "linear",
        "choice",
        "fp8_*: the four large products of each block are rounded to FP8 at load.",
    ),
    (
        "amax",
        "Largest activation",
        ("shared", "local"),
        "",
        "choice",
        "Of layers that scale by it. shared: of all ranks, as on one; local: each its own, lossy.",
    ),
    (
        "weights",
        "Dequantised weights",
        ("packed", "cached"),
        "",
        "choice",
        "packed: widened at every use; cached: once at load, the same bits in more memory.",
    ),
    ("nvfp4", "NVFP4 layers", (), "linear", "choice", "How layers stored as NVFP4 are computed."),
    ("fp8", "FP8 layers", (), "linear", "choice", "How layers stored as FP8 are computed."),
    ("int8", "INT8 layers", (), "linear", "choice", "How layers stored as INT8 are computed."),
    (
        "elementwise",
        "Elementwise steps",
        (),
        "elementwise",
        "choice",
        "Norms, rotation, SwiGLU, sums.",
    ),
    (
        "island_rounding",
        "Island rounding",
        ("comfy", "keep"),
        "",
        "choice",
        "comfy: fp32 layers of a quantised file are rounded as ComfyUI does; keep: they are not.",
    ),
    (
        "video_vae_dtype",
        "Video VAE type",
        ("fp16", "fp32"),
        "",
        "choice",
        "ComfyUI takes fp16; fp32 takes about seven times as long.",
    ),
    ("vae_blend", "VAE tile blending", ("raw_tails",), "", "choice", "As ComfyUI 0.33 blends."),
    (
        "vae_tiles",
        "VAE tiles at once",
        (),
        "",
        "whole number",
        "Decoded in one batch; each takes about 150 MB (fp32: 300 MB), 960x544 has 15 a clip.",
    ),
    (
        "text_encoder",
        "Text encoder",
        ("resident", "stream", "layers"),
        "",
        "choice",
        "resident: stays in memory; stream: loaded for each prompt; layers: two at a time, slower.",
    ),
    (
        "adaln",
        "AdaLN weights",
        ("resident", "offloaded"),
        "",
        "choice",
        "offloaded: those of a full checkpoint are read again for each new schedule; saves 26 GB.",
    ),
    (
        "graphs",
        "CUDA graphs",
        (),
        "",
        "switch",
        "Each evaluation is one graph of its exact shape; needs times of kernels off.",
    ),
    (
        "cache",
        "Step cache",
        STEP_CACHES,
        "",
        "choice",
        "Lossy: leaves out steps whose result it expects to guess; off computes every step.",
    ),
    (
        "cache_threshold",
        "Cache threshold",
        (),
        "",
        "number",
        "Of its measure, for video and for audio; higher skips more, 0 is the cache's own.",
    ),
    (
        "cache_warmup",
        "Cache warm-up",
        (),
        "",
        "whole number",
        "First steps that are always computed; 0 is the cache's own.",
    ),
    (
        "cache_max_run",
        "Cache run",
        (),
        "",
        "whole number",
        "Most steps left out in a row; 0 is the cache's own.",
    ),
    ("threads", "CPU threads", (), "", "whole number", "Of each process; 0 leaves it to PyTorch."),
    (
        "kernel_times",
        "Times of kernels",
        (),
        "",
        "switch",
        "Attention, GEMM and the rest of each step are timed apart.",
    ),
)
