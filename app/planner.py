"""Will a request run here? Files, mode, rows, memory, disk and time of one request on one plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from app import ltx_planning, memory, needs
from app.estimate import Estimate, Need, Phase, ReferencePlan, Rows, Verdict, worst
from app.machine import Machine
from app.measured import Measured
from app.models import Models
from app.needs import Past
from app.step_counts import steps_run
from runtime.messages import FPS, Plan, Ref2VARequest, Request

_AUDIO_PER_SECOND = 40
_TRAINED_FRAMES = (124, 362)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """How one family is counted; partly: why its memory is more than its phases say, or ""."""

    rows: Callable[[Any, Measured], Rows]
    phases: Callable[[Any, Plan, Models, Measured, Rows], tuple[Phase, ...]]
    advice: Callable[[Any], tuple[str, ...]]
    note: Callable[[Any, Models, Plan], str]
    partly: str = ""


def estimate(
    request: Request,
    plan: Plan,
    machine: Machine,
    models: Models,
    measured: Measured,
    past: Past,
    *,
    disk_free: int,
    loaded: bool = False,
    unavailable: tuple[str, ...] = (),
) -> Estimate:
    """Everything that can be known before the run; what is not known is named as such.

    loaded: the engine has this plan now. unavailable: what the probe says cannot run of the plan.
    """
    missing = [file.problem for file in models.files if file.problem]
    unread = [r.problem for r in measured.references if r.problem]
    unread += [measured.refused] if measured.refused else []
    way = _WAYS[request.family]
    rows = way.rows(request, measured)
    phases = way.phases(request, plan, models, measured, rows)
    vram = _known(needs.vram(plan, machine, phases, past), rows)
    ram = _known(needs.ram(plan, machine, models.files, measured.references, phases, past), rows)
    if way.partly and not past.peak_runs:
        vram, ram = (_at_least(need, way.partly) for need in (vram, ram))
    disk = needs.disk(request, disk_free)
    blocked = next(iter((*missing, *unread, *_refused(disk))), "")
    counted: Verdict = "unknown" if rows.total is None else "fits"
    verdicts = (vram.verdict, ram.verdict, disk.verdict, counted)
    return Estimate(
        verdict="no" if blocked else worst(verdicts),
        blocked=blocked,
        needs_force=next(iter((*unavailable, *_refused(vram), *_refused(ram))), ""),
        warnings=(*unavailable, *filter(None, [measured.problem]), *way.advice(request)),
        mode=models.mode,
        mode_note=way.note(request, models, plan),
        files=models.files,
        references=measured.references or _unmeasured(request),
        rows=rows,
        vram=vram,
        ram=ram,
        disk=disk,
        time=needs.time(past, loaded=loaded),
    )


def _known(need: Need, rows: Rows) -> Need:
    """No promise of memory while the rows are not counted; a plain no stays one."""
    if rows.total is not None or need.needed is None or need.verdict == "no":
        return need
    return replace(need, verdict="unknown", reason=needs.NOT_COUNTED)


def _at_least(need: Need, why: str) -> Need:
    """Of a family whose activations are not counted: a plain no stays one."""
    if need.needed is None or need.verdict == "no":
        return need
    reason = f"It needs more than {needs.gib(need.needed)}. {why}"
    return replace(need, verdict="unknown", reason=reason, source="formula: weights alone")


def _advice(request: Ref2VARequest) -> tuple[str, ...]:
    """What is allowed but hardly meant."""
    told = []
    run = steps_run(request.scheduler, request.steps)
    if run != request.steps:
        told.append(f"beta leaves out repeated sigmas: {run} of {request.steps} steps will run.")
    low, high = _TRAINED_FRAMES
    if request.frames > high:
        told.append(
            f"{request.frames} frames are more than H3 was trained on (about {low} to {high}): "
            "expect repetition or drift."
        )
    if request.cfg < 0:
        told.append(
            f"CFG {request.cfg:g} is below 0 and steers away from the prompt; "
            "1 is off, above 1 follows the prompt more."
        )
    return tuple(told)


def _refused(need: Need) -> tuple[str, ...]:
    return (need.reason,) if need.verdict == "no" else ()


def _rows(request: Ref2VARequest, measured: Measured) -> Rows:
    """The generated rows follow from the request alone, the others from what was read."""
    latents = (request.frames - 5) // 17 * 5 + 2
    video = latents * (request.width // 32) * (request.height // 32)
    audio = 2 * round(request.frames / FPS * _AUDIO_PER_SECOND)
    if measured.problem or any(r.problem for r in measured.references):
        return Rows(total=None, text=None, references=None, audio=audio, video=video)
    return Rows(
        total=measured.total,
        text=measured.text,
        references=sum(reference.rows for reference in measured.references),
        audio=audio,
        video=video,
        negative=measured.negative or None,
    )


def _phases(
    request: Ref2VARequest, plan: Plan, models: Models, measured: Measured, rows: Rows
) -> tuple[Phase, ...]:
    """Empty when a file or the rows are not known."""
    if rows.total is None or len(models.parts) < len(models.files):
        return ()
    videos = [r.width * r.height for r in measured.references if r.kind == "video"]
    shape = memory.Shape(
        rows=max(rows.total, rows.negative or 0),
        text_rows=measured.text,
        vision_tokens=measured.most_vision,
        images=any(r.kind == "image" for r in measured.references),
        video_pixels=max(videos, default=0),
        sound_latents=measured.sound_latents,
        audio_latents=rows.audio // 2,
    )
    return memory.phases(models.parts, plan, request, shape)


def _unmeasured(request: Request) -> tuple[ReferencePlan, ...]:
    return tuple(
        ReferencePlan(index=i, label="", kind=r.kind, name=r.path.name)
        for i, r in enumerate(request.references)
    )


def _mode_note(request: Ref2VARequest, models: Models, plan: Plan) -> str:
    """What the runtime will say of the mode (h3.pipeline), and why."""
    if "dit" not in models.parts:
        return ""
    name = plan.models.dit.name
    if models.mode == "ref2va":
        return f"{name} is known as Ref2VA."
    if models.mode == "fl2va":
        more = ", but the request has references" if request.references else ""
        return f"{name} is known as FL2VA{more}."
    return (
        f"Mode of {name} unknown: if it is not a Ref2VA file the result is wrong without an error "
        f"(launch.py inspect --learn names it)."
    )


_WAYS: Mapping[str, _Way] = {
    "h3": _Way(rows=_rows, phases=_phases, advice=_advice, note=_mode_note),
    "ltx": _Way(
        rows=ltx_planning.rows,
        phases=ltx_planning.phases,
        advice=ltx_planning.advice,
        note=ltx_planning.note,
        partly=ltx_planning.WEIGHTS_ONLY,
    ),
}
