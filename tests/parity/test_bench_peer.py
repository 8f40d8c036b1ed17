"""The peer of a benchmark computes the same velocities from the same rows, so its time counts."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor

from runtime.bench.base import Setup, opener
from runtime.h3.denoise import Latents, Shifts, Side, draw_noise
from runtime.h3.load import load_denoiser
from runtime.h3.model import pack_audio, patchify
from runtime.h3.packing import target_of
from runtime.h3.schedule import map_sigma
from runtime.h3.synthetic import synthetic_conditioning
from runtime.messages import Ref2VARequest
from tests.denoiser_parts import CPU, demo_plan

pytest.importorskip("diffusers", reason="pip install -e .[peers]")

WEIGHTS = "tiny:full_bf16"
WORDS = 11
REQUEST = Ref2VARequest(id="peer", prompt="", width=96, height=64, frames=22, steps=1)
BF16_LIMIT = 2.5e-2  # of tests/parity/test_diffusers_oracle.py, which says where it comes from


def setup() -> Setup:
    return Setup(
        subject="diffusers",
        plan=demo_plan(dtype="bf16"),
        request=REQUEST,
        text_rows=WORDS,
        weights=WEIGHTS,
        decode=False,
        media=False,
        out=Path(),
        attention="native",
    )


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def test_the_peer_packs_our_rows_and_finds_our_velocities() -> None:
    from runtime.bench.peer import DiffusersSubject

    peer, sigma = DiffusersSubject(setup()), torch.tensor(0.7)
    plan = demo_plan(dtype="bf16")
    model, _ = load_denoiser(opener(WEIGHTS)(plan.models.dit, "dit"), plan, CPU)
    text_dim = model.cfg.text_dim
    conditioning = synthetic_conditioning(REQUEST, WORDS, REQUEST.seed, text_dim=text_dim)
    side = Side(
        model, conditioning, target_of(REQUEST), seed=REQUEST.seed, shifts=Shifts(), device=CPU
    )
    assert peer.rows == side.layout.num_rows
    noise = draw_noise(target_of(REQUEST), REQUEST.seed)
    # the network must see the peer's audio, so the carried one is scaled back
    carried = noise.audio * (sigma / map_sigma(sigma, 12.0, 3.0))
    taps: dict[str, Tensor] = {}
    with torch.inference_mode():
        side.velocity(Latents(video=noise.video, audio=carried), sigma, taps.__setitem__)
    video, audio = peer.velocity(sigma)
    assert relative(-video.float(), patchify(taps["v_video"].float())) <= BF16_LIMIT
    assert relative(-audio.float(), pack_audio(taps["v_audio"].float())) <= BF16_LIMIT


def test_the_peer_refuses_a_plan_on_files() -> None:
    from dataclasses import replace

    from runtime.bench.peer import DiffusersSubject

    with pytest.raises(ValueError, match="random conditioning and weights"):
        DiffusersSubject(replace(setup(), weights=""))


def test_the_peers_vae_decodes_in_fp16_with_what_diffusers_keeps_in_fp32() -> None:
    """One part of a name is not a module: quant_conv stays, post_quant_conv does not."""
    from diffusers import AutoencoderKLMiniMaxH3

    from runtime.bench.peer import as_loaded

    torch.manual_seed(0)
    exact = AutoencoderKLMiniMaxH3(
        block_out_channels=(8,) * 6,
        layers_per_block=1,
        norm_num_groups=4,
        decoder_num_layers=2,
        decoder_num_attention_heads=2,
    ).eval()
    half, latent = as_loaded(copy.deepcopy(exact), torch.float16), torch.randn(1, 24, 7, 4, 4)
    dtypes = {name: parameter.dtype for name, parameter in half.named_parameters()}
    assert dtypes["quant_conv.weight"] == dtypes["decoder.norm_out.weight"] == torch.float32
    assert dtypes["post_quant_conv.weight"] == dtypes["decoder.proj_in.weight"] == torch.float16
    with torch.inference_mode():
        assert relative(half.decode(latent).sample, exact.decode(latent).sample) < 5e-3
