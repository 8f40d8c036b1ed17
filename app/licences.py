"""Licences that must be acknowledged before their weights run, and where that is kept.

The file <runs>/licences.json stands beside the job store; it is written whole or not at all.
Weights that our own make-demo wrote are random numbers under the licence of this program: they say
so in their header, and nothing has to be acknowledged for them.
"""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from app import models
from app.errors import Missing, Unacknowledged
from runtime.checkpoints.header import RANDOM_WEIGHTS, Header, read_header
from runtime.ltx.folders import weight_files
from runtime.ltx.published import TINY_CONFIG
from runtime.media.files import write_json_atomic
from runtime.messages import Plan
from runtime.quoted import MOST, quoted

FILE = "licences.json"
_SHOWN = 200  # characters of a header's license: it may hold the whole text
_WRITING = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Licence:
    """What is asked, and of which family's weights; terms: sentences that are shown.

    folders: roles of its plans, beside the denoiser, whose weights are under it too.
    """

    id: str
    name: str
    date: str
    family: str
    folders: tuple[str, ...]
    terms: tuple[str, ...]

    @property
    def version(self) -> str:
        """Changes with any word that is shown: what was acknowledged is then asked for again."""
        text = "\n".join((self.name, self.date, *self.terms))
        return f"{self.date}+{hashlib.sha256(text.encode()).hexdigest()[:8]}"


LTX = Licence(
    id="ltx-2.x",
    name="LTX-2.x Community License",
    date="2026-08-11",
    family="ltx",
    folders=("video_vae", "audio_vae", "vocoder", "upsampler"),  # Gemma has terms of its own
    terms=(
        "The weights of LTX-2.5 are under the LTX-2.x Community License Agreement of 11 August "
        "2026. This program neither brings nor downloads them and grants no right to them.",
        "Free use ends at an annual revenue of USD 10 million, counted over your whole group: at "
        "or above it you need a paid licence of Lightricks, but for evaluation and research "
        "outside of production.",
        "The Acceptable Use Policy and Attachment A bind every use. Among other things, generated "
        "content must be disclosed as such, nobody may be imitated without consent, and marks of "
        "provenance may not be removed; the mp4 files written here carry them.",
        "Whoever passes the weights, changed or not, or a service with them on to others must pass "
        "on the licence.",
        "Read the licence text and the policy that came with the weights you obtained; the text "
        "encoder may have terms of its own. This summary replaces neither and is no legal advice.",
    ),
)
LICENCES = (LTX,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Acknowledgement:
    """Who acknowledged what, when, and what the weights themselves say of their licence."""

    licence: str
    name: str
    date: str
    version: str  # of the words that were shown
    acknowledged: str  # ISO 8601, local time with its offset
    by: str
    file: str  # name of the file, of one in a folder with that
    metadata: str | None  # `license` of its header, cut; None: the header has none
    digest: str  # of that metadata whole; "" without


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a file of a plan's weights says of its licence."""

    file: str
    metadata: str | None
    digest: str

    @property
    def random(self) -> bool:
        """Written by make-demo."""
        return self.metadata == RANDOM_WEIGHTS


def of_plan(plan: Plan) -> Licence | None:
    """The licence of the family's published weights; None where nothing has to be acknowledged."""
    return next((one for one in LICENCES if one.family == plan.family), None)


def look(plan: Plan) -> tuple[Found, ...]:
    """Reads headers: the denoiser's, then those in folders that are under the licence too.

    A file in a folder that says nothing, as diffusers writes them, goes with the denoiser, and is
    left out: but for a random one that make-demo writes no folders for, where it is from elsewhere.
    A folder that the plan cannot use is left out as well, since it does not run.

    ValueError or OSError when the denoiser cannot be read; ValueError also when the plan cannot use
    it: nobody is asked about its licence.
    """
    if problem := models.denoiser_problem(plan):
        raise ValueError(problem)
    header, licence = read_header(plan.models.dit), of_plan(plan)
    denoiser = _found(plan.models.dit.name, header)
    silent_too = not denoiser.random or _has_demo_folders(header)
    others = [
        _found(f"{folder.name}/{file.name}", read_header(file))
        for folder in _folders(plan, licence.folders if licence else ())
        for file in weight_files(folder)
    ]
    return denoiser, *(one for one in others if one.metadata is not None or not silent_too)


def _found(file: str, header: Header) -> Found:
    told = header.metadata.get("license")
    digest = "" if told is None else hashlib.sha256(told.encode()).hexdigest()[:16]
    return Found(file=file, metadata=told and told[:_SHOWN], digest=digest)


def _has_demo_folders(denoiser: Header) -> bool:
    """make-demo writes folders around its tiny denoiser alone."""
    return json.loads(denoiser.metadata["config"]) == {"transformer": dict(TINY_CONFIG)}


def _folders(plan: Plan, roles: tuple[str, ...]) -> list[Path]:
    """Those of these roles that the plan can use."""
    files = models.look(plan).files if roles else ()
    return [Path(file.path) for file in files if file.role in roles and not file.problem]


def stored(root: Path) -> tuple[Acknowledgement, ...]:
    """All acknowledgements of a runs folder, oldest first; ValueError for a damaged file."""
    path = root / FILE
    if not path.is_file():
        return ()
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["acknowledgements"]
        return tuple(Acknowledgement(**entry) for entry in entries)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{path} is damaged ({error}); move it away and acknowledge again"
        ) from error


def missing(plan: Plan, root: Path) -> str:
    """Why the plan may not start here, in one sentence; "" when it may.

    A licence counts as acknowledged for weights whose header says the same of it: others, and ones
    that say nothing, are asked about once more.
    """
    licence = of_plan(plan)
    if licence is None:
        return ""
    found = needed(plan, root)
    if not found:
        return ""
    told = " and ".join(f"{one.file}, {_says(one)}," for one in found)
    return (
        f"{told} {'is' if len(found) == 1 else 'are'} not to run before the {licence.name} of "
        f"{licence.date} is acknowledged; read it, then give --acknowledge-licence {licence.id} to "
        f"launch.py generate once, or use the page"
    )


def needed(plan: Plan, root: Path) -> tuple[Found, ...]:
    """Of `look`, what has to be acknowledged and is not yet; of a plan with a licence."""
    licence = of_plan(plan)
    assert licence is not None, "only plans with a licence are asked about"
    known = {one.digest for one in stored(root) if _is_of(one, licence)}
    return tuple(one for one in look(plan) if not one.random and one.digest not in known)


def _is_of(given: Acknowledgement, licence: Licence) -> bool:
    return (given.licence, given.version) == (licence.id, licence.version)


def _says(found: Found) -> str:
    if found.metadata:
        more = "..." if len(found.metadata) > MOST else ""  # its whole length is not known here
        return f"whose header names {found.metadata[:MOST]!r}{more}"
    return "whose header has no license metadata"


def check(plan: Plan, root: Path) -> None:
    """Unacknowledged, with the sentence, while the plan may not start here."""
    if reason := missing(plan, root):
        raise Unacknowledged(reason)


def acknowledge(id: str, plan: Plan, root: Path, *, by: str) -> tuple[Acknowledgement, ...]:
    """Keeps that a licence is acknowledged for the weights of a plan, each of its files by itself.

    Missing for a licence that there is not; ValueError when it is not that of the plan's weights,
    or its denoiser cannot be read.
    """
    licence = next((one for one in LICENCES if one.id == id), None)
    if licence is None:
        raise Missing(
            f"there is no licence {quoted(id)}; there are {', '.join(one.id for one in LICENCES)}"
        )
    if licence is not of_plan(plan):
        raise ValueError(
            f"{licence.id} is the licence of family {licence.family}, and plan {plan.name} is of "
            f"family {plan.family}; nothing has to be acknowledged for it"
        )
    found = look(plan)
    if all(one.random for one in found):
        raise ValueError(
            f"{found[0].file} holds random weights of make-demo ({RANDOM_WEIGHTS}); nothing has to "
            f"be acknowledged for it"
        )
    given = tuple(
        Acknowledgement(
            licence=licence.id,
            name=licence.name,
            date=licence.date,
            version=licence.version,
            acknowledged=datetime.now().astimezone().isoformat(timespec="seconds"),
            by=by,
            file=one.file,
            metadata=one.metadata,
            digest=one.digest,
        )
        for one in found
        if not one.random
    )
    with _WRITING:
        entries = [asdict(one) for one in (*stored(root), *given)]
        write_json_atomic(root / FILE, {"acknowledgements": entries})
    return given


def licence_json(licence: Licence, root: Path) -> dict[str, Any]:
    """A licence for pages: its terms, and who has acknowledged it here."""
    given = [asdict(one) for one in stored(root) if one.licence == licence.id]
    return {**asdict(licence), "version": licence.version, "acknowledgements": given}
