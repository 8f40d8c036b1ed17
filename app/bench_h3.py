"""What `launch.py bench` asks and tells of H3."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from app import bench, bench_table, presets, runs
from app.bench_kind import Kind
from runtime.messages import Ref2VARequest

_STEPS = 2  # of a turn with random conditioning; a request brings its own number


def _check(args: Namespace) -> None:
    if args.peer and not args.text_rows:
        raise ValueError("--peer is measured on random conditioning; give --text-rows, such as 300")
    if args.no_decode and not args.text_rows:
        raise ValueError("--no-decode belongs to --text-rows; a request is always decoded")
    if not args.request and not args.text_rows:
        raise ValueError("nothing says what to run; give --request, or --text-rows such as 300")


def _request(args: Namespace) -> Ref2VARequest:
    """The request; with text rows its references and prompt do not count."""
    changes: dict[str, Any] = {} if args.steps is None else {"steps": args.steps}
    if args.text_rows:
        changes = {"steps": _STEPS, "references": (), "prompt": "", **changes}
    if not args.request:
        return Ref2VARequest(id=runs.new_id(), **changes)
    path = presets.find("requests", args.request)
    return presets.load_request(path, id=runs.new_id(), changes=changes)


def _setup(args: Namespace) -> dict[str, Any]:
    return {"decode": bool(args.text_rows) and not args.no_decode}


H3 = Kind(
    check=_check,
    request=_request,
    text_rows=lambda args: args.text_rows,
    setup=_setup,
    peer_weights="full_bf16",
    words=bench.rows_and_step,
    same_size=bench.same_rows,
    size=lambda rows: {"rows": rows},
    summary=bench.summary,
    ratios=bench.ratios,
    lines=bench_table.lines,
)
