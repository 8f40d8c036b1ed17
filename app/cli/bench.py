"""`launch.py bench`: how long a plan takes, alone or in turns with another plan or with a peer."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from app import bench, families, measurements, preflight, presets, runs
from app.bench_child import BenchFailed, Child
from app.bench_h3 import H3
from app.bench_kind import Kind
from app.bench_lock import alone
from app.bench_ltx import LTX
from app.stored import plain
from runtime.messages import Plan, Request

FAILED = 1
_SCHEMA = 1
_MOST_RUNS = 1000
_NO_MEMORY = "ran out of memory"  # of runtime.worker.sentence
_KINDS = {"h3": H3, "ltx": LTX}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--plan", required=True, help="a TOML file or a name in presets/plans: A")
    other = parser.add_mutually_exclusive_group()
    other.add_argument("--against", metavar="PLAN", help="B, in turns with A: A B A B")
    other.add_argument("--peer", choices=("diffusers",), help="B is this package's own model")
    parser.add_argument("--request", help="a TOML file or a name in presets/requests")
    parser.add_argument(
        "--text-rows",
        type=int,
        default=0,
        metavar="N",
        help="random conditioning of N words and one picture (LTX: of N rows, for sampling alone): "
        "no text encoder, no media",
    )
    parser.add_argument("--runs", type=int, default=3, help="turns of each after its warm-up (3)")
    parser.add_argument("--steps", type=int, help="of a turn (with --text-rows 2)")
    parser.add_argument("--no-decode", action="store_true", help="with --text-rows: sampling alone")
    parser.add_argument("--no-media", action="store_true", help="float frames in place of an mp4")
    parser.add_argument(
        "--repeat-request",
        action="store_true",
        help="one turn: the second request, whose conditioning is known",
    )
    parser.add_argument("--profile", action="store_true", help="one more step, kernel by kernel")
    parser.add_argument(
        "--random-weights",
        metavar="FORMAT",
        help="of the denoiser, in place of A's (and B's) files",
    )
    parser.add_argument("--against-weights", metavar="FORMAT", help="the same for B alone")
    parser.add_argument("--random-size", choices=("full", "tiny"), default="full")
    parser.add_argument(
        "--peer-attention", default="_native_cudnn", help="of diffusers (_native_cudnn)"
    )
    parser.add_argument("--out", help="folder that keeps what requests write")
    parser.add_argument(
        "--record", action="store_true", help="add the result to docs/benchmarks/records.jsonl"
    )
    parser.add_argument("--record-to", metavar="FILE", help="add the result to this file")
    add_store(parser)


def add_store(parser: argparse.ArgumentParser) -> None:
    """--store, of `sweep` too."""
    parser.add_argument(
        "--store",
        type=Path,
        default=runs.FOLDER,
        metavar="FOLDER",
        help="the console's runs: its Timing panel shows what is in bench/ there",
    )


def run(args: argparse.Namespace) -> int:
    """The table, then the result as one line of JSON; 0 ok, 1 failed, 2 bad input."""
    plan = presets.load_plan(presets.find("plans", args.plan))
    kind = _KINDS[families.of_plan(plan).name]
    _check(args)
    kind.check(args)
    request = kind.request(args)
    setups = _setups(args, kind, plan, request)
    records = _records(args)
    measurements.check(args.store)
    say = partial(print, file=sys.stderr, flush=True)
    for note in kind.notes(args):
        say(f"note: {note}")
    with ExitStack() as stack:
        stack.enter_context(alone("launch.py bench"))
        watch = stack.enter_context(watching(plan.device))
        children = []
        for name, setup in setups:
            children.append(stack.enter_context(Child(name, setup)))
        try:
            measured, order = bench.measure(
                children,
                runs=1 if args.repeat_request else args.runs,
                profile=args.profile,
                watch=watch,
                say=say,
                words=kind.words,
                check=kind.same_size,
            )
        except BenchFailed as error:
            reason = str(error)
            if len(children) > 1 and _NO_MEMORY in reason:
                reason += "; both subjects stay loaded: bench each alone, or a smaller format"
            print(f"launch.py bench: {reason}", file=sys.stderr)
            print(json.dumps({"bench": _SCHEMA, "ok": False, "reason": reason}))
            return FAILED
    for child in children:
        if child.fault:
            say(f"note: {child.fault}")
    result = _result(kind, request, setups, measured, order)
    print("\n".join(kind.lines(result["subjects"], result.get("ratio"))))
    for path in records:
        append(path, result)
    measurements.keep(args.store, result)
    print(json.dumps(result))
    return 0


def _check(args: argparse.Namespace) -> None:
    if not 1 <= args.runs <= _MOST_RUNS:
        raise ValueError(f"--runs must be 1 to {_MOST_RUNS}, got {args.runs}")
    if args.against_weights and not args.against:
        raise ValueError("--against-weights belongs to --against, which is not given")
    if args.text_rows < 0:
        raise ValueError(f"--text-rows must be 1 or more, got {args.text_rows}")


def _records(args: argparse.Namespace) -> list[Path]:
    """The files that get the result; ValueError now, not after minutes, if one cannot be written.

    One that is not there yet is made, empty.
    """
    paths = [measurements.PUBLISHED] if args.record else []
    paths += [presets.user_path(args.record_to)] if args.record_to else []
    for path in paths:
        try:
            path.open("ab").close()
        except OSError as error:
            why = (error.strerror or str(error)).lower()
            raise ValueError(f"the result cannot be added to {path}: {why}") from error
    return paths


def _setups(
    args: argparse.Namespace, kind: Kind, plan: Plan, request: Request
) -> list[tuple[str, dict[str, Any]]]:
    """(name, setup) of A and, where there is one, of B."""
    out = presets.user_path(args.out).absolute() if args.out else None
    text_rows = kind.text_rows(args)

    def setup(place: str, subject: str, plan: Plan, weights: str | None) -> dict[str, Any]:
        folder = out / place if out else None
        families.check_pair(request, plan)
        if not weights and not text_rows:
            place_of_files = folder or Path(tempfile.gettempdir()) / request.id
            preflight.check(request, plan, place_of_files, media=not args.no_media)
        if not weights:
            kind.ready(plan)
        return {
            "subject": subject,
            "plan": plain(plan),
            "request": plain(request),
            "text_rows": text_rows,
            "weights": f"{args.random_size}:{weights}" if weights else "",
            "media": not text_rows and not args.no_media,
            "out": str(folder or ""),
            "attention": args.peer_attention,
            **kind.setup(args),
        }

    found = [(plan.name, setup("A", "plan", plan, args.random_weights))]
    if args.peer:
        found.append((args.peer, setup("B", args.peer, plan, kind.peer_weights)))
    if args.against:
        other = presets.load_plan(presets.find("plans", args.against))
        if other.device != plan.device:
            raise ValueError(
                f"{plan.name} runs on {plan.device} and {other.name} on {other.device}; a ratio "
                f"needs two plans of one device"
            )
        name = other.name if other.name != plan.name else f"{other.name} (B)"
        weights = args.against_weights or args.random_weights
        found.append((name, setup("B", "plan", replace(other, name=name), weights)))
    return found


@contextmanager
def watching(device: str) -> Iterator[bench.Watch]:
    """How a turn's GPU is watched; without NVML the reason stands in its place."""
    if device != "cuda":
        yield partial(_unseen, "the plan runs on the CPU")
        return
    try:
        from app import bench_watch
        from app.telemetry import Telemetry
    except ImportError as error:  # a bare machine: speed can be measured, power cannot
        yield partial(_unseen, f"{error}; pip install nvidia-ml-py psutil")
        return
    with Telemetry(bench_watch.Silent()) as telemetry:
        yield partial(bench_watch.turn, telemetry)


@contextmanager
def _unseen(reason: str) -> Iterator[Callable[[], dict[str, Any]]]:
    yield lambda: {"reason": reason}


def _result(
    kind: Kind,
    request: Request,
    setups: list[tuple[str, dict[str, Any]]],
    measured: list[bench.Measured],
    order: str,
) -> dict[str, Any]:
    subjects = [
        {**kind.summary(one), "subject": s["subject"], "weights": s["weights"], "plan": s["plan"]}
        for one, (_, s) in zip(measured, setups, strict=True)
    ]
    result = {
        "bench": _SCHEMA,
        "ok": True,
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "request": plain(request),
        "text_rows": setups[0][1]["text_rows"],
        **kind.size(measured[0].rows),
        "order": order,
        "subjects": subjects,
    }
    if len(measured) > 1:
        result["ratio"] = kind.ratios(measured[0], measured[1])
    return result


def append(path: Path, result: dict[str, Any]) -> None:
    """One line in one write: two benchmarks that end together do not mix."""
    line = json.dumps(result).encode() + b"\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(descriptor, line)
    finally:
        os.close(descriptor)
