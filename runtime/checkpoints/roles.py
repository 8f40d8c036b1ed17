"""Which model a file (or a part of an all-in-one file) holds, from its tensor names (no torch)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from runtime.checkpoints.header import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """One kind of model: the tensors that give it away and the key prefixes it may carry."""

    title: str
    keys: tuple[str, ...]
    prefixes: tuple[str, ...]  # whole prefixes; one ending in "*" may continue up to the key
    unmarked: str = ""  # format of packed layers in a file that has no markers at all


ROLES: Mapping[str, Role] = {
    "dit": Role(
        title="MiniMax H3 DiT",
        keys=("video_patch_proj.weight", "audio_patch_proj.weight"),
        prefixes=("", "diffusion_model.", "model.diffusion_model.", "model.model.", "net."),
    ),
    "text_encoder": Role(
        title="Qwen3-VL text encoder",
        keys=(
            "visual.deepstack_merger_list.0.norm.weight",
            "model.layers.49.self_attn.q_proj.weight",
        ),
        prefixes=("", "text_encoders.*"),
    ),
    "video_vae": Role(
        title="H3 video VAE",
        keys=("decoder.transformer_blocks.0.scale1", "encoder.down.5.block.0.conv1.weight"),
        prefixes=("", "vae.", "video_vae.", "first_stage_model."),
    ),
    "audio_vae": Role(
        title="H3 audio VAE",
        keys=("pre_block.attn.zero_k_bias",),
        prefixes=("", "vae.", "audio_vae.", "first_stage_model."),
    ),
    "ltx_dit": Role(
        title="two-stream LTX denoiser",
        keys=(
            "adaln_single.emb.timestep_embedder.linear_1.bias",
            "audio_adaln_single.linear.weight",
        ),
        prefixes=("model.diffusion_model.", "diffusion_model.", ""),
        unmarked="nvfp4",
    ),
}
_OTHER_LAYOUTS = {
    "transformer_blocks.0.attn.to_q.weight": "a diffusers-layout transformer (split q/k/v, swapped "
    "SwiGLU halves)",
    "transformer_blocks.0.attn1.to_q.weight": "an LTX transformer without an audio stream",
}


def present(names: Collection[str]) -> dict[str, str]:
    """Roles found among the tensor names, each with its key prefix ("" in a plain file)."""
    found = {role: _prefix(names, spec) for role, spec in ROLES.items()}
    return {role: prefix for role, prefix in found.items() if prefix is not None}


def own_names(names: Collection[str], role: str, path: Path) -> dict[str, str]:
    """Map the role's tensor names without prefix -> name in the file.

    Tensors of other models in an all-in-one file are left out; anything else outside the prefix
    keeps its full name, so that strict loading lists it. Raises CheckpointError when the file does
    not hold this role (contract 1.2, 0.1.13).
    """
    if role not in ROLES:
        raise ValueError(f"role must be one of {', '.join(ROLES)}, got {role!r}")
    roles = present(names)
    if role not in roles:
        raise CheckpointError(f"{path} is not a {ROLES[role].title}: {_what_it_is(names, roles)}")
    prefix = roles[role]
    others = [_territory(key, other) for key, other in roles.items() if key != role and other]
    mine: dict[str, str] = {}
    for name in names:
        own = name.removeprefix(prefix)
        if own == name and any(name.startswith(other) for other in others):
            continue
        if own in mine:
            raise CheckpointError(
                f"{path} has the tensor {own} twice, with the prefix {prefix} and without; use a "
                f"file that has it once"
            )
        mine[own] = name
    return mine


def _territory(role: str, prefix: str) -> str:
    """The keys that belong to another model: an open-ended prefix owns its whole first word."""
    open_ended = any(want.endswith("*") for want in ROLES[role].prefixes)
    return prefix.split(".")[0] + "." if open_ended else prefix


def _prefix(names: Collection[str], role: Role) -> str | None:
    first = role.keys[0]
    candidates = [name[: -len(first)] for name in names if name.endswith(first)]
    for prefix in sorted(candidates, key=len):
        allowed = any(
            prefix.startswith(want[:-1]) if want.endswith("*") else prefix == want
            for want in role.prefixes
        )
        if allowed and all(prefix + key in names for key in role.keys):
            return prefix
    return None


def _what_it_is(names: Collection[str], roles: Mapping[str, str]) -> str:
    if roles:
        return f"it holds a {', a '.join(ROLES[role].title for role in roles)}"
    for key, layout in _OTHER_LAYOUTS.items():
        if any(name.endswith(key) for name in names):
            return f"it looks like {layout}, which is not supported"
    examples = ", ".join(sorted(names)[:3]) or "no tensors"
    return f"the tensors that mark one are missing (it begins with {examples})"
