"""`launch.py parity PATH...`: replay goldens free and staged, name the first wrong tensor.

Torch reads the CPU pins while it is imported, so nothing here imports it before a worker is pinned.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from runtime.parity.cpu import pin
from runtime.parity.report import CaseResult, finish, heading, line

FOLDER_OF_CHECKPOINTS = "checkpoints"
NOT_ASKED = "unpinned: --unpinned"
ON_GPU = "unpinned: --device cuda"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """PATH..., --checkpoints, --json, --jobs, --at-least, --unpinned, --device, --threads."""
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
        default="cpu",
        help="cuda: free runs only, within tolerances, TF32 off",
    )
    parser.add_argument("--threads", type=int, default=1, help="per case, with --unpinned only")


def run(args: argparse.Namespace) -> int:
    """Exit 0 only if every case passes; the last line is one JSON object."""
    _check(args)
    cases = list(_cases(args.paths, args.checkpoints))
    if not cases:
        named = ", ".join(map(str, args.paths))
        raise ValueError(f"there is no golden (*.safetensors) in {named}; name a folder of goldens")
    print(heading())
    threads = args.threads if args.unpinned else 0
    results: list[CaseResult] = []
    with ProcessPoolExecutor(
        max_workers=1 if args.device == "cuda" else min(args.jobs, len(cases)),
        mp_context=multiprocessing.get_context("spawn"),
    ) as pool:
        pending = [
            (path, pool.submit(_work, path, beside, threads, args.device)) for path, beside in cases
        ]
        for path, future in pending:
            results.append(_outcome(path, future))
            print(line(results[-1]), flush=True)
    return finish(results, at_least=args.at_least, out=args.out)


def _check(args: argparse.Namespace) -> None:
    for name in ("jobs", "threads"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} is {getattr(args, name)}; it must be 1 or more")
    if args.threads > 1 and not args.unpinned:
        raise ValueError("--threads above 1 moves sums by an ulp; give --unpinned with it")
    if args.device == "cuda":
        import torch  # the workers that are pinned import their own

        if not torch.cuda.is_available():
            raise ValueError("--device cuda: torch sees no CUDA device here")
    if args.checkpoints is not None and not args.checkpoints.is_dir():
        raise ValueError(f"--checkpoints {args.checkpoints} is not a folder; name an existing one")
    if args.out is not None and not args.out.absolute().parent.is_dir():
        raise ValueError(f"--json {args.out}: its folder does not exist; make it first")


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


def _work(path: Path, checkpoints: Path, threads: int, device: str) -> CaseResult:
    """In a worker process. threads: 0 pins the CPU; more leave it as it is."""
    warnings.filterwarnings("ignore", message=".*expandable_segments.*")
    cpu = ON_GPU if device == "cuda" else NOT_ASKED if threads else pin()
    import torch  # only now: pin() comes before torch

    from runtime.parity.judge import replay_case

    torch.set_num_threads(threads or 1)
    if device == "cuda":  # the fp32 goldens of convolutions know no TF32
        torch.backends.cudnn.allow_tf32 = False
    return replay_case(path, checkpoints, cpu, torch.device(device))


def _outcome(path: Path, future: Future[CaseResult]) -> CaseResult:
    try:
        return future.result()
    except BrokenProcessPool:
        return CaseResult(
            case=path.stem,
            path=str(path),
            status="FAIL",
            reason="the replay's process died (out of memory?); replay this file alone, --jobs 1",
        )
