"""`launch.py serve`: the console in a browser, for this machine only."""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
import webbrowser
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from app import presets, runs
from app.host import build_host, check_bind, listen
from app.preflight import check_models
from app.session import Session
from runtime.families import FAMILIES
from runtime.messages import Plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--host", default="127.0.0.1", help="127.0.0.1 or localhost")
    parser.add_argument("--port", type=int, default=7860, help="0 takes any free port")
    parser.add_argument("--plan", default="cpu", help="a TOML file or a name in presets/plans")
    parser.add_argument("--runs", type=Path, default=runs.FOLDER, help="where runs are kept")
    parser.add_argument(
        "--open", action=argparse.BooleanOptionalAction, default=False, help="open the browser"
    )


def run(args: argparse.Namespace) -> int:
    """Serves until Ctrl-C."""
    check_bind(args.host)
    plan = presets.load_plan(presets.find("plans", args.plan))
    check_models(plan)
    serve(plan, host=args.host, port=args.port, open_browser=args.open, root=args.runs)
    return 0


def serve(
    plan: Plan,
    *,
    host: str,
    port: int,
    open_browser: bool = False,
    root: Path = runs.FOLDER,
    families: Mapping[str, str] = FAMILIES,
) -> None:
    """Starts the engine and the page together; returns after Ctrl-C, with nothing left running."""
    socket = listen(host, port)
    url = f"http://{host}:{socket.getsockname()[1]}"
    with (
        tempfile.TemporaryDirectory(prefix="h3-uploads-") as uploads,  # made with mode 0700
        Session(plan, root=root, families=families) as session,
    ):
        app = mount(build_host(session), session, Path(uploads))
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=1,  # an open tab holds its event stream for ever
        )
        server = uvicorn.Server(config)
        print(f"H3 console with plan {plan.name}: {url}  (Ctrl-C ends it)", flush=True)
        if open_browser:
            threading.Timer(1.0, webbrowser.open, [url]).start()
        with suppress(KeyboardInterrupt):  # raised once the server has ended: the usual way out
            server.run(sockets=[socket])


def mount(host: FastAPI, session: Session, uploads: Path) -> FastAPI:
    """Mounts the page at /; Gradio keeps uploads in `uploads` and calls nobody."""
    os.environ["GRADIO_TEMP_DIR"] = str(uploads)
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    os.environ["HF_HUB_OFFLINE"] = "1"
    import gradio as gr  # costs seconds: after the arguments have been found good

    from panels import build_ui
    from panels.assets import add_assets
    from panels.theme import css, head, theme

    add_assets(host)
    return gr.mount_gradio_app(
        host,
        build_ui(session),
        path="/",
        theme=theme(),
        css=css(),
        head=head(),
        footer_links=[],
        run_history=False,
        max_file_size="2gb",
        show_error=False,
        enable_monitoring=False,
    )
