"""`python -m runtime.parity.latents A B`: how far the latents of two runs are apart."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

TENSORS = ("video", "audio")

Figures = dict[str, Any]


def main(argv: Sequence[str]) -> int:
    """Prints {"video": figures, "audio": figures}."""
    a, b = map(Path, argv)
    print(json.dumps(between(a, b), allow_nan=False))
    return 0


def between(a: Path, b: Path) -> dict[str, Figures]:
    """The figures of both tensors; a file that cannot be read is a ValueError."""
    left, right = _read(a), _read(b)
    return {name: figures(left[name], right[name]) for name in TENSORS}


def figures(a: NDArray[Any], b: NDArray[Any]) -> Figures:
    """{"equal", "max_abs", "mean_abs", "relative_l2", "cosine", "psnr", "reason"}.

    In float64; relative L2 is over the norm of A, PSNR in dB over A's value range. A figure
    without a value (PSNR of equal tensors, everything of two shapes) is null.
    """
    if a.shape != b.shape:
        return _empty(f"their shapes differ: {_shape(a)} and {_shape(b)}")
    if not a.size:
        return _empty("they are empty")
    wide_a, wide_b = (x.astype(np.float64).ravel() for x in (a, b))
    if not (np.isfinite(wide_a).all() and np.isfinite(wide_b).all()):
        return _empty("they hold values that are not finite")
    difference = np.abs(wide_a - wide_b)
    norm_a, norm_b = float(np.linalg.norm(wide_a)), float(np.linalg.norm(wide_b))
    squared_error = float(np.square(difference).mean())
    value_range = float(wide_a.max() - wide_a.min())
    both = norm_a * norm_b
    equal = a.tobytes() == b.tobytes()  # bit for bit: -0.0 is not 0.0
    return {
        "equal": equal,
        "max_abs": float(difference.max()),
        "mean_abs": float(difference.mean()),
        "relative_l2": float(np.linalg.norm(difference)) / norm_a if norm_a else None,
        "cosine": (1.0 if equal else float(wide_a @ wide_b) / both) if both else None,
        "psnr": 10 * math.log10(value_range**2 / squared_error)
        if squared_error and value_range
        else None,
        "reason": "",
    }


def _empty(reason: str) -> Figures:
    names = ("max_abs", "mean_abs", "relative_l2", "cosine", "psnr")
    return {"equal": False, **dict.fromkeys(names), "reason": reason}


def _shape(x: NDArray[Any]) -> str:
    return "x".join(map(str, x.shape))


def _read(path: Path) -> dict[str, NDArray[Any]]:
    try:
        with safe_open(str(path), framework="np") as file:
            return {name: file.get_tensor(name) for name in TENSORS}
    except (SafetensorError, OSError, TypeError) as error:
        raise ValueError(f"{path.name} is not a readable latents file ({error})") from error


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ValueError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
