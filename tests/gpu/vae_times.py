"""Times of the video VAE's decode at 124 frames of 960x544: `python -m tests.gpu.vae_times`.

Full-size random weights; each time is the wall clock from a latent on the CPU to the last frame as
bytes on the CPU, the median of `--runs` after one that is not counted. Prints one JSON line per
setting, the kernels of the best one, and everything as one JSON line at the end.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
from torch.profiler import ProfilerActivity, profile

from runtime.checkpoints.demo import random_checkpoint
from runtime.h3.audio_vae import load_audio_vae
from runtime.h3.sizes import audio_latents_of_frames
from runtime.h3.video_vae import VideoVAE
from runtime.kernels.attention import BACKENDS
from runtime.kernels.unavailable import Unavailable
from tests.gpu.vae_parts import CUDA, FRAMES, exact, random_latent, random_vae, set_up

KERNELS_SHOWN = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    dtype: str
    tiles: int
    elementwise: str
    attention: str
    as_bytes: bool = True


def settings() -> Iterator[Setting]:
    """Of fp16: what one change alone does, then the sizes of a batch."""
    for elementwise, attention, tiles in (
        ("eager", "sdpa", 1),
        ("eager", "sdpa_cudnn", 1),
        ("eager", "sdpa_cudnn", 15),
        ("triton", "sdpa", 15),
        *(("triton", "sdpa_cudnn", tiles) for tiles in (1, 5, 15, 35, 105)),
    ):
        yield Setting(dtype="fp16", tiles=tiles, elementwise=elementwise, attention=attention)


def timed(call: Callable[[], object], runs: int) -> tuple[float, list[float]]:
    """The first call's seconds, and those of `runs` more."""
    seconds = []
    for _ in range(runs + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds[0], seconds[1:]


def decode(vae: VideoVAE, as_bytes: bool) -> int:
    """Frames reach the host and are dropped."""
    with torch.inference_mode():
        return sum(len(c) for c in vae.decode_stream(random_latent(), as_bytes=as_bytes))


def measure(vae: VideoVAE, setting: Setting, runs: int) -> dict[str, object]:
    """One row of the table; a setting that cannot run says why."""
    try:
        set_up(
            vae,
            attention=setting.attention,
            elementwise=setting.elementwise,
            tiles=setting.tiles,
        )
    except Unavailable as error:
        return {**asdict(setting), "unavailable": str(error)}
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    first, seconds = timed(lambda: decode(vae, setting.as_bytes), runs)
    return {
        **asdict(setting),
        "seconds": round(statistics.median(seconds), 3),
        "least": round(min(seconds), 3),
        "most": round(max(seconds), 3),
        "first": round(first, 3),
        "peak_mib_over_weights": (torch.cuda.max_memory_allocated() - before) >> 20,
    }


def kernel_table(call: Callable[[], object]) -> list[dict[str, object]]:
    """The kernels that take longest in one call, and how many there were of each."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = {}
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found.setdefault(event.name, []).append(event.time_range.elapsed_us())
    rows = sorted(found.items(), key=lambda item: -sum(item[1]))
    total = sum(sum(times) for times in found.values())
    print(f"{total / 1e6:.3f} s of kernels and copies, {sum(map(len, found.values()))} of them")
    table: list[dict[str, object]] = [
        {
            "kernel": name[:110],
            "ms": round(sum(times) / 1e3, 1),
            "share": round(sum(times) / total, 4),
            "calls": len(times),
        }
        for name, times in rows[:KERNELS_SHOWN]
    ]
    for row in table:
        print(f"{row['ms']:>9} ms  {row['share']:>7}  x{row['calls']:<6} {row['kernel']}")
    return table


def best_of(rows: list[dict[str, object]]) -> Setting:
    """The fastest."""
    ran = [row for row in rows if "seconds" in row]
    row = min(ran, key=lambda row: row["seconds"])  # type: ignore[arg-type,return-value]
    return Setting(**{name: row[name] for name in Setting.__dataclass_fields__})  # type: ignore[arg-type]


def half(runs: int) -> dict[str, object]:
    """fp16: every setting, the best one's floats and kernels."""
    vae = random_vae("fp16")
    rows = []
    for setting in settings():
        rows.append(measure(vae, setting, runs))
        print(json.dumps(rows[-1]), flush=True)
    best = best_of(rows)
    floats = measure(vae, Setting(**{**asdict(best), "as_bytes": False}), runs)
    print(json.dumps(floats), flush=True)
    return {"fp16": rows, "floats": floats, "kernels": kernel_table(lambda: decode(vae, True))}


def single(runs: int, tiles: int) -> dict[str, object]:
    """fp32 without TF32: the attentions that compute it."""
    vae = random_vae("fp32")
    rows = []
    for attention in ("sdpa", "sdpa_math"):
        if attention not in BACKENDS:
            continue
        setting = Setting(dtype="fp32", tiles=tiles, elementwise="triton", attention=attention)
        rows.append(measure(vae, setting, runs))
        print(json.dumps(rows[-1]), flush=True)
    return {"fp32": rows, "fp32 kernels": kernel_table(lambda: decode(vae, True))}


def sound(runs: int) -> dict[str, object]:
    """The audio VAE of the same clip."""
    checkpoint = random_checkpoint("audio_vae", size="full", format="fp32")
    vae, _ = load_audio_vae(checkpoint, device=CUDA)
    latent = torch.randn(1, 32, 2, audio_latents_of_frames(FRAMES))

    def call() -> None:
        with torch.inference_mode():
            vae.decode(latent).cpu()

    first, seconds = timed(call, runs)
    row = {"first": round(first, 4), "seconds": round(statistics.median(seconds), 4)}
    print(json.dumps({"audio": row}), flush=True)
    return {"audio": row, "audio kernels": kernel_table(call)}


def main() -> None:
    """Every part that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3, help="counted runs of a setting")
    parser.add_argument("--fp32-runs", type=int, default=1, help="of the fp32 settings")
    parser.add_argument("--fp32-tiles", type=int, default=15)
    parser.add_argument("--parts", nargs="+", default=["fp16", "fp32", "audio"])
    options = parser.parse_args()
    exact()
    told: dict[str, object] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
    }
    if "fp16" in options.parts:
        told |= half(options.runs)
        torch.cuda.empty_cache()
    if "fp32" in options.parts:
        told |= single(options.fp32_runs, options.fp32_tiles)
        torch.cuda.empty_cache()
    if "audio" in options.parts:
        told |= sound(options.runs)
    print(json.dumps(told))


if __name__ == "__main__":
    main()
