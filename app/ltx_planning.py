"""What the planner counts of LTX: tokens from the sizes alone, bytes of the weights alone."""

from __future__ import annotations

from collections.abc import Callable

from app import families, ltx_fit, ltx_prompt, media, preflight
from app.estimate import FileFound, Phase, ReferencePlan, Rows
from app.measured import Measured
from app.models import Models
from runtime.ltx.sizes import CONTEXT_ROWS, LTXShape
from runtime.messages import LTXRequest, Plan, Reference

WEIGHTS_ONLY = "What LTX computes with besides is not counted before a first run here."
_LONGEST_SECONDS = 20  # the rope's positions stand for 20 s (ltx25.md 3.4)
_STALLING_FPS = 16  # reported: a periodic stall (ltx25.md 3.4)


def measured(request: LTXRequest, plan: Plan, models: Models) -> Measured:
    """The first frame replaces generated tokens: it adds none. The text is as long for any prompt.

    A prompt is counted where the plan's models can be used.
    """
    shape = LTXShape(
        frames=request.frames, height=request.height, width=request.width, fps=request.fps
    ).latent
    references = tuple(
        ReferencePlan(
            index=index,
            label="first frame",
            kind=reference.kind,
            name=reference.path.name,
            width=request.width,
            height=request.height,
            frames=1,
            notes=("encoded at half the size for stage 1, at the full size for stage 2",),
            problem=_said(_check_frame, reference),
        )
        for index, reference in enumerate(request.references)
    )
    usable = not any(file.problem for file in models.files)
    return Measured(
        references=references,
        text=CONTEXT_ROWS,
        total=shape.video_tokens + shape.audio,
        refused=(_said(ltx_fit.check, plan) or _said(ltx_prompt.check, request.prompt, plan))
        if usable
        else "",
    )


def _check_frame(frame: Reference) -> None:
    preflight.check_reference(frame, media.facts, least_side=families.LTX.least_side)


def _said(check: Callable[..., None], *asked: object) -> str:
    """Why the queue, which asks the same, would not take it; "" if it would."""
    try:
        check(*asked)
    except ValueError as error:
        return str(error)
    return ""


def rows(request: LTXRequest, found: Measured) -> Rows:
    """Tokens of the second stage; the text stands beside them, in attentions of its own."""
    shape = LTXShape(
        frames=request.frames, height=request.height, width=request.width, fps=request.fps
    ).latent
    return Rows(
        total=found.total,
        text=found.text,
        references=0,
        audio=shape.audio,
        video=shape.video_tokens,
    )


def phases(
    request: LTXRequest, plan: Plan, models: Models, found: Measured, counted: Rows
) -> tuple[Phase, ...]:
    """Weights on the device; a text encoder that is streamed lies there while it encodes only."""
    if any(file.problem for file in models.files):
        return ()
    held = {file.role: file.resident_bytes for file in models.files}
    text = held.pop("text_encoder")
    base = sum(held.values()) + (text if plan.text_encoder == "resident" else 0)
    return (
        Phase(name="weights", bytes=base),
        Phase(name="text encode", bytes=sum(held.values()) + text),
    )


def advice(request: LTXRequest) -> tuple[str, ...]:
    """What is allowed but hardly meant."""
    told = []
    if request.frames / request.fps > _LONGEST_SECONDS:
        told.append(
            f"{request.frames / request.fps:.1f} s are longer than the {_LONGEST_SECONDS} s that "
            "LTX-2.5's positions are made for: expect repetition or drift."
        )
    if request.fps <= _STALLING_FPS:
        told.append(f"{request.fps} fps: a picture that stalls now and then has been reported.")
    return tuple(told)


def note(request: LTXRequest, models: Models, plan: Plan) -> str:
    """What the denoiser's file says it is."""
    found: FileFound = models.files[0]
    return "" if found.problem else f"{found.name}: {found.family}, {found.stored}."
