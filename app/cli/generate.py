"""`launch.py generate`: a request and a plan in, a video with sound and the stage table out."""

from __future__ import annotations

import argparse
import getpass
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app import families, licences, preflight, presets, runs
from app.cli import watch
from app.cli.progress import Bar
from app.jobs import State
from app.runs import Run
from app.timing import seconds_by_stage, stage_rows, table
from runtime.engine import Engine
from runtime.messages import Failure, Plan, Ready, Reference, Request, Result

_NUMBERS = ("seed", "steps", "frames", "fps", "width", "height")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command; those given replace what the request file says."""
    parser.add_argument("--request", help="a TOML file or a name in presets/requests")
    parser.add_argument("--plan", required=True, help="a TOML file or a name in presets/plans")
    parser.add_argument("--prompt", help="may be empty: the model then follows the references")
    for kind in ("image", "video", "audio"):
        parser.add_argument(
            f"--ref-{kind}",
            dest="references",
            metavar="FILE",
            action=_AddReference,
            const=kind,
            default=[],
            help=f"a reference {kind}; repeat it for more, in the order of the prompt's numbers",
        )
    parser.add_argument(
        "--soundtrack",
        dest="references",
        metavar="FILE",
        action=_ChangeVideo,
        default=[],
        help="replaces the sound of the --ref-video before it",
    )
    parser.add_argument(
        "--mute",
        dest="references",
        action=_ChangeVideo,
        nargs=0,
        default=[],
        help="leaves out the sound of the --ref-video before it",
    )
    parser.add_argument("--image", metavar="FILE", help="first frame, of a plan of family ltx")
    for number in _NUMBERS:
        parser.add_argument(f"--{number}", type=int)
    parser.add_argument("--out", help="the run's folder (default: a new one in runs/)")
    parser.add_argument(
        "--no-media",
        action="store_true",
        help="no mp4: latents, float frames and the wave (needs no PyAV)",
    )
    parser.add_argument(
        "--acknowledge-licence",
        metavar="ID",
        help="once, when you have read the licence of the plan's weights: ltx-2.x",
    )


def run(args: argparse.Namespace) -> int:
    """Checks, loads, generates; exit status 0 ok, 1 failed, 2 bad input, 130 cancelled."""
    plan = presets.load_plan(presets.find("plans", args.plan))
    request = _request(args, families.of_plan(plan))
    if args.out == "":  # an unset shell variable; as a path it would mean the folder one is in
        raise ValueError("--out must be a folder, got ''; give its path or leave --out away")
    folder = presets.user_path(args.out or runs.FOLDER / request.id).absolute()
    preflight.check(request, plan, folder, media=not args.no_media)
    _acknowledge(args.acknowledge_licence, plan)
    record = Run(folder, request, plan)
    try:
        return _generate(request, plan, record, media=not args.no_media)
    except OSError as error:  # the record itself could not be written
        reason = f"{error.strerror.lower()}: {folder}" if error.strerror else str(error)
        print(f"launch.py generate: record: {reason}", file=sys.stderr)
        return watch.FAILED


def _generate(request: Request, plan: Plan, record: Run, *, media: bool) -> int:
    bar, folder = Bar(), record.folder
    with Engine(plan) as engine:
        ready = watch.load(engine, bar)
        pids = engine.pids
        last: Result | Failure
        if isinstance(ready, Failure):
            last = ready
        else:
            events = engine.generate(request, out=folder, media=media, preview=False)
            last = watch.follow(engine, request.id, events, bar, record.add)
    loaded = ready if isinstance(ready, Ready) else None
    state = _state(last)
    record.finish(last, loaded, state, pids=pids)
    if isinstance(last, Result) and loaded:
        print(_table(last, loaded))
    status = watch.status("generate", last)
    print(json.dumps(_summary(request, plan, folder, last, state)))
    return status


@dataclass(slots=True)
class _Given:
    """A reference while the command line is still being read."""

    kind: str
    path: str
    soundtrack: str | None = None
    mute: bool = False


class _AddReference(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        given = _Given(kind=str(self.const), path=str(values))
        namespace.references = [*namespace.references, given]


class _ChangeVideo(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        if not namespace.references or namespace.references[-1].kind != "video":
            parser.error(f"{option_string} belongs after a --ref-video")
        if option_string == "--mute":
            namespace.references[-1].mute = True
        else:
            namespace.references[-1].soundtrack = str(values)


def _acknowledge(id: str | None, plan: Plan) -> None:
    """Asks for what the plan's weights need, or keeps it; the terms are shown either way."""
    needed = licences.missing(plan, runs.FOLDER)
    if id is not None and not needed:
        print(f"note: plan {plan.name} needs no acknowledgement (any more)", file=sys.stderr)
    elif needed:
        licence = licences.of_plan(plan)
        assert licence is not None, "only a licence can be missing"
        print("\n".join((f"{licence.name}, {licence.date}", *licence.terms)), file=sys.stderr)
        if id is None:
            raise ValueError(needed)
        licences.acknowledge(id, plan, runs.FOLDER, by=getpass.getuser())


def _request(args: argparse.Namespace, family: families.Family) -> Request:
    """Of the file's family; without a file, of the plan's."""
    changes: dict[str, Any] = {
        name: getattr(args, name)
        for name in ("prompt", *_NUMBERS)
        if getattr(args, name) is not None
    }
    if args.references:
        changes["references"] = tuple(_reference(given) for given in args.references)
    if args.image is not None:
        changes["image"] = _local(args.image)
    if args.request is None and args.prompt is None:
        raise ValueError(
            "nothing says what to generate; give --request (a name in presets/requests or a TOML "
            'file) or --prompt "..."'
        )
    if args.request is None:
        families.check_choices(family, changes)
        request: Request = family.request(id=runs.new_id(), **({"prompt": ""} | changes))
        return request
    path = presets.find("requests", args.request)
    return presets.load_any_request(path, id=runs.new_id(), changes=changes)


def _reference(given: _Given) -> Reference:
    return Reference(
        kind=given.kind,  # type: ignore[arg-type]  # const of the option
        path=_local(given.path),
        soundtrack=None if given.soundtrack is None else _local(given.soundtrack),
        mute=given.mute,
    )


def _local(text: str) -> Path:
    return presets.user_path(text).absolute()


def _state(last: Result | Failure) -> State:
    if isinstance(last, Result):
        return "done"
    return "cancelled" if last.cancelled else "failed"


def _table(result: Result, ready: Ready) -> str:
    return table(
        stage_rows(
            result.stages,
            load_seconds=ready.load_seconds,
            peak_memory_bytes=result.peak_memory_bytes,
        )
    )


def _summary(
    request: Request, plan: Plan, folder: Path, last: Result | Failure, state: State
) -> dict[str, Any]:
    """The last line of stdout, for programs."""
    summary: dict[str, Any] = {"id": request.id, "state": state, "plan": plan.name}
    summary |= {"run": str(folder / "run.json"), "demo": presets.is_demo(plan)}
    if isinstance(last, Failure):
        return summary | {"stage": last.stage, "reason": last.reason}
    return summary | {
        "video": last.video and str(last.video),
        "latents": last.latents and str(last.latents),
        "seconds": seconds_by_stage(last.stages),
        "peak_memory_bytes": last.peak_memory_bytes,
    }
