"""Asks a child process what a request will be packed to, and remembers the answers."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

from app.children import run_child
from app.estimate import ReferencePlan
from app.measured import Measured
from app.stored import plain
from runtime.messages import Ref2VARequest

SECONDS = 90.0
_AT_ONCE = 2
_KEPT = 256
_COUNTS_NOT = ("id", "seed", "steps", "sampler", "scheduler", "shift_video", "shift_audio")


class Measurer:
    """Every method may be called from any thread; two children run at once at most."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._children = threading.BoundedSemaphore(_AT_ONCE)
        self._known: OrderedDict[str, Measured] = OrderedDict()

    def measure(self, request: Ref2VARequest, tokenizer: Path | None) -> Measured:
        """Takes as long as decoding the references, the first time."""
        asked = {"request": plain(request), "tokenizer": tokenizer and str(tokenizer)}
        key = _key(asked, request)
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
                return self._known[key]
        with self._children:
            found = _ask(asked, request)
        with self._lock:
            self._known[key] = found
            while len(self._known) > _KEPT:
                self._known.popitem(last=False)
        return found


def _ask(asked: dict[str, Any], request: Ref2VARequest) -> Measured:
    try:
        answer = run_child(
            "runtime.h3.measure",
            what="measuring this request",
            seconds=SECONDS,
            stdin=json.dumps(asked).encode(),
        )
    except ValueError as error:
        return Measured(problem=str(error))
    found = json.loads(answer)
    pairs = zip(found["references"], request.references, strict=True)
    return Measured(
        references=tuple(
            ReferencePlan(
                index=index,
                label=one["label"],
                kind=one["kind"],
                name=reference.path.name,
                width=one["width"],
                height=one["height"],
                frames=one["frames"],
                rows=one["rows"],
                text_rows=one["text_rows"],
                notes=tuple(one["notes"]),
                problem=one["problem"],
            )
            for index, (one, reference) in enumerate(pairs)
        ),
        sound_latents=max((one["sound_latents"] for one in found["references"]), default=0),
        text=found["text"],
        total=found["total"],
        negative=found["negative"],
        most_vision=found["most_vision"],
    )


def _key(asked: dict[str, Any], request: Ref2VARequest) -> str:
    """All that the answer depends on, the files' times and sizes included."""
    counted = {k: v for k, v in asked["request"].items() if k not in _COUNTS_NOT}
    files = [p for r in request.references for p in (r.path, r.soundtrack) if p is not None]
    states = [(s.st_mtime_ns, s.st_size) for p in files if p.exists() and (s := p.stat())]
    return json.dumps([counted, asked["tokenizer"], states])
