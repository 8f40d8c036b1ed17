"""`launch.py make-demo`: writes a random checkpoint set of full or tiny size."""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from runtime.checkpoints.demo import write_random
from runtime.checkpoints.published import FORMATS

_GIB = 1 << 30
# Families that make their own set: DEFAULT_FORMAT, write_denoiser(path, ...) -> bytes,
# write_components(folder, ...) -> part to folder
_MAKERS = {"ltx": "runtime.ltx.demo"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    dit = {name: None for size in FORMATS.values() for name in size["dit"]}
    parser.add_argument("--family", choices=("h3", *_MAKERS), default="h3")
    parser.add_argument("--size", choices=tuple(FORMATS), default="full")
    parser.add_argument(
        "--format",
        default=None,
        help=f"of the denoiser; h3: {', '.join(dit)}; ltx: nvfp4, nvfp4_bare (as first released: "
        "no markers, no keyframes), bf16; left out: the first",
    )
    parser.add_argument("--text-encoder", choices=FORMATS["full"]["text_encoder"], default=None)
    parser.add_argument("--video-vae", choices=FORMATS["full"]["video_vae"], default=None)
    parser.add_argument("--out", type=Path, required=True, help="folder for the files")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only",
        action="append",
        choices=tuple(FORMATS["full"]),
        help="write this file only; may be given more than once",
    )


def _show(path: Path, done: int, total: int) -> None:
    if sys.stderr.isatty():
        end = "\n" if done == total else ""
        print(f"\r{path.name}  {done / _GIB:.1f}/{total / _GIB:.1f} GiB", end=end, file=sys.stderr)


def run(args: argparse.Namespace) -> int:
    """Write the set; prints one line per file: path, bytes, GiB/s."""
    if args.family == "h3":
        return _h3(args)
    for option in ("text_encoder", "video_vae"):
        if getattr(args, option) is not None:
            raise ValueError(f"--{option.replace('_', '-')} belongs to family h3; leave it out")
    if args.only not in (None, ["dit"]):
        raise ValueError(f"--only of family {args.family} may be dit, got {', '.join(args.only)}")
    maker = importlib.import_module(_MAKERS[args.family])  # other families stay unimported
    format = args.format or maker.DEFAULT_FORMAT
    path = args.out / f"random_{args.size}_{args.family}_dit_{format}.safetensors"
    chosen = {"size": args.size, "format": format, "seed": args.seed}
    _written(path, partial(maker.write_denoiser, **chosen))
    if args.only is None:
        for part, folder in maker.write_components(args.out, **chosen).items():
            print(f"{folder}  {part}")
    return 0


def _h3(args: argparse.Namespace) -> int:
    wanted = {
        "dit": args.format,
        "text_encoder": args.text_encoder,
        "video_vae": args.video_vae,
        "audio_vae": None,
    }
    for role in args.only or wanted:
        format = wanted[role] or FORMATS[args.size][role][0]
        path = args.out / f"random_{args.size}_{role}_{format}.safetensors"
        _written(
            path, partial(write_random, role=role, size=args.size, format=format, seed=args.seed)
        )
    return 0


def _written(path: Path, write: Callable[..., int]) -> None:
    began = time.perf_counter()
    size = write(path, progress=partial(_show, path))
    seconds = time.perf_counter() - began
    speed = f"{size / _GIB:7.2f} GiB  {seconds:6.1f} s  {size / _GIB / seconds:5.2f} GiB/s"
    print(f"{path}  {size:,} bytes  {speed}")
