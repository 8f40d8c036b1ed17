"""`launch.py inspect`: what a checkpoint file holds, for people or as JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from app.cli import inspect_ltx
from app.cli.inspect_ltx import Facts
from runtime.checkpoints.classify import Part, Report, TensorReport, classify, totals
from runtime.checkpoints.header import CheckpointError, read_header
from runtime.checkpoints.modes import KNOWN_MODELS, MODES, learn

_GIB, _MIB = 1 << 30, 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="a .safetensors file")
    parser.add_argument("--json", action="store_true", help="everything, as one JSON object")
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    parser.add_argument(
        "--against",
        type=Path,
        default=None,
        help="of an LTX denoiser: an unquantised copy, which tells the order of its NVFP4",
    )
    parser.add_argument("--learn", choices=MODES, help="remember these weights as this mode")
    parser.add_argument("--known", type=Path, default=KNOWN_MODELS, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Print the report; raises CheckpointError at the end when the file cannot be loaded."""
    header = read_header(args.file)
    if args.learn:
        new = learn(header, args.learn, args.known)
        print(f"{args.file} {'is now' if new else 'was already'} known as {args.learn}")
        return 0
    report = classify(header, args.known)
    is_ltx = any(part.role == "ltx_dit" for part in report.parts)
    if args.against is not None and not is_ltx:
        raise ValueError(f"--against belongs to an LTX denoiser, which {args.file} is not")
    ltx = inspect_ltx.facts_of(header, args.against) if is_ltx else None
    if args.json:
        print(json.dumps(_plain(report, ltx), indent=1))
    else:
        print("\n".join(_lines(report, args.tensors, ltx)))
    problems = [part.problem for part in report.parts if part.problem]
    problems += [ltx.problem] if ltx is not None and ltx.problem else []
    if problems:
        raise CheckpointError(problems[0])
    return 0


def _plain(report: Report, ltx: Facts | None) -> dict[str, object]:
    plain = asdict(report)
    if ltx is not None:
        plain["ltx"] = inspect_ltx.plain(ltx)
    plain["gpu_bytes"] = report.gpu_bytes
    for part, shown in zip(report.parts, plain["parts"], strict=True):
        for by in ("role", "dtype"):
            shown[f"by_{by}"] = {
                key: {"tensors": count, "bytes": size, "gpu_bytes": resident}
                for key, (count, size, resident) in totals(part.tensors, by).items()
            }
    return plain


def _lines(report: Report, every_tensor: bool, ltx: Facts | None) -> list[str]:
    unit = _Unit(report.file_bytes)
    lines = [
        Path(report.path).name,
        f"{unit.show(report.file_bytes)} {unit.name}   {report.file_bytes:,} bytes   "
        f"{report.tensors:,} tensors   header {report.header_bytes:,} bytes",
    ]
    for part in report.parts:
        lines += ["", *_part(part, unit, ltx if part.role == "ltx_dit" else None)]
        if every_tensor:
            lines += ["", *_tensors(part.tensors)]
    lines += ["", f"a GPU will hold {unit.show(report.gpu_bytes)} {unit.name} of it"]
    return lines


def _part(part: Part, unit: _Unit, ltx: Facts | None) -> list[str]:
    facts = [part.family]
    if part.role == "dit":
        grid = f"pruned (grid {part.dims.get('grid')}, rank {part.dims.get('rank')})"
        facts += [grid if part.pruned else "full", f"mode {part.mode}"]
        facts[-1] += " (not in presets/known_models.toml)" if part.mode == "unknown" else ""
    if part.prefix:
        facts.append(f"prefix {part.prefix}")
    lines = [" · ".join(facts)]
    hidden = ("grid", "rank")
    dims = [f"{name} {size:,}" for name, size in part.dims.items() if name not in hidden]
    if dims:
        lines.append(" · ".join(dims))
    if ltx is not None:
        lines += inspect_ltx.lines(ltx)
    if part.quantised:
        lines += ["", *_quantised(part)]
    for by in ("role", "dtype"):
        rows = [
            (key, f"{count:,}", unit.show(size), unit.show(resident))
            for key, (count, size, resident) in totals(part.tensors, by).items()
        ]
        lines += ["", *_table((by, "tensors", unit.name, f"{unit.name} on GPU"), rows)]
    return lines


def _quantised(part: Part) -> list[str]:
    rows = []
    for group in part.quantised:
        notes = [f"rotated by {group.convrot_group}"] if group.convrot_group else []
        notes += ["full precision matmul"] if group.full_precision else []
        rows.append(
            (
                group.format,
                f"{group.layers:,}",
                f"{group.input_scale:,}",
                f"{group.pre_quant_scale:,}",
                ", ".join(notes) or "-",
            )
        )
    header = ("quantised as", "layers", "input_scale", "pre_quant_scale", "options")
    return _table(header, rows, left=(0, 4))


def _tensors(tensors: Sequence[TensorReport]) -> list[str]:
    rows = [
        (
            tensor.name,
            tensor.role,
            tensor.dtype,
            "x".join(map(str, tensor.shape)) or "scalar",
            f"{tensor.bytes:,}",
            "; ".join(filter(None, (tensor.quant, tensor.layout, _padding(tensor)))),
        )
        for tensor in tensors
    ]
    header = ("tensor", "role", "dtype", "shape", "bytes", "layout")
    return _table(header, rows, left=(0, 1, 2, 5))


def _padding(tensor: TensorReport) -> str:
    return f"padding {tensor.padding}" if tensor.padding else ""


def _table(
    header: tuple[str, ...], rows: Sequence[tuple[str, ...]], left: tuple[int, ...] = (0,)
) -> list[str]:
    """Columns under a rule, numbers to the right; `left`: columns set to the left."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]

    def line(row: tuple[str, ...]) -> str:
        cells = (
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        return "  ".join(cells).rstrip()

    return [line(header), "  ".join("─" * width for width in widths), *map(line, rows)]


class _Unit:
    """GiB, or MiB when the whole file is smaller than one GiB."""

    def __init__(self, whole: int) -> None:
        self.name, self._bytes = ("GiB", _GIB) if whole >= _GIB else ("MiB", _MIB)

    def show(self, size: int) -> str:
        return f"{size / self._bytes:.3f}"
