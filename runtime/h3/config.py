"""The dimensions of one H3 denoiser, read from its checkpoint's shapes (contract 1.2)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from runtime.checkpoints.base import Checkpoint, CheckpointError

NORM_EPS = 1e-5  # norm, q/k norm and final norm alike
PATCH = 2
_VECTORS = ("blocks.0.attn.q_norm.weight", "rope.inv_freq")
NUM_MODALITIES = 3  # AdaLN rows per timestep: 0 video, 1 text, 2 audio
# Names in the header's `config` -> ours; the others there do not shape the model
_CONFIG_NAMES = {
    "hidden_size": "hidden",
    "num_layers": "num_layers",
    "token_refiner_num_layers": "num_refiner_layers",
    "num_attention_heads": "num_heads",
    "attention_head_dim": "head_dim",
    "ffn_hidden_size": "ffn",
    "text_dim": "text_dim",
    "latents_dim": "video_channels",
    "audio_latents_dim": "audio_channels",
    "rope_inv_freq_len": "num_inv_freq",
    "time_embed_dim": "time_dim",
    "adaln_curve_grid": "curve_grid",
    "time_embed_hidden_size": "time_hidden",
    "timestep_input_dim": "frequency_dim",
}
_EPS_NAMES = ("norm_eps", "qk_norm_eps", "final_norm_eps")


@dataclass(frozen=True, slots=True, kw_only=True)
class H3Config:
    """Everything is derived from shapes, or from the header's `config` where a file has one."""

    hidden: int
    num_layers: int
    num_refiner_layers: int
    num_heads: int
    head_dim: int
    ffn: int
    text_dim: int
    video_channels: int
    audio_channels: int
    num_inv_freq: int
    time_dim: int  # width of t_emb: 2688 (full), 8 (pruned)
    curve_grid: int  # rows of adaln_t_table; 0 in the full form
    time_hidden: int  # hidden width of the time embedder; 0 in the pruned form
    frequency_dim: int  # sinusoids that enter it: 256; 0 in the pruned form

    @property
    def pruned(self) -> bool:
        """Pruned: the time path is a table (contract 1.17)."""
        return self.curve_grid > 0

    @property
    def rope_dim(self) -> int:
        """Leading dims of a head that are rotated: 3 axes x inv_freq x 2."""
        return 6 * self.num_inv_freq

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> H3Config:
        """Contract 1.2; only output rows are used, so packed columns do not disturb it.

        What the header's `config` says under "transformer" stands over the shapes; a size that
        then does not fit the tensors is refused when they are loaded. CheckpointError when a
        tensor is missing or the sizes do not fit together.
        """
        names, told = set(checkpoint.names()), _told(checkpoint.metadata)
        for needed in ("video_patch_proj.weight", "audio_patch_proj.weight"):
            if needed not in names:
                raise CheckpointError(f"not an H3 denoiser: it has no {needed}")

        def shape(name: str) -> tuple[int, ...]:
            sizes = checkpoint.shape(name)
            if 0 in sizes or len(sizes) != (1 if name in _VECTORS else 2):
                raise CheckpointError(
                    f"{name} has shape {list(sizes)}; it must be a "
                    f"{'vector' if name in _VECTORS else 'matrix'} that is not empty"
                )
            return sizes

        head_dim = shape("blocks.0.attn.q_norm.weight")[0]
        if "adaln_t_table" in names:
            curve_grid, time_dim = shape("adaln_t_table")
            time_hidden = frequency_dim = 0
        else:
            curve_grid = 0
            time_hidden, frequency_dim = shape("time_embedder.proj_in.weight")
            time_dim = shape("time_embedder.proj_out.weight")[0]
        cfg = cls(
            hidden=shape("video_patch_proj.weight")[0],
            num_layers=_count(names, "blocks"),
            num_refiner_layers=_count(names, "token_refiner.blocks"),
            num_heads=shape("blocks.0.attn.qkv_proj.weight")[0] // (3 * head_dim),
            head_dim=head_dim,
            ffn=shape("blocks.0.mlp.fc1.weight")[0] // 2,
            text_dim=told.get("text_dim") or _text_dim(checkpoint),
            video_channels=shape("final_layer.video_out.weight")[0] // PATCH**2,
            audio_channels=shape("final_layer.audio_out.weight")[0],
            num_inv_freq=shape("rope.inv_freq")[0],
            time_dim=time_dim,
            curve_grid=curve_grid,
            time_hidden=time_hidden,
            frequency_dim=frequency_dim,
        )
        cfg = replace(cfg, **told)
        if cfg.rope_dim > cfg.head_dim:
            raise CheckpointError(
                f"rope.inv_freq has {cfg.num_inv_freq} frequencies, which rotate {cfg.rope_dim} "
                f"dims, but a head has {cfg.head_dim}"
            )
        return cfg


def _told(metadata: Mapping[str, Any]) -> dict[str, int]:
    """Our sizes that the header's `config` names; CheckpointError for what cannot be run."""
    text = metadata.get("config")
    if text is None:
        return {}
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"the header's config is not JSON: {error}") from error
    table = config.get("transformer", {}) if isinstance(config, dict) else None
    if not isinstance(table, dict):
        raise CheckpointError(
            f"the header's config must be an object with an object 'transformer', got {text:.80}"
        )
    for name in _EPS_NAMES:
        eps = table.get(name, NORM_EPS)
        if not (isinstance(eps, float) and math.isclose(eps, NORM_EPS)):
            raise CheckpointError(f"the header's config has {name} {eps}; {NORM_EPS} is supported")
    if table.get("patch_size", [1, PATCH, PATCH]) != [1, PATCH, PATCH]:
        raise CheckpointError(
            f"the header's config has patch_size {table['patch_size']}; [1, 2, 2] is supported"
        )
    sizes: dict[str, int] = {}
    for name, ours in _CONFIG_NAMES.items():
        size = table.get(name)
        if size is None:  # absent, or null: a full file's adaln_curve_grid
            continue
        if type(size) is not int or size < 1:
            raise CheckpointError(
                f"the header's config has {name} {size!r}; it must be a whole number of at least 1"
            )
        sizes[ours] = size
    return sizes


def _count(names: set[str], prefix: str) -> int:
    count = 0
    while any(name.startswith(f"{prefix}.{count}.") for name in names):
        count += 1
    return count


def _text_dim(checkpoint: Checkpoint) -> int:
    # A packed width would be half the real one, as ComfyUI's own detection would read it.
    quant = checkpoint.layers.get("condition_proj")
    if quant is not None and quant.format == "nvfp4":
        raise CheckpointError(
            "condition_proj is NVFP4: its text width cannot be read from the file"
        )
    return checkpoint.shape("condition_proj.weight")[1]
