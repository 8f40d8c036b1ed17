"""Seconds of one LTX step, ours and diffusers' in turns: `python -m tests.gpu.ltx_times`.

Random full-size weights in the published layout, made on the device, bf16; diffusers' module holds
the very same tensors, so the velocities are compared too. A figure is the median over calls timed
by GPU events, with the least and the most. One JSON line per size and stage, everything again as
the last line. `--size tiny --device cpu` runs all of it on a CPU (seconds of a CPU's clock).
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.metadata
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from runtime.ltx.attention import load_ltx_attention
from runtime.ltx.config import LTXConfig
from runtime.ltx.demo import random_denoiser
from runtime.ltx.denoise import Streams, Velocity, nothing_clean, times_of
from runtime.ltx.load import load_denoiser
from runtime.ltx.model import Contexts, LTXModel
from runtime.ltx.sizes import LatentShape, LTXShape
from runtime.machine import driver
from tests.ltx_parts import diffusers_name

FPS, TEXT_ROWS, SIGMA = 24.0, 1024, 0.725
SIZES = {"full": ((768, 512, 97), (1280, 704, 121)), "tiny": ((128, 64, 9),)}
NVFP4, BF16, PEER = "nvfp4_dequant", "bf16", "diffusers"
Call = Callable[[], tuple[Tensor, Tensor]]


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=tuple(SIZES), default="full")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--attention", default="sdpa_cudnn")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    device = torch.device(args.device)
    models, weights = load_all(args.size, args.attention, device)
    stages = [
        {"size": f"{width}x{height}x{frames}", "stage": stage}
        | measure(models, shape.half.latent if stage == 1 else shape.latent, args.rounds, device)
        for width, height, frames in SIZES[args.size]
        for shape in (LTXShape(frames=frames, height=height, width=width, fps=FPS),)
        for stage in (1, 2)
    ]
    on_gpu = device.type == "cuda"
    result = {
        "gpu": torch.cuda.get_device_name() if on_gpu else "cpu",
        "driver": driver(),
        "torch": torch.__version__,
        "diffusers": importlib.metadata.version("diffusers"),
        "attention": args.attention,
        "text_rows": TEXT_ROWS,
        "rounds": args.rounds,
        "weights": weights,
        "stages": stages,
    }
    print(json.dumps(result))


def load_all(
    size: str, attention: str, device: torch.device
) -> tuple[dict[str, nn.Module], dict[str, Any]]:
    """Every model by name; bytes and seconds of loading."""
    models: dict[str, nn.Module] = {}
    told = {}
    for name, stored in ((BF16, "bf16"), (NVFP4, "nvfp4")):
        before, began = used(device), time.perf_counter()
        checkpoint = random_denoiser(size, stored)
        attend = load_ltx_attention(attention, checkpoint.census.config, device, torch.bfloat16)
        models[name], _ = load_denoiser(checkpoint, attend, device=device, dtype=torch.bfloat16)
        seconds = time.perf_counter() - began
        told[name] = {"bytes": used(device) - before, "seconds": round(seconds, 2)}
        print(json.dumps({name: told[name]}), flush=True)
    models[PEER] = diffusers_twin(models[BF16], attention, device)
    return models, told


def diffusers_twin(ours: nn.Module, attention: str, device: torch.device) -> nn.Module:
    """diffusers' module over the same tensors, with the four hooks of ltx25.md 9.1."""
    assert isinstance(ours, LTXModel)
    config: LTXConfig = ours.config
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
    tensors = {diffusers_name(name): value for name, value in ours.state_dict().items()}
    # its tables are bf16, as from_pretrained(torch_dtype=bfloat16) makes them
    tensors = {name: value.to(torch.bfloat16) for name, value in tensors.items()}
    twin.load_state_dict(tensors, strict=True, assign=True)
    if device.type == "cuda":
        twin.set_attention_backend("_native_cudnn" if attention == "sdpa_cudnn" else "native")
    twin.eval().requires_grad_(False)
    own: dict[str, Any] = {}
    twin.time_embed.register_forward_pre_hook(lambda _, a: own.__setitem__("v", a[0]))
    twin.audio_time_embed.register_forward_pre_hook(lambda _, a: own.__setitem__("a", a[0]))
    video, audio = twin.av_cross_attn_video_scale_shift, twin.av_cross_attn_audio_scale_shift
    video.register_forward_pre_hook(lambda _, a: (own["v"], *a[1:]))
    audio.register_forward_pre_hook(lambda _, a: (own["a"], *a[1:]))
    rest = [name for name, value in twin.named_parameters() if value.is_meta]
    assert not rest, rest
    return twin


def measure(
    models: dict[str, nn.Module], shape: LatentShape, rounds: int, device: torch.device
) -> dict[str, Any]:
    """One size: the calls in turn, what memory each takes above all weights, how they differ."""
    bf16 = models[BF16]
    assert isinstance(bf16, LTXModel)
    state, contexts = inputs(bf16.config, shape, device)
    calls: dict[str, Call] = {}
    for name, model in models.items():
        if isinstance(model, LTXModel):
            calls[name] = our_call(model, contexts, shape, state, device)
        else:
            calls[name] = their_call(model, contexts, shape, state, device)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    peak, results = {}, {}
    with torch.inference_mode():
        for name, call in calls.items():  # the warm-up
            before = reset_peak(device)
            results[name] = [value.float() for value in call()]
            peak[name] = reset_peak(device, before)
        for _ in range(rounds):
            for name, call in calls.items():
                seconds[name].append(timed(call, device))
    found: dict[str, Any] = {
        "video_tokens": shape.video_tokens,
        "audio_tokens": shape.audio,
        "subjects": {
            name: {
                "median": round(statistics.median(took), 5),
                "min": round(min(took), 5),
                "max": round(max(took), 5),
                "peak_above_weights": peak[name],
            }
            for name, took in seconds.items()
        },
    }
    found["bf16_from_diffusers"] = [
        float(torch.linalg.vector_norm(a - b) / torch.linalg.vector_norm(b))
        for a, b in zip(results[BF16], results[PEER], strict=True)
    ]
    print(json.dumps(found), flush=True)
    return found


def inputs(config: LTXConfig, shape: LatentShape, device: torch.device) -> tuple[Streams, Contexts]:
    """Unit noise as latents and contexts."""
    generator = torch.Generator(device).manual_seed(3)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, device=device)

    state = Streams(
        video=normal(1, shape.video_tokens, config.in_channels),
        audio=normal(1, shape.audio, config.audio_in_channels),
    )
    contexts = Contexts(
        video_BLD=normal(1, TEXT_ROWS, config.cross_attention_dim).bfloat16(),
        audio_BLD=normal(1, TEXT_ROWS, config.audio_cross_attention_dim).bfloat16(),
    )
    return state, contexts


def our_call(
    model: LTXModel, contexts: Contexts, shape: LatentShape, state: Streams, device: torch.device
) -> Call:
    """As the sampler calls it."""
    velocity = Velocity(model, contexts, shape, FPS)
    times = times_of(state, nothing_clean(state.video), torch.tensor(SIGMA, device=device))

    def call() -> tuple[Tensor, Tensor]:
        found = velocity(state, times)
        return found.video, found.audio

    return call


def their_call(
    model: nn.Module, contexts: Contexts, shape: LatentShape, state: Streams, device: torch.device
) -> Call:
    """As its text-to-video pipeline does: one time for all tokens, coordinates made before."""
    time_B = torch.full((1,), SIGMA * 1000, device=device)
    marker = torch.zeros(1, shape.video_tokens, 1, device=device, dtype=torch.bfloat16)
    marker[:, : shape.frame_tokens] = 1
    places: Any = model
    arguments = {
        "hidden_states": state.video.bfloat16(),
        "audio_hidden_states": state.audio.bfloat16(),
        "encoder_hidden_states": contexts.video_BLD,
        "audio_encoder_hidden_states": contexts.audio_BLD,
        "timestep": time_B,
        "sigma": time_B,
        "num_frames": shape.frames,
        "height": shape.height,
        "width": shape.width,
        "fps": FPS,
        "audio_num_frames": shape.audio,
        "video_coords": places.rope.prepare_video_coords(
            1, shape.frames, shape.height, shape.width, device, fps=FPS
        ),
        "audio_coords": places.audio_rope.prepare_audio_coords(1, shape.audio, device),
        "use_cross_timestep": True,
        "video_keyframes_mask": marker,
        "return_dict": False,
    }

    def call() -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = model(**arguments)
        return found

    return call


def timed(call: Call, device: torch.device) -> float:
    """Seconds of one call: GPU events, or a CPU's clock."""
    if device.type != "cuda":
        began = time.perf_counter()
        call()
        return time.perf_counter() - began
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / 1000


def used(device: torch.device) -> int:
    """Allocated bytes; 0 on a CPU."""
    gc.collect()
    return torch.cuda.memory_allocated() if device.type == "cuda" else 0


def reset_peak(device: torch.device, before: int = 0) -> int:
    """The most bytes since the last call, less `before` where given; else what is in use now."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize()
    most = torch.cuda.max_memory_allocated() - before if before else torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return most


if __name__ == "__main__":
    main()
