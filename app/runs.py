"""One folder per run: request.toml, plan.toml, events.jsonl, run.json, the video, the latents."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from app import presets
from app.jobs import State
from app.stored import plain
from runtime.media.files import remove_parts, write_bytes_atomic, write_json_atomic
from runtime.messages import Event, Failure, Note, Plan, Ready, Request, Result, StageTime

FOLDER = Path(__file__).parents[1] / "runs"


def new_id() -> str:
    """A name for a request and its folder: local date and time, then six random hex digits."""
    return f"{datetime.now():%Y%m%d-%H%M%S}_{secrets.token_hex(3)}"


class Run:
    """The record of one request; `add` takes every event, `finish` writes run.json."""

    def __init__(self, folder: Path, request: Request, plan: Plan) -> None:
        """Makes the folder; ValueError if it already holds a run."""
        folder.mkdir(parents=True, exist_ok=True)
        try:  # "x": of two runs that start at once, one gets the folder
            with (folder / "request.toml").open("x", encoding="utf-8") as file:
                file.write(presets.dump_request(request))
        except FileExistsError as error:
            raise ValueError(f"{folder} already holds a run; give another folder") from error
        write_bytes_atomic(folder / "plan.toml", presets.dump_plan(plan).encode())
        self.folder = folder
        self.request = request
        self._plan = plan
        self._notes: list[Note] = []
        self._stages: list[StageTime] = []
        self._started = time.time()

    def add(self, event: Event) -> None:
        """Appends the event to events.jsonl and keeps what run.json needs."""
        line = {"time": time.time(), "event": type(event).__name__, **plain(event)}
        with (self.folder / "events.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
        if isinstance(event, Note):
            self._notes.append(event)
        if isinstance(event, StageTime):
            self._stages.append(event)

    def finish(
        self,
        last: Result | Failure,
        ready: Ready | None,
        state: State,
        *,
        pids: tuple[int, ...] = (),
        keep_latents: bool = True,
    ) -> None:
        """Writes run.json: the request, the resolved plan, every note, all times, how it ended.

        pids: the ranks that served it; what a killed one was building is removed.
        keep_latents: False removes the latents of a run whose mp4 is whole.
        """
        if isinstance(last, Failure):
            remove_parts(self.folder, pids)
        notes = [{"text": note.text, "warning": note.warning} for note in self._notes]
        if isinstance(last, Result) and last.video and last.latents and not keep_latents:
            last.latents.unlink()
            last = replace(last, latents=None)
            notes.append({"text": "latents removed once the mp4 was written", "warning": False})
        stages = last.stages if isinstance(last, Result) else self._stages
        write_record(
            self.folder,
            self.request,
            self._plan,
            state,
            started=self._started,
            seconds=time.time() - self._started,
            engine=plain(ready) if ready else None,
            notes=notes,
            stages=[plain(stage) for stage in stages],
            last=plain(last),
        )


def write_record(
    folder: Path,
    request: Request,
    plan: Plan,
    state: State,
    *,
    started: float,
    seconds: float,
    engine: Mapping[str, Any] | None,
    notes: Iterable[Mapping[str, Any]],
    stages: Iterable[Mapping[str, Any]],
    last: Mapping[str, Any],
) -> None:
    """Writes run.json, and of a done run result.json, which says what its mp4 carries.

    started: seconds since the epoch. last: a Result if the state is "done", else a Failure.
    """
    notes = list(notes)
    if state == "done":
        same: dict[str, Any] = {"request": plain(request), "plan": plain(plan)}
        same |= {"resolved": (engine or {}).get("resolved"), "notes": [n["text"] for n in notes]}
        write_json_atomic(folder / "result.json", same)
    record = {
        "id": request.id,
        "state": state,
        "started": datetime.fromtimestamp(started).astimezone().isoformat(),
        "seconds": seconds,
        "request": plain(request),
        "plan": plain(plan),
        "engine": engine,
        "notes": notes,
        "stages": list(stages),
        "result": last if state == "done" else None,
        "failure": last if state != "done" else None,
    }
    write_json_atomic(folder / "run.json", record)
