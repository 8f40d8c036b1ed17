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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--plan", required=True, help="a TOML file or a name in presets/plans")
    parser.add_argument("--request", help="a TOML file or a name in presets/requests: its size")
    parser.add_argument("--layouts", default="all", help="all (what fits here), or U2,U4,TP2xU2")
    parser.add_argument(
        "--text-rows", type=int, default=300, metavar="N", help="random words (300); no media"
    )
    parser.add_argument("--random-weights", metavar="FORMAT", help="of the denoiser, not its file")
    parser.add_argument("--random-size", choices=("full", "tiny"), default="full")
    parser.add_argument("--rounds", type=int, default=2, help="starts of each layout (2)")
    parser.add_argument("--steps", type=int, help="of a turn (2 without --request)")
    parser.add_argument("--no-decode", action="store_true", help="sampling alone")
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
    names = sweep.chosen(args.layouts, _devices(plan), cuda=cuda, cfg=request.cfg)
    for name in names:
        replace(plan, layout=name)  # what the plan cannot be with a layout is said before the first
    measurements.check(args.store)
    with (
        alone("launch.py sweep"),
        tempfile.TemporaryDirectory(prefix="h3-sweep-") as folder,
    ):
        layouts = _measured(args, plan, request, names, Path(folder))
    result = {
        "sweep": _SCHEMA,
        "ok": all(one["ok"] for one in layouts),
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "plan": plain(plan),
        "request": plain(request),
        "text_rows": args.text_rows,
        "weights": args.random_weights or "",
        "order": " ".join(names * args.rounds),
        "layouts": layouts,
    }
    print("\n".join(sweep.lines(layouts)))
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
    args: argparse.Namespace, plan: Plan, request: Ref2VARequest, names: list[str], folder: Path
) -> list[dict[str, Any]]:
    """Each round starts every layout anew, as two do not fit on one GPU; one turn in each."""
    parts: dict[str, list[bench.Measured]] = {name: [] for name in names}
    failed: dict[str, str] = {}
    with watching(plan.device) as watch:
        for round in range(args.rounds):
            last = round + 1 == args.rounds
            for name in names:
                if name in failed:
                    continue
                setup = _setup(
                    args, replace(plan, layout=name), request, folder / name / f"{round}"
                )
                try:
                    with Child(name, setup) as child:
                        (found,), _ = bench.measure(
                            [child],
                            runs=1,
                            profile=last and plan.device == "cuda",
                            watch=watch,
                            say=partial(print, file=sys.stderr, flush=True),
                        )
                except (BenchFailed, ValueError) as error:
                    failed[name] = str(error)
                else:
                    parts[name].append(found)
    latents = {name: _latents(folder / name / "0") for name in names if name not in failed}
    summaries = {n: bench.summary(sweep.merged(parts[n])) for n in names if n not in failed}
    return [
        _failure(name, failed[name])
        if name in failed
        else sweep.told(name, summaries[name], summaries.get(SINGLE), latents)
        for name in names
    ]


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
