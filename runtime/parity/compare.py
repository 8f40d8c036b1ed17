"""`launch.py compare A B`: frame folders, latents, goldens or videos, worst frames first."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from runtime.media.files import write_json_atomic
from runtime.parity.frames import (
    VIDEO_SUFFIXES,
    Figures,
    Folder,
    Source,
    Stored,
    Video,
    added,
    join_of,
    measured,
    pairs,
)
from runtime.parity.metrics import Comparison, compare
from runtime.parity.report import number

EQUAL, DIFFERENT = 0, 1
PIXEL_TENSORS = ("decode/video", "out/video")
_FRAME = "{:>6}  {:>9} {:>9} {:>9} {:>7}  {}"
_TENSOR = "{:<44} {:>9} {:>9}  {}"

Document = dict[str, object]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A, B, --worst, --json."""
    parser.add_argument("a", type=Path, help="frame folder, .safetensors file or video")
    parser.add_argument("b", type=Path, help="what it is compared with")
    parser.add_argument("--worst", type=int, default=10, help="rows shown (default: 10)")
    parser.add_argument("--json", type=Path, dest="out", help="write every figure there")


def run(args: argparse.Namespace) -> int:
    """Exit status 0 equal bit for bit, 1 different; what cannot be compared is a ValueError (2)."""
    if args.worst < 1:
        raise ValueError(f"--worst is {args.worst}; it must be 1 or more")
    for path in (args.a, args.b):
        if not path.exists():
            raise ValueError(f"{path} does not exist; give a frame folder, .safetensors or video")
    if _is_tensors(args.a) and _is_tensors(args.b):
        document = _tensors(args.a, args.b, args.worst)
    else:
        document = _frames(_source(args.a), _source(args.b), args.worst)
    if args.out is not None:
        write_json_atomic(args.out, document)
    print("equal" if document["equal"] else "different")
    return EQUAL if document["equal"] else DIFFERENT


def _is_tensors(path: Path) -> bool:
    return path.is_file() and path.suffix == ".safetensors"


def _source(path: Path) -> Source:
    if path.is_dir():
        return Folder(path)
    if path.suffix.lower() in VIDEO_SUFFIXES:
        return Video(path)
    if not _is_tensors(path):
        raise ValueError(f"{path} is not a frame folder, a .safetensors file or a video")
    file = _open(path)
    name = next((n for n in PIXEL_TENSORS if n in file.keys()), None)  # noqa: SIM118
    if name is None:
        raise ValueError(f"{path} has no frames ({' or '.join(PIXEL_TENSORS)}); decode it first")
    return Stored(path, _pixels(path, name))


# ---- frames


def _frames(a: Source, b: Source, worst: int) -> Document:
    for warning in sorted({a.warning, b.warning} - {""}):
        print(f"warning: {warning}")
    sums = [measured(left, right) for left, right in pairs(a, b)]
    if not sums:
        raise ValueError(f"{a.path} and {b.path} have no frames")
    joins = [join_of(n, len(sums)) for n in range(len(sums))]
    figures = [s.figures() for s in sums]
    _print_worst(figures, joins, worst)
    parts = {
        "all frames": sums,
        "in temporal joins": [s for s, join in zip(sums, joins, strict=True) if join is not None],
        "outside of joins": [s for s, join in zip(sums, joins, strict=True) if join is None],
    }
    summary: Document = {}
    for name, part in parts.items():
        if part:
            whole = added(part).figures()
            print(_figures_line(str(len(part)), whole, name))
            summary[name] = {"frames": len(part), **_numbers(whole)}
    return {
        "a": str(a.path),
        "b": str(b.path),
        "equal": all(s.equal for s in sums),
        "summary": summary,
        "frames": [
            {"frame": n, "join": joins[n], **_numbers(figures[n])} for n in range(len(sums))
        ],
    }


def _print_worst(figures: Sequence[Figures], joins: Sequence[int | None], worst: int) -> None:
    different = sorted(
        (n for n, f in enumerate(figures) if not f.equal),
        key=lambda n: (-figures[n].max_abs, -figures[n].mean_abs, n),
    )
    print(_FRAME.format("frame", "max abs", "mean abs", "rel L2", "PSNR", "").rstrip())
    for n in different[:worst]:
        print(_figures_line(str(n), figures[n], "" if joins[n] is None else f"join at {joins[n]}"))
    if len(different) > worst:
        print(f"... {len(different) - worst} more frames differ (--worst shows more)")
    print(f"{len(different)} of {len(figures)} frames differ")


def _figures_line(first: str, f: Figures, last: str) -> str:
    values = (f"{f.max_abs:.2e}", f"{f.mean_abs:.2e}", f"{f.relative_l2:.2e}", f"{f.psnr:.1f}")
    return _FRAME.format(first, *values, last).rstrip()


def _numbers(f: Figures) -> Document:
    return {
        name: value if isinstance(value, bool) else number(value)
        for name, value in asdict(f).items()
    }


# ---- tensors


def _tensors(a: Path, b: Path, worst: int) -> Document:
    left, right = _open(a), _open(b)
    names = (frozenset(left.keys()), frozenset(right.keys()))
    shared = sorted(names[0] & names[1])
    if not shared:
        raise ValueError(f"{a} and {b} have no tensor name in common; compare files of one kind")
    found = [compare(n, right.get_tensor(n), left.get_tensor(n), run="", stage="") for n in shared]
    lonely = {str(a): sorted(names[0] - names[1]), str(b): sorted(names[1] - names[0])}
    _print_tensors(found, lonely, worst)
    document: Document = {
        "a": str(a),
        "b": str(b),
        "equal": all(c.equal for c in found) and not any(lonely.values()),
        "tensors": [_row(c) for c in found],
        "only_in": lonely,
    }
    for c in found:
        if c.name in PIXEL_TENSORS and not c.equal and not c.problem:
            print(f"frames of {c.name}:")
            one, other = (Stored(path, _pixels(path, c.name)) for path in (a, b))
            document[c.name] = _frames(one, other, worst)
    return document


def _print_tensors(
    found: Sequence[Comparison], lonely: Mapping[str, Sequence[str]], worst: int
) -> None:
    different = sorted((c for c in found if not c.equal), key=lambda c: (-c.relative_l2, c.name))
    print(_TENSOR.format("tensor", "max abs", "rel L2", "").rstrip())
    for c in different[:worst]:
        row = _TENSOR.format(c.name, f"{c.max_abs:.2e}", f"{c.relative_l2:.2e}", c.problem)
        print(row.rstrip())
    if len(different) > worst:
        print(f"... {len(different) - worst} more tensors differ (--worst shows more)")
    for path, only in lonely.items():
        if only:
            print(f"only in {path}: {', '.join(only[:worst])}{' ...' * (len(only) > worst)}")
    print(f"{len(different)} of {len(found)} tensors differ")


def _row(c: Comparison) -> Document:
    return {
        "name": c.name,
        "equal": c.equal,
        "max_abs": number(c.max_abs),
        "mean_abs": number(c.mean_abs),
        "relative_l2": number(c.relative_l2),
        "cosine": number(c.cosine),
        "psnr": number(c.psnr),
        "problem": c.problem,
    }


def _pixels(path: Path, name: str) -> NDArray[np.float32]:
    array: NDArray[np.float32] = _open(path).get_tensor(name).numpy()
    return array


def _open(path: Path) -> Any:
    try:
        return safe_open(str(path), framework="pt")
    except Exception as error:  # safetensors raises its own untyped errors
        raise ValueError(f"{path} is not a readable .safetensors file ({error})") from error
