"""What is taken from a running sampler: every tensor is copied to the CPU the moment it is seen.

Uses two extension points of ComfyUI (h3_contract.md 3.6): the sampler's callback(step, denoised, x,
total) and the DIFFUSION_MODEL wrapper. Later in-place work on a tensor cannot reach a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .tensors import copied, copies, copy, leaves, options_of, parts

WRAPPER = "diffusion_model"  # the wrapper type's name in ComfyUI
KEY = "h3_golden"
VIDEO_CHANNELS, AUDIO_CHANNELS, STEREO = 24, 32, 2
SHIFT_VIDEO, SHIFT_AUDIO = 12.0, 3.0  # without a sigma shift node
SIDES = ("pos", "neg")  # of ComfyUI's cond_or_uncond 0 and 1
SHIFTS = {  # what the sigma shift node leaves in the options of every call
    "shift_video": "minimax_h3_sigma_shift_video",
    "shift_audio": "minimax_h3_sigma_shift_audio",
}


class Recording:
    """One sampling: noise, schedule, states, denoised, velocities; `names` maps names to tensors.

    A new sampling with the same recorder starts it afresh. `complete` once the sampler has
    returned; `shifts` and `cfg` are empty and None where ComfyUI's objects do not tell them;
    `patched` counts the weights that a LoRA changed.
    """

    def __init__(self) -> None:
        self.patched = 0
        self.begin()

    def begin(self) -> None:
        """Forgets the sampling before."""
        self.names: dict[str, Tensor] = {}
        self.shapes: tuple[torch.Size, torch.Size] | None = None
        self.seed: int | None = None
        self.sampler = ""
        self.dtype = ""
        self.cfg: float | None = None
        self.shifts: dict[str, float] = {}
        self.complete = False
        self._packed: dict[str, Any] = {}
        self._step = 0

    @property
    def steps(self) -> int:
        """How many times the sampler called back."""
        return self._step

    # ---- the sampler

    def start(self, sigmas: Tensor, noise: Any, latent_image: Any, seed: Any) -> None:
        """Schedule, initial noise and start of a sampling, as the sampler gets them."""
        self.begin()
        self.seed = int(seed) if seed is not None else None
        self.names["sigmas"] = copy(sigmas)
        self._packed["noise"] = copies(noise)
        if latent_image is not None and any(bool(t.any()) for t in parts(latent_image)):
            self._packed["init_latent"] = copies(latent_image)

    def step(self, index: int, denoised: Any, x: Any) -> None:
        """The sampler's callback: the state before the update at this step's sigma."""
        if index != self._step:
            raise RuntimeError(
                f"H3 golden: the sampler called back for step {index} after {self._step} steps; "
                "a sampler that skips or repeats steps cannot be recorded"
            )
        for name, value in (("x", x), ("denoised", denoised)):
            self._pair(f"step_{index:02d}/{name}_", value)
        self._step += 1

    def finish(self) -> None:
        """Names what came packed before the latents' shapes were known."""
        for name, value in self._packed.items():
            self._pair(f"{name}/", value)
        self._packed = {}
        if "init_latent/audio" in self.names and "step_00/x_audio" in self.names:
            self._uncarry()
        self.complete = True

    def _uncarry(self) -> None:
        """The start's sound in its own scale, which the golden holds; ComfyUI may have carried it.

        The first state is sigma * noise + (1 - sigma) * carried start: it tells which one this is.
        """
        sigma, scale = self.names["sigmas"][0], self._audio_scale()
        start, noise = self.names["init_latent/audio"], self.names["noise/audio"]
        rest = self.names["step_00/x_audio"] - sigma * noise

        def off(carried: Tensor) -> float:
            return float((rest - (1 - sigma) * carried).abs().max())

        if off(start) < off(start * scale):
            self.names["init_latent/audio"] = start / scale

    def _audio_scale(self) -> float:
        video, audio = (self.shifts.get(name) for name in SHIFTS)
        return (video or SHIFT_VIDEO) / (audio or SHIFT_AUDIO)

    # ---- the network

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """One call of the network: what it saw, and its raw velocities (noise-ward)."""
        given = [*leaves(args), *leaves(tuple(kwargs.values()))]
        video, audio = _find(given, _is_video, "video"), _find(given, _is_audio, "audio")
        options = options_of(args, kwargs)
        side = SIDES[int((options.get("cond_or_uncond") or [0])[0])]
        self.shifts |= {n: float(options[k]) for n, k in SHIFTS.items() if k in options}
        velocity = list(leaves((parts(out),)))
        self.shapes = (video.shape, audio.shape)
        self.dtype = str(video.dtype)
        prefix = f"step_{self._step:02d}/net_{side}"
        self.names[f"{prefix}/audio_in"] = copy(audio)
        self.names[f"{prefix}/v_video"] = copy(_find(velocity, _is_video, "video velocity"))
        self.names[f"{prefix}/v_audio"] = copy(_find(velocity, _is_audio, "audio velocity"))
        context = next((t for t in given if t.dim() == 3 and t.shape[0] == 1), None)
        if context is not None and f"layout/{side}/context_refined" not in self.names:
            self.names[f"layout/{side}/context_refined"] = copy(context)

    def _pair(self, prefix: str, value: Any) -> None:
        video, audio = self._split(value)
        self.names[f"{prefix}video"], self.names[f"{prefix}audio"] = copy(video), copy(audio)

    def _split(self, value: Any) -> tuple[Tensor, Tensor]:
        """Video and audio of a nested pair or of the sampler's flat pack [1, 1, N], video first."""
        pair = parts(value)
        if len(pair) == 2:
            return pair[0], pair[1]
        if self.shapes is None or len(pair) != 1:
            raise RuntimeError(
                f"H3 golden: got {len(pair)} latents of shapes {[tuple(p.shape) for p in pair]}; "
                "only the pair of video and audio of MiniMax H3 can be recorded"
            )
        video, audio = self.shapes
        flat = pair[0].reshape(-1)
        if flat.numel() != video.numel() + audio.numel():
            raise RuntimeError(
                f"H3 golden: a pack of {flat.numel()} values is not video {tuple(video)} and "
                f"audio {tuple(audio)}"
            )
        return flat[: video.numel()].reshape(video), flat[video.numel() :].reshape(audio)


class RecordedSampler:
    """A SAMPLER that tells the recording what it is given and calls back; else the one inside."""

    def __init__(self, inner: Any, recording: Recording) -> None:
        self._inner = inner
        self._recording = recording

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # a copy asks before it has an inner sampler
            raise AttributeError(name)
        return getattr(self._inner, name)

    def sample(
        self,
        model_wrap: Any,
        sigmas: Tensor,
        extra_args: dict[str, Any],
        callback: Callable[[int, Any, Any, int], Any] | None,
        noise: Any,
        latent_image: Any = None,
        *rest: Any,
        **more: Any,
    ) -> Any:
        """As ComfyUI calls it; the samples are the inner sampler's own."""
        recording = self._recording
        _refuse_masks(rest[0] if rest else more.get("denoise_mask"))
        recording.start(sigmas, noise, latent_image, extra_args.get("seed"))
        function = getattr(self._inner, "sampler_function", None)
        recording.sampler = getattr(function, "__name__", "").removeprefix("sample_")
        cfg = getattr(model_wrap, "cfg", None)
        recording.cfg = float(cfg) if isinstance(cfg, int | float) else None

        def called(index: int, denoised: Any, x: Any, total: int) -> Any:
            recording.step(index, denoised, x)
            return None if callback is None else callback(index, denoised, x, total)

        samples = self._inner.sample(
            model_wrap, sigmas, extra_args, called, noise, latent_image, *rest, **more
        )
        recording.finish()
        return samples


def watch(model: Any, recording: Recording) -> Any:
    """A clone of ComfyUI's MODEL whose network calls are recorded; the given one stays as it is."""
    watched = model.clone()
    recording.patched = len(getattr(watched, "patches", None) or {})

    def wrapper(executor: Any, *args: Any, **kwargs: Any) -> Any:
        # The network may write into what it is given.
        seen = copied(args), {name: copied(value) for name, value in kwargs.items()}
        out = executor(*args, **kwargs)
        recording.forward(seen[0], seen[1], out)
        return out

    watched.add_wrapper_with_key(WRAPPER, KEY, wrapper)
    return watched


def _is_video(t: Tensor) -> bool:
    return t.dim() == 5 and t.shape[1] == VIDEO_CHANNELS


def _is_audio(t: Tensor) -> bool:
    return t.dim() == 4 and tuple(t.shape[1:3]) == (AUDIO_CHANNELS, STEREO)


def _find(tensors: list[Tensor], fits: Callable[[Tensor], bool], what: str) -> Tensor:
    found = next((t for t in tensors if fits(t)), None)
    if found is None:
        seen = ", ".join(str(tuple(t.shape)) for t in tensors) or "none"
        raise RuntimeError(
            f"H3 golden: no {what} latent among the network's tensors ({seen}); "
            "only MiniMax H3 with video and audio can be recorded"
        )
    if found.shape[0] != 1:
        raise RuntimeError(
            f"H3 golden: the network ran a batch of {found.shape[0]}; record a batch of 1"
        )
    return found


def _refuse_masks(mask: Any) -> None:
    if mask is not None and any(bool((part != 1).any()) for part in parts(mask)):
        raise RuntimeError(
            "H3 golden: the latent has a noise mask, which the runtime does not replay; "
            "record a run without one"
        )
