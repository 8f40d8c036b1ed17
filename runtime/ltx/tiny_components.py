"""Random tiny folders of everything around the denoiser, as diffusers and transformers write them.

For `make-demo --family ltx --size tiny` and the tests: the published topology with few channels, so
that a whole request runs on a CPU in seconds. The numbers are random; pictures and sound are noise.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from runtime.ltx.components import library
from runtime.ltx.config import LTXConfig

TEXT_LAYERS = 3
BYTES = 256
PAD, EOS, BOS = 0, 1, 2
SPECIAL = {"<pad>": PAD, "<eos>": EOS, "<bos>": BOS}


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentFolders:
    """Where write_tiny_components put each part; the tokenizer lies beside the text encoder."""

    text_encoder: Path
    tokenizer: Path
    video_vae: Path
    audio_vae: Path
    vocoder: Path
    upsampler: Path


def write_tiny_components(
    folder: Path, config: LTXConfig, *, gemma_version: str = "", seed: int = 0
) -> ComponentFolders:
    """Write all parts that fit a denoiser of this config, named as diffusers names them.

    gemma_version: what the text encoder's config.json says, "" for nothing. Unavailable without the
    extra `ltx`.
    """
    folders = ComponentFolders(
        text_encoder=folder / "text_encoder",
        tokenizer=folder / "tokenizer",
        video_vae=folder / "vae",
        audio_vae=folder / "audio_vae",
        vocoder=folder / "vocoder",
        upsampler=folder / "latent_upsampler",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for role, module in tiny_modules(config).items():
            _save(module, getattr(folders, role))
        _save(_connectors(config), folder / "connectors")
    if gemma_version:
        path = folders.text_encoder / "config.json"
        table = json.loads(path.read_text()) | {"gemma_version": gemma_version}
        path.write_text(json.dumps(table, indent=2))
    folders.tokenizer.mkdir(exist_ok=True)
    (folders.tokenizer / "tokenizer.json").write_text(tiny_tokenizer())
    return folders


def tiny_modules(config: LTXConfig) -> dict[str, Any]:
    """By role, random modules of diffusers and transformers, on torch's default device."""
    return {
        "video_vae": _video_vae(config),
        "audio_vae": _audio_vae(),
        "vocoder": _vocoder(),
        "upsampler": _upsampler(config),
        "text_encoder": _text_encoder(config),
    }


def _save(module: Any, folder: Path) -> None:
    library("transformers").utils.logging.disable_progress_bar()
    nn.Module.to(module, torch.bfloat16).save_pretrained(folder)


def _statistics(module: Any) -> None:
    """Not the identity, so that a normalisation left out would show."""
    module.latents_mean.normal_(std=0.1)
    module.latents_std.uniform_(0.8, 1.2)


def _video_vae(config: LTXConfig) -> Any:
    """Strides, paddings and causality of the published convolutional VAE (section 6)."""
    vae = library("diffusers").AutoencoderKLLTX2Video(
        latent_channels=config.in_channels,
        block_out_channels=(8, 16, 16, 16),
        layers_per_block=(1, 1, 1, 1, 1),
        downsample_type=("spatial", "temporal", "spatiotemporal", "spatiotemporal"),
        spatio_temporal_scaling=(True, True, True, True),
        decoder_block_out_channels=(8, 16, 16, 32),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
        decoder_spatio_temporal_scaling=(True, True, True, True),
        decoder_inject_noise=(False, False, False, False, False),
        upsample_type=("spatiotemporal", "spatiotemporal", "temporal", "spatial"),
        upsample_factor=(2, 2, 1, 2),
        upsample_residual=(False, False, False, False),
        decoder_causal=False,
        encoder_spatial_padding_mode="zeros",
        decoder_spatial_padding_mode="zeros",
        spatial_compression_ratio=32,
        temporal_compression_ratio=8,
    )
    _statistics(vae)
    return vae


def _audio_vae() -> Any:
    """128 base channels, for so many statistics has a packed latent; one block a level."""
    vae = library("diffusers").AutoencoderKLLTX2Audio(ch_mult=(1, 1, 1), num_res_blocks=1)
    _statistics(vae)
    return vae


def _vocoder() -> Any:
    """The published strides over few channels, which halve at each."""
    module = library("diffusers.pipelines.ltx2.vocoder")
    return module.LTX2VocoderWithBWE(hidden_channels=64, bwe_hidden_channels=32)


def _upsampler(config: LTXConfig) -> Any:
    module = library("diffusers.pipelines.ltx2.latent_upsampler")
    return module.LTX2LatentUpsamplerModel(
        in_channels=config.in_channels,
        mid_channels=32,  # a group norm of 32 groups follows
        num_blocks_per_stage=1,
        use_rational_resampler=False,
    )


def _text_encoder(config: LTXConfig) -> Any:
    """Sliding layers, then one that sees all and takes its values from its keys, as Gemma 4."""
    transformers = library("transformers")
    text = {
        "vocab_size": BYTES + len(SPECIAL),
        "hidden_size": config.caption_channels,
        "intermediate_size": 2 * config.caption_channels,
        "num_hidden_layers": TEXT_LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "layer_types": ["sliding_attention"] * (TEXT_LAYERS - 1) + ["full_attention"],
        "pad_token_id": PAD,
        "eos_token_id": EOS,
        "bos_token_id": BOS,
    }
    made = transformers.Gemma4UnifiedConfig(
        text_config=text, vision_config=None, audio_config=None, initializer_range=0.1
    )
    tower: nn.Module = transformers.Gemma4UnifiedForConditionalGeneration(made)
    for parameter in tower.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return tower


def _connectors(config: LTXConfig) -> Any:
    """diffusers keeps the text projection with the connectors; ours come from the denoiser."""
    module = library("diffusers.pipelines.ltx2.connectors")
    heads, head_dim = config.connector_heads(False)
    audio_heads, audio_head_dim = config.connector_heads(True)
    return module.LTX2TextConnectors(
        caption_channels=config.caption_channels,
        text_proj_in_factor=TEXT_LAYERS + 1,
        video_connector_num_attention_heads=heads,
        video_connector_attention_head_dim=head_dim,
        video_connector_num_layers=1,
        video_connector_num_learnable_registers=config.connector_num_learnable_registers,
        video_gated_attn=True,
        audio_connector_num_attention_heads=audio_heads,
        audio_connector_attention_head_dim=audio_head_dim,
        audio_connector_num_layers=1,
        audio_connector_num_learnable_registers=config.connector_num_learnable_registers,
        audio_gated_attn=True,
        rope_type="split",
        per_modality_projections=True,
        video_hidden_dim=config.video_dim,
        audio_hidden_dim=config.audio_dim,
        proj_bias=True,
    )


def tiny_tokenizer() -> str:
    """tokenizer.json of a byte-level tokenizer without merges, which adds no BOS of its own."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = SPECIAL | {letter: i + len(SPECIAL) for i, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
    return str(tokenizer.to_str())
