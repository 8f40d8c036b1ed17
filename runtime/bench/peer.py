"""diffusers' H3 as a benchmark's peer: the same packed rows, weights and schedule, its own code."""

from __future__ import annotations

import importlib
import importlib.metadata
import time
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from runtime.bench.base import (
    OneProcess,
    Setup,
    Turn,
    named,
    opener,
    peak_of_process,
    peak_reserved_bytes,
    turn_of,
)
from runtime.bench.profile import profiled, tell
from runtime.checkpoints.base import Checkpoint
from runtime.clock import DENOISE, VIDEO_VAE_DECODE, StageClock
from runtime.h3.conditioning import Conditioning
from runtime.h3.config import NUM_MODALITIES, H3Config
from runtime.h3.denoise import (
    Latents,
    condition_audio,
    condition_video,
    draw_noise,
    layout_of,
    step_rows,
)
from runtime.h3.model import pack_audio, patchify
from runtime.h3.packing import PackedLayout, target_of
from runtime.h3.schedule import map_sigma, sigmas_for
from runtime.h3.synthetic import synthetic_conditioning
from runtime.layouts import guided
from runtime.meter import Ranges

CPU = torch.device("cpu")
FORMAT = "full_bf16"  # it refuses pruned weights
_DTYPES = {"fp16": torch.float16, "fp32": torch.float32}  # of the plan's video VAE


class DiffusersSubject(OneProcess):
    """Random weights of the published layout, made on the device; one forward is one step."""

    def __init__(self, setup: Setup) -> None:
        self._setup, self._device = setup, _device(setup)
        if guided(setup.request.cfg):
            raise ValueError(
                f"the peer evaluates one side, and the request's cfg is {setup.request.cfg}; set "
                f"cfg to 1 to compare with it"
            )
        _package()
        size = setup.weights.partition(":")[0]
        checkpoint = opener(f"{size}:{FORMAT}")(setup.plan.models.dit, "dit")
        cfg = H3Config.from_checkpoint(checkpoint)
        began = time.perf_counter()
        self.model = build_transformer(checkpoint, self._device)
        self.model.set_attention_backend(setup.attention)
        self._video_vae = _video_vae(setup, self._device) if setup.decode else None
        self._conditioning = synthetic_conditioning(
            setup.request, setup.text_rows, setup.request.seed, text_dim=cfg.text_dim
        )
        self.layout = layout_of(self._conditioning, target_of(setup.request))
        self.rows = self.layout.num_rows
        self._noise = draw_noise(target_of(setup.request), setup.request.seed)
        self.facts: Mapping[str, Any] = {
            "resolved": {
                "diffusers": importlib.metadata.version("diffusers"),
                "torch": str(torch.__version__),
                "attention": setup.attention,
                "dtype": "bf16, fp32 where the file has it",
            },
            "load_seconds": time.perf_counter() - began,
        }

    def turn(self) -> Turn:
        """As many forwards as the request has steps, then one decode where asked."""
        return self._turn(self._setup.request.steps, self._setup.decode, named(self._device))

    def profile(self) -> Mapping[str, Any]:
        """One forward."""
        measured, events = profiled(
            self._device, lambda: self._turn(1, False, torch.profiler.record_function)
        )
        return tell(events, f"{DENOISE}, step 1", measured.steps[0])

    @torch.inference_mode()
    def velocity(self, sigma: Tensor) -> tuple[Tensor, Tensor]:
        """Data-ward velocities of the target's rows at 0-dim sigma: [Nv, 96] and [Na, 32]."""
        return self._target(self.model(**self._inputs(sigma)))

    @torch.inference_mode()
    def _turn(self, steps: int, decode: bool, ranges: Ranges) -> Turn:
        clock = StageClock(self._device, ranges=ranges)
        schedule = sigmas_for(self._setup.request.scheduler, steps, 12.0)
        inputs = [self._inputs(sigma) for sigma in schedule[:steps]]
        began = time.perf_counter()
        for step, given in enumerate(inputs):
            with clock.stage(DENOISE, step=step):
                self.model(**given)
        if decode and self._video_vae is not None:
            latent = self._noise.video.to(self._device)
            with clock.stage(VIDEO_VAE_DECODE):
                self._video_vae.decode(latent).sample.cpu()
        times = clock.times()
        seconds = time.perf_counter() - began
        allocated = clock.peak_bytes() if self._device.type == "cuda" else peak_of_process()
        return turn_of(times, seconds, allocated, peak_reserved_bytes(self._device))

    def _inputs(self, sigma: Tensor) -> dict[str, Tensor]:
        return packed_inputs(
            self._conditioning,
            self.layout,
            self._noise,
            sigma,
            seed=self._setup.request.seed,
            device=self._device,
        )

    def _target(self, found: Any) -> tuple[Tensor, Tensor]:
        """The target comes last in both streams."""
        video = patchify(self._noise.video).shape[0]
        audio = pack_audio(self._noise.audio).shape[0]
        return found.sample[0, -video:], found.audio_sample[0, -audio:]


def packed_inputs(
    conditioning: Conditioning,
    layout: PackedLayout,
    noise: Latents,
    sigma: Tensor,
    *,
    seed: int,
    device: torch.device,
) -> dict[str, Tensor]:
    """The forward's arguments for the rows of `layout`; shifts 12 and 3.

    The target is `noise` itself: the time of a step does not depend on it.
    """
    segments = tuple((s.start, s.stop, s.kind) for s in layout.segments)
    rows = step_rows(segments, conditioning.context.token_tags, sigma, map_sigma(sigma, 12.0, 3.0))
    place_S = torch.empty(layout.num_rows, dtype=torch.int64)
    for start, stop, row in rows.spans:
        place_S[start:stop] = row
    kinds = [kind for start, stop, kind in segments for _ in range(stop - start)]
    audio_S = torch.tensor(["audio" in kind for kind in kinds])
    text_S = torch.tensor([kind == "text" for kind in kinds])
    pictures, sounds = condition_video(conditioning, seed, CPU), condition_audio(conditioning, CPU)
    given = {
        "hidden_states": _after(pictures, patchify(noise.video)),
        "audio_hidden_states": _after(sounds, pack_audio(noise.audio)),
        "encoder_hidden_states": conditioning.context.context,
        "timestep": rows.times_M,
        "timestep_indices": place_S // NUM_MODALITIES,
        "token_tags": place_S % NUM_MODALITIES,
        "position_ids": torch.from_numpy(layout.positions_S3),
        "video_indices": (~audio_S & ~text_S).nonzero()[:, 0],
        "audio_indices": audio_S.nonzero()[:, 0],
        "text_indices": text_S.nonzero()[:, 0],
    }
    return {name: tensor.to(device) for name, tensor in given.items()}


def _after(conditions: Tensor | None, rows: Tensor) -> Tensor:
    return (rows if conditions is None else torch.cat([conditions, rows]))[None]


def build_transformer(checkpoint: Checkpoint, device: torch.device) -> Any:
    """Its model with the checkpoint's weights through its own converter, dtypes as stored."""
    cfg = H3Config.from_checkpoint(checkpoint)
    dims = {
        "num_attention_heads": cfg.num_heads,
        "attention_head_dim": cfg.head_dim,
        "hidden_size": cfg.hidden,
        "num_layers": cfg.num_layers,
        "num_refiner_layers": cfg.num_refiner_layers,
        "ffn_dim": cfg.ffn,
        "text_dim": cfg.text_dim,
        "time_embed_hidden_dim": cfg.time_hidden,
        "time_embed_dim": cfg.time_dim,
    }
    single_file = importlib.import_module("diffusers.loaders.single_file_utils")
    package = importlib.import_module("diffusers.models.transformers.transformer_minimax_h3")
    with torch.device("meta"):
        model = package.MiniMaxH3Transformer3DModel(**dims)
    weights = {name: checkpoint.tensor(name, device) for name in checkpoint.names()}
    converted = single_file.convert_minimax_h3_transformer_checkpoint_to_diffusers(weights, dims)
    model.load_state_dict(converted, strict=True, assign=True)
    model.rope = package.MiniMaxH3RotaryPosEmbed().to(device)  # not stored: computed
    return model.eval().requires_grad_(False)


def _video_vae(setup: Setup, device: torch.device) -> Any:
    """Published widths and random numbers of PyTorch's own; tiled, as it ships."""
    if setup.weights.startswith("tiny"):
        raise ValueError("diffusers' video VAE is measured at full size only; give --no-decode")
    with device:
        vae = importlib.import_module("diffusers").AutoencoderKLMiniMaxH3()
    return as_loaded(vae, _DTYPES[setup.plan.video_vae_dtype])


def as_loaded(vae: Any, dtype: torch.dtype) -> Any:
    """Its dtypes after from_pretrained(torch_dtype=dtype): some modules stay in fp32.

    They are named by whole parts of a path: "quant_conv" keeps no "post_quant_conv".
    """
    kept = set(vae._keep_in_fp32_modules)
    for name, parameter in vae.named_parameters():
        if kept.isdisjoint(name.split(".")):
            parameter.data = parameter.data.to(dtype)
    return vae.eval().requires_grad_(False)


def _device(setup: Setup) -> torch.device:
    if not setup.text_rows or not setup.weights:
        raise ValueError(
            "diffusers is measured on random conditioning and weights; give --text-rows and "
            "--random-weights"
        )
    if setup.plan.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("the plan asks for device cuda, but torch sees no CUDA device")
    return torch.device(setup.plan.device)


def _package() -> ModuleType:
    try:
        return importlib.import_module("diffusers")
    except ImportError as error:
        raise ValueError(
            f"diffusers cannot be imported ({error}); pip install -e .[peers]"
        ) from error
