"""The share link: with a made-up tunnel, without a network, and after the deadline."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.events import Hub
from app.hosts import Hosts
from app.share import Share
from tests.consoles import until

URL = "https://abc123.gradio.live"


class FakeTunnel:
    """Answers when it is let, with a URL or an error."""

    def __init__(self, answer: str | Exception) -> None:
        self.let = threading.Event()
        self.closed = threading.Event()
        self._answer = answer

    def open(self, port: int) -> str:
        """Waits, then tells."""
        assert port == 7860 and self.let.wait(10)
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer

    def close(self) -> None:
        """Remembers that it was asked to."""
        self.closed.set()


@pytest.fixture
def hosts() -> Hosts:
    return Hosts("127.0.0.1")


@pytest.fixture
def share(hosts: Hosts) -> Iterator[Share]:
    share = Share(Hub(), hosts)
    yield share
    share.close()


def test_nothing_is_asked_for_unless_it_is_started(share: Share) -> None:
    assert share.json() == {"state": "off", "url": "", "reason": ""}


def test_a_link_is_told_and_its_name_answered(share: Share, hosts: Hosts) -> None:
    tunnel, told = FakeTunnel(URL), list[str]()
    share.start(tunnel, 7860, told.append)
    assert share.json()["state"] == "starting" and not hosts.allows("abc123.gradio.live")
    tunnel.let.set()
    until(lambda: told)
    assert told == [f"share link: {URL}"] and hosts.allows("abc123.gradio.live")
    assert share.json() == {"state": "up", "url": URL, "reason": ""}
    share.close()
    assert tunnel.closed.is_set()


@pytest.mark.parametrize("error", [ValueError("no such service"), OSError(101, "no network")])
def test_without_a_link_the_reason_is_one_sentence(share: Share, error: Exception) -> None:
    tunnel, told = FakeTunnel(error), list[str]()
    tunnel.let.set()
    share.start(tunnel, 7860, told.append)
    until(lambda: told)
    assert told == [share.json()["reason"]] and share.json()["state"] == "failed"
    assert told[0].startswith("no share link: ") and "goes on for this machine" in told[0]


def test_a_tunnel_that_says_nothing_is_given_up_and_a_late_link_not_used(
    share: Share, hosts: Hosts
) -> None:
    tunnel, told = FakeTunnel(URL), list[str]()
    share.start(tunnel, 7860, told.append, seconds=0.05)
    until(lambda: told)
    assert "there was no answer in 0.05 s" in told[0] and tunnel.closed.is_set()
    tunnel.closed.clear()
    tunnel.let.set()
    assert tunnel.closed.wait(5)
    assert share.json()["state"] == "failed" and not hosts.allows("abc123.gradio.live")
    assert len(told) == 1


def test_pages_are_told_of_the_link() -> None:
    async def test() -> list[str]:
        hub, tunnel = Hub(), FakeTunnel(URL)
        stream = hub.stream("local", admin=True)
        await anext(stream)
        tunnel.let.set()
        Share(hub, Hosts("127.0.0.1")).start(tunnel, 7860, lambda line: None)
        return [await asyncio.wait_for(anext(stream), 10) for _ in range(3)]

    _, starting, up = asyncio.run(test())
    assert "event: share" in starting and '"state": "starting"' in starting
    assert '"state": "up"' in up and URL in up


def test_a_refused_network_is_a_sentence_that_names_the_service() -> None:
    from panels.share import GradioTunnel  # loads Gradio

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    tunnel = GradioTunnel(api=f"http://127.0.0.1:{port}/v3/tunnel-request")
    with pytest.raises(ValueError, match=r"the share service 127\.0\.0\.1 cannot be reached"):
        tunnel.open(7860)
    tunnel.close()


@pytest.mark.parametrize("answer", [b"[]", b"{}", b"nonsense", b'[{"host": "x"}]'])
def test_a_service_that_talks_nonsense_is_a_sentence(answer: bytes) -> None:
    from panels.share import GradioTunnel

    def reply(server: socket.socket) -> None:
        with server.accept()[0] as connection:
            connection.recv(4096)
            length = str(len(answer)).encode()
            connection.sendall(
                b"HTTP/1.1 200 OK\r\nContent-Length: " + length + b"\r\n\r\n" + answer
            )

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=reply, args=(server,))
        thread.start()
        tunnel = GradioTunnel(api=f"http://127.0.0.1:{server.getsockname()[1]}/")
        with pytest.raises(ValueError, match="cannot be reached"):
            tunnel.open(7860)
        thread.join()
    tunnel.close()


PROGRAMS = {
    "ok": ("#!/bin/sh\necho '[I] start proxy success: https://x.gradio.live'\nexec sleep 60\n", ""),
    "refused": ("#!/bin/sh\necho 'login to server failed: no'\nexec sleep 60\n", "login to server"),
    "dies": ("#!/bin/sh\necho 'bad flag'\nexit 1\n", "frpc failed .bad flag"),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_tunnel_program_s_words_become_a_link_or_a_sentence(tmp_path: Path, name: str) -> None:
    from panels.share import QuietTunnel

    script, words = PROGRAMS[name]
    program = tmp_path / "frpc"
    program.write_text(script)
    program.chmod(0o700)
    tunnel = QuietTunnel("127.0.0.1", 1, "127.0.0.1", 7860, "token", None)
    if words:
        with pytest.raises(ValueError, match=words):
            tunnel.run(program)
    else:
        assert tunnel.run(program) == "https://x.gradio.live"
    process = tunnel.proc
    tunnel.kill()
    assert tunnel.proc is None and (process is None or process.poll() is not None)
