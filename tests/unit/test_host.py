"""The host: who may ask what, what every answer carries, and how it ends."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from app.access import LOGIN_TRIES, Access
from app.console import Console
from app.guard import MOST_BODY_BYTES, PER_MINUTE
from app.host import build_host
from app.hosts import Hosts, listen
from app.passwords import account
from app.share import Share
from panels.serve import Server
from tests.consoles import fake_console, until

ROOT = Path(__file__).parents[2]
HEALTH = "/api/v1/health"
TOKEN = "a token of the tests"
PAGE = {"Accept": "text/html"}


@pytest.fixture(scope="module")
def console(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    with fake_console(tmp_path_factory.mktemp("runs")) as console:
        yield console


def host(console: Console, folder: Path, *users: str, token: str = "") -> FastAPI:
    """The application with accounts kept in `folder`, and routes that go wrong."""
    accounts = [account(text, source="--auth") for text in users]
    hosts = Hosts("127.0.0.1")
    hosts.share("link.gradio.live")
    app = build_host(console, Access(folder, accounts, token), hosts, Share(console.hub, hosts))

    @app.get("/broken")
    def broken() -> None:
        raise RuntimeError("inner secret")

    @app.get("/refusing")
    def refusing() -> None:
        raise ValueError("7 is too many; take 6")

    return app


@pytest.fixture
def web(console: Console, tmp_path: Path) -> TestClient:
    return TestClient(host(console, tmp_path), base_url="http://127.0.0.1")


@pytest.fixture
def locked(console: Console, tmp_path: Path) -> TestClient:
    app = host(console, tmp_path, "anna:correct horse", "ben:battery staple", token=TOKEN)
    return TestClient(app, base_url="http://127.0.0.1", follow_redirects=False)


def test_health_tells_engine_and_share(web: TestClient) -> None:
    told = web.get(HEALTH).json()
    assert told["engine"]["plan"] == "cpu" and told["share"]["state"] == "off"


def test_the_session_tells_who_asks(web: TestClient, console: Console) -> None:
    assert web.get("/api/v1/session").json() == {
        "user": "local",
        "admin": True,
        "locked": False,
        "boot": console.hub.boot,
        "plan": "cpu",
    }


def test_a_foreign_host_name_is_refused(web: TestClient) -> None:
    answer = web.get(HEALTH, headers={"Host": "evil.example"})
    assert answer.status_code == 400 and "not called 'evil.example'" in answer.json()["detail"]


@pytest.mark.parametrize("origin", ["http://evil.example", "http://127.0.0.1:1", "null"])
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_a_request_of_another_site_is_refused(web: TestClient, origin: str, method: str) -> None:
    answer = web.request(method, HEALTH, headers={"Origin": origin})
    assert answer.status_code == 403 and "another site" in answer.json()["detail"]


@pytest.mark.parametrize(
    ("origin", "name"),
    [("http://127.0.0.1", "127.0.0.1"), ("https://link.gradio.live", "link.gradio.live")],
)
def test_a_request_of_the_page_itself_passes(web: TestClient, origin: str, name: str) -> None:
    assert web.get(HEALTH, headers={"Origin": origin, "Host": name}).status_code == 200


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_what_another_site_embeds_is_refused_and_its_links_are_followed(
    web: TestClient, site: str
) -> None:
    came = {"Sec-Fetch-Site": site, "Sec-Fetch-Dest": "image"}  # browsers send no Origin with it
    assert web.get(HEALTH, headers=came).status_code == 403
    assert web.get(HEALTH, headers={**came, "Sec-Fetch-Dest": "document"}).status_code == 200
    assert web.get(HEALTH, headers={**came, "Sec-Fetch-Site": "same-origin"}).status_code == 200


def test_every_answer_carries_the_security_headers(web: TestClient) -> None:
    for path in (HEALTH, "/api/v1/nothing", "/broken", "/gradio_api/upload"):
        headers = web.get(path).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert "default-src 'self'" in headers["content-security-policy"]


@pytest.mark.parametrize(
    "path",
    [
        "/gradio_api/upload",
        "/gradio_api/file=/etc/passwd",
        "/gradio_api/file/etc/passwd",
        "/gradio_api/proxy=http://127.0.0.1/",
        "/gradio_api/component_server",
        "/gradio_api/stream/x",
        "/gradio_api/queue/join",  # the page has no functions: Gradio answers with a traceback
        "/gradio_api/run/predict",
        "/gradio_api/queue/join/../../upload",
        "/monitoring",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_gradio_s_own_doors_are_shut(web: TestClient, path: str, method: str) -> None:
    assert web.request(method, path).status_code == 404


def test_a_fault_inside_tells_nothing_and_is_logged(web: TestClient, console: Console) -> None:
    answer = web.get("/broken")
    assert answer.status_code == 500
    assert answer.json()["detail"].startswith("something went wrong in the console; console.log")
    assert "RuntimeError: inner secret" in (console.root / "console.log").read_text()


def test_a_refusal_is_its_sentence(web: TestClient) -> None:
    answer = web.get("/refusing")
    assert (answer.status_code, answer.json()) == (400, {"detail": "7 is too many; take 6"})


@pytest.mark.parametrize("body", ["nonsense", "[]", '{"request": 5, "plans": []}'])
def test_a_body_of_the_wrong_shape_is_one_sentence(web: TestClient, body: str) -> None:
    answer = web.post("/api/v1/jobs", content=body, headers={"Content-Type": "application/json"})
    detail = answer.json()["detail"]
    assert answer.status_code == 400 and isinstance(detail, str) and detail.startswith("body")


def test_what_there_is_not_is_json_too(web: TestClient) -> None:
    for method in ("GET", "POST", "DELETE"):
        answer = web.request(method, "/api/v1/nothing")
        assert (
            answer.status_code == 404 and "there is no /api/v1/nothing" in answer.json()["detail"]
        )


def test_a_body_that_is_too_large_is_refused(web: TestClient) -> None:
    answer = web.post("/api/v1/jobs", content=b" " * (MOST_BODY_BYTES + 1))
    assert answer.status_code == 413

    def unannounced() -> Iterator[bytes]:
        for _ in range(MOST_BODY_BYTES // 65536 + 1):
            yield b" " * 65536

    assert web.post("/api/v1/jobs", content=unannounced()).status_code in (400, 413)


def test_a_golden_of_no_announced_length_ends_at_the_limit(
    web: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.guard.MOST_GOLDEN_BYTES", 0)

    def unannounced() -> Iterator[bytes]:
        yield b'--B\r\nContent-Disposition: form-data; name="file"; filename="a.zip"\r\n\r\n'
        for _ in range(3):
            yield b"x" * (1 << 19)

    form = {"Content-Type": "multipart/form-data; boundary=B"}
    answer = web.post("/api/v1/parity/goldens", content=unannounced(), headers=form)
    assert answer.status_code == 413
    assert answer.json()["detail"] == "a request may have at most 1 MiB"


def test_the_interface_describes_itself_without_foreign_scripts(web: TestClient) -> None:
    paths = web.get("/api/v1/openapi.json").json()["paths"]
    assert {"/api/v1/jobs", "/api/v1/media", "/api/v1/events", HEALTH} <= set(paths)
    assert web.get("/docs").status_code == web.get("/redoc").status_code == 404


def test_plotly_is_served_from_the_package_and_kept_by_browsers(web: TestClient) -> None:
    answer = web.get("/assets/plotly.min.js")
    assert answer.headers["content-type"].startswith("text/javascript")
    assert "max-age=604800" in answer.headers["cache-control"]
    assert b"plotly.js v" in answer.content[:200]


def test_jobs_of_one_user_are_limited_per_minute(web: TestClient) -> None:
    bad = {"request": {"prompt": "x", "width": 7}, "plans": ["cpu"]}
    seen = {web.post("/api/v1/jobs", json=bad).status_code for _ in range(PER_MINUTE)}
    answer = web.post("/api/v1/jobs", json=bad)
    assert seen == {400} and answer.status_code == 429
    assert 1 <= int(answer.headers["retry-after"]) <= 60
    assert web.get("/api/v1/jobs").status_code == 200


# ---- signing in


def test_a_stranger_s_page_leads_to_the_sign_in_and_the_api_says_401(locked: TestClient) -> None:
    page = locked.get("/", headers=PAGE)
    assert (page.status_code, page.headers["location"]) == (303, "/login")
    for path in (HEALTH, "/api/v1/events", "/config", "/gradio_api/info", "/metrics"):
        assert locked.get(path).status_code == 401
    assert locked.get(HEALTH, headers=PAGE).status_code == 401


def test_signing_in_sets_a_cookie_that_scripts_cannot_read(locked: TestClient) -> None:
    answer = locked.post("/login", data={"name": "ben", "password": "battery staple"})
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=lax" in cookie and "Secure" not in cookie
    told = locked.get("/api/v1/session").json()
    assert (told["user"], told["admin"], told["locked"]) == ("ben", False, True)


@pytest.mark.parametrize(
    "headers", [{"Host": "link.gradio.live"}, {"X-Forwarded-Proto": "https"}], ids=str
)
def test_over_https_the_cookie_never_travels_in_the_clear(
    locked: TestClient, headers: dict[str, str]
) -> None:
    form = {"name": "anna", "password": "correct horse"}
    assert "Secure" in locked.post("/login", data=form, headers=headers).headers["set-cookie"]


def test_signing_out_ends_the_session(locked: TestClient) -> None:
    locked.post("/login", data={"name": "anna", "password": "correct horse"})
    kept = dict(locked.cookies)
    assert locked.get(HEALTH).status_code == 200
    assert locked.post("/logout").headers["location"] == "/login"
    assert locked.get(HEALTH, cookies=kept).status_code == 401


def test_a_wrong_password_says_so_and_too_many_are_limited(locked: TestClient) -> None:
    form = {"name": "anna", "password": "wrong"}
    pages = [locked.post("/login", data=form) for _ in range(LOGIN_TRIES + 1)]
    assert [page.status_code for page in pages] == [403] * LOGIN_TRIES + [429]
    assert "wrong user or password" in pages[0].text and "too many attempts" in pages[-1].text
    assert all("set-cookie" not in page.headers for page in pages)


def test_the_link_with_the_token_leaves_no_token_in_the_address(locked: TestClient) -> None:
    answer = locked.get(f"/?token={TOKEN}", headers=PAGE)
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    assert locked.get("/api/v1/session").json()["user"] == "guest"
    again = locked.get(f"/?token={TOKEN}", headers=PAGE)
    assert again.headers["location"] == "/"


def test_a_link_with_a_wrong_token_leads_to_the_sign_in(locked: TestClient) -> None:
    answer = locked.get("/?token=guess", headers=PAGE)
    assert answer.headers["location"] == "/login?why=403"
    assert "wrong token" in locked.get("/login?why=403").text
    assert locked.get(f"{HEALTH}?token={TOKEN}").status_code == 401


def test_the_token_works_as_a_bearer_for_scripts(locked: TestClient) -> None:
    assert locked.get(HEALTH, headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200


def test_what_is_typed_never_becomes_markup(locked: TestClient) -> None:
    evil = '"><script>alert(1)</script>&$why${why}'
    page = locked.post("/login", data={"name": evil, "password": "x"})
    assert "<script" not in page.text and "&lt;script&gt;" in page.text
    assert 'value="&quot;&gt;' in page.text and "${why}" in page.text
    assert "<script" not in locked.get("/login", params={"why": evil}).text
    assert "script-src" not in page.headers["content-security-policy"]
    assert page.headers["content-security-policy"].startswith("default-src 'none'")


def test_a_sign_in_is_small(locked: TestClient) -> None:
    assert locked.post("/login", data={"name": "x" * 5000}).status_code == 413


def test_changes_stand_in_the_audit_log(locked: TestClient, tmp_path: Path) -> None:
    locked.post("/login", data={"name": "anna", "password": "correct horse"})
    locked.post("/api/v1/jobs/nothing/cancel")
    lines = [json.loads(line) for line in (tmp_path / "audit.log").read_text().splitlines()]
    assert [line["event"] for line in lines] == ["signed in", "POST /api/v1/jobs/nothing/cancel"]
    assert (lines[1]["user"], lines[1]["status"]) == ("anna", 404)


# ---- the server


@contextmanager
def served(app: FastAPI, console: Console) -> Iterator[tuple[Server, int]]:
    """The application behind a real server."""
    with listen("127.0.0.1", 0) as socket:
        server, up = Server(app, console), threading.Event()
        server.when_up(up.set)
        thread = threading.Thread(target=lambda: server.run(sockets=[socket]))
        thread.start()
        assert up.wait(30)
        try:
            yield server, socket.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(30)
        assert not thread.is_alive()


def stream(port: int, **headers: str) -> tuple[HTTPConnection, HTTPResponse]:
    """An open event stream."""
    connection = HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", "/api/v1/events", headers=headers)
    answer = connection.getresponse()
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.readline() == b"retry: 1000\n"
    return connection, answer


def event(answer: HTTPResponse, kind: str) -> bytes:
    """The data of the next event of a kind."""
    while (line := answer.readline()) != f"event: {kind}\n".encode():
        assert line, "the stream ended"
    return answer.readline()


def test_events_reach_the_page_and_resume_by_id(tmp_path: Path) -> None:
    with fake_console(tmp_path) as console, served(host(console, tmp_path), console) as (_, port):
        connection, answer = stream(port)
        until(lambda: console.hub.readers == 1)
        console.hub.publish("job", {"n": 1})
        assert event(answer, "job") == b'data: {"n": 1}\n'
        connection.close()
        until(lambda: console.hub.readers == 0)
        console.hub.publish("job", {"n": 2})
        _, answer = stream(port, **{"Last-Event-ID": f"{console.hub.boot}-0"})
        assert event(answer, "job") == b'data: {"n": 1}\n'
        assert event(answer, "job") == b'data: {"n": 2}\n'


def test_stopping_the_server_ends_the_streams_at_once(tmp_path: Path) -> None:
    with fake_console(tmp_path) as console, served(host(console, tmp_path), console) as (server, p):
        _, answer = stream(p)
        until(lambda: console.hub.readers == 1)
        began = time.monotonic()
        server.should_exit = True
        while answer.readline():
            pass
        assert time.monotonic() - began < 1.0


def test_a_taken_port_is_named() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"port {port} on 127.0.0.1 cannot be used"):
            listen("127.0.0.1", port)


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_that_is_none_is_refused(port: int) -> None:
    with pytest.raises(
        ValueError, match=rf"port {port} .* cannot be used \(ports are 0 to 65535\)"
    ):
        listen("127.0.0.1", port)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--share"], "--share opens the console to others"),
        (["--host", "0.0.0.0"], "--host 0.0.0.0 opens the console to others"),
        (["--auth", "anna:short"], "the password of anna in --auth has 5 characters"),
        (["--token", "short"], "the token has 5 characters"),
        (["--auth-file", "nowhere"], "no such file or directory: nowhere"),
    ],
)
def test_the_command_refuses_in_one_sentence(
    tmp_path: Path, options: list[str], words: str
) -> None:
    command = [sys.executable, "launch.py", "serve", "--port", "0", "--runs", str(tmp_path)]
    done = subprocess.run(
        [*command, *options], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_console_with_a_loaded_engine_has_neither_torch_nor_pyav() -> None:
    code = """
import sys, tempfile, time
from pathlib import Path
from app import host, presets
from app.console import Console
if __name__ == "__main__":
    plan = presets.load_plan(presets.find("plans", "cpu"))
    with tempfile.TemporaryDirectory() as root, Console(Path(root), plan) as console:
        while console.session.engine_state().state not in ("ready", "failed"):
            time.sleep(0.05)
        print(console.session.engine_state().state)
        print([name for name in ("torch", "av", "scipy", "plotly") if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["ready", "[]"], done.stderr
