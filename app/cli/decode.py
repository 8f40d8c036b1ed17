"""`launch.py decode`: saved latents in, the video with sound out."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from app import families, licences, preflight, presets, runs
from app.cli import watch
from app.cli.progress import Bar
from runtime.checkpoints.header import read_header
from runtime.engine import Engine
from runtime.h3.packing import LATENTS
from runtime.ltx.census import read_census
from runtime.ltx.sizes import latents_form
from runtime.media.files import remove_parts
from runtime.media.latents import LatentsForm, check_latents
from runtime.messages import Event, Failure, Plan, Result


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("latents", type=Path, help='safetensors with tensors "video" and "audio"')
    parser.add_argument("--plan", help="a TOML file or a name (default: plan.toml beside LATENTS)")
    parser.add_argument("--out", type=Path, required=True, help="the mp4 to write")


def run(args: argparse.Namespace) -> int:
    """Checks, loads, decodes; exit status 0 ok, 1 failed, 2 bad input, 130 cancelled."""
    latents, out = (presets.user_path(path).absolute() for path in (args.latents, args.out))
    if not latents.is_file():
        raise ValueError(f"{args.latents} does not exist; give a latents.safetensors of a run")
    if out.suffix != ".mp4":
        raise ValueError(f"--out must end in .mp4, got {args.out}")
    plan = presets.load_plan(_plan_file(args.plan, latents))
    preflight.check_pyav()
    preflight.check_models(plan)
    check_latents(latents, _form(plan))  # the engine asks the same, once all is loaded
    preflight.check_loadable(plan)
    licences.check(plan, runs.FOLDER)
    bar = Bar()
    last: Result | Failure
    with Engine(plan) as engine:
        ready = watch.load(engine, bar)
        if isinstance(ready, Failure):
            last = ready
        else:
            pids = engine.pids
            events = engine.decode("decode", latents, out=out)
            last = watch.follow(engine, "decode", events, bar, _ignore)
            if isinstance(last, Failure):
                remove_parts(out.parent, pids)
    status = watch.status("decode", last)
    print(json.dumps({"ok": status == watch.OK, "video": str(out) if status == watch.OK else None}))
    return status


def _form(plan: Plan) -> LatentsForm:
    """Of a latents file that the plan's models decode."""
    if families.of_plan(plan) is families.LTX:
        return latents_form(read_census(read_header(plan.models.dit)).config.in_channels)
    return LATENTS


def _plan_file(name: str | None, latents: Path) -> Path:
    if name is not None:
        return presets.find("plans", name)
    beside = latents.with_name("plan.toml")
    if not beside.is_file():
        raise ValueError(f"no plan.toml beside {latents}; name a plan with --plan")
    return beside


def _ignore(event: Event) -> None:
    """A decode keeps no record."""
