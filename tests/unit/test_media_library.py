"""The media library and its routes: what is kept, for whom, within which limits."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient
from PIL import Image

from app.access import LOCAL, User
from app.children import ChildFailed, run_child
from app.console import Console
from app.errors import Missing, NoRoom, TooLarge
from app.incoming import FACTS
from app.media import Media, MediaLibrary, facts
from app.media_use import needed, sweep
from runtime.media.mp4 import Mp4Options, write_mp4
from runtime.media.probe import probe
from tests.consoles import at_step, client, ended, fake_console, until
from tests.unit.media_clips import write_wav

MEDIA = "/api/v1/media"
ANNA, BEN = User(name="anna"), User(name="ben")
FORM = {"Content-Type": "multipart/form-data; boundary=x"}
NEW = {"id": "a", "prompt": "x", "references": []}
HALF = b'--x\r\nContent-Disposition: form-data; name="f"; filename="f"\r\n\r\nab'
READER = "runtime.media.probe_child"


def png(shade: int = 90, side: int = 64) -> bytes:
    """A small picture."""
    file = io.BytesIO()
    Image.new("RGB", (side, side), (shade, 20, 20)).save(file, "PNG")
    return file.getvalue()


def put(
    library: MediaLibrary, owner: str = "anna", data: bytes = b"", name: str = "a.png"
) -> Media:
    return library.add(owner, name, io.BytesIO(data or png()))


def left(library: MediaLibrary) -> list[str]:
    """What stands in the library's folder."""
    return sorted(path.name for path in library.root.iterdir())


@pytest.fixture
def library(tmp_path: Path) -> MediaLibrary:
    return MediaLibrary(tmp_path / "media")


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An mp4 of ours: its record names one reference by a path."""
    path = tmp_path_factory.mktemp("clip") / "film.mp4"
    frames = [np.full((22, 64, 96, 3), 0.25, np.float32)]
    request = {
        "id": "old",
        "prompt": "a <b>calm</b> sea",
        "references": [
            {"kind": "image", "path": "/gone/cat.png", "soundtrack": None, "mute": False}
        ],
        "width": 96,
        "height": 64,
        "frames": 22,
        "seed": 2**64 - 1,
    }
    record = {"request": request, "plan": {"name": "cpu"}, "notes": ["one note"]}
    write_mp4(path, frames, None, record, Mp4Options())
    return path


def test_a_file_is_kept_with_its_facts_a_thumb_and_private(library: MediaLibrary) -> None:
    media = put(library, name="../../etc/my cat <b>.png")
    assert (media.name, media.path.name) == ("my cat <b>.png", "my_cat_b_.png")
    assert media.path.read_bytes() == png() and media.facts == probe(media.path)
    assert media.thumb is not None and Image.open(media.thumb).format == "WEBP"
    assert library.root.stat().st_mode & 0o777 == 0o700
    assert left(library) == [media.id]


def test_a_video_has_a_picture_and_a_sound_has_none(
    library: MediaLibrary, clip: Path, tmp_path: Path
) -> None:
    film = put(library, data=clip.read_bytes(), name="film.mp4")
    assert (film.kind, film.facts.frames, film.thumb is not None) == ("video", 22, True)
    write_wav(tmp_path / "a.wav", np.zeros((2, 8000), np.int16), rate=8000)
    sound = put(library, data=(tmp_path / "a.wav").read_bytes(), name="a.wav")
    assert (sound.kind, sound.thumb) == ("audio", None)


def test_the_same_content_is_kept_once_for_each_owner(library: MediaLibrary) -> None:
    first, again, other = put(library), put(library, name="b.png"), put(library, "ben")
    assert first == again and first.id != other.id
    assert len(left(library)) == 2


def test_a_library_is_read_back_and_what_was_unfinished_is_gone(library: MediaLibrary) -> None:
    media = put(library)
    (library.root / ".incoming-0123").mkdir()
    (library.root / ".incoming-0123" / "half.mp4").write_bytes(b"x")
    again = MediaLibrary(library.root)
    assert again.list(ANNA) == (media,) and left(library) == [media.id]


def test_others_files_are_not_there(library: MediaLibrary) -> None:
    media = put(library)
    assert library.list(BEN) == () and library.find(BEN, media.path) is None
    for id in (media.id, "..", "", "x" * 99):
        with pytest.raises(Missing, match="there is no file"):
            library.get(BEN, id)
    with pytest.raises(Missing):
        library.remove(BEN, media.id)
    assert library.get(LOCAL, media.id) == library.find(ANNA, media.path) == media


@pytest.mark.parametrize(
    ("data", "words"),
    [(b"remember the milk", "notes.png is not"), (png()[:60], "notes.png"), (b"", "is empty")],
)
def test_what_cannot_be_read_is_refused_and_leaves_nothing(
    library: MediaLibrary, data: bytes, words: str
) -> None:
    with pytest.raises(ValueError, match=words) as refused:
        library.add("anna", "notes.png", io.BytesIO(data))
    assert str(library.root) not in str(refused.value)
    assert left(library) == [] and library.used_bytes("anna") == 0


def test_a_file_over_the_size_is_refused_while_it_comes(tmp_path: Path) -> None:
    library = MediaLibrary(tmp_path / "media", most_bytes=1000)
    with library.begin("anna", "big.mp4") as incoming:
        incoming.write(b"x" * 1000)
        with pytest.raises(TooLarge, match=r"big\.mp4 is larger than"):
            incoming.write(b"x")
    assert left(library) == [] and library.used_bytes("anna") == 0


def test_the_quota_of_a_user_counts_what_is_still_coming(tmp_path: Path) -> None:
    library = MediaLibrary(tmp_path / "media", quota_bytes=len(png()) + 150)
    put(library)
    with library.begin("anna", "b.png") as one, library.begin("anna", "c.png") as two:
        one.write(b"x" * 100)
        with pytest.raises(TooLarge, match=r"c\.png does not fit in your library"):
            two.write(b"x" * 100)
    with library.begin("ben", "b.png") as free, library.begin("anna", "d.png") as again:
        free.write(b"x" * 100)
        again.write(b"x" * 100)


def test_uploads_leave_room_on_the_disk_for_the_jobs(tmp_path: Path) -> None:
    library = MediaLibrary(tmp_path / "media", spare_bytes=1 << 60)
    with pytest.raises(NoRoom, match=r"almost full, so a\.png was not kept"):
        put(library)
    assert left(library) == []


def test_stored_facts_need_no_child_and_a_strange_file_gets_one(
    library: MediaLibrary, tmp_path: Path
) -> None:
    media = put(library)
    record = media.path.parent / FACTS
    told = json.loads(record.read_text())
    told["facts"]["width"] = 4321
    record.write_text(json.dumps(told))
    assert facts(media.path).width == 4321
    (tmp_path / "b.png").write_bytes(png(side=48))
    assert facts(tmp_path / "b.png").width == 48
    (tmp_path / "c.png").write_text("no picture")
    with pytest.raises(ValueError, match=r"^c\.png is not"):
        facts(tmp_path / "c.png")


def test_a_child_is_stopped_by_its_limits_and_its_death_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    command = ["probe", str(tmp_path / "a.png")]
    with pytest.raises(ChildFailed, match=r"a\.png took more than 0.01 s"):
        run_child(READER, command, what="a.png", seconds=0.01)
    with pytest.raises(ChildFailed, match=r"a\.png"):
        run_child(READER, command, what="a.png", memory_bytes=64 << 20)
    assert json.loads(run_child(READER, command, what="a.png"))["width"] == 64


def test_a_child_cannot_outlive_a_console_that_is_killed(tmp_path: Path) -> None:
    code = (
        "from app.children import run_child; print('up', flush=True); "
        "run_child('http.server', ['0'], what='x', seconds=60)"
    )
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=root, stdout=subprocess.PIPE
    ) as console:
        assert console.stdout is not None and console.stdout.readline() == b"up\n"
        tasks = Path(f"/proc/{console.pid}/task/{console.pid}/children")
        (child,) = until(lambda: tasks.read_text().split())
        until(lambda: b"http.server" in Path(f"/proc/{child}/cmdline").read_bytes())
        time.sleep(0.3)  # the child has asked to die with its parent
        console.kill()
    until(lambda: not Path(f"/proc/{child}").exists(), 5)


# ---- over REST


@pytest.fixture(scope="module")
def console(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    with fake_console(tmp_path_factory.mktemp("runs")) as console:
        yield console


@pytest.fixture
def web(console: Console) -> TestClient:
    return client(console, ANNA)


def sent(web: TestClient, data: bytes, name: str = "cat.png") -> dict[str, Any]:
    answer = web.post(MEDIA, files={"file": (name, data)})
    assert answer.status_code == 201, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_an_upload_is_listed_shown_and_deleted(web: TestClient) -> None:
    made = sent(web, png(1), "cät.png")
    assert (made["name"], made["kind"], made["facts"]["width"]) == ("cät.png", "image", 64)
    listed = web.get(MEDIA).json()
    assert made in listed["media"] and listed["bytes"] >= len(png(1))
    shown = web.get(made["url"])
    assert shown.content == png(1) and shown.headers["content-type"] == "image/png"
    assert shown.headers["content-disposition"].startswith("inline")
    assert web.get(made["thumb"]).headers["content-type"] == "image/webp"
    assert web.delete(f"{MEDIA}/{made['id']}").status_code == 204
    for path in (made["url"], made["thumb"], f"{MEDIA}/{made['id']}"):
        assert web.get(path).status_code == 404


def test_a_file_is_served_in_ranges(web: TestClient, clip: Path) -> None:
    made = sent(web, clip.read_bytes(), "film.html")
    part = web.get(made["url"], headers={"Range": "bytes=4-7"})
    assert (part.status_code, part.content) == (206, b"ftyp")
    assert part.headers["content-type"] == "video/mp4"


def test_another_user_s_file_is_a_404(console: Console, web: TestClient) -> None:
    made = sent(web, png(2))
    for path in (made["url"], made["thumb"], f"{MEDIA}/{made['id']}"):
        assert client(console, BEN).get(path).status_code == 404
    assert client(console, BEN).delete(f"{MEDIA}/{made['id']}").status_code == 404
    assert client(console, LOCAL).get(made["url"]).status_code == 200


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"files": {"file": ("a.png", b"milk")}}, "a.png is not"),
        ({"data": {"a": "b"}}, "the upload is no form"),
        ({"files": {"a": (None, "b")}}, "the form holds no file"),
        ({"files": [("a", ("a", png())), ("b", ("b", png()))]}, "several files"),
        ({"content": b"--x\r\n", "headers": {"Content-Type": "multipart/form-data"}}, "no form"),
        ({"content": b"nonsense", "headers": FORM}, "the upload is damaged"),
        ({"content": HALF, "headers": FORM}, "broke off"),
        ({"content": b"--x\r\nA: " + b"b" * 9000, "headers": FORM}, "header size exceeded"),
    ],
)
def test_a_bad_upload_is_one_sentence_and_leaves_nothing(
    console: Console, web: TestClient, request_: dict[str, Any], words: str
) -> None:
    before = left(console.media)
    answer = web.post(MEDIA, **request_)
    assert answer.status_code == 400 and words in answer.json()["detail"]
    assert left(console.media) == before


def test_an_upload_over_the_limit_is_a_413(
    console: Console, web: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console.media, "most_bytes", 100)
    assert web.post(MEDIA, files={"file": ("a.png", png())}).status_code == 413


def test_an_upload_that_the_disk_cannot_hold_is_a_507_with_a_sentence(
    console: Console, web: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console.media, "spare_bytes", 1 << 60)
    answer = web.post(MEDIA, files={"file": ("a.png", png())})
    assert answer.status_code == 507 and "almost full" in answer.json()["detail"]


def test_settings_come_out_of_our_own_mp4(web: TestClient, clip: Path, console: Console) -> None:
    before = left(console.media)
    answer = web.post(f"{MEDIA}/settings", files={"file": ("film.mp4", clip.read_bytes())})
    told = answer.json()
    assert answer.status_code == 200 and told["plan"] == "cpu"
    assert told["request"]["prompt"] == "a <b>calm</b> sea"
    assert told["request"]["seed"] == str(2**64 - 1) and told["request"]["width"] == 96
    assert told["request"]["references"][0]["media"] == ""
    assert told["notes"] == ["one note", "cat.png is not in your library; add it again"]
    assert left(console.media) == before


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"other": 1}, "holds no request"),
        ({"request": [1]}, "holds no request"),
        ({"request": {"prompt": 5}}, "cannot be read"),
        ({"request": NEW | {"width": "wide"}}, "cannot be read"),
        ({"request": NEW | {"width": 33}}, "multiples of 32"),
        ({"request": NEW | {"references": [{"path": 7}]}}, "cannot be read"),
    ],
)
def test_a_record_that_is_none_is_refused(
    web: TestClient, tmp_path: Path, record: dict[str, Any], words: str
) -> None:
    path = tmp_path / "film.mp4"
    write_mp4(path, [np.zeros((1, 64, 64, 3), np.float32)], None, record, Mp4Options())
    answer = web.post(f"{MEDIA}/settings", files={"file": ("film.mp4", path.read_bytes())})
    assert answer.status_code == 400, answer.text
    assert words in answer.json()["detail"]


@pytest.mark.parametrize("notes", [5, True, "text", {"a": 1}])
def test_notes_of_a_record_that_are_no_list_are_left_out(
    web: TestClient, tmp_path: Path, notes: object
) -> None:
    path = tmp_path / "film.mp4"
    record = {"request": NEW, "notes": notes}
    write_mp4(path, [np.zeros((1, 64, 64, 3), np.float32)], None, record, Mp4Options())
    answer = web.post(f"{MEDIA}/settings", files={"file": ("film.mp4", path.read_bytes())})
    assert (answer.status_code, answer.json()["notes"]) == (200, [])


def test_a_picture_has_no_settings(web: TestClient) -> None:
    answer = web.post(f"{MEDIA}/settings", files={"file": ("cat.png", png())})
    assert answer.status_code == 400 and "cat.png" in answer.json()["detail"]


def test_a_file_that_was_cleared_from_the_disk_says_so_and_can_be_removed(
    console: Console, web: TestClient
) -> None:
    media = put(console.media, data=png(9))
    shutil.rmtree(media.path.parent)
    for part in ("file", "thumb"):
        answer = web.get(f"{MEDIA}/{media.id}/{part}")
        assert answer.status_code == 404 and "gone from the disk" in answer.json()["detail"]
    assert web.delete(f"{MEDIA}/{media.id}").status_code == 204
    assert web.get(f"{MEDIA}/{media.id}").status_code == 404


def test_a_reference_of_a_waiting_job_stays(console: Console, web: TestClient) -> None:
    media = put(console.media, data=png(3))
    request = {"prompt": "slow", "width": 64, "height": 64, "frames": 22, "steps": 60}
    request |= {"references": [{"kind": "image", "media": media.id}]}
    answer = web.post("/api/v1/jobs", json={"request": request, "plans": ["cpu"]})
    assert answer.status_code == 201, answer.text
    id = answer.json()["jobs"][0]["id"]
    refused = web.delete(f"{MEDIA}/{media.id}")
    assert refused.status_code == 409 and "reference of a job" in refused.json()["detail"]
    long_ago = time.time() - 1000
    os.utime(media.path.parent / FACTS, (long_ago, long_ago))
    assert media.path in needed(console.jobs)
    assert sweep(console.media, console.jobs, kept_seconds=500) == 0
    at_step(console, id, 1)
    web.post(f"/api/v1/jobs/{id}/cancel")
    ended(console, id)
    assert sweep(console.media, console.jobs, kept_seconds=500) == 1
    assert web.get(f"{MEDIA}/{media.id}").status_code == 404
