"""`launch.py gate --plan P --against Q`: two plans step by step, video and audio rows apart."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from runtime.checkpoints import open_checkpoint
from runtime.families import need_h3
from runtime.media.files import write_bytes_atomic, write_json_atomic
from runtime.messages import Plan
from runtime.parity import gate_plans
from runtime.parity.gate_cases import (
    OWN,
    RANDOM,
    Case,
    aligned_case,
    golden_cases,
    random_case,
    random_denoiser,
    read_request,
)
from runtime.parity.gate_judge import judge
from runtime.parity.gate_pages import RUNS, keep, markdown, page_of
from runtime.parity.gate_ranks import RankFailed, check, check_sides
from runtime.parity.gate_references import References
from runtime.parity.gate_report import EXIT_FAILED, GATED, document
from runtime.parity.gate_tables import lines
from runtime.parity.plans import read_plan

BASELINE = "baseline"  # --against: the correctness baseline of the plan on this machine
DEFAULT_REQUEST = "reference_960x544_124f"
EXITS = (
    "exit status: 0 passed; 1 failed; 2 bad input, or no verdict: a backend cannot run here, or is "
    "not exercised (no layer of the checkpoint uses it, its cache answered no step)"
)
GOLDENS = Path(__file__).parents[2] / "tests" / "goldens"
_TOLD = (
    "fields",
    "backends",
    "options",
    "against_name",
    "status",
    "reason",
    "worst",
    "share",
    "failed",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--plan --against, what is evaluated, and where the figures go."""
    parser.epilog = EXITS
    parser.add_argument("--plan", help="plan P: a TOML file or a name in presets/plans")
    parser.add_argument(
        "--against",
        help=f"plan Q, the reference; '{BASELINE}': P with SageAttention 2, or SDPA where it "
        "cannot run, and without lossy linears and caches",
    )
    parser.add_argument("--all", action="store_true", help="every lossy backend by itself")
    parser.add_argument(
        "--only", default="", metavar="A,B", help="with --all: these lossy backends alone"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="settings",
        metavar="FIELD=VALUE",
        help="change a field of plan P (not of Q)",
    )
    where = parser.add_argument_group("what is evaluated (tests/goldens unless told)")
    where.add_argument("--goldens", type=Path, help="golden files: their Ref2VA requests, tiny")
    where.add_argument("--request", help="size, frames and steps of a request (with --text-rows)")
    where.add_argument("--text-rows", type=int, help="random words and one random reference")
    where.add_argument(
        "--random", metavar="FORMAT", help="full-size random weights instead of the plan's file"
    )
    where.add_argument("--steps", type=int, default=0, help="denoising steps (default: its own)")
    parser.add_argument(
        "--blocks", type=int, default=0, metavar="STEP", help="also compare each block at that step"
    )
    parser.add_argument("--json", type=Path, dest="out", help="write every figure there")
    parser.add_argument(
        "--runs", type=Path, default=RUNS, help="the console's runs: its Backends panel reads gate/"
    )
    parser.add_argument("--markdown", type=Path, help="write the table for docs/benchmarks there")


def run(args: argparse.Namespace) -> int:
    """0: within limits; 1: a stream of a step is beyond; 2: no verdict (EXITS), or bad input."""
    _check(args)
    base = read_plan(args.plan) if args.plan else gate_plans.default_plan()
    need_h3(base, "launch.py gate")
    base = gate_plans.changed(base, args.settings)
    cases = _cases(args, base)
    shortest = min(case.num_steps for case in cases)
    if args.blocks > shortest:
        raise ValueError(f"--blocks must be a step from 1 to {shortest}, got {args.blocks}")
    pairs = (
        gate_plans.pairs(base, [name for name in args.only.split(",") if name])
        if args.all
        else [(base, _reference(args.against, base))]
    )
    for p, q in pairs:
        check(p, q, args.blocks > 0)
        check_sides(p, cases)
    print(GATED, flush=True)
    references = References()
    documents = [_gate(p, q, cases, references, args.blocks - 1) for p, q in pairs]
    _write(args, documents, base)
    told = [{key: found[key] for key in _TOLD} for found in documents]
    print(json.dumps({"results": told} if args.all else told[0]))
    found = {document["exit"] for document in documents}
    return EXIT_FAILED if EXIT_FAILED in found else max(found)


def _write(args: argparse.Namespace, documents: list[dict[str, Any]], base: Plan) -> None:
    if args.out is not None:
        write_json_atomic(args.out, documents if args.all else documents[0])
    for found in documents:
        keep(found, args.runs)
    page = args.markdown or (page_of(documents[0]["device"]) if args.all else None)
    if page is not None:
        title = "The quality gate: every lossy backend" if args.all else f"Gate of {base.name}"
        write_bytes_atomic(
            page, markdown(documents, title, gate_plans.alone() if args.all else []).encode()
        )


def _check(args: argparse.Namespace) -> None:
    """ValueError for options that cannot be followed, before anything is loaded."""
    if not args.plan and not args.all:
        raise ValueError("--plan is missing; name a plan, or give --all for every lossy backend")
    if args.all and args.against:
        raise ValueError("--all takes each backend's own reference; leave out --against")
    if args.only and not args.all:
        raise ValueError("--only chooses among the backends of --all; give both")
    if args.goldens and (args.request or args.text_rows is not None or args.random):
        raise ValueError("--goldens bring their own requests; leave out --request and --text-rows")
    if (args.request or args.random) and args.text_rows is None:
        raise ValueError(
            "--request and --random need --text-rows N: a gate takes random words, not a text "
            "encoder (300 words give the reference shape its 20,094 rows)"
        )
    place = next(p for p in (args.runs.absolute(), *args.runs.absolute().parents) if p.exists())
    if not (place.is_dir() and os.access(place, os.W_OK)):
        raise ValueError(f"--runs {args.runs}: {place} is no folder that can be written to")
    for name in ("steps", "blocks"):
        if getattr(args, name) < 0:
            raise ValueError(f"--{name} is {getattr(args, name)}; it must be 1 or more")
    for name in ("out", "markdown"):
        path = getattr(args, name)
        if path is not None and not path.absolute().parent.is_dir():
            option = "--json" if name == "out" else "--markdown"
            raise ValueError(f"{option} {path}: its folder does not exist; make it first")


def _cases(args: argparse.Namespace, plan: Plan) -> list[Case]:
    if plan.device == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"plan {plan.name} names cuda: torch sees no CUDA device here")
    if args.text_rows is None:
        found = golden_cases(args.goldens or GOLDENS, args.steps)
        return [*found, aligned_case(gate_plans.default_plan().models.dit)] if args.all else found
    changes: dict[str, object] = {"steps": args.steps} if args.steps else {}
    request = read_request(args.request or DEFAULT_REQUEST, changes)
    if args.random:
        return [random_case(request, args.text_rows, random_denoiser(args.random), RANDOM)]
    dit = plan.models.dit
    if not dit.is_file():
        raise ValueError(f"{dit} of plan {plan.name} does not exist; give --random FORMAT without")
    return [random_case(request, args.text_rows, partial(open_checkpoint, dit, "dit"), OWN)]


def _reference(against: str | None, p: Plan) -> Plan:
    """Plan Q; ValueError says which one the baseline would be when none is named."""
    if against and against != BASELINE:
        q = read_plan(against)
        need_h3(q, "launch.py gate")
        if q.device != p.device:
            raise ValueError(
                f"plan {p.name} runs on {p.device} and {q.name} on {q.device}; a gate compares "
                "two plans on one device"
            )
        return q
    baseline, reason = gate_plans.baseline(p)
    said = f"sdpa (sage2 cannot run here: {reason})" if reason else "sage2"
    if not against:
        raise ValueError(
            f"--against is missing; the correctness baseline of {p.name} here would be the same "
            f"plan with attention {said}: give `--against {BASELINE}` to take it, or a plan"
        )
    return replace(baseline, name=said)


def _gate(
    p: Plan, q: Plan, cases: list[Case], references: References, block_step: int
) -> dict[str, Any]:
    print(f"\n{p.name} against {q.name}", flush=True)
    verdicts = []
    for case in cases:
        try:
            verdicts.append(judge(p, q, case, references, block_step))
        except RankFailed as error:
            raise ValueError(f"{case.name} on layout {p.layout}: {error}") from error
        print("\n".join(lines(verdicts[-1])), flush=True)
    note = " ".join(["launch.py gate", *sys.argv[2:]])
    return document(p, q, verdicts, note)
