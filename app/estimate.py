"""What the planner answers: one request on one plan and machine, before anything is run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["fits", "tight", "no", "unknown"]

ORDER: tuple[Verdict, ...] = ("fits", "unknown", "tight", "no")  # the worst one counts


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFound:
    """One checkpoint file of the plan, from its header; `problem` says why it cannot be used."""

    role: str  # dit | text_encoder | video_vae | audio_vae
    name: str
    path: str
    bytes: int = 0
    family: str = ""  # "H3 denoiser", as `launch.py inspect` names it
    stored: str = ""  # "nvfp4 in 200 layers, BF16, F32"
    resident_bytes: int = 0  # on the device of the plan
    largest_bytes: int = 0  # of one tensor, which lies in RAM while it is copied
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferencePlan:
    """What will be done to one reference, in the words of the run's notes."""

    index: int  # in the order of the request, from 0
    label: str  # "Picture 1", as the prompt calls it
    kind: str
    name: str
    width: int = 0  # encoded; 0 for a sound
    height: int = 0
    frames: int = 0  # encoded, 1 for an image
    rows: int = 0  # of pictures and sound in the packed sequence
    text_rows: int = 0  # its label and what the text encoder sees of it
    notes: tuple[str, ...] = ()
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows of the packed sequence; None where they are not known, and never guessed."""

    total: int | None
    text: int | None
    references: int | None
    audio: int
    video: int
    negative: int | None = None  # total of the other side when cfg is not 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Bytes that one phase needs on the device at its worst moment."""

    name: str  # weights | text encode | reference encode | denoise | video VAE decode | ...
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """One resource: what is needed, what is there, and the verdict with its reason.

    needed and available: bytes (seconds for the time); None where not known.
    """

    what: str  # VRAM | RAM | disk | time
    verdict: Verdict
    reason: str  # one sentence
    needed: float | None = None
    available: float | None = None
    total: float | None = None
    source: str = ""  # "measured ..." | "formula ..." | ""
    phases: tuple[Phase, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Everything the preflight card shows.

    blocked: a sentence when the console refuses to queue this (files, references, disk), else "".
    needs_force: a sentence when it refuses unless told `force` (memory), else "".
    warnings: sentences; the request may be queued all the same.
    """

    verdict: Verdict
    blocked: str
    needs_force: str
    warnings: tuple[str, ...]
    mode: str  # ref2va | fl2va | unknown
    mode_note: str
    files: tuple[FileFound, ...]
    references: tuple[ReferencePlan, ...]
    rows: Rows
    vram: Need
    ram: Need
    disk: Need
    time: Need


def worst(verdicts: tuple[Verdict, ...]) -> Verdict:
    """The verdict of several: no, then tight, then unknown, then fits."""
    return max(verdicts, key=ORDER.index)
