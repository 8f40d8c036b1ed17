"""What the engine and the running job look like at one moment, for pages to ask."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from app.history import AFTER, DENOISE, Moment
from runtime.messages import Event, Note, Plan, Preview, Progress, Ready, StageTime

EngineState = Literal["unloaded", "loading", "ready", "busy", "failed", "closed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """What the engine does now; stage, done and total tell how far a load is."""

    state: EngineState = "unloaded"
    plan: Plan | None = None
    reason: str = ""  # why it failed
    stage: str = ""
    done: int = 0
    total: int = 0
    ready: Ready | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """The running job so far; times are seconds since the epoch, 0 while not reached."""

    id: str
    stage: str = "load"
    done: int = 0
    total: int = 0
    detail: str = ""
    notes: tuple[Note, ...] = ()
    stages: tuple[StageTime, ...] = ()
    preview_step: int = -1  # the newest step in preview.webp
    began: float = 0.0  # the request, on a loaded engine
    stage_began: float = 0.0  # of what follows the steps: the first of it
    step_ended: float = 0.0

    def after(self, event: Event, now: float) -> Live:
        """The job once this has happened, at `now`."""
        if isinstance(event, Progress):
            told = replace(
                self,
                stage=event.stage,
                done=event.done,
                total=event.total,
                detail=event.detail,
            )
            if event.stage in AFTER and self.stage in AFTER:  # they take turns
                return told
            if event.stage != self.stage:
                return replace(told, stage_began=now, step_ended=now)
            moved = event.stage == DENOISE and event.done != self.done
            return replace(told, step_ended=now) if moved else told
        if isinstance(event, Note):
            return replace(self, notes=(*self.notes, event))
        if isinstance(event, StageTime):
            return replace(self, stages=(*self.stages, event))
        if isinstance(event, Preview):
            return replace(self, preview_step=event.step)
        return self

    def moment(self, now: float) -> Moment:
        """Where it is at `now`, for the history to tell what is left."""
        return Moment(
            stage=self.stage,
            done=self.done,
            total=self.total,
            run_seconds=now - self.began,
            stage_seconds=now - self.stage_began,
            step_seconds=now - self.step_ended if self.step_ended else 0.0,
        )


def engine_json(status: EngineStatus) -> dict[str, Any]:
    """The status as pages get it."""
    return {
        "state": status.state,
        "plan": status.plan.name if status.plan else "",
        "reason": status.reason,
        "stage": status.stage,
        "done": status.done,
        "total": status.total,
    }
