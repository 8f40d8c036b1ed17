"""`launch.py parity PATH...`: replay goldens free and staged, name the first wrong tensor.

Torch is imported only after the CPU is pinned, so this file's own imports stay free of it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from runtime.parity.cpu import pin

if TYPE_CHECKING:
    from runtime.parity.golden import Golden
    from runtime.parity.metrics import Comparison

FOLDER_OF_CHECKPOINTS = "checkpoints"
WIDTHS = "{:<46} {:<11} {:>8} {:>11} {:>11} {:>7}  {}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """One case: status is bit-equal | pass | info | FAIL | unsupported."""

    case: str
    path: str
    status: str
    compared: int = 0
    equal: int = 0
    first: str = ""  # first differing tensor, with run and stage
    max_abs: float = 0.0  # of the first differing tensor
    relative_l2: float = 0.0
    reason: str = ""
    seconds: float = 0.0
    cpu: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """PATH..., --checkpoints, --json, --jobs, --expect."""
    parser.add_argument("paths", nargs="+", type=Path, help="golden files or folders of them")
    parser.add_argument("--checkpoints", type=Path, help="folder of the tiny checkpoints")
    parser.add_argument("--json", type=Path, dest="out", help="write every comparison there")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="cases at once, one thread each"
    )
    parser.add_argument("--at-least", type=int, default=0, help="fail if fewer cases are bit-equal")


def run(args: argparse.Namespace) -> int:
    """Exit 0 only if every case passes; the last line is one JSON object."""
    cases = list(_cases(args.paths, args.checkpoints))
    if not cases:
        raise ValueError(f"no golden files in {', '.join(map(str, args.paths))}")
    results: list[CaseResult] = []
    details: list[dict[str, object]] = []
    print(WIDTHS.format("case", "status", "equal", "max abs", "rel L2", "s", "first difference"))
    with ProcessPoolExecutor(
        max_workers=max(1, min(args.jobs, len(cases))),
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_pin_worker,
    ) as pool:
        pending: list[Future[tuple[CaseResult, list[dict[str, object]]]]] = [
            pool.submit(replay_case, path, checkpoints) for path, checkpoints in cases
        ]
        for future in pending:
            result, comparisons = future.result()
            results.append(result)
            details.append({"case": result.case, "comparisons": comparisons})
            print(_line(result), flush=True)
    return _finish(args, results, details)


def _finish(
    args: argparse.Namespace, results: list[CaseResult], details: list[dict[str, object]]
) -> int:
    bad = [r.case for r in results if r.status == "FAIL"]
    unsupported = [r.case for r in results if r.status == "unsupported"]
    bit_equal = sum(r.status == "bit-equal" for r in results)
    summary = {
        "cases": len(results),
        "passed": len(results) - len(bad) - len(unsupported),
        "bit_equal": bit_equal,
        "failed": bad,
        "unsupported": unsupported,
        "cpu": results[0].cpu,
    }
    if args.out is not None:
        from runtime.media.files import write_json_atomic

        write_json_atomic(args.out, {**summary, "details": details})
    if bit_equal < args.at_least:
        print(f"only {bit_equal} cases are bit-equal, {args.at_least} were expected")
    print(json.dumps(summary))
    return int(bool(bad or unsupported) or bit_equal < args.at_least)


def _line(result: CaseResult) -> str:
    same = result.status in ("bit-equal", "unsupported")
    return WIDTHS.format(
        result.case,
        result.status,
        f"{result.equal}/{result.compared}",
        "" if same else f"{result.max_abs:.2e}",
        "" if same else f"{result.relative_l2:.2e}",
        f"{result.seconds:.1f}",
        result.first or result.reason,
    )


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


def _pin_worker() -> None:
    os.environ["H3_PARITY_CPU"] = pin()  # read back by replay_case in the same process


def replay_case(path: Path, checkpoints: Path) -> tuple[CaseResult, list[dict[str, object]]]:
    """Replay one file in this process; an error is a FAIL of this case and of no other."""
    import importlib
    import warnings

    import torch

    from runtime.parity.golden import Golden
    from runtime.parity.metrics import Unsupported
    from runtime.parity.replay import KINDS

    cpu = os.environ.get("H3_PARITY_CPU", "")
    started = time.perf_counter()
    case = path.stem

    def failed(status: str, reason: str) -> tuple[CaseResult, list[dict[str, object]]]:
        seconds = time.perf_counter() - started
        return CaseResult(
            case=case, path=str(path), status=status, reason=reason, seconds=seconds, cpu=cpu
        ), []

    warnings.filterwarnings("ignore", message=".*expandable_segments.*")
    try:
        golden = Golden(path)
        case = golden.case
        if golden.kind not in KINDS:
            return failed("unsupported", f"golden kind {golden.kind!r}")
        module = importlib.import_module(KINDS[golden.kind])
        with torch.inference_mode():
            comparisons = module.replay(golden, checkpoints)
    except Unsupported as error:
        return failed("unsupported", str(error))
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        return failed("FAIL", f"{type(error).__name__}: {error} ({where})")
    return _judge(golden, path, comparisons, time.perf_counter() - started, cpu)


def _judge(
    golden: Golden, path: Path, comparisons: list[Comparison], seconds: float, cpu: str
) -> tuple[CaseResult, list[dict[str, object]]]:
    from runtime.parity.limits import limit_of

    details: list[dict[str, object]] = []
    gated, beyond = 0, []
    different = [c for c in comparisons if not c.equal]
    for c in comparisons:
        limit = limit_of(golden, c)
        passes = c.equal or (limit is not None and not c.problem and c.relative_l2 <= limit)
        gated += limit is not None
        if not passes and (limit is not None or c.problem):
            beyond.append(c)
        details.append(
            {
                "name": c.name,
                "run": c.run,
                "stage": c.stage,
                "equal": c.equal,
                "max_abs": c.max_abs,
                "relative_l2": c.relative_l2,
                "limit": limit,
                "problem": c.problem,
            }
        )
    status = "bit-equal"
    if different:
        status = "FAIL" if beyond else "pass" if gated else "info"
    first = _first(beyond or different)
    result = CaseResult(
        case=golden.case,
        path=str(path),
        status=status if comparisons else "FAIL",
        compared=len(comparisons),
        equal=len(comparisons) - len(different),
        first=_named(first) if first else "",
        max_abs=first.max_abs if first else 0.0,
        relative_l2=first.relative_l2 if first else 0.0,
        reason="" if comparisons else "nothing was compared",
        seconds=seconds,
        cpu=cpu,
    )
    return result, details


def _first(different: list[Comparison]) -> Comparison | None:
    """Staged before free: a staged difference names the stage that is wrong by itself."""
    staged = [c for c in different if c.run == "staged"]
    return (staged or different or [None])[0]


def _named(c: Comparison) -> str:
    problem = f" ({c.problem})" if c.problem else ""
    return f"{c.run} {c.stage}: {c.name}{problem}"
