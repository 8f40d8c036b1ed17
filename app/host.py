"""The web host: one application with every REST resource; the pages are mounted by panels."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from pathlib import Path

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, Response

from app import login
from app.access import Access
from app.console import Console
from app.errors import Refused
from app.guard import Guard
from app.hosts import Hosts
from app.log import Log
from app.routes import ROUTES, health, metrics
from app.share import Share
from runtime.media.files import DiskFullError
from runtime.quoted import cut

API = "/api/v1"
_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
_WEEK = {"Cache-Control": "public, max-age=604800"}


def build_host(console: Console, access: Access, hosts: Hosts, share: Share) -> FastAPI:
    """The application without pages: guards, sign-in, REST under /api/v1, /metrics, plotly.js."""
    app = FastAPI(
        title="Video console",
        description="Jobs, runs, media, plans and telemetry of one console. Errors are "
        '{"detail": "one sentence"}.',
        docs_url=None,  # both pages would load their scripts from elsewhere
        redoc_url=None,
        openapi_url=f"{API}/openapi.json",
    )
    app.add_middleware(Guard, access=access, hosts=hosts, log=Log(console.root / "console.log"))
    app.add_exception_handler(ValueError, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(DiskFullError, _full)
    app.include_router(login.router(access, hosts))
    app.include_router(health.router(console, access, share), prefix=API)
    app.include_router(metrics.router(console, access.need))
    for name in ROUTES:
        module = importlib.import_module(f"app.routes.{name}")
        app.include_router(module.router(console, access.need), prefix=API)
    app.add_api_route("/assets/plotly.min.js", _plotly, include_in_schema=False)
    app.add_api_route(
        API + "/{path:path}", _nowhere, methods=list(_METHODS), include_in_schema=False
    )
    return app


def plotly_file() -> Path:
    """plotly.js of the installed package, which is not imported: that costs 60 MB."""
    spec = find_spec("plotly")
    if spec is None or spec.origin is None:
        raise ValueError("plotly is not installed; pip install -e . brings it")
    return Path(spec.origin).parent / "package_data" / "plotly.min.js"


def _plotly() -> FileResponse:
    return FileResponse(plotly_file(), media_type="text/javascript", headers=_WEEK)


def _nowhere(path: str) -> None:
    raise HTTPException(404, f"there is no {API}/{cut(path)}; {API}/openapi.json lists what is")


def _refused(_request: Request, error: Exception) -> Response:
    status = error.status if isinstance(error, Refused) else Refused.status
    return JSONResponse({"detail": str(error)}, status)


def _invalid(_request: Request, error: Exception) -> Response:
    """The first fault of a request that does not have the shape of its route."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    if first["type"] == "value_error":  # a sentence of ours, which names the field itself
        return JSONResponse({"detail": str(first["ctx"]["error"])}, 400)
    place = ".".join(str(part) for part in first["loc"])
    return JSONResponse({"detail": f"{cut(place)}: {cut(first['msg'], 300)}"}, 400)


def _full(_request: Request, error: Exception) -> Response:
    return JSONResponse({"detail": str(error)}, 507)
