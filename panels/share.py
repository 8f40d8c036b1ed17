"""Gradio's share tunnel without its prints and endless waits: all that ever asks the internet."""

from __future__ import annotations

import hashlib
import secrets
import tempfile
import threading
from pathlib import Path
from typing import IO

import httpx
from gradio import tunneling
from gradio.networking import GRADIO_API_SERVER

_WAIT_SECONDS = 10.0
_SUCCESS = "start proxy success: "


class GradioTunnel:
    """One tunnel to one local port; `close` ends it, also while it is being opened."""

    def __init__(self, *, api: str = GRADIO_API_SERVER) -> None:
        self._api = api
        self._tunnel: QuietTunnel | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="h3-share-")  # until it is closed

    def open(self, port: int) -> str:
        """The public address; ValueError with the reason when there is none to be had."""
        host, remote_port, certificate = self._server()
        file = Path(self._folder.name) / "certificate.pem"
        file.write_text(certificate, encoding="ascii")
        token = secrets.token_urlsafe(32)
        self._tunnel = QuietTunnel(host, remote_port, "127.0.0.1", port, token, str(file))
        return self._tunnel.run(_program())

    def close(self) -> None:
        """Ends the program that holds the tunnel."""
        if self._tunnel is not None:
            self._tunnel.kill()
        self._folder.cleanup()

    def _server(self) -> tuple[str, int, str]:
        try:
            answer = httpx.get(self._api, timeout=_WAIT_SECONDS)
            answer.raise_for_status()
            told = answer.json()[0]
            return told["host"], int(told["port"]), told["root_ca"]
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            where = httpx.URL(self._api).host
            raise ValueError(f"the share service {where} cannot be reached ({error})") from error


class QuietTunnel(tunneling.Tunnel):
    """Reads the program's output to its end instead of for ever, and says nothing itself."""

    def run(self, program: Path) -> str:
        """Starts frpc; the public address, or ValueError with its last words."""
        return self._start_tunnel(str(program))

    def kill(self) -> None:
        if self.proc is not None:
            self.proc.terminate()
            self.proc.wait()
            self.proc = None

    def _read_url_from_tunnel_stream(self) -> str:
        assert self.proc is not None and self.proc.stdout is not None
        last = "it ended without a word"
        for line in self.proc.stdout:
            last = line.decode("utf-8", "replace").strip() or last
            if _SUCCESS in last:
                threading.Thread(target=_drain, args=(self.proc.stdout,), daemon=True).start()
                return last.partition(_SUCCESS)[2]
            if "login to server failed" in last:
                break
        self.kill()
        raise ValueError(f"the tunnel program frpc failed ({last[:200]})")


def _drain(stream: IO[bytes]) -> None:
    """Keeps a full pipe from stopping the program."""
    for _ in stream:
        pass


def _program() -> Path:
    """Gradio downloads frpc once; a file that is not the one it should be is removed again."""
    path = Path(tunneling.BINARY_PATH)
    try:
        tunneling.Tunnel.download_binary()
    except (httpx.HTTPError, OSError) as error:
        raise ValueError(
            f"the tunnel program frpc cannot be downloaded ({error}); put {tunneling.BINARY_URL} "
            f"at {path} by hand and make it executable"
        ) from error
    wanted = tunneling.CHECKSUMS.get(tunneling.BINARY_URL)
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() == wanted:
            return path
    path.unlink()
    raise ValueError(f"the tunnel program at {path} was not the expected one and was removed")
