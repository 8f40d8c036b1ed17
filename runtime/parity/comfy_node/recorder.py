"""What is taken from a running sampler: every tensor is copied to the CPU the moment it is seen.

Uses two extension points of ComfyUI (h3_contract.md 3.6): the sampler's callback(step, denoised, x,
total) and the DIFFUSION_MODEL wrapper. Later in-place work on a tensor cannot reach a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

WRAPPER = "diffusion_model"  # the wrapper type's name in ComfyUI
KEY = "h3_golden"
VIDEO_CHANNELS, AUDIO_CHANNELS, STEREO = 24, 32, 2
SIDES = ("pos", "neg")  # of ComfyUI's cond_or_uncond 0 and 1


class Recording:
    """One sampling: noise, schedule, states, denoised, velocities; `names` maps names to tensors.

    A new sampling with the same recorder starts it afresh.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forgets the sampling before."""
        self.names: dict[str, Tensor] = {}
        self.shapes: tuple[torch.Size, torch.Size] | None = None
        self.seed: int | None = None
        self.sampler = ""
        self.dtype = ""
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
        self.names["sigmas"] = _copy(sigmas)
        self._packed["noise"] = _copies(noise)
        if latent_image is not None and any(bool(t.any()) for t in _parts(latent_image)):
            self._packed["init_latent"] = _copies(latent_image)

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

    # ---- the network

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """One call of the network: what it saw, and its raw velocities (noise-ward)."""
        given = list(_leaves((args, kwargs)))
        video, audio = _find(given, _is_video, "video"), _find(given, _is_audio, "audio")
        side = SIDES[_side(args, kwargs)]
        velocity = list(_leaves((_parts(out),)))
        self.shapes = (video.shape, audio.shape)
        self.dtype = str(video.dtype)
        prefix = f"step_{self._step:02d}/net_{side}"
        self.names[f"{prefix}/audio_in"] = _copy(audio)
        self.names[f"{prefix}/v_video"] = _copy(_find(velocity, _is_video, "video velocity"))
        self.names[f"{prefix}/v_audio"] = _copy(_find(velocity, _is_audio, "audio velocity"))
        context = next((t for t in given if t.dim() == 3 and t.shape[0] == 1), None)
        if context is not None and f"layout/{side}/context_refined" not in self.names:
            self.names[f"layout/{side}/context_refined"] = _copy(context)

    def _pair(self, prefix: str, value: Any) -> None:
        video, audio = self._split(value)
        self.names[f"{prefix}video"], self.names[f"{prefix}audio"] = _copy(video), _copy(audio)

    def _split(self, value: Any) -> tuple[Tensor, Tensor]:
        """Video and audio of a nested pair or of the sampler's flat pack [1, 1, N], video first."""
        parts = _parts(value)
        if len(parts) == 2:
            return parts[0], parts[1]
        if self.shapes is None or len(parts) != 1:
            raise RuntimeError(
                f"H3 golden: got {len(parts)} latents of shapes {[tuple(p.shape) for p in parts]}; "
                "only the pair of video and audio of MiniMax H3 can be recorded"
            )
        video, audio = self.shapes
        flat = parts[0].reshape(-1)
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
        recording.start(sigmas, noise, latent_image, extra_args.get("seed"))
        function = getattr(self._inner, "sampler_function", None)
        recording.sampler = getattr(function, "__name__", "").removeprefix("sample_")

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

    def wrapper(executor: Any, *args: Any, **kwargs: Any) -> Any:
        seen = _copied_inputs(args), _copied_inputs(kwargs)  # the network may write into them
        out = executor(*args, **kwargs)
        recording.forward(seen[0], seen[1], out)
        return out

    watched.add_wrapper_with_key(WRAPPER, KEY, wrapper)
    return watched


def _copied_inputs(value: Any) -> Any:
    """The latents and the context copied; all else (payload, options) as it is."""
    if isinstance(value, Tensor):
        return _copy(value)
    if isinstance(value, list | tuple):
        return tuple(_copied_inputs(v) for v in value)
    if getattr(value, "is_nested", False):
        return _copies(value)
    if isinstance(value, dict):
        return {k: _copy(v) if isinstance(v, Tensor) else v for k, v in value.items()}
    return value


def _leaves(value: Any) -> Iterator[Tensor]:
    """The tensors of arguments, in order; not those inside a payload or the options."""
    if isinstance(value, Tensor) and not getattr(value, "is_nested", False):
        yield value
    elif isinstance(value, list | tuple) or getattr(value, "is_nested", False):
        for part in value if isinstance(value, list | tuple) else _parts(value):
            yield from _leaves(part)
    elif isinstance(value, dict):
        for part in value.values():
            if not isinstance(part, dict):
                yield from _leaves(part)


def _parts(value: Any) -> list[Tensor]:
    """The tensors of a NestedTensor or a sequence; a plain tensor alone."""
    if isinstance(value, list | tuple):
        return list(value)
    if isinstance(value, Tensor) and not getattr(value, "is_nested", False):
        return [value]
    if hasattr(value, "tensors"):
        return list(value.tensors)
    return list(value.unbind())


def _copies(value: Any) -> list[Tensor]:
    return [_copy(part) for part in _parts(value)]


def _copy(value: Tensor) -> Tensor:
    return value.detach().to("cpu", copy=True).contiguous()


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


def _side(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """0 for the positive side, 1 for the negative one, from the options' cond_or_uncond."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, dict) and value.get("cond_or_uncond"):
            return int(value["cond_or_uncond"][0])
    return 0
