"""Replay of a run that the ComfyUI node recorded, with the checkpoints that a plan names.

Free: from the prompt and the references where the capture has them, else from its conditioning.
Staged, on any device: each step from the recorded state, as a free run of a real model drifts away
from two roundings alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from runtime.checkpoints import open_checkpoint
from runtime.checkpoints.base import Checkpoint
from runtime.h3.audio_vae import load_audio_vae
from runtime.h3.denoise import Side
from runtime.h3.load import DTYPES, attention_options, load_denoiser
from runtime.h3.schedule import SCHEDULERS
from runtime.h3.text_streamed import encoder_of
from runtime.h3.video_vae import load_vae_attention, load_video_vae
from runtime.messages import Plan
from runtime.parity.golden import Golden
from runtime.parity.metrics import Comparison, Unsupported
from runtime.parity.replay.e2e import Case, stored_conditioning
from runtime.parity.setup import Setup

SIDES = ("pos", "neg")
_FORMATS = {"nvfp4": "nvfp4", "fp8": "float8_e4m3fn"}  # plan field -> stored format


def replay(golden: Golden, checkpoints: Path, setup: Setup) -> list[Comparison]:
    """Free, then staged. Unsupported if the plan names no checkpoints or another dtype."""
    case = _Capture(golden, checkpoints, setup)
    return [*case.free(), *case.staged()]


class _Capture(Case):
    """A captured run; `checkpoints` is not looked at."""

    def _load(self, checkpoints: Path) -> None:
        del checkpoints
        plan, device = _plan(self.golden, self.setup), self.device
        files, dtype = plan.models, DTYPES[plan.video_vae_dtype]
        dit = open_checkpoint(files.dit, "dit")
        self.model, _ = load_denoiser(dit, plan, device)
        video = open_checkpoint(files.video_vae, "video_vae")
        _complete(self.golden, plan, _formats(dit), _formats(video))
        self.video_vae, _ = load_video_vae(
            video,
            device=device,
            dtype=dtype,
            attend=load_vae_attention(plan.vae_attention, device, dtype, attention_options(plan)),
            int8=plan.int8,
            elementwise=plan.elementwise,
            tiles=plan.vae_tiles,
        )
        self.audio_vae, _ = load_audio_vae(
            open_checkpoint(files.audio_vae, "audio_vae"), device=device
        )
        if self.params["from_prompt"]:
            self.text = encoder_of(plan)(
                open_checkpoint(files.text_encoder, "text_encoder"),
                device=device,
                deepstack_layers=files.deepstack_layers,
            )

    def free(self) -> Iterator[Comparison]:
        """From the prompt, or from the conditioning where prompt or references are missing."""
        if self.params["from_prompt"]:
            yield from super().free()
            return
        sides: dict[str, Side] = {}
        for side in self._sides():
            yield from self._side("free", side, stored_conditioning(self.golden, side), sides)
        yield from self._sampling(sides)

    def _sigmas(self) -> Tensor:
        """The schedule by its name; the recorded one where the graph told none that we have.

        Of another length it is not the one that the sampler got: the graph has split it.
        """
        recorded = self.golden.tensor("sigmas")
        if self.params["scheduler"] not in SCHEDULERS:
            return recorded
        named = super()._sigmas()
        return named if named.shape == recorded.shape else recorded

    def _staged_text(self, side: str) -> Iterator[Comparison]:
        """A capture stores nothing inside the text encoder."""
        yield from ()

    def _sides(self) -> list[str]:
        return [side for side in SIDES if f"cond/{side}/context" in self.golden]


def _plan(golden: Golden, setup: Setup) -> Plan:
    plan = setup.plan
    if plan is None or not plan.models.dit.name:
        raise Unsupported(
            "a captured run names no checkpoints; choose a plan (--plan) with its [models]"
        )
    if golden.params.get("patched_weights"):
        raise Unsupported(
            f"the run had {golden.params['patched_weights']} patched weights (a LoRA), which this "
            "runtime does not apply; record it without"
        )
    if plan.dtype != golden.params["compute"]:
        raise Unsupported(
            f"the run was captured in {golden.params['compute']} and plan {plan.name} computes in "
            f"{plan.dtype}"
        )
    return replace(plan, device=setup.device.type)


def _formats(checkpoint: Checkpoint) -> set[str]:
    return {quant.format for quant in checkpoint.layers.values()}


def _complete(golden: Golden, plan: Plan, formats: set[str], vae_formats: set[str]) -> None:
    """What decides the limits, told as the other goldens tell it: formats, quantised activations.

    ComfyUI does not tell the node; the plan is held to be the run's twin.
    """
    native = any(
        stored in formats and getattr(plan, field).endswith("_native")
        for field, stored in _FORMATS.items()
    )
    golden.params |= {
        "dit": " ".join(sorted(formats)),
        "vvae": " ".join(sorted(vae_formats)),
        "native_quant": native,
    }
    golden.header["vae_dtype"] = {"video": str(DTYPES[plan.video_vae_dtype])}
