"""diffusers' LTX as a benchmark's peer: our tensors, sizes and sigmas, its own code.

The four hooks of ltx25.md 9.1 make it compute what LTX-2.5 does; it is called as its text-to-video
pipeline calls it. A step is one forward.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from runtime.bench.base import OneProcess, Turn, named
from runtime.bench.ltx import timed_turn, told_of_stages
from runtime.bench.ltx_base import (
    LTXSetup,
    device_of,
    opened,
    random_conditioning,
    sizes,
)
from runtime.bench.profile import profiled
from runtime.clock import DENOISE, StageClock
from runtime.ltx.denoise import Streams
from runtime.ltx.denoiser import DTYPES, Denoiser, stages_of
from runtime.ltx.model import Contexts, LTXModel
from runtime.ltx.recipe import Stage
from runtime.meter import Ranges

Forward = Callable[[], tuple[Tensor, Tensor]]

# Every name that diffusers gives to the same weights (ltx25.md 9.1)
NAMES = {
    "audio_patchify_proj": "audio_proj_in",
    "patchify_proj": "proj_in",
    "audio_prompt_adaln_single": "audio_prompt_adaln",
    "prompt_adaln_single": "prompt_adaln",
    "av_ca_video_scale_shift_adaln_single": "av_cross_attn_video_scale_shift",
    "av_ca_audio_scale_shift_adaln_single": "av_cross_attn_audio_scale_shift",
    "av_ca_a2v_gate_adaln_single": "av_cross_attn_video_a2v_gate",
    "av_ca_v2a_gate_adaln_single": "av_cross_attn_audio_v2a_gate",
    "audio_adaln_single": "audio_time_embed",
    "adaln_single": "time_embed",
    "scale_shift_table_a2v_ca_video": "video_a2v_cross_attn_scale_shift_table",
    "scale_shift_table_a2v_ca_audio": "audio_a2v_cross_attn_scale_shift_table",
    "q_norm": "norm_q",
    "k_norm": "norm_k",
}


class DiffusersSubject(OneProcess):
    """Random weights, those of a subject of ours with the same seed; all in the plan's dtype."""

    def __init__(self, setup: LTXSetup) -> None:
        if not setup.weights:
            raise ValueError("diffusers is measured on random weights; give --random-weights bf16")
        self.setup, self.device, self.rows = setup, device_of(setup.plan), sizes(setup)
        if self.device.type == "cpu" and setup.attention != "native":
            raise ValueError(
                f"diffusers' attention {setup.attention} needs a GPU and the plan's device is cpu; "
                f"give --peer-attention native"
            )
        _check_package()
        if setup.plan.threads:
            torch.set_num_threads(setup.plan.threads)
        began = time.perf_counter()
        plan = replace(setup.plan, attention="sdpa", kernel_times=False, weights="packed")
        checkpoint = opened(plan, setup.weights)
        ours = Denoiser(plan, checkpoint.census.config, self.device)
        ours.load(checkpoint, lambda done, total: None)
        self._dtype = DTYPES[plan.dtype]
        self.model = own_times(diffusers_twin(ours.model, self._dtype))
        self.model.set_attention_backend(setup.attention)
        self._contexts = random_conditioning(
            ours.config, setup.text_rows, setup.request.seed, self._dtype
        ).contexts
        self.facts: Mapping[str, Any] = {
            "resolved": {
                "diffusers": importlib.metadata.version("diffusers"),
                "torch": str(torch.__version__),
                "attention": setup.attention,
                "dtype": f"{plan.dtype}, AdaLN tables too",
            },
            "load_seconds": time.perf_counter() - began,
        }

    def turn(self) -> Turn:
        """As many forwards of each size as that stage has steps."""
        return self._turn(named(self.device))

    def profile(self) -> Mapping[str, Any]:
        """The first forward of each size, of one more turn."""
        measured, events = profiled(self.device, lambda: self._turn(torch.profiler.record_function))
        return told_of_stages(measured, events, [size["steps"] for size in self.rows])

    @torch.inference_mode()
    def _turn(self, ranges: Ranges) -> Turn:
        contexts = Contexts(
            video_BLD=self._contexts.video_BLD.to(self.device),
            audio_BLD=self._contexts.audio_BLD.to(self.device),
        )
        calls: list[Forward] = []
        for stage in stages_of(self.setup.request):
            state = noise(self.model.config, stage, self.device)
            calls += forwards(self.model, state, contexts, stage)

        def run(clock: StageClock) -> Callable[[], None]:
            for step, call in enumerate(calls):
                with clock.stage(DENOISE, step=step):
                    call()
            return lambda: None

        return timed_turn(self.device, ranges, None, run)


def diffusers_twin(ours: LTXModel, dtype: torch.dtype) -> Any:
    """Its module over the tensors of ours, all in dtype as from_pretrained(torch_dtype=) has it."""
    config = ours.config
    package = importlib.import_module("diffusers")
    with torch.device("meta"):
        twin = package.LTX2VideoTransformer3DModel(
            in_channels=config.in_channels,
            out_channels=config.out_channels,
            num_attention_heads=config.num_attention_heads,
            attention_head_dim=config.attention_head_dim,
            cross_attention_dim=config.cross_attention_dim,
            audio_in_channels=config.audio_in_channels,
            audio_out_channels=config.audio_out_channels,
            audio_num_attention_heads=config.audio_num_attention_heads,
            audio_attention_head_dim=config.audio_attention_head_dim,
            audio_cross_attention_dim=config.audio_cross_attention_dim,
            num_layers=config.num_layers,
            rope_type="split",
            rope_double_precision=True,
            gated_attn=True,
            audio_gated_attn=True,
            cross_attn_mod=True,
            audio_cross_attn_mod=True,
            use_prompt_embeddings=False,
            ff_bias=config.ff_bias,
            audio_ff_bias=config.audio_ff_bias,
            use_prompt_adaln_single=True,
            use_keyframes_abs_pos_embedding=True,
        )
    tensors = {diffusers_name(name): value.to(dtype) for name, value in ours.state_dict().items()}
    twin.load_state_dict(tensors, strict=True, assign=True)
    rest = [name for name, value in twin.named_parameters() if value.is_meta]
    assert not rest, rest
    return twin.eval().requires_grad_(False)


def own_times(twin: Any) -> Any:
    """The same module with the hooks: AV attentions are modulated by the stream's own times."""
    own: dict[str, Tensor] = {}
    twin.time_embed.register_forward_pre_hook(lambda _, a: own.__setitem__("v", a[0]))
    twin.audio_time_embed.register_forward_pre_hook(lambda _, a: own.__setitem__("a", a[0]))
    video, audio = twin.av_cross_attn_video_scale_shift, twin.av_cross_attn_audio_scale_shift
    video.register_forward_pre_hook(lambda _, a: (own["v"], *a[1:]))
    audio.register_forward_pre_hook(lambda _, a: (own["a"], *a[1:]))
    return twin


def diffusers_name(name: str) -> str:
    """The name of one of our parameters in diffusers' module."""
    parts = name.split(".")
    for ours in sorted(NAMES, key=len, reverse=True):
        if ours in parts:
            return ".".join(NAMES[ours] if part == ours else part for part in parts)
    return name


def noise(config: Any, stage: Stage, device: torch.device) -> Streams:
    """Unit noise as the state of a stage: the time of a step does not depend on it."""
    generator = torch.Generator(device).manual_seed(3)
    latent = stage.shape.latent

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, device=device)

    return Streams(
        video=normal(1, latent.video_tokens, config.in_channels),
        audio=normal(1, latent.audio, config.audio_in_channels),
    )


def forwards(model: Any, state: Streams, contexts: Contexts, stage: Stage) -> list[Forward]:
    """A call for each step as its pipeline makes it: one time for all tokens.

    What is the same in all, coordinates among it, is made before. Everything is on one device.
    """
    latent, fps = stage.shape.latent, stage.shape.fps
    device, dtype = state.video.device, model.dtype
    marker = torch.zeros(1, latent.video_tokens, 1, device=device, dtype=dtype)
    marker[:, : latent.frame_tokens] = 1
    same = {
        "hidden_states": state.video.to(dtype),
        "audio_hidden_states": state.audio.to(dtype),
        "encoder_hidden_states": contexts.video_BLD,
        "audio_encoder_hidden_states": contexts.audio_BLD,
        "num_frames": latent.frames,
        "height": latent.height,
        "width": latent.width,
        "fps": fps,
        "audio_num_frames": latent.audio,
        "video_coords": model.rope.prepare_video_coords(
            1, latent.frames, latent.height, latent.width, device, fps=fps
        ),
        "audio_coords": model.audio_rope.prepare_audio_coords(1, latent.audio, device),
        "use_cross_timestep": True,
        "video_keyframes_mask": marker,
        "return_dict": False,
    }
    times = [torch.full((1,), sigma * 1000, device=device) for sigma in stage.sigmas[:-1]]
    return [partial(model, **same, timestep=time_B, sigma=time_B) for time_B in times]


def _check_package() -> None:
    try:
        importlib.import_module("diffusers")
    except ImportError as error:
        raise ValueError(
            f"diffusers cannot be imported ({error}); pip install -e .[peers]"
        ) from error
