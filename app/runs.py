"""One folder per run: request.toml, plan.toml, events.jsonl, run.json, the video, the latents."""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from app import presets
from runtime.media.files import remove_parts, write_bytes_atomic, write_json_atomic
from runtime.messages import Event, Failure, Note, Plan, Ready, Ref2VARequest, Result, StageTime

FOLDER = Path(__file__).parents[1] / "runs"

State = Literal["queued", "running", "cancelling", "done", "failed", "cancelled", "interrupted"]


def new_id() -> str:
    """A name for a request and its folder: local date and time, then six random hex digits."""
    return f"{datetime.now():%Y%m%d-%H%M%S}_{secrets.token_hex(3)}"


def plain(value: Any) -> Any:
    """A dataclass as what JSON knows; paths become text."""
    return json.loads(json.dumps(asdict(value), default=str))


class Run:
    """The record of one request; `add` takes every event, `finish` writes run.json."""

    def __init__(self, folder: Path, request: Ref2VARequest, plan: Plan) -> None:
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
    ) -> None:
        """Writes run.json: the request, the resolved plan, every note, all times, how it ended.

        pids: the ranks that served it; what a killed one was building is removed.
        """
        if isinstance(last, Failure):
            remove_parts(self.folder, pids)
        stages = last.stages if isinstance(last, Result) else tuple(self._stages)
        record = {
            "id": self.request.id,
            "state": state,
            "started": datetime.fromtimestamp(self._started).astimezone().isoformat(),
            "seconds": time.time() - self._started,
            "request": plain(self.request),
            "plan": plain(self._plan),
            "engine": plain(ready) if ready else None,
            "notes": [{"text": note.text, "warning": note.warning} for note in self._notes],
            "stages": [plain(stage) for stage in stages],
            "result": plain(last) if isinstance(last, Result) else None,
            "failure": plain(last) if isinstance(last, Failure) else None,
        }
        write_json_atomic(self.folder / "run.json", record)
