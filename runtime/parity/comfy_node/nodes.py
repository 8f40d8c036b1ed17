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
from .graph import settings
from .recorder import RecordedSampler, Recording, watch

IMAGES, VIDEOS, AUDIOS = 9, 3, 3
KIND = "capture"  # replayed with a plan's checkpoints: runtime/parity/replay/capture.py
MODES = ("ref2va", "t2va")
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
        names = dict(recording.names)
        names |= _pair("final", latent)
        names |= _pair("final_x0", denoised) if denoised is not None else {}
        conditioning = {"pos": _conditioning("pos", positive, names)}
        if negative is not None:
            conditioning["neg"] = _conditioning("neg", negative, names)
        names |= _media(media)
        if frames is not None:
            names["decode/video"] = frames.detach().to("cpu", torch.float32, copy=True)
        if audio is not None:
            names["decode/audio"] = audio["waveform"].detach().to("cpu", torch.float32, copy=True)
        header = _header(case, recording, names, conditioning, settings(graph, node), media)
        if graph is not None:
            header["graph"] = graph
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
    references = conditioning["pos"]["refs"]
    params: dict[str, Any] = {
        **DEFAULTS,
        **{k: v for k, v in told.items() if not k.startswith("shift_")},
        "kind": KIND,
        "mode": MODES[0] if references else MODES[1],
        "compute": COMPUTE.get(recording.dtype, recording.dtype),
        "width": latent_w * 16,
        "height": latent_h * 16,
        "length": 5 if latent_t <= 2 else (latent_t - 2) // 5 * 17 + 5,
        "steps": recording.steps,
        "from_prompt": "prompt" in told
        and "neg" not in conditioning  # its text is not told
        and len(_given(media)) == _wanted(references),
        "shift": [told.get("shift_video", 12.0), told.get("shift_audio", 3.0)],
        **_media_params(media),
    }
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
    names[f"cond/{side}/context"] = _cpu(context)
    tags = extra.get("minimax_token_tags")
    if tags is None:
        raise RuntimeError("H3 golden: the conditioning has no token tags; use ComfyUI's H3 nodes")
    names[f"cond/{side}/token_tags"] = _cpu(torch.as_tensor(tags))
    described: dict[str, Any] = {}
    for key, stored, kind in (
        ("refs", "minimax_refs", "ref"),
        ("keyframes", "minimax_keyframes", "keyframe"),
    ):
        described[key] = []
        for i, block in enumerate(extra.get(stored) or []):
            for part in ("latent", "audio_latent"):
                if block.get(part) is not None:
                    names[f"cond/{side}/{kind}_{i}/{part}"] = _cpu(block[part])
            plain = {k: v for k, v in block.items() if isinstance(v, int | float | str)}
            described[key].append(plain)
    return described


def _media(media: Mapping[str, Any]) -> dict[str, Tensor]:
    """The references as the replay reads them: 8-bit frames, float waves."""
    found: dict[str, Tensor] = {}
    for name, value in _given(media).items():
        if isinstance(value, Mapping):
            found[f"in/{name}"] = _cpu(value["waveform"]).float()
            continue
        scaled = _cpu(value).float() * 255
        frames = scaled.round()
        if bool(((scaled - frames).abs() > 1e-3).any()):
            raise RuntimeError(
                f"H3 golden: {name} holds values between 8-bit steps (it was resized or graded in "
                "the graph); connect the picture as it was loaded, or leave it out"
            )
        found[f"in/{name}"] = frames.to(torch.uint8)
    return found


def _media_params(media: Mapping[str, Any]) -> dict[str, Any]:
    """Which references there are, as the replay counts them; waves with their rate."""
    given = _given(media)
    params: dict[str, Any] = {"ref_images": [], "ref_videos": [], "ref_audios": []}
    for name, value in sorted(given.items()):
        if name.startswith("ref_image_"):
            params["ref_images"].append(list(value.shape[1:3]))
        elif name.startswith("ref_audio_"):
            params["ref_audios"].append(_wave(value))
        elif not name.startswith("ref_video_audio_"):
            sound = given.get(name.replace("ref_video_", "ref_video_audio_"))
            spec: dict[str, Any] = {"shape": list(value.shape[:3])}
            params["ref_videos"].append(spec | ({"audio": _wave(sound)} if sound else {}))
    return {name: specs for name, specs in params.items() if specs}


def _wave(audio: Mapping[str, Any]) -> dict[str, int]:
    return {
        "channels": int(audio["waveform"].shape[1]),
        "samples": int(audio["waveform"].shape[2]),
        "sr": int(audio["sample_rate"]),
    }


def _given(media: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in media.items() if value is not None}


def _wanted(references: Sequence[Mapping[str, Any]]) -> int:
    """How many media inputs the encoded references came from; a sounding video has two."""
    return sum(2 if block.get("kind") == "video_audio" else 1 for block in references)


def _pair(name: str, latent: Mapping[str, Any]) -> dict[str, Tensor]:
    samples = latent["samples"]
    parts = list(samples.tensors if hasattr(samples, "tensors") else samples.unbind())
    if len(parts) != 2:
        raise RuntimeError(f"H3 golden: {name} holds {len(parts)} latents, not video and audio")
    return {f"{name}/video": _cpu(parts[0]), f"{name}/audio": _cpu(parts[1])}


def _cpu(value: Tensor) -> Tensor:
    return value.detach().to("cpu", copy=True)


def _safe(case: str) -> str:
    name = re.sub(r"[^\w.-]+", "_", case).strip("._")
    if not name:
        raise RuntimeError(f"H3 golden: case {case!r} is no file name; use letters and digits")
    return name


def _folder() -> Path:
    """ComfyUI's output folder."""
    paths = importlib.import_module("folder_paths")
    return Path(paths.get_output_directory()) / "h3_goldens"
