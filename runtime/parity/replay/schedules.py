"""Replay of `schedules` goldens: sigma lists and the samplers on a closed-form denoiser."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from runtime.h3.schedule import SCHEDULERS, audio_sigma, sigma_table, sigmas_for
from runtime.parity.golden import Golden
from runtime.parity.metrics import Comparison, Unsupported, compare
from runtime.parity.setup import Setup
from runtime.solvers import SAMPLERS


def replay(golden: Golden, checkpoints: Path, setup: Setup) -> list[Comparison]:
    """Every stored list and every stored sampler state; unknown names are reported unsupported."""
    del checkpoints, setup  # these goldens need no weights
    out: list[Comparison] = []
    for name in sorted(golden.names):
        parts = name.split("/")
        if parts[0] in ("sigmas", "sigmas_audio"):
            out.append(_sigma_list(golden, name, *parts))
        elif parts[0] == "model_sampling_sigmas":
            table = sigma_table(float(parts[1].split("_")[0]))
            out.append(compare(name, table, golden.tensor(name), run="free", stage="schedule"))
        elif parts[0] == "solver" and parts[-1] == "out":
            out += _solver(golden, parts[1], parts[2])
    return out


def _sigma_list(
    golden: Golden, name: str, stream: str, shifts: str, scheduler: str, steps: str
) -> Comparison:
    if scheduler not in SCHEDULERS:
        raise Unsupported(f"scheduler {scheduler!r}")
    video, audio = (float(s) for s in shifts.split("_"))
    sigmas = sigmas_for(scheduler, int(steps), video)
    if stream == "sigmas_audio":
        sigmas = audio_sigma(sigmas, video, audio)
    return compare(name, sigmas, golden.tensor(name), run="free", stage="schedule")


def _solver(golden: Golden, sampler: str, schedule: str) -> list[Comparison]:
    if sampler not in SAMPLERS:
        raise Unsupported(f"sampler {sampler!r}")
    prefix = f"solver/{sampler}/{schedule}"
    stored_x, stored_denoised = golden.tensor(f"{prefix}/x"), golden.tensor(f"{prefix}/denoised")
    states: list[Tensor] = []

    def denoise(x: Tensor, sigma: Tensor, step: int) -> Tensor:
        del sigma
        states.append(x.clone())
        return stored_denoised[step]

    noise, sigmas = golden.tensor("solver/noise"), golden.tensor(f"{prefix}/sigmas")
    start = noise * sigmas[0] if sigmas[0] != 1 else noise
    end = SAMPLERS[sampler](denoise, start, sigmas)
    out = [
        compare(f"{prefix}/x", torch.stack(states), stored_x, run="free", stage="solver"),
        compare(f"{prefix}/out", end, golden.tensor(f"{prefix}/out"), run="free", stage="solver"),
    ]
    name, steps = schedule.rsplit("_", 1)
    if name in SCHEDULERS:
        shift = float(golden.params["shifts"][-1][0])  # the solver tables use the last pair
        ours = sigmas_for(name, int(steps), shift)
        out.append(compare(f"{prefix}/sigmas", ours, sigmas, run="free", stage="schedule"))
    return out
