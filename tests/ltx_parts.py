"""Small LTX denoisers for tests: random weights, and the same ones in diffusers' module."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor, nn

from runtime.kernels.attention import AttentionOptions, load_attention
from runtime.ltx.config import LTXConfig
from runtime.ltx.forms import MODEL, Form
from runtime.ltx.model import LTXModel
from runtime.ltx.packing import Seconds, keyframe_mask, rope_tables
from runtime.ltx.sizes import LatentShape

CPU = torch.device("cpu")
SHAPE = LatentShape(frames=3, height=2, width=4, audio=9)
FPS = 24.0
TRANSFORMER: dict[str, Any] = {
    "_class_name": "AVTransformer3DModel",
    "num_layers": 3,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "in_channels": 8,
    "out_channels": 8,
    "audio_num_attention_heads": 2,
    "audio_attention_head_dim": 8,
    "audio_in_channels": 128,
    "audio_out_channels": 128,
    "caption_channels": 12,
    "norm_eps": 1e-6,
    "positional_embedding_theta": 10000.0,
    "positional_embedding_max_pos": [20, 2048, 2048],
    "audio_positional_embedding_max_pos": [20],
    "rope_type": "split",
    "frequencies_precision": "float64",
    "use_middle_indices_grid": True,
    "causal_temporal_positioning": True,
    "timestep_scale_multiplier": 1000,
    "av_ca_timestep_scale_multiplier": 1000.0,
    "cross_attention_adaln": True,
    "apply_gated_attention": True,
    "ff_bias": False,
    "audio_ff_bias": True,
    "use_prompt_adaln_single": True,
    "connector_num_layers": 2,
    "connector_num_learnable_registers": 8,
    "connector_positional_embedding_max_pos": [4096],
    "connector_apply_gated_attention": True,
    "connector_norm_output": True,
}


def tiny_config(**changes: Any) -> LTXConfig:
    """Video 32 wide, audio 16; one angle of the video's rope is padding, as in the real model."""
    table = TRANSFORMER | changes
    for lead in ("", "audio_"):
        heads = table[f"{lead}num_attention_heads"], table[f"{lead}attention_head_dim"]
        table[f"{lead}cross_attention_dim"] = heads[0] * heads[1]
        table[f"{lead}connector_num_attention_heads"] = heads[0]
        table[f"{lead}connector_attention_head_dim"] = heads[1]
    config = json.dumps({"transformer": table})
    return LTXConfig.from_header({"model_version": "2.5.0", "config": config})


def fill(model: nn.Module, seed: int = 1) -> None:
    """Random weights, by name; norms of queries and keys around 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            values = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(values * (0.15 if parameter.ndim > 1 else 0.05))
            if "q_norm" in name or "k_norm" in name:
                parameter.add_(1.0)


def tiny_model(
    config: LTXConfig | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    keyframes: bool = True,
    form: Form = MODEL,
) -> LTXModel:
    """A tiny denoiser on the CPU, sdpa."""
    attend = load_attention("sdpa", CPU, dtype, AttentionOptions())
    model = LTXModel(config or tiny_config(), attend, keyframes=keyframes, form=form)
    fill(model)
    return model.to(dtype).eval().requires_grad_(False)


def inputs(config: LTXConfig, *, batch: int = 1, sigma: float = 0.725, frozen: bool = False) -> Any:
    """Random arguments of LTXModel.forward as keywords, without rope and v2a_source."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    sigma_B = torch.full((batch,), sigma)
    mask_BN = torch.ones(batch, SHAPE.video_tokens)
    if frozen:
        mask_BN[:, : SHAPE.frame_tokens] = 0
    return {
        "video_BNC": normal(batch, SHAPE.video_tokens, config.in_channels),
        "audio_BAC": normal(batch, SHAPE.audio, config.audio_in_channels),
        "context_video": normal(batch, 5, config.video_dim),
        "context_audio": normal(batch, 5, config.audio_dim),
        "video_timestep_BN": mask_BN * sigma_B[:, None],
        "audio_timestep_BA": sigma_B[:, None].expand(-1, SHAPE.audio).contiguous(),
        "video_sigma_B": sigma_B,
        "audio_sigma_B": sigma_B,
        "keyframe_mask": keyframe_mask(SHAPE),
    }


def run(
    model: LTXModel, arguments: Any, *, seconds: Seconds = "divide", **changes: Any
) -> tuple[Tensor, Tensor]:
    """One forward on SHAPE."""
    rope = rope_tables(model.config, SHAPE, FPS, seconds=seconds)
    with torch.inference_mode():
        found: tuple[Tensor, Tensor] = model(**arguments | {"rope": rope} | changes)
    return found
