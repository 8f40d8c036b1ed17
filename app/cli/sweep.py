"""`launch.py sweep`: every layout that this machine can hold, in turns, against a single device."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from app import bench, families, measurements, presets, runs, sweep
from app.bench_child import BenchFailed, Child
from app.bench_lock import alone
from app.cli.bench import add_store, append, watching
from app.stored import plain
from runtime.layouts import SINGLE, Layout
from runtime.messages import Plan, Ref2VARequest

_SCHEMA = 1
_STEPS = 2  # of a turn; a request brings its own number
_MOST_ROUNDS = 100

Start = tuple[str, int]  # a layout, and for single on which GPU


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--plan", required=True, help="a TOML file or a name in presets/plans")
    parser.add_argument("--request", help="a TOML file or a name in presets/requests: its size")
    parser.add_argument(
        "--layouts", default="all", help="all (what this machine and the plan can be), or U2,U4"
    )
    parser.add_argument(
        "--text-rows", type=int, default=300, metavar="N", help="random words (300); no media"
    )
    parser.add_argument("--random-weights", metavar="FORMAT", help="of the denoiser, not its file")
    parser.add_argument("--random-size", choices=("full", "tiny"), default="full")
    parser.add_argument("--rounds", type=int, default=2, help="starts of each layout (2)")
    parser.add_argument("--steps", type=int, help="of a turn (2 without --request)")
    parser.add_argument("--no-decode", action="store_true", help="sampling alone")
    parser.add_argument(
        "--each-gpu", action="store_true", help="single on each GPU of the layouts: cards differ"
    )
    parser.add_argument("--record-to", metavar="FILE", help="add the result to this file")
    add_store(parser)


def run(args: argparse.Namespace) -> int:
    """The table, then the result as one line of JSON; 0 ok, 1 a layout failed, 2 bad input."""
    if not 1 <= args.rounds <= _MOST_ROUNDS:
        raise ValueError(f"--rounds must be 1 to {_MOST_ROUNDS}, got {args.rounds}")
    if args.text_rows < 1:
        raise ValueError(f"--text-rows must be 1 or more, got {args.text_rows}")
    plan = presets.load_plan(presets.find("plans", args.plan))
    request = _request(args)
    families.check_pair(request, plan)
    cuda = plan.device == "cuda"
    if args.each_gpu and not cuda:
        raise ValueError(f"--each-gpu measures GPUs, and the device of the plan is {plan.device}")
    devices = _devices(plan)
    names = sweep.chosen(plan, args.layouts, devices, cfg=request.cfg)
    order = _order(names, each_gpu=args.each_gpu)
    measurements.check(args.store)
    for note in sweep.left_out(plan, devices, cfg=request.cfg) if args.layouts == "all" else ():
        print(f"note: {note}", file=sys.stderr, flush=True)
    with (
        alone("launch.py sweep"),
        tempfile.TemporaryDirectory(prefix="h3-sweep-") as folder,
    ):
        layouts, gpus = _measured(args, plan, request, order, Path(folder))
    result = {
        "sweep": _SCHEMA,
        "ok": all(one["ok"] for one in (*layouts, *gpus)),
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "plan": plain(plan),
        "request": plain(request),
        "text_rows": args.text_rows,
        "weights": args.random_weights or "",
        "order": " ".join([_label(*one) for one in order] * args.rounds),
        "layouts": layouts,
        "gpus": gpus,
    }
    print("\n".join([*sweep.lines(layouts), *sweep.gpu_lines(layouts, gpus)]))
    if args.record_to:
        append(presets.user_path(args.record_to), result)
    measurements.keep(args.store, result)
    print(json.dumps(result))
    return 0 if result["ok"] else 1


def _request(args: argparse.Namespace) -> Ref2VARequest:
    changes: dict[str, Any] = {"references": (), "prompt": ""}
    if args.steps is not None or not args.request:
        changes["steps"] = _STEPS if args.steps is None else args.steps
    if not args.request:
        return Ref2VARequest(id=runs.new_id(), **changes)
    path = presets.find("requests", args.request)
    return presets.load_request(path, id=runs.new_id(), changes=changes)


def _measured(
    args: argparse.Namespace, plan: Plan, request: Ref2VARequest, order: list[Start], folder: Path
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Each round starts every layout anew, as two do not fit on one GPU; one turn in each.

    What is told of the layouts, and of single on each GPU alone where that was asked for.
    """
    parts: dict[Start, list[bench.Measured]] = {one: [] for one in order}
    failed: dict[Start, str] = {}
    with watching(plan.device) as watch:
        for round in range(args.rounds):
            last = round + 1 == args.rounds
            for name, gpu in order:
                if (name, gpu) in failed:
                    continue
                out = folder / f"{name}-{gpu}" / f"{round}"
                setup = _setup(args, replace(plan, layout=name), request, out)
                try:
                    with Child(_label(name, gpu), setup, gpu) as child:
                        (found,), _ = bench.measure(
                            [child],
                            runs=1,
                            profile=last and plan.device == "cuda" and gpu == 0,
                            watch=watch,
                            say=partial(print, file=sys.stderr, flush=True),
                        )
                    if child.fault:
                        print(f"note: {child.fault}", file=sys.stderr, flush=True)
                except (BenchFailed, ValueError) as error:
                    failed[name, gpu] = str(error)
                else:
                    parts[name, gpu].append(found)
    summaries = {one: bench.summary(sweep.merged(parts[one])) for one in order if one not in failed}
    latents = {name: _latents(folder / f"{name}-0" / "0") for name, gpu in summaries if gpu == 0}
    layouts = [
        _failure(name, failed[name, 0])
        if (name, 0) in failed
        else sweep.told(name, summaries[name, 0], summaries.get((SINGLE, 0)), latents)
        for name, gpu in order
        if gpu == 0
    ]
    return layouts, [
        {"gpu": gpu, "ok": False, "reason": failed[SINGLE, gpu]}
        if (SINGLE, gpu) in failed
        else {"gpu": gpu, "ok": True, "step_seconds": summaries[SINGLE, gpu]["step_seconds"]}
        for name, gpu in order
        if name == SINGLE and args.each_gpu
    ]


def _order(names: list[str], *, each_gpu: bool) -> list[Start]:
    """single first, then single on every other GPU that a layout of these takes."""
    most = max(Layout.parse(name).ranks for name in names) if each_gpu else 1
    return [*((SINGLE, gpu) for gpu in range(most)), *((n, 0) for n in names if n != SINGLE)]


def _label(name: str, gpu: int) -> str:
    return f"{name} on GPU {gpu}" if gpu else name


def _latents(folder: Path) -> Path:
    """Of the turn after the warm-up."""
    return folder / "turn_2" / "latents.safetensors"


def _failure(name: str, reason: str) -> dict[str, Any]:
    return {"layout": name, "ranks": Layout.parse(name).ranks, "ok": False, "reason": reason}


def _setup(
    args: argparse.Namespace, plan: Plan, request: Ref2VARequest, out: Path
) -> dict[str, Any]:
    return {
        "subject": "plan",
        "plan": plain(plan),
        "request": plain(request),
        "text_rows": args.text_rows,
        "weights": f"{args.random_size}:{args.random_weights}" if args.random_weights else "",
        "decode": not args.no_decode,
        "media": False,
        "out": str(out),
        "attention": "",
    }


def _devices(plan: Plan) -> int:
    """How many ranks this machine can hold: GPUs, or cores for ranks on the CPU."""
    if plan.device != "cuda":
        return os.cpu_count() or 1
    code = "import torch; print(torch.cuda.device_count())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    return int(found.stdout)
