"""/api/v1/media: the user's pictures, videos and sounds, and the settings inside our own mp4s."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import FileResponse

from app import stored
from app.access import User, UserDependency
from app.console import Console
from app.errors import Missing, WrongState
from app.incoming import Incoming
from app.media import Media
from app.media_use import needed
from app.multipart import receive
from app.shapes import request_json

_UNCHANGING = {"Cache-Control": "private, max-age=31536000, immutable"}  # an id is its content
_TYPES = {
    "png": "image/png",
    "jpeg": "image/jpeg",
    "webp": "image/webp",
    "gif": "image/gif",
    "bmp": "image/bmp",
    "avif": "image/avif",
    "tiff": "image/tiff",
}
_BY_NAME = {
    ".webm": "video/webm",
    ".mkv": "video/x-matroska",
    ".avi": "video/x-msvideo",
    ".wav": "audio/wav",
    ".flac": "audio/flac",
    ".ogg": "audio/ogg",
    ".m4a": "audio/mp4",
}


def router(console: Console, user: UserDependency) -> APIRouter:
    """The routes; the file of another user is a 404."""
    routes = APIRouter(prefix="/media", tags=["media"])
    asked = Depends(user)
    library = console.media

    @routes.get("")
    def files(who: User = asked) -> dict[str, Any]:
        """The user's files, newest first, and how much room they take."""
        own = [media_json(media) for media in library.list(who)]
        return {"media": own, "bytes": library.used_bytes(who.name), "quota": library.quota_bytes}

    @routes.post("", status_code=201)
    async def upload(request: Request, who: User = asked) -> dict[str, Any]:
        """Takes one file (multipart/form-data); the same content again is the same file."""
        with await receive(request, lambda name: library.begin(who.name, name)) as incoming:
            return media_json(await run_in_threadpool(incoming.keep))

    @routes.post("/settings")
    async def settings(request: Request, who: User = asked) -> dict[str, Any]:
        """{request, plan, notes} of an mp4 that was made here; the file is not kept."""
        with await receive(request, lambda name: library.begin(who.name, name)) as incoming:
            return await run_in_threadpool(_settings, console, who, incoming)

    @routes.get("/{id}")
    def one(id: str, who: User = asked) -> dict[str, Any]:
        """What a file holds."""
        return media_json(library.get(who, id))

    @routes.get("/{id}/file")
    def file(id: str, who: User = asked) -> FileResponse:
        """The file as it came; answers Range requests."""
        media = library.get(who, id)
        return FileResponse(
            _there(media, media.path),
            media_type=_media_type(media),
            filename=media.name,
            content_disposition_type="inline",
            headers=_UNCHANGING,
        )

    @routes.get("/{id}/thumb")
    def thumb(id: str, who: User = asked) -> FileResponse:
        """A WebP of at most 320 pixels; a sound has none (404)."""
        media = library.get(who, id)
        if media.thumb is None:
            raise Missing(f"{media.name} is a sound and has no picture")
        path = _there(media, media.thumb)
        return FileResponse(path, media_type="image/webp", headers=_UNCHANGING)

    @routes.delete("/{id}", status_code=204)
    def remove(id: str, who: User = asked) -> None:
        """Deletes a file; 409 while a job that waits or runs needs it."""
        media = library.get(who, id)
        if media.path in needed(console.jobs):
            raise WrongState(
                f"{media.name} is a reference of a job that waits or runs; remove the job first"
            )
        library.remove(who, id)

    return routes


def _there(media: Media, path: Path) -> Path:
    """The path, unless somebody has cleared the disk behind the console's back."""
    if not path.is_file():
        raise Missing(f"{media.name} is gone from the disk; remove it here and add it again")
    return path


def media_json(media: Media) -> dict[str, Any]:
    """A file for pages; created is in epoch seconds, thumb "" for sounds."""
    url = f"/api/v1/media/{media.id}"
    return {
        "id": media.id,
        "name": media.name,
        "kind": media.kind,
        "created": media.created,
        "facts": asdict(media.facts),
        "url": f"{url}/file",
        "thumb": f"{url}/thumb" if media.thumb else "",
    }


def _media_type(media: Media) -> str:
    """Never by the name alone: the browser gets a picture, a video or a sound, or a download."""
    if media.kind == "image":
        return _TYPES.get(media.facts.video_codec, "application/octet-stream")
    usual = "video/mp4" if media.kind == "video" else "audio/mpeg"
    by_name = _BY_NAME.get(media.path.suffix.lower(), usual)
    return by_name if by_name.startswith(media.kind) else usual


def _settings(console: Console, who: User, incoming: Incoming) -> dict[str, Any]:
    record = json.loads(incoming.read("record"))
    told = record.get("request")
    if not isinstance(told, dict):
        raise ValueError(f"the run record of {incoming.name} holds no request; give another video")
    request = stored.request_of(told)
    plan, notes = record.get("plan"), record.get("notes")
    missing = [
        f"{reference.path.name} is not in your library; add it again"
        for reference in request.references
        if console.media.find(who, reference.path) is None
    ]
    return {
        "request": request_json(console, who, request),
        "plan": str(plan.get("name", "")) if isinstance(plan, dict) else "",
        "notes": [*map(str, notes if isinstance(notes, list) else ()), *missing],
    }
