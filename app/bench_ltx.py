"""What `launch.py bench` asks and tells of LTX: two stages of steps, never one median over both.

A turn's rows are, of each stage, {"steps", "video", "audio", "text"}: tokens of an evaluation.
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from app import bench, families, licences, presets, runs
from app.bench_kind import Kind
from app.bench_table import Row, profile_lines, ratio_line, step_rows, table
from runtime.messages import LTXRequest, Plan

_TEXT_ROWS = 1024  # of a prompt's contexts


def _check(args: Namespace) -> None:
    alone = bool(_text_rows(args))
    if args.peer and not args.random_weights:
        raise ValueError(
            "--peer is measured on random weights of LTX; give --random-weights, such as bf16"
        )
    if args.no_decode and not alone:
        raise ValueError(
            "--no-decode belongs to --text-rows or --random-weights; a request is always decoded"
        )
    if not args.request and not alone:
        raise ValueError(
            "nothing says what to run; give --request, or --random-weights such as bf16"
        )


def _text_rows(args: Namespace) -> int:
    random = args.random_weights or args.against_weights
    rows: int = args.text_rows or (_TEXT_ROWS if random else 0)
    return rows


def _request(args: Namespace) -> LTXRequest:
    """The request; with text rows its prompt and first frame do not count."""
    changes: dict[str, Any] = {} if args.steps is None else {"steps": args.steps}
    if _text_rows(args):
        changes |= {"prompt": "", "image": None}
    if not args.request:
        families.check_choices(families.LTX, changes)
        return LTXRequest(**{"id": runs.new_id(), "prompt": "", **changes})
    path = presets.find("requests", args.request)
    request = presets.load_any_request(path, id=runs.new_id(), changes=changes)
    if not isinstance(request, LTXRequest):
        raise ValueError(f"{path.name} is a request of family {request.family}; give one of ltx")
    return request


def _setup(args: Namespace) -> dict[str, Any]:
    return {"known": args.repeat_request}


def _ready(plan: Plan) -> None:
    licences.check(plan, runs.FOLDER)


def _notes(args: Namespace) -> Sequence[str]:
    if not _text_rows(args) or args.no_decode:
        return ()
    why = "random weights have" if args.random_weights else "--text-rows loads"
    return (
        f"sampling alone, as with --no-decode: {why} no text tower, upsampler or decoders of LTX",
    )


# ---- what is told


def _words(told: bench.Told) -> str:
    return "; ".join(
        f"{_title(number)} {_tokens(size)}, {statistics.median(told['steps'][first:last]):.4f} s a "
        f"step"
        for number, size, first, last in _spans(told["rows"])
    )


def _same_size(subjects: Sequence[bench.Subject], warm: Sequence[bench.Told]) -> None:
    """A ratio between different numbers of tokens means nothing."""
    if any(told["rows"] != warm[0]["rows"] for told in warm):
        said = " and ".join(
            f"{s.name} {'; '.join(_tokens(size) for size in told['rows'])}"
            for s, told in zip(subjects, warm, strict=True)
        )
        raise ValueError(f"the subjects have different numbers of tokens ({said})")


def _summary(measured: bench.Measured) -> dict[str, Any]:
    """Steps by stage, each with its profile if there is one; the rest as of H3."""
    sampling = []
    for number, size, first, last in _spans(measured.rows):
        told = {"stage": number, **size, **_steps(measured.turns, first, last)}
        if measured.profile is not None:
            told["profile"] = measured.profile[_title(number)]
        sampling.append(told)
    around = bench.of_turns(replace(measured, profile=None), _outside)
    return {"name": measured.name, "sampling": sampling, **around}


def _steps(turns: Sequence[bench.Told], first: int, last: int) -> dict[str, Any]:
    """Of the steps `first` to before `last` of each turn."""
    steps = [turn["steps"][first:last] for turn in turns]
    return {
        "step_seconds": bench.spread(seconds for turn in steps for seconds in turn),
        "step_values": steps,
        "parts": {
            name: bench.spread(x for turn in turns for x in turn["parts"][name][first:last])
            for name in turns[0]["parts"]
        },
    }


def _outside(turn: bench.Told) -> float:
    """Seconds of a turn that are neither steps nor a stage."""
    return turn["seconds"] - sum(turn["steps"]) - sum(turn["stages"].values())


def _ratios(first: bench.Measured, second: bench.Measured) -> dict[str, Any]:
    """By stage: how many times as long a step of the second takes, as bench.ratios."""
    return {
        _title(number): bench.ratio_of(
            [turn["steps"][start:stop] for turn in first.turns],
            [turn["steps"][start:stop] for turn in second.turns],
        )
        for number, _, start, stop in _spans(first.rows)
    }


def lines(subjects: Sequence[Mapping[str, Any]], ratio: Mapping[str, Any] | None) -> list[str]:
    """The table: tokens and steps of each stage, then as of H3."""
    rows: list[Row] = []
    for stages in zip(*(one["sampling"] for one in subjects), strict=True):
        title = f"{_title(stages[0]['stage'])}, {stages[0]['steps']} steps"
        rows.append((title, *(_tokens(one) for one in stages)))
        rows += step_rows("  step", stages)
    told = table(rows, subjects, _profile)
    for title, of_stage in (ratio or {}).items():
        told += ["", ratio_line(f"a step of {title}", subjects, of_stage)]
    return told


def _profile(subject: Mapping[str, Any]) -> list[str]:
    return [
        line
        for of in subject["sampling"]
        for line in profile_lines(
            f"{subject['name']}: one profiled step of {_title(of['stage'])},", of.get("profile")
        )
    ]


def _spans(sizes: Sequence[Mapping[str, int]]) -> Iterator[tuple[int, Mapping[str, int], int, int]]:
    """(number, size, first step, the one after its last) of each stage."""
    ends = list(accumulate(size["steps"] for size in sizes))
    for number, (size, end) in enumerate(zip(sizes, ends, strict=True), 1):
        yield number, size, end - size["steps"], end


def _title(number: int) -> str:
    return f"stage {number}"


def _tokens(size: Mapping[str, int]) -> str:
    return f"{size['video']:,} video + {size['audio']:,} audio tokens, {size['text']:,} of text"


LTX = Kind(
    check=_check,
    request=_request,
    text_rows=_text_rows,
    setup=_setup,
    ready=_ready,
    notes=_notes,
    peer_weights="bf16",
    words=_words,
    same_size=_same_size,
    size=lambda sizes: {"tokens": [{"stage": n, **size} for n, size, _, _ in _spans(sizes)]},
    summary=_summary,
    ratios=_ratios,
    lines=lines,
)
