"""The web host: guards, health, and the finished videos; the pages are mounted by panels."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import FileResponse, PlainTextResponse, Response
from starlette.middleware.trustedhost import TrustedHostMiddleware

from app.session import Session
from runtime.messages import Result

LOOPBACK = ("127.0.0.1", "localhost")
# Gradio compiles its templates in the page, hence unsafe-eval; nothing may come from elsewhere.
_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; media-src 'self' blob:; "
    "font-src 'self' data:; connect-src 'self'; frame-ancestors 'self'; object-src 'none'; "
    "base-uri 'self'; form-action 'self'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Frame-Options": "SAMEORIGIN",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def check_bind(host: str) -> None:
    """Only this machine may connect, as there are no accounts yet; else ValueError."""
    if host not in LOOPBACK:
        raise ValueError(
            f"--host {host} would open the console to the network, and it has no accounts yet; "
            "use 127.0.0.1 and reach it through an SSH tunnel"
        )


def listen(host: str, port: int) -> socket.socket:
    """A listening socket (port 0: any free one); ValueError if the port is taken."""
    try:
        return socket.create_server((host, port))
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) else "ports are 0 to 65535"
        raise ValueError(
            f"port {port} on {host} cannot be used ({reason}); choose another with --port"
        ) from error


def build_host(session: Session) -> FastAPI:
    """The application without pages. Requests of other sites and host names are refused."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(LOOPBACK))
    app.middleware("http")(_guard)

    @app.get("/api/v1/health")
    def health() -> dict[str, Any]:
        now = session.snapshot()
        return {"engine": now.engine, "reason": now.reason, "plan": session.plan.name}

    @app.get("/api/v1/runs/{id}/video")
    def video(id: str) -> FileResponse:
        job = session.snapshot().job(id)
        if job is None or not isinstance(job.last, Result) or job.last.video is None:
            raise HTTPException(404, "no such video")
        if not job.last.video.is_file():
            raise HTTPException(404, f"the video is no longer in {job.folder}")
        return FileResponse(job.last.video, media_type="video/mp4")

    return app


async def _guard(request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
    origin = request.headers.get("origin")
    changes = request.method not in ("GET", "HEAD", "OPTIONS")
    if changes and origin and origin.split("://")[-1] != request.headers.get("host"):
        return PlainTextResponse("this request comes from another site", 403)
    response = await answer(request)
    response.headers.update(_HEADERS)
    return response
