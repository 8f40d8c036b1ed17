"""The share link: asked for once the console serves, with a deadline; without one it goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Literal, Protocol
from urllib.parse import urlsplit

from app.events import Hub
from app.hosts import Hosts

SECONDS = 30.0

State = Literal["off", "starting", "up", "failed"]


class Tunnel(Protocol):
    """Whoever makes the link."""

    def open(self, port: int) -> str:
        """The public URL of a local port; ValueError or OSError when there is none."""

    def close(self) -> None:
        """Ends it, also from another thread while it is being opened."""


class Share:
    """The state of the link, also told as the event `share`."""

    def __init__(self, hub: Hub, hosts: Hosts) -> None:
        self._hub, self._hosts = hub, hosts
        self._lock = threading.Lock()
        self._state: State = "off"
        self._tunnel: Tunnel | None = None
        self._url = self._reason = ""

    def json(self) -> dict[str, str]:
        """{state, url, reason}; the reason is one sentence when there is no link."""
        with self._lock:
            return {"state": self._state, "url": self._url, "reason": self._reason}

    def start(
        self,
        tunnel: Tunnel,
        port: int,
        told: Callable[[str], None],
        *,
        seconds: float = SECONDS,
    ) -> None:
        """Asks for the link in the background; `told` gets the line for the terminal.

        After `seconds` without an answer the link counts as failed, and a late one is not used.
        """
        with self._lock:
            self._tunnel, self._state = tunnel, "starting"
        self._hub.publish("share", self.json())
        ask = threading.Thread(target=self._ask, args=(tunnel, port, told), daemon=True)
        ask.start()
        threading.Thread(target=self._wait, args=(ask, told, seconds), daemon=True).start()

    def close(self) -> None:
        """Takes the link away."""
        if self._tunnel is not None:
            self._tunnel.close()

    def _ask(self, tunnel: Tunnel, port: int, told: Callable[[str], None]) -> None:
        try:
            url = tunnel.open(port)
        except (ValueError, OSError) as error:
            self._end("failed", "", " ".join(str(error).split()), told)
        else:
            if not self._end("up", url, "", told):
                tunnel.close()

    def _wait(self, ask: threading.Thread, told: Callable[[str], None], seconds: float) -> None:
        ask.join(seconds)
        if self._end("failed", "", f"there was no answer in {seconds:g} s", told):
            self.close()

    def _end(self, state: State, url: str, why: str, told: Callable[[str], None]) -> bool:
        """Sets how it ended, once; False if that is known already."""
        with self._lock:
            if self._state != "starting":
                return False
            if url:
                self._hosts.share(urlsplit(url).hostname or "")
            reason = why and (
                f"no share link: {why}; the console goes on for this machine, and --share at the "
                f"next start tries again"
            )
            self._state, self._url, self._reason = state, url, reason
        told(reason or f"share link: {url}")
        self._hub.publish("share", self.json())
        return True
