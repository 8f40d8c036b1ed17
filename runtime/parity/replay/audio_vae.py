"""Replay of `audio` goldens: waves to latents and back, free, and module by module as stored."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from runtime.checkpoints import open_checkpoint
from runtime.h3.audio_vae import AudioVAE, fit_stereo, load_audio_vae, loudness_guard, resample
from runtime.h3.sizes import SAMPLE_RATE
from runtime.parity.golden import Golden
from runtime.parity.metrics import Comparison, Unsupported, compare
from runtime.parity.setup import Setup

CHECKPOINT = "h3_tiny_audio_vae_fp32.safetensors"
ENCODE, DECODE = "audio VAE encode", "audio VAE decode"


def replay(golden: Golden, checkpoints: Path, setup: Setup) -> list[Comparison]:
    """Every stored output and module tap.

    Free: from the waves or latents alone. Staged (CPU only): each module and decode from its stored
    input.
    """
    vae, _ = load_audio_vae(
        open_checkpoint(checkpoints / CHECKPOINT, "audio_vae"), device=setup.device
    )
    with torch.no_grad(), _tapped(vae) as taps:
        out = [c for k in _numbers(golden, r"in/(\d+)/wave") for c in _round_trip(vae, golden, k)]
        for k in _numbers(golden, r"in/latent_(\d+)"):
            out += _decoded(vae, golden, k)
        out += [_free_module(golden, name, taps) for name in _modules(golden)]
        if setup.staged:
            out += list(_staged_modules(vae, golden))
    return out


def _numbers(golden: Golden, pattern: str) -> list[int]:
    found = (re.fullmatch(pattern, name) for name in golden.names)
    return sorted(int(m[1]) for m in found if m)


def _modules(golden: Golden) -> list[str]:
    return sorted(name[len("mod/") :] for name in golden.names if name.startswith("mod/"))


@contextmanager
def _tapped(vae: AudioVAE) -> Iterator[dict[str, Tensor]]:
    """The output of every module's first call."""
    taps: dict[str, Tensor] = {}

    def hook(name: str) -> Callable[[nn.Module, object, Tensor], None]:
        def keep(module: nn.Module, args: object, output: Tensor) -> None:
            if name not in taps:
                taps[name] = output.clone()

        return keep

    handles = [m.register_forward_hook(hook(name)) for name, m in vae.named_modules()]
    try:
        yield taps
    finally:
        for handle in handles:
            handle.remove()


def _wave(golden: Golden, k: int) -> Tensor:
    return resample(golden.tensor(f"in/{k}/wave"), golden.params["waves"][k]["sr"], SAMPLE_RATE)


def _round_trip(vae: AudioVAE, golden: Golden, k: int) -> Iterator[Comparison]:
    latent = vae.encode(_wave(golden, k))
    yield from _compared(golden, f"out/{k}/latent", latent, "free", ENCODE)
    name = f"out/{k}/decoded"
    if name in golden:
        yield from _compared(golden, name, vae.decode(latent), "free", DECODE)
        staged = vae.decode(golden.tensor(f"out/{k}/latent"))
        yield from _compared(golden, name, staged, "staged", DECODE)


def _decoded(vae: AudioVAE, golden: Golden, k: int) -> Iterator[Comparison]:
    latent, out = golden.tensor(f"in/latent_{k}"), f"out/latent_{k}"
    for gain, suffix in ((1.0, ""), (float(golden.params.get("loud", 1.0)), "_loud")):
        raw = vae.decode(latent * gain)
        yield from _compared(golden, f"{out}/raw{suffix}", raw, "free", DECODE)
        node = loudness_guard(raw)
        yield from _compared(golden, f"{out}/node{suffix}", node, "free", DECODE)
        if f"{out}/raw{suffix}" in golden:
            staged = loudness_guard(golden.tensor(f"{out}/raw{suffix}"))
            yield from _compared(golden, f"{out}/node{suffix}", staged, "staged", DECODE)


def _compared(golden: Golden, name: str, got: Tensor, run: str, stage: str) -> Iterator[Comparison]:
    if name in golden:
        yield compare(name, got, golden.tensor(name), run=run, stage=stage)


def _free_module(golden: Golden, name: str, taps: dict[str, Tensor]) -> Comparison:
    if name not in taps:
        raise Unsupported(f"module tap {name}")
    want = golden.tensor(f"mod/{name}")
    return compare(f"mod/{name}", taps[name], want, run="free", stage=_stage(name))


def _stage(module: str) -> str:
    return DECODE if module.startswith("dec") else ENCODE


def _staged_modules(vae: AudioVAE, golden: Golden) -> Iterator[Comparison]:
    """Every tap, and the first output, from the stored tensors that its stage starts from."""
    for name, (needs, compute) in _steps(vae).items():
        if name in golden and all(need in golden for need in needs):
            got = compute(*(_input(golden, need) for need in needs))
            stage = _stage(name.split("/")[1]) if name.startswith("mod/") else ENCODE
            yield compare(name, got, golden.tensor(name), run="staged", stage=stage)


def _input(golden: Golden, name: str) -> Tensor:
    if name != "in/0/wave":
        return golden.tensor(name)
    wave = fit_stereo(_wave(golden, 0))
    return wave.reshape(2, 1, -1)


def _steps(vae: AudioVAE) -> dict[str, tuple[tuple[str, ...], Callable[..., Tensor]]]:
    pre, decoder = vae.pre_block, vae.decoder
    steps: dict[str, tuple[tuple[str, ...], Callable[..., Tensor]]] = {
        "mod/pre_block.attn": (
            ("mod/encoder",),
            lambda x: pre.attn(pre.norm1(x.transpose(1, 2))),
        ),
        "mod/pre_block": (("mod/encoder",), lambda x: pre(x.transpose(1, 2))),
        "mod/mean_proj": (("mod/pre_block",), lambda x: vae.mean_proj(x.transpose(1, 2))),
        "out/0/latent": (("mod/mean_proj",), vae.normalised),
        "mod/dec_in_proj": (("in/latent_0",), lambda z: vae.dec_in_proj(vae.denormalised(z))),
        "mod/decoder.conv_pre": (("mod/dec_in_proj",), decoder.conv_pre),
        "mod/decoder.ups.0": (("mod/decoder.conv_pre",), decoder.ups[0]),
        "out/latent_0/raw": (
            ("mod/decoder.activation_post",),
            lambda x: decoder.finish(x).reshape(1, 2, -1),
        ),
    }
    for i, block in enumerate(vae.encoder.block):
        source = f"mod/encoder.block.{i - 1}" if i else "in/0/wave"
        steps[f"mod/encoder.block.{i}"] = ((source,), block)
    for i in range(len(decoder.ups)):
        last = i + 1 == len(decoder.ups)
        name = "decoder.activation_post" if last else f"decoder.ups.{i + 1}"
        after = vae.get_submodule(name)
        steps[f"mod/{name}"] = ((f"mod/decoder.ups.{i}",), _after_mix(vae, i, after))
    return steps


def _after_mix(vae: AudioVAE, stage: int, after: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: after(vae.decoder.mix(stage, x))
