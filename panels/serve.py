"""`launch.py serve`: the console in a browser, for this machine or for whoever may sign in."""

from __future__ import annotations

import argparse
import os
import socket
import sys
import tempfile
import webbrowser
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from pathlib import Path

import uvicorn
from fastapi import FastAPI, Request

from app import passwords, presets, runs
from app.access import Access
from app.console import Console
from app.host import build_host
from app.hosts import Hosts, check_bind, is_wildcard, listen
from app.media_use import sweeping
from app.preflight import check_loadable
from app.private import TOKEN, kept_token
from app.share import Share, Tunnel
from runtime.families import FAMILIES
from runtime.messages import Plan

_POLL_SECONDS = 0.1  # Gradio looks at its queue 1000 times a second: 5 % of a core for nothing
_RANDOM = "random"  # what a bare --token means


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=7860, help="0 takes any free port")
    parser.add_argument("--plan", default="cpu", help="a TOML file or a name in presets/plans")
    parser.add_argument("--runs", type=Path, default=runs.FOLDER, help="where runs are kept")
    parser.add_argument(
        "--auth",
        action="append",
        default=[],
        metavar="USER:PASSWORD",
        help="who may sign in (seen in the list of processes); repeatable, the first is the admin",
    )
    parser.add_argument(
        "--auth-file", type=Path, help="a file of such lines, or of what app.passwords prints"
    )
    parser.add_argument(
        "--token",
        nargs="?",
        const=_RANDOM,
        default="",
        help="a link with this token opens the console; alone: a random one, kept with the runs",
    )
    parser.add_argument("--share", action="store_true", help="ask Gradio for a public link")
    parser.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a further host name of this console, of a reverse proxy say; may be repeated",
    )
    parser.add_argument(
        "--open", action=argparse.BooleanOptionalAction, default=False, help="open the browser"
    )


def run(args: argparse.Namespace) -> int:
    """Serves until Ctrl-C."""
    accounts = [passwords.account(text, source="--auth") for text in args.auth]
    if args.auth_file is not None:
        accounts += passwords.read_accounts(args.auth_file)
    check_bind(args.host, share=args.share, locked=bool(accounts or args.token))
    plan = presets.load_plan(presets.find("plans", args.plan))
    check_loadable(plan)
    if find_spec("av") is None:
        raise ValueError("mp4 files need PyAV; pip install 'av>=18.1,<20'")
    token, fresh = kept_token(args.runs) if args.token == _RANDOM else (args.token, False)
    access = Access(args.runs, accounts, token)
    with listen(args.host, args.port) as listening:
        url = _url(args.host, listening.getsockname()[1])

        def greet() -> None:
            _say(f"Video console with plan {plan.name}: {url}  (Ctrl-C ends it)")
            if fresh:
                _say(f"Whoever has this link may use it: {url}/?token={token}")
            elif args.token == _RANDOM:
                _say(f"The token is the one of before; it stands in {args.runs / TOKEN}")
            if args.open:
                webbrowser.open(url)

        print("starting the console ...", file=sys.stderr, flush=True)  # Gradio loads for seconds
        serve(
            plan,
            access,
            Hosts(args.host, args.allow_host),
            listening,
            root=args.runs,
            tunnel=_gradio_tunnel if args.share else None,
            when_up=greet,
        )
    return 0


def serve(
    plan: Plan,
    access: Access,
    hosts: Hosts,
    listening: socket.socket,
    *,
    root: Path,
    tunnel: Callable[[], Tunnel] | None = None,
    when_up: Callable[[], None],
    families: Mapping[str, str] = FAMILIES,
) -> None:
    """Starts the engine and the page together; returns after Ctrl-C, with nothing left running."""
    with ExitStack() as opened:
        uploads = opened.enter_context(tempfile.TemporaryDirectory(prefix="h3-gradio-"))  # 0700
        console = opened.enter_context(Console(root, plan, families=families))
        share = Share(console.hub, hosts)
        opened.callback(share.close)
        app = mount(build_host(console, access, hosts, share), console, access, Path(uploads))
        opened.enter_context(sweeping(console.media, console.jobs))
        server = Server(app, console)
        server.when_up(when_up)
        if tunnel is not None:
            made, port = tunnel(), listening.getsockname()[1]
            server.when_up(lambda: share.start(made, port, _say))
        with suppress(KeyboardInterrupt):  # raised once the server has ended: the usual way out
            server.run(sockets=[listening])


class Server(uvicorn.Server):
    """uvicorn for one console: ends its event streams at once when it is told to stop."""

    def __init__(self, app: FastAPI, console: Console) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,  # anybody may send them; a limit by address would be void
                timeout_graceful_shutdown=1,  # Gradio's own streams stay open for ever
            )
        )
        self._console = console
        self._when_up: list[Callable[[], None]] = []

    def when_up(self, call: Callable[[], None]) -> None:
        """Calls once connections are accepted."""
        self._when_up.append(call)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, then the calls of when_up."""
        await super().startup(sockets)
        for call in self._when_up:
            call()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, after the event streams."""
        self._console.hub.close()
        await super().shutdown(sockets)


def mount(host: FastAPI, console: Console, access: Access, uploads: Path) -> FastAPI:
    """Mounts the page at /; Gradio keeps what it must in `uploads` and calls nobody."""
    _set_environment(uploads)
    import gradio as gr  # costs seconds: after the arguments have been found good

    from panels import build_ui
    from panels.theme import css, head, theme

    def name(request: Request) -> str | None:
        user = access.user(request)
        return user.name if user else None

    page = build_ui(console)
    page._queue.sleep_when_free = _POLL_SECONDS
    return gr.mount_gradio_app(
        host,
        page,
        path="/",
        auth_dependency=name,
        theme=theme(),
        css=css(),
        head=head(),
        footer_links=[],
        run_history=False,
        max_file_size=1,  # bytes: uploads go through /api/v1/media
        show_error=False,
        enable_monitoring=False,
    )


def _gradio_tunnel() -> Tunnel:
    from panels.share import GradioTunnel  # loads Gradio

    return GradioTunnel()


def _url(host: str, port: int) -> str:
    name = "127.0.0.1" if is_wildcard(host) else host
    return f"http://{f'[{name}]' if ':' in name else name}:{port}"


def _say(line: str) -> None:
    print(line, flush=True)


def _set_environment(uploads: Path) -> None:
    os.environ["GRADIO_TEMP_DIR"] = str(uploads)
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
