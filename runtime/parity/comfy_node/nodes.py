"""The two nodes: one puts recorders on MODEL and SAMPLER, the other saves what they saw."""

from __future__ import annotations

import importlib
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import golden_file
from .graph import finite, settings
from .media import AUDIOS, IMAGES, VIDEOS, described, numbered, stored, wanted
from .recorder import SHIFT_AUDIO, SHIFT_VIDEO, RecordedSampler, Recording, watch
from .tensors import copy, parts

KIND = "capture"  # replayed with a plan's checkpoints: runtime/parity/replay/capture.py
COMPUTE = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}
DEFAULTS = {"sampler": "", "scheduler": "", "denoise": 1.0, "cfg": 1.0, "ref_image_size": "match"}


class H3GoldenRecord:
    """MODEL and SAMPLER in, the same out with recorders; the run itself is not changed."""

    CATEGORY = "H3 runtime"
    FUNCTION = "record"
    RETURN_TYPES = ("MODEL", "SAMPLER", "H3_RECORDING")
    RETURN_NAMES = ("model", "sampler", "recording")
    DESCRIPTION = "Put this last before the guider (model) and the sampler node (sampler)."

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802  # ComfyUI names it
        """ComfyUI's declaration of the inputs."""
        return {"required": {"model": ("MODEL",), "sampler": ("SAMPLER",)}}

    def record(self, model: Any, sampler: Any) -> tuple[Any, Any, Recording]:
        """A clone of the model and a sampler that record into one recording."""
        recording = Recording()
        return watch(model, recording), RecordedSampler(sampler, recording), recording


class H3GoldenSave:
    """The recording with conditioning, media, latents and decoded frames as one file."""

    CATEGORY = "H3 runtime"
    FUNCTION = "save"
    RETURN_TYPES = ("STRING",)
    RETURN_NAMES = ("path",)
    OUTPUT_NODE = True
    DESCRIPTION = (
        "latent: the sampler node's output. Connect the references as they go into the H3 node, "
        "so that the runtime can start from the prompt; without them it starts from the "
        "conditioning."
    )

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802  # ComfyUI names it
        """ComfyUI's declaration of the inputs."""
        optional: dict[str, Any] = {
            "denoised": ("LATENT",),
            "negative": ("CONDITIONING",),
            "frames": ("IMAGE",),
            "audio": ("AUDIO",),
        }
        optional |= {f"ref_image_{i}": ("IMAGE",) for i in range(IMAGES)}
        for i in range(VIDEOS):
            optional |= {f"ref_video_{i}": ("IMAGE",), f"ref_video_audio_{i}": ("AUDIO",)}
        optional |= {f"ref_audio_{i}": ("AUDIO",) for i in range(AUDIOS)}
        return {
            "required": {
                "recording": ("H3_RECORDING",),
                "latent": ("LATENT",),
                "positive": ("CONDITIONING",),
                "case": ("STRING", {"default": "my_run"}),
            },
            "optional": optional,
            "hidden": {"graph": "PROMPT", "node": "UNIQUE_ID"},
        }

    @classmethod
    def IS_CHANGED(cls, **_: Any) -> float:  # noqa: N802  # ComfyUI names it
        """Never cached: the recording is the same object with other tensors."""
        return float("nan")

    def save(
        self,
        recording: Recording,
        latent: Mapping[str, Any],
        positive: Sequence[Any],
        case: str,
        denoised: Mapping[str, Any] | None = None,
        negative: Sequence[Any] | None = None,
        frames: Tensor | None = None,
        audio: Mapping[str, Any] | None = None,
        graph: Mapping[str, Any] | None = None,
        node: str = "",
        **media: Any,
    ) -> dict[str, Any]:
        """Writes <output>/h3_goldens/<case>.safetensors; the node shows and returns its path."""
        if not recording.steps:
            raise RuntimeError(
                "H3 golden: nothing was recorded; take model and sampler of 'H3 golden: record' "
                "into the guider and the sampler node, and run the graph again"
            )
        if not recording.complete:
            raise RuntimeError(
                f"H3 golden: the sampling ended after {recording.steps} steps without a result; "
                "run the graph again"
            )
        guided = any("/net_neg/" in name for name in recording.names)
        if guided and negative is None:
            raise RuntimeError(
                "H3 golden: the run had a negative side; connect the guider's negative "
                "conditioning to 'negative'"
            )
        media = numbered(media)
        names = dict(recording.names)
        names |= _pair("final", latent)
        names |= _pair("final_x0", denoised) if denoised is not None else {}
        conditioning = {"pos": _conditioning("pos", positive, names)}
        if negative is not None and guided:
            conditioning["neg"] = _conditioning("neg", negative, names)
        names |= stored(media)
        if frames is not None:
            pictures = frames.reshape(-1, *frames.shape[-3:])  # [T,H,W,3]
            names["decode/video"] = pictures.detach().to("cpu", torch.float32, copy=True)
        if audio is not None:
            names["decode/audio"] = audio["waveform"].detach().to("cpu", torch.float32, copy=True)
        header = _header(case, recording, names, conditioning, settings(graph, node), media)
        if graph is not None:
            header["graph"] = finite(graph)
        path = golden_file.write(_folder() / f"{_safe(case)}.safetensors", names, header)
        return {"ui": {"text": [str(path)]}, "result": (str(path),)}


def _header(
    case: str,
    recording: Recording,
    names: Mapping[str, Tensor],
    conditioning: Mapping[str, Any],
    told: Mapping[str, Any],
    media: Mapping[str, Any],
) -> dict[str, Any]:
    video = names["final/video"]
    latent_t, latent_h, latent_w = video.shape[2:]
    references, keyframes = (conditioning["pos"][kind] for kind in ("refs", "keyframes"))
    told = {**told, **recording.shifts}
    params: dict[str, Any] = {
        **DEFAULTS,
        **{k: v for k, v in told.items() if not k.startswith("shift_")},
        "kind": KIND,
        "mode": "ref2va" if references else "fl2va" if keyframes else "t2va",
        "compute": COMPUTE.get(recording.dtype, recording.dtype),
        "width": latent_w * 16,
        "height": latent_h * 16,
        "length": 5 if latent_t <= 2 else (latent_t - 2) // 5 * 17 + 5,
        "steps": told.get("steps", recording.steps),  # of the schedule: some drop duplicates
        "from_prompt": "prompt" in told
        and "neg" not in conditioning  # its text is not told
        and not keyframes  # nor are their pictures in the file
        and len(media) == wanted(references),
        "shift": [told.get("shift_video", SHIFT_VIDEO), told.get("shift_audio", SHIFT_AUDIO)],
        "patched_weights": recording.patched,
        **described(media),
    }
    params["cfg"] = params["cfg"] if recording.cfg is None else recording.cfg
    params["sampler"] = recording.sampler or params["sampler"]
    params["seed"] = params.get("seed") if recording.seed is None else recording.seed
    return {
        "case": case,
        "group": "captured",
        "kind": KIND,
        "params": params,
        "environment": golden_file.environment(),
        "captured": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "conditioning": conditioning,
        "latent_shapes": {n: list(names[f"final/{n}"].shape) for n in ("video", "audio")},
        "steps": [{"sigma": float(s)} for s in names["sigmas"][:-1]],
    }


def _conditioning(side: str, value: Sequence[Any], names: dict[str, Tensor]) -> dict[str, Any]:
    """Context, tags and encoded references of a CONDITIONING; their numbers for the header."""
    if len(value) != 1:
        raise RuntimeError(f"H3 golden: {len(value)} conditionings on one side; record one")
    context, extra = value[0]
    names[f"cond/{side}/context"] = copy(context)
    tags = extra.get("minimax_token_tags")
    if tags is None:
        raise RuntimeError("H3 golden: the conditioning has no token tags; use ComfyUI's H3 nodes")
    names[f"cond/{side}/token_tags"] = copy(torch.as_tensor(tags))
    described: dict[str, Any] = {}
    for key, held, kind in (
        ("refs", "minimax_refs", "ref"),
        ("keyframes", "minimax_keyframes", "keyframe"),
    ):
        described[key] = []
        for i, block in enumerate(extra.get(held) or []):
            for part in ("latent", "audio_latent"):
                if block.get(part) is not None:
                    names[f"cond/{side}/{kind}_{i}/{part}"] = copy(block[part])
            plain = {k: v for k, v in block.items() if isinstance(v, int | float | str)}
            described[key].append(plain)
    return described


def _pair(name: str, latent: Mapping[str, Any]) -> dict[str, Tensor]:
    pair = parts(latent["samples"])
    if len(pair) != 2:
        raise RuntimeError(f"H3 golden: {name} holds {len(pair)} latents, not video and audio")
    return {f"{name}/video": copy(pair[0]), f"{name}/audio": copy(pair[1])}


def _safe(case: str) -> str:
    name = re.sub(r"[^\w.-]+", "_", case).strip("._")
    if not name:
        raise RuntimeError(f"H3 golden: case {case!r} is no file name; use letters and digits")
    return name


def _folder() -> Path:
    """ComfyUI's output folder."""
    paths = importlib.import_module("folder_paths")
    return Path(paths.get_output_directory()) / "h3_goldens"
