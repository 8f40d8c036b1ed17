"""The sign-in page: one form for a name and password, one for the token; no script."""

from __future__ import annotations

from html import escape
from pathlib import Path
from string import Template
from urllib.parse import parse_qs

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from app.access import Access
from app.errors import Forbidden, Refused, TooLarge, TooMany
from app.guard import set_cookie
from app.hosts import Hosts

_WEB = Path(__file__).with_name("web")
_MOST_BYTES = 4096
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; form-action 'self'; "
    "frame-ancestors 'none'; base-uri 'none'"
)
_WHY = {
    str(Forbidden.status): "wrong token; use the link that the console printed when it started",
    str(TooMany.status): "too many attempts to sign in; wait a minute",
}


def router(access: Access, hosts: Hosts) -> APIRouter:
    """GET and POST /login, POST /logout."""
    routes = APIRouter(include_in_schema=False)

    @routes.get("/login")
    def page(request: Request, why: str = "") -> Response:
        if access.user(request) is not None:
            return RedirectResponse("/", 303)
        return _page(access, _WHY.get(why, ""))

    @routes.post("/login")
    async def sign_in(request: Request) -> Response:
        form = await _form(request)
        try:
            cookie = await run_in_threadpool(_cookie, access, hosts, request, form)
        except Refused as refused:
            return _page(access, str(refused), form.get("name", ""), refused.status)
        response = RedirectResponse("/", 303)
        set_cookie(response, request, access, hosts, cookie)
        return response

    @routes.post("/logout")
    def sign_out(request: Request) -> Response:
        access.sign_out(request, hosts.address(request))
        response = RedirectResponse("/login", 303)
        set_cookie(response, request, access, hosts, "")
        return response

    return routes


def _cookie(access: Access, hosts: Hosts, request: Request, form: dict[str, str]) -> str:
    address = hosts.address(request)
    if "token" in form:
        return access.sign_in_by_token(form["token"], address)
    return access.sign_in(form.get("name", ""), form.get("password", ""), address)


async def _form(request: Request) -> dict[str, str]:
    data = b""
    async for chunk in request.stream():
        data += chunk
        if len(data) > _MOST_BYTES:
            raise TooLarge(f"a sign-in has at most {_MOST_BYTES} bytes")
    fields = parse_qs(data.decode("utf-8", "replace"), keep_blank_values=True, max_num_fields=8)
    return {name: values[0] for name, values in fields.items()}


def _page(access: Access, why: str, name: str = "", status: int = 200) -> Response:
    """The page; what a user typed is escaped, and the policy would run no script anyway."""
    forms = ("login_name",) * access.by_name + ("login_token",) * access.by_token
    filled = "".join(_template(form).substitute(name=escape(name[:64])) for form in forms)
    html = _template("login").substitute(why=escape(why), forms=filled)
    return HTMLResponse(
        html, status, headers={"Content-Security-Policy": _POLICY, "Cache-Control": "no-store"}
    )


def _template(name: str) -> Template:
    return Template((_WEB / f"{name}.html").read_text(encoding="utf-8"))
