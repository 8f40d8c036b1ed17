"""What a plan can be changed in: every field in its group, with its allowed values and help."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from runtime.layouts import LAYOUTS
from runtime.messages import (
    KJ_MODES,
    LTX_ATTENTION,
    LTX_DEFAULTS,
    LTX_LEAVES,
    LTX_NVFP4_ORDERS,
    LTX_ONLY,
    LTX_TEXT_ENCODER,
    LTX_VAE_DTYPES,
    STEP_CACHES,
    Plan,
)

Kind = Literal[
    "choice", "whole number", "number", "text", "switch", "attention", "linear", "elementwise"
]
_SECTIONS = ("attention", "linear", "elementwise")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanField:
    """values: allowed ones, () for a number, text or backend; lossy: those that change the result.

    kind: attention, linear and elementwise are a choice of the backends that the probe lists under
    that name; backends: the field that it lists them for, "" for the other kinds.
    group: title of the part of an editor that it stands in, "" for the part that is always open.
    of, of_values: it has a meaning only while the field `of` has one of these values.
    least, most: of a number.
    families: in whose plans it can be changed; ltx_values: its allowed values in one of LTX, where
    they are others; default, ltx_default: what it has where a plan of H3 or of LTX leaves it out.
    """

    name: str
    title: str
    help: str
    group: str
    values: tuple[str, ...] = ()
    lossy: tuple[str, ...] = ()
    of: str = ""
    of_values: tuple[str, ...] = ()
    least: float = 0
    most: float = 0
    backends: str = ""
    kind: Kind = "choice"
    default: Any = None
    families: tuple[str, ...] = ("h3", "ltx")
    ltx_values: tuple[str, ...] = ()
    ltx_default: Any = None


def plan_fields() -> tuple[PlanField, ...]:
    """In the order of an editor; model files and the name are apart."""
    return tuple(_field(group, row) for group, rows in _GROUPS.items() for row in rows)


def _field(group: str, row: _Row) -> PlanField:
    name, title, values, kind, help = row
    of, of_values = _OF.get(name, ("", ()))
    least, most = _RANGES.get(name, (0, 0))
    return PlanField(
        name=name,
        title=title,
        help=help,
        group=group,
        values=values,
        lossy=_LOSSY.get(name, ()),
        of=of,
        of_values=of_values,
        least=least,
        most=most,
        backends=_LISTED_AS.get(name, name) if kind in _SECTIONS else "",
        kind=kind,
        default=_DEFAULTS[name],
        families=_families(name),
        ltx_values=_LTX_VALUES.get(name, ()),
        ltx_default=LTX_DEFAULTS.get(name, _DEFAULTS[name]),
    )


def _families(name: str) -> tuple[str, ...]:
    if name in LTX_ONLY:
        return ("ltx",)
    return ("h3",) if name in LTX_LEAVES else ("h3", "ltx")


_CACHES = STEP_CACHES[1:]  # without off
_SOL = ("attention", ("sol", "sol_nvlabs"))
_OF: dict[str, tuple[str, tuple[str, ...]]] = {
    "kj_mode": ("attention", ("kj",)),
    "sol_tau": _SOL,
    "sol_sinks": _SOL,
    "cache_threshold": ("cache", _CACHES),
    "cache_warmup": ("cache", _CACHES),
    "cache_max_run": ("cache", _CACHES),
}
_RANGES: dict[str, tuple[float, float]] = {  # as runtime/messages.py checks them (a test compares)
    "sol_tau": (0, 10),
    "cache_threshold": (0, 100),
    "cache_warmup": (0, 1000),
    "cache_max_run": (0, 1000),
    "vae_tiles": (1, 1024),
    "threads": (0, 4096),
}
# Of backends: presets/backends.toml
_LOSSY: dict[str, tuple[str, ...]] = {"cache": _CACHES, "amax": ("local",)}
_LTX_VALUES: dict[str, tuple[str, ...]] = {
    "attention": LTX_ATTENTION,
    "text_encoder": LTX_TEXT_ENCODER,
    "video_vae_dtype": LTX_VAE_DTYPES,
}
_LISTED_AS = {"vae_attention": "attention"}
_DEFAULTS = {field.name: field.default for field in fields(Plan)}
_Row = tuple[str, str, tuple[str, ...], Kind, str]
_GROUPS: dict[str, tuple[_Row, ...]] = {
    "": (
        ("device", "Device", ("cuda", "cpu"), "choice", "Where the models run."),
        (
            "layout",
            "Layout",
            LAYOUTS,
            "choice",
            "U4: four GPUs share rows and heads; TP2: two share each weight; CFG2: one a side.",
        ),
        (
            "dtype",
            "Compute type",
            ("bf16", "fp32"),
            "choice",
            "What the denoiser computes in; fp32 takes twice the memory.",
        ),
        ("attention", "Attention", (), "attention", "The kernel of the denoiser."),
        (
            "kj_mode",
            "KJ Sage mode",
            KJ_MODES,
            "choice",
            "Which SageAttention kernel runs; auto takes the one that sage2 takes.",
        ),
        (
            "sol_tau",
            "Sol threshold",
            (),
            "number",
            "Higher computes fewer blocks of keys exactly: faster and less like the exact result.",
        ),
        (
            "sol_sinks",
            "Sol sinks",
            ("conditioning", "none"),
            "choice",
            "conditioning: text and references always count exactly; none: like all other rows.",
        ),
        (
            "text_encoder",
            "Text encoder",
            ("resident", "stream", "layers"),
            "choice",
            "resident: stays in memory; stream: read for each prompt; layers: so, two at a time.",
        ),
        (
            "cache",
            "Step cache",
            STEP_CACHES,
            "choice",
            "Leaves out steps that it expects to guess: by the change of the output (easy_cache) "
            "or of the first block (h3_cache), or by a forecast (spectrum); off leaves out none.",
        ),
        (
            "cache_threshold",
            "Cache threshold",
            (),
            "number",
            "How much change it lets pass, in video and in audio; higher skips more, 0: its own.",
        ),
        (
            "cache_warmup",
            "Cache warm-up",
            (),
            "whole number",
            "First steps that are always computed; 0: its own number.",
        ),
        (
            "cache_max_run",
            "Cache run",
            (),
            "whole number",
            "Most steps left out in a row; 0: its own number.",
        ),
    ),
    "Layers": (
        (
            "dense",
            "Unquantised layers",
            (),
            "linear",
            "How layers that the file stores unquantised are computed.",
        ),
        (
            "nvfp4",
            "NVFP4 layers",
            (),
            "linear",
            "How layers stored as NVFP4 are computed.",
        ),
        ("fp8", "FP8 layers", (), "linear", "How layers stored as FP8 are computed."),
        ("int8", "INT8 layers", (), "linear", "How layers stored as INT8 are computed."),
        (
            "elementwise",
            "Elementwise steps",
            (),
            "elementwise",
            "How norms, rotation, SwiGLU and sums between the layers are computed.",
        ),
        (
            "amax",
            "Largest activation",
            ("shared", "local"),
            "choice",
            "Of layers that scale by it. shared: of all ranks, as on one; local: each its own.",
        ),
        (
            "overlap",
            "Exchange overlap",
            ("off", "qkv"),
            "choice",
            "Of GPUs that share rows. qkv: some heads travel while the next ones are projected.",
        ),
        (
            "gather",
            "Gathered rows",
            ("heads", "packed_nvfp4"),
            "choice",
            "Of GPUs that share rows. packed_nvfp4: rows and outputs travel packed; slow links.",
        ),
        (
            "transport",
            "Transport",
            ("collective", "copy_engine"),
            "choice",
            "Of GPUs that share rows. copy_engine: copies to each other's memory, on one host.",
        ),
        (
            "row_split",
            "Split of rows",
            (),
            "text",
            "Of unequal GPUs that share rows: parts by rank, as 9984:10110. Unused on one GPU.",
        ),
        (
            "island_rounding",
            "Island rounding",
            ("comfy", "keep"),
            "choice",
            "comfy: fp32 layers of a quantised file are rounded as ComfyUI does; keep: not.",
        ),
    ),
    "Memory": (
        (
            "memory",
            "Activations",
            ("plain", "low"),
            "choice",
            "low: freed as soon as they are used, and computed in groups; takes less memory.",
        ),
        (
            "weights",
            "Dequantised weights",
            ("packed", "cached"),
            "choice",
            "packed: widened at every use; cached: once, at load: faster, more memory, same bits.",
        ),
        (
            "adaln",
            "AdaLN weights",
            ("resident", "offloaded"),
            "choice",
            "offloaded: a full checkpoint's are read again for each new schedule; saves 26 GB.",
        ),
    ),
    "Video VAE": (
        (
            "video_vae_dtype",
            "Video VAE type",
            ("fp16", "fp32"),
            "choice",
            "ComfyUI takes fp16; fp32 takes about seven times as long.",
        ),
        (
            "vae_attention",
            "VAE attention",
            (),
            "attention",
            "The kernel of the video VAE.",
        ),
        (
            "vae_tiles",
            "VAE tiles at once",
            (),
            "whole number",
            "Decoded in one batch; each takes about 150 MB (fp32: 300 MB); 960x544 has 15 a clip.",
        ),
        ("vae_blend", "VAE tile blending", ("raw_tails",), "choice", "As ComfyUI 0.33 blends."),
    ),
    "LTX": (
        (
            "v2a_source",
            "Video to audio",
            ("pre_a2v", "post_a2v"),
            "choice",
            "pre_a2v: sound attends to the picture before it heard the sound, as the model was "
            "trained; post_a2v: after, as ComfyUI 0.33 computes it.",
        ),
        (
            "ltx_rope_seconds",
            "Rope times",
            ("divide", "multiply"),
            "choice",
            "Seconds of a frame: its number divided by fps, or multiplied by 1/fps.",
        ),
        (
            "ltx_tables",
            "AdaLN tables",
            ("fp32", "comfy"),
            "choice",
            "fp32: as the file stores them; comfy: rounded to the compute type, as ComfyUI does.",
        ),
        (
            "ltx_rounding",
            "Order of rounding",
            ("model", "comfy"),
            "choice",
            "model: the model's own; comfy: ComfyUI's, whose bits it gives with the three above.",
        ),
        (
            "ltx_nvfp4_order",
            "NVFP4 order",
            ("auto", *LTX_NVFP4_ORDERS),
            "choice",
            "auto: as published; a file without markers that is not the published one is refused "
            "unless its order is named here (inspect --against a copy tells it).",
        ),
    ),
    "Process": (
        (
            "graphs",
            "CUDA graphs",
            (),
            "switch",
            "An evaluation is replayed as one graph; needs a GPU, and kernel times and cache off.",
        ),
        (
            "kernel_times",
            "Times of kernels",
            (),
            "switch",
            "Attention, GEMM and the rest of each step are timed apart.",
        ),
        (
            "threads",
            "CPU threads",
            (),
            "whole number",
            "Of each process; 0 leaves it to PyTorch.",
        ),
    ),
}
