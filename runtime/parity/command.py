"""`launch.py parity PATH...`: replay goldens free and staged, name the first wrong tensor.

Torch reads the CPU pins while it is imported, so nothing here imports it before a worker is pinned.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from runtime.layouts import LAYOUTS, SINGLE, Layout
from runtime.lifeline import die_with_parent
from runtime.messages import Plan
from runtime.parity.cpu import pin
from runtime.parity.events import emit
from runtime.parity.plans import read_plan
from runtime.parity.ranks import on_ranks
from runtime.parity.report import (
    CaseResult,
    ending,
    exit_status,
    finish,
    heading,
    line,
    summarise,
    write_report,
)

FOLDER_OF_CHECKPOINTS = "checkpoints"
NOT_ASKED = "unpinned: --unpinned"
ON_GPU = "unpinned: --device cuda"
_LOOPBACK = "lo"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """What a worker needs for one golden. threads: 0 pins the CPU; more leave it as it is."""

    index: int
    path: Path
    checkpoints: Path
    plan: Plan | None
    device: str
    layout: str
    threads: int
    dump: Path | None
    events: bool

    @property
    def ranks(self) -> int:
        """Processes that replay it together."""
        return Layout.parse(self.layout).ranks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """PATH..., --checkpoints, --json, --jobs, --at-least, --unpinned, --device, --plan ..."""
    parser.add_argument("paths", nargs="+", type=Path, help="golden files or folders of them")
    parser.add_argument(
        "--checkpoints",
        type=Path,
        help="folder of the checkpoints (default: beside the files)",
    )
    parser.add_argument("--json", type=Path, dest="out", help="write every comparison there")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="cases at once (default: one per CPU)"
    )
    parser.add_argument("--at-least", type=int, default=0, help="fail if fewer cases are bit-equal")
    parser.add_argument(
        "--unpinned", action="store_true", help="this processor's own code paths, within tolerances"
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        help="cuda: free runs only, within tolerances, TF32 off (default: the plan's, else cpu)",
    )
    parser.add_argument(
        "--plan",
        help="a TOML file or a name in presets/plans: its backends where a golden leaves them open",
    )
    parser.add_argument(
        "--layout",
        metavar="U2",
        help="whole requests (kind e2e) on the ranks of a layout, within tolerances, each rank's "
        "tensors compared (default: the plan's, else single)",
    )
    parser.add_argument(
        "--dump", type=Path, help="write frames of both sides and their difference there, as PNG"
    )
    parser.add_argument(
        "--events", action="store_true", help="JSON lines on stdout, and end with the parent"
    )
    parser.add_argument("--threads", type=int, default=1, help="per case, with --unpinned only")


def run(args: argparse.Namespace) -> int:
    """Exit 0 only if every case passes; the last line is one JSON object."""
    if args.events:
        die_with_parent(os.getppid())
    plan = read_plan(args.plan) if args.plan else None
    layout = _layout(args.layout, plan)
    if plan is not None:
        plan = replace(plan, layout=layout)  # what it cannot be with that layout is said here
    device = _check(args, plan)
    ranks = Layout.parse(layout).ranks
    _check_gpus(device, layout)
    found = list(_cases(args.paths, args.checkpoints))
    if not found:
        named = ", ".join(map(str, args.paths))
        raise ValueError(f"there is no golden (*.safetensors) in {named}; name a folder of goldens")
    names = _names([path for path, _ in found])
    cases = [
        _Case(
            index=index,
            path=path,
            checkpoints=beside,
            plan=plan,
            device=device,
            layout=layout,
            threads=args.threads if args.unpinned else 0,
            dump=args.dump.absolute() / names[index] if args.dump else None,
            events=args.events,
        )
        for index, (path, beside) in enumerate(found)
    ]
    _say(args.events, heading(), "begin", {"cases": names})
    at_once = 1 if device == "cuda" else min(max(1, args.jobs // ranks), len(cases))
    results = _results(cases, at_once)
    if args.out is not None:
        facts = {"plan": plan.name if plan else "", "device": device, "layout": layout}
        write_report(args.out, results, facts)
    if not args.events:
        return finish(results, at_least=args.at_least)
    emit("end", summarise(results))
    return exit_status(results, at_least=args.at_least)


def _results(cases: Sequence[_Case], jobs: int) -> list[CaseResult]:
    results: list[CaseResult] = []
    with ProcessPoolExecutor(
        max_workers=jobs,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=die_with_parent,  # else a worker of a killed command waits for ever
        initargs=(os.getpid(),),
    ) as pool:
        pending = [(case, pool.submit(_work, case)) for case in cases]
        for case, future in pending:
            results.append(_outcome(case, future))
            facts = {"index": case.index, "case": case.path.stem, **ending(results[-1])}
            _say(case.events, line(results[-1]), "result", facts)
    return results


def _say(events: bool, text: str, event: str, facts: Mapping[str, object]) -> None:
    if events:
        emit(event, facts)
    else:
        print(text, flush=True)


def _check(args: argparse.Namespace, plan: Plan | None) -> str:
    """The device; ValueError for an option that cannot be followed."""
    for name in ("jobs", "threads"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} is {getattr(args, name)}; it must be 1 or more")
    if args.threads > 1 and not args.unpinned:
        raise ValueError("--threads above 1 moves sums by an ulp; give --unpinned with it")
    if plan and args.device not in (None, plan.device):
        raise ValueError(
            f"--device {args.device} contradicts plan {plan.name}, which names {plan.device}; "
            "leave out one of them"
        )
    if plan and plan.memory != "plain":
        raise ValueError(
            f"plan {plan.name} has memory {plan.memory}, whose attention runs in groups of heads, "
            f'and parity compares whole tensors inside it; set memory = "plain"'
        )
    if plan and plan.cache != "off":
        raise ValueError(
            f"plan {plan.name} has the step cache {plan.cache}, which leaves steps out, and parity "
            'compares every step; set cache = "off" (launch.py gate measures what a cache loses)'
        )
    device: str = plan.device if plan else args.device or "cpu"
    if device == "cuda":
        import torch  # the workers that are pinned import their own

        if not torch.cuda.is_available():
            asked = f"plan {plan.name} names cuda" if plan else "--device cuda"
            raise ValueError(f"{asked}: torch sees no CUDA device here")
    if args.checkpoints is not None and not args.checkpoints.is_dir():
        raise ValueError(f"--checkpoints {args.checkpoints} is not a folder; name an existing one")
    if args.out is not None and not args.out.absolute().parent.is_dir():
        raise ValueError(f"--json {args.out}: its folder does not exist; make it first")
    return device


def _layout(asked: str | None, plan: Plan | None) -> str:
    """The layout to replay in; ValueError for an unknown one, and for two that contradict."""
    if asked is not None and asked not in LAYOUTS:
        raise ValueError(f"--layout must be one of {', '.join(LAYOUTS)}, got {asked!r}")
    own = plan.layout if plan else SINGLE
    if asked is not None and plan and own not in (SINGLE, asked):
        raise ValueError(
            f"--layout {asked} contradicts plan {plan.name}, which names {own}; leave out one"
        )
    return asked or own


def _check_gpus(device: str, layout: str) -> None:
    ranks = Layout.parse(layout).ranks
    if device != "cuda" or ranks == 1:
        return
    import torch  # as in _check

    if ranks > (count := torch.cuda.device_count()):
        raise ValueError(f"layout {layout} needs {ranks} GPUs, this machine has {count}")


def _cases(paths: list[Path], checkpoints: Path | None) -> Iterator[tuple[Path, Path]]:
    for path in paths:
        if path.is_dir():
            files = sorted(
                p
                for p in path.rglob("*.safetensors")
                if FOLDER_OF_CHECKPOINTS not in p.relative_to(path).parts
            )
        elif path.is_file():
            files = [path]
        else:
            raise ValueError(f"{path} does not exist; give golden files or folders of them")
        for file in files:
            yield file, checkpoints or _beside(file, path)


def _beside(file: Path, root: Path) -> Path:
    """The `checkpoints` folder beside the file or in the folder that was named."""
    candidates = [file.parent / FOLDER_OF_CHECKPOINTS, root / FOLDER_OF_CHECKPOINTS]
    return next((c for c in candidates if c.is_dir()), candidates[0])


def _names(paths: Sequence[Path]) -> list[str]:
    """A name per case for its pictures: the file's, numbered where two files share it."""
    names: list[str] = []
    for path in paths:
        twins = sum(name == path.stem or name.startswith(f"{path.stem}.") for name in names)
        names.append(f"{path.stem}.{twins + 1}" if twins else path.stem)
    return names


def _work(case: _Case) -> CaseResult:
    """In a worker process."""
    if case.ranks == 1:
        return _replayed(case, 0, "")
    return on_ranks(partial(_replayed, case), case.ranks, case.path.stem, case.path)


def _replayed(case: _Case, rank: int, store: str) -> CaseResult:
    """By one rank of the case's layout, which meets the others at `store`."""
    warnings.filterwarnings("ignore", message=".*expandable_segments.*")
    on_gpu = case.device == "cuda"
    cpu = ON_GPU if on_gpu else NOT_ASKED if case.threads else pin()
    import torch  # only now: pin() comes before torch

    from runtime.parallel.mesh import mesh_of
    from runtime.parity.judge import replay_case
    from runtime.parity.setup import Setup, unwatched
    from runtime.team import Meeting, Ranks

    torch.set_num_threads(case.threads or 1)
    if on_gpu:  # the fp32 goldens of convolutions know no TF32
        torch.backends.cudnn.allow_tf32 = False
    facts = {"index": case.index, "case": case.path.stem}
    tells = case.events and rank == 0
    if tells:
        emit("case", facts)

    def on_step(run: str, done: int, total: int) -> None:
        emit("step", {**facts, "run": run, "done": done, "total": total})

    device = torch.device(case.device)
    if case.ranks > 1:
        if on_gpu:
            device = torch.device(case.device, rank)
            torch.cuda.set_device(device)
        Ranks(
            Meeting(rank=rank, ranks=case.ranks, local=rank, store=store, interface=_LOOPBACK),
            case.device,
        )
    setup = Setup(
        device=device,
        plan=case.plan,
        on_step=on_step if tells else unwatched,
        mesh=mesh_of(Layout.parse(case.layout)),
    )
    return replay_case(case.path, case.checkpoints, cpu, setup, case.dump if rank == 0 else None)


def _outcome(case: _Case, future: Future[CaseResult]) -> CaseResult:
    try:
        return future.result()
    except BrokenProcessPool:
        return CaseResult(
            case=case.path.stem,
            path=str(case.path),
            status="FAIL",
            reason="the replay's process died (out of memory?); replay this file alone, --jobs 1",
        )
