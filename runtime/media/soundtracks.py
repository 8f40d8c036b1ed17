"""The sound beside the pictures of a video reference, in step with them, and what was changed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from runtime.media.sounds import Downmix, LoadedSound, find_sound, load_sound
from runtime.messages import FPS, Reference

_SYNC_SECONDS = 0.5 / FPS  # sound and picture starts closer than half a frame count as one


def soundtrack(
    reference: Reference,
    notes: list[str],
    *,
    shown_frames: int,
    start_seconds: float,
    downmix: Downmix,
    model_rate: int,
) -> tuple[NDArray[np.float32] | None, int]:
    """The wave [1,C,L] and its rate, or None and 0; what was done is added to `notes`.

    shown_frames, start_seconds: of the pictures. Raises ValueError for a sound that ends before
    they begin, and as the loaders do.
    """
    if reference.mute:
        return None, 0
    if reference.soundtrack is not None:
        sound = load_sound(reference.soundtrack, downmix=downmix)
    else:
        own = find_sound(reference.path, downmix=downmix)
        if own is None:
            return None, 0
        sound = own
    changes = sound.notes + rate_notes(sound, model_rate)
    wave_1CL = sound.wave
    if reference.soundtrack is not None:
        notes += [f"soundtrack {reference.soundtrack.name}: {change}" for change in changes]
    else:
        notes += changes
        late_seconds = start_seconds - sound.start_seconds
        if round(late_seconds * sound.rate) >= wave_1CL.shape[2]:
            raise ValueError(
                f"the sound of {reference.path} ends before its pictures start; mute it"
            )
        wave_1CL = _in_sync(wave_1CL, sound.rate, late_seconds, notes)
    seconds, shown = wave_1CL.shape[2] / sound.rate, shown_frames / FPS
    if seconds - shown > 1 / FPS:
        notes.append(f"soundtrack of {seconds:.2f} s used whole beside {shown:.2f} s of pictures")
    return wave_1CL, sound.rate


def _in_sync(
    wave_1CL: NDArray[np.float32], rate: int, late_seconds: float, notes: list[str]
) -> NDArray[np.float32]:
    """Cuts or pads the head of the sound so that it starts with the first picture."""
    if abs(late_seconds) <= _SYNC_SECONDS:
        return wave_1CL
    samples = round(abs(late_seconds) * rate)
    if late_seconds > 0:
        notes.append(f"{late_seconds:.2f} s of sound before the first picture cut")
        return np.ascontiguousarray(wave_1CL[..., samples:])
    notes.append(f"{-late_seconds:.2f} s of silence put before the sound, as in the file")
    return np.pad(wave_1CL, ((0, 0), (0, 0), (samples, 0)))


def rate_notes(sound: LoadedSound, model_rate: int) -> tuple[str, ...]:
    """What resampling will do."""
    if sound.rate == model_rate:
        return ()
    return (f"{sound.rate} Hz -> {model_rate} Hz",)
