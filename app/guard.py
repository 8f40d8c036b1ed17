"""Stands before every route: names, origins, sign-in, limits, headers, audit, and no traceback."""

from __future__ import annotations

import math
import re
import traceback
from dataclasses import dataclass

from fastapi import HTTPException
from fastapi.responses import JSONResponse, RedirectResponse, Response
from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.access import SESSION_SECONDS, Access, User
from app.errors import Refused
from app.golden_imports import MOST_BYTES as MOST_GOLDEN_BYTES
from app.hosts import Hosts
from app.limits import Window
from app.log import Log
from runtime.quoted import quoted

PER_MINUTE = 120  # jobs enqueued, and files uploaded, by one user
MOST_BODY_BYTES = 8 << 20  # but for uploads, which count for themselves

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
    "Referrer-Policy": "same-origin",  # with no-referrer a form of the page has no Origin
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
}
_SAFE = ("GET", "HEAD", "OPTIONS")
_PUBLIC = ("/login", "/logout", "/manifest.json")  # browsers fetch the last without a cookie
_ASKING = ("/api/v1/preflight",)  # a POST that changes nothing
# What the page calls of Gradio, in which it has no functions; everything else stays shut.
_GRADIO = re.compile(r"/gradio_api/(heartbeat/[^/]+|app_id|startup-events|theme\.css|info/?)")
_ENQUEUE = re.compile(r"/api/v1/(jobs|jobs/[^/]+/(retry|duplicate)|parity)/?")
_UPLOAD = re.compile(r"/api/v1/(media|media/settings|parity/goldens)/?")
_STREAMED = re.compile(r"/api/v1/media(/settings)?/?")  # counted by the library as they come
_GOLDENS = re.compile(r"/api/v1/parity/goldens/?")
_BROKEN = "something went wrong in the console; console.log in the runs folder says what"


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who sent a request, and from where ("share": through the link)."""

    user: User | None
    address: str


class Guard:
    """ASGI middleware; one per console."""

    def __init__(self, app: ASGIApp, *, access: Access, hosts: Hosts, log: Log) -> None:
        self._app, self._access, self._hosts, self._log = app, access, hosts, log
        self._enqueued = Window(PER_MINUTE, 60.0)
        self._uploaded = Window(PER_MINUTE, 60.0)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers what is refused itself and passes on the rest."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":  # there is none here
            await send({"type": "websocket.close", "code": 1008})
        else:
            await self._http(scope, receive, send)

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        path = request.url.path
        caller = Caller(user=self._access.user(request), address=self._hosts.address(request))
        answering = _Answering(send, request, caller, self._access)
        refusal = self._refusal(request, caller)
        if refusal is not None:
            await refusal(scope, receive, answering)
            return
        limited = receive if _STREAMED.fullmatch(path) else _limited(receive, _most_bytes(path))
        try:
            await self._app(scope, limited, answering)
        except ClientDisconnect:  # the browser left in the middle of an upload
            return
        except Exception:
            self._log.text(f"{request.method} {path!r}\n{traceback.format_exc()}")
            if answering.started:
                raise
            await _sentence(500, _BROKEN)(scope, receive, answering)

    def _refusal(self, request: Request, caller: Caller) -> Response | None:
        """The answer that the request gets instead of its route's; None lets it pass."""
        return (
            self._foreign(request)
            or self._shut(request)
            or self._stranger(request, caller)
            or self._too_often(request, caller)
        )

    def _foreign(self, request: Request) -> Response | None:
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        if not self._hosts.allows(host):
            return _sentence(400, f"this console is not called {quoted(host)}; use its own address")
        asked = origin.split("://")[-1] if origin else host
        if asked != host and not self._hosts.is_shared(asked):
            return _sentence(403, "this request comes from another site")
        path, site = request.url.path, request.headers.get("sec-fetch-site", "")
        page = request.headers.get("sec-fetch-dest", "") == "document"  # a link may be followed
        if site in ("cross-site", "same-site") and path.startswith("/api/") and not page:
            return _sentence(403, "this request comes from another site")  # <img> has no Origin
        return None

    def _shut(self, request: Request) -> Response | None:
        path, size = request.url.path, request.headers.get("content-length", "0")
        if path.startswith("/gradio_api") and not _GRADIO.fullmatch(path):
            return _sentence(404, "files go through /api/v1/media")
        if path.startswith("/monitoring"):
            return _sentence(404, "there is no such page")
        if not _STREAMED.fullmatch(path):
            most = _most_bytes(path)
            if not size.isdecimal() or int(size) > most:
                return _sentence(413, _too_large(most))
        return None

    def _stranger(self, request: Request, caller: Caller) -> Response | None:
        path = request.url.path
        if path in _PUBLIC:
            return None
        page = request.method == "GET" and not path.startswith(("/api/", "/gradio_api/"))
        token = request.query_params.get("token")
        if page and token and self._access.by_token:
            return self._by_link(request, caller, token)
        if caller.user is not None:
            return None
        if page and "text/html" in request.headers.get("accept", ""):
            return RedirectResponse("/login", 303)
        return _sentence(401, "sign in first: open /login, or send the token as a Bearer")

    def _by_link(self, request: Request, caller: Caller, token: str) -> Response:
        """The token leaves the address bar for a cookie."""
        try:
            cookie = self._access.sign_in_by_token(token, caller.address)
        except Refused as refused:
            return RedirectResponse(f"/login?why={refused.status}", 303)
        response = RedirectResponse(request.url.path, 303)
        set_cookie(response, request, self._access, self._hosts, cookie)
        return response

    def _too_often(self, request: Request, caller: Caller) -> Response | None:
        if request.method != "POST" or caller.user is None:
            return None
        for pattern, window, what in (
            (_ENQUEUE, self._enqueued, "jobs"),
            (_UPLOAD, self._uploaded, "files"),
        ):
            if pattern.fullmatch(request.url.path) and (wait := window.take(caller.user.name)):
                seconds = math.ceil(wait)
                response = _sentence(
                    429, f"{PER_MINUTE} {what} a minute are taken from one user; wait {seconds} s"
                )
                response.headers["Retry-After"] = str(seconds)
                return response
        return None


class _Answering:
    """The way back: adds the headers and notes changes in the audit log."""

    def __init__(self, send: Send, request: Request, caller: Caller, access: Access) -> None:
        self._send, self._request, self._caller, self._access = send, request, caller, access
        self.started = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            headers = MutableHeaders(scope=message)
            for name, value in _HEADERS.items():
                headers.setdefault(name, value)
            path = self._request.url.path
            if path.startswith("/api/"):
                headers.setdefault("Cache-Control", "no-store")
                if self._request.method not in _SAFE and path not in _ASKING:
                    self._note(path, message["status"])
        await self._send(message)

    def _note(self, path: str, status: int) -> None:
        self._access.audit.line(
            event=f"{self._request.method} {path[:200]}",
            user=self._caller.user.name if self._caller.user else "",
            address=self._caller.address,
            status=status,
        )


def set_cookie(
    response: Response, request: Request, access: Access, hosts: Hosts, value: str
) -> None:
    """Gives the browser its session; "" takes it away."""
    forwarded = request.headers.get("x-forwarded-proto", "")
    encrypted = "https" in (request.url.scheme, forwarded)
    response.set_cookie(
        access.cookie,
        value,
        max_age=SESSION_SECONDS if value else 0,
        httponly=True,
        samesite="lax",
        secure=encrypted or hosts.is_shared(request.headers.get("host", "")),
    )


def _most_bytes(path: str) -> int:
    """Of a body that is taken whole: into memory, or a golden into a temporary file."""
    return MOST_GOLDEN_BYTES + (1 << 20) if _GOLDENS.fullmatch(path) else MOST_BODY_BYTES


def _too_large(most: int) -> str:
    return f"a request may have at most {most >> 20} MiB"


def _limited(receive: Receive, most: int) -> Receive:
    """The body of a request that does not tell its length in advance, up to a limit."""
    taken = 0

    async def next_message() -> Message:
        nonlocal taken
        message = await receive()
        taken += len(message.get("body", b""))
        if taken > most:
            raise HTTPException(413, _too_large(most))  # FastAPI makes others a 400
        return message

    return next_message


def _sentence(status: int, detail: str) -> Response:
    return JSONResponse({"detail": detail}, status)
