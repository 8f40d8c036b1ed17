"""The host's guards, and the views that the page draws."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from PIL import Image

from app.host import build_host, check_bind, listen
from app.session import Session
from panels import views
from runtime.messages import Result
from tests import fakes
from tests.unit.test_session import demo_plan, ended, until


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    root = tmp_path_factory.mktemp("runs")
    with Session(demo_plan(), root=root, families=fakes.FAMILIES) as session:
        session.submit(fakes.request(id="film"))
        ended(session, "film")
        yield session


@pytest.fixture
def client(session: Session) -> TestClient:
    return TestClient(build_host(session), base_url="http://127.0.0.1")


def test_health_tells_engine_and_plan(client: TestClient) -> None:
    assert client.get("/api/v1/health").json()["plan"] == "cpu"


def test_a_finished_video_is_served_in_ranges(client: TestClient) -> None:
    part = client.get("/api/v1/runs/film/video", headers={"Range": "bytes=0-99"})
    assert (part.status_code, len(part.content)) == (206, 100)
    assert part.headers["content-type"] == "video/mp4"


@pytest.mark.parametrize("id", ["other", "..%2f..%2fetc%2fpasswd", "film%00"])
def test_anything_but_a_known_run_is_not_found(client: TestClient, id: str) -> None:
    assert client.get(f"/api/v1/runs/{id}/video").status_code == 404


def test_a_video_that_was_deleted_is_a_404_that_says_so(
    client: TestClient, session: Session
) -> None:
    job = session.snapshot().job("film")
    assert job is not None and isinstance(job.last, Result) and job.last.video is not None
    aside = job.last.video.rename(job.folder / "aside.mp4")
    answer = client.get("/api/v1/runs/film/video")
    aside.rename(job.last.video)
    assert answer.status_code == 404 and "no longer in" in answer.text


def test_a_foreign_host_name_is_refused(client: TestClient) -> None:
    assert client.get("/api/v1/health", headers={"Host": "evil.example"}).status_code == 400


@pytest.mark.parametrize("origin", ["http://evil.example", "http://127.0.0.1:1", "null"])
def test_a_post_from_another_site_is_refused(client: TestClient, origin: str) -> None:
    assert client.post("/api/v1/health", headers={"Origin": origin}).status_code == 403


def test_a_post_of_the_page_itself_passes_the_guard(client: TestClient) -> None:
    same = client.post("/api/v1/health", headers={"Origin": "http://127.0.0.1"})
    assert same.status_code == 405  # past the guard: there is only no such route


def test_every_answer_carries_the_security_headers(client: TestClient) -> None:
    headers = client.get("/api/v1/health").headers
    assert headers["x-content-type-options"] == "nosniff"
    assert "default-src 'self'" in headers["content-security-policy"]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org"])
def test_only_this_machine_may_be_bound(host: str) -> None:
    with pytest.raises(ValueError, match="would open the console to the network"):
        check_bind(host)


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


def test_the_view_of_a_finished_run_has_its_video_notes_and_table(session: Session) -> None:
    view = views.run(session.snapshot())
    assert view["video"] == "/api/v1/runs/film/video" and not view["running"]
    assert dict(view["rows"])["video VAE decode"] == "not measured"
    assert dict(view["rows"])["E2E"].endswith("s")


@pytest.mark.parametrize(
    ("asked", "made", "line"),
    [
        (22, 22, "22 frames = 0.92 s at 24 fps"),
        (30, 39, "30 becomes 39 frames = 1.62 s at 24 fps (17k + 5)"),
        (0, 5, "0 becomes 5 frames = 0.21 s at 24 fps (17k + 5)"),
        (9999, 3592, "9999 becomes 3592 frames = 149.67 s at 24 fps (17k + 5)"),
    ],
)
def test_frames_snap_to_the_grid(asked: int, made: int, line: str) -> None:
    assert views.snap(asked) == (made, line)


@pytest.mark.parametrize("text", ["", "96", "96x", "a x b", "96x64x3", "-96x64"])
def test_a_size_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="size must be width x height like 960x544"):
        views.size(text)


@pytest.mark.parametrize("value", [None, "", "x", 1.5, float("nan"), float("inf")])
def test_a_number_that_is_none_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="steps must be a whole number, got"):
        views.whole(value, "steps")


def test_references_can_be_moved_muted_and_removed(tmp_path: Path) -> None:
    items = []
    for name in ("a.png", "b.png"):
        Image.new("RGB", (64, 64)).save(tmp_path / name)
        items.append(views.upload(tmp_path / name))
    a, b = items
    assert views.arrange((a, b), "down", 0) == (b, a)
    assert views.arrange((a, b), "up", 0) == (a, b)
    assert views.arrange((a, b), "remove", 1) == (a,)
    assert views.arrange((a, b), "remove", 7) == (a, b)
    assert views.arrange((a,), "mute", 0)[0].mute
    assert [item["tag"] for item in views.strip((b, a))["items"]] == ["<Picture 1>", "<Picture 2>"]


def test_an_engine_that_cannot_load_says_why_on_the_page(tmp_path: Path) -> None:
    plan = replace(demo_plan(), name="broken")
    with Session(plan, root=tmp_path, families=fakes.FAMILIES) as session:
        now = until(session, lambda now: now.engine == "failed")
        assert views.run(now)["error"].startswith("dit.safetensors is truncated")
        assert views.chip(now, plan)["text"] == "broken · stopped"
