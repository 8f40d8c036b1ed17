"""What sweeps and benches found is told in one form, without paths, the newest first."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from app import measurements
from app.console import Console
from tests.consoles import client, fake_console
from tests.measured import bench, sweep

NONE = Path("no such file")


@pytest.fixture(scope="module")
def console(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    with fake_console(tmp_path_factory.mktemp("runs")) as console:
        yield console


def test_a_sweep_tells_each_layout_and_why_one_failed(tmp_path: Path) -> None:
    measurements.keep(tmp_path, sweep())
    (told,) = measurements.listed(tmp_path, NONE)
    single, two, failed = told["subjects"]
    assert (told["kind"], told["source"], told["device"]) == ("sweep", "bench", "NVIDIA H200")
    assert two["efficiency"] == pytest.approx(2.2 / 1.25 / 2)
    assert two["exposed_communication_share"] == pytest.approx(0.05 / 1.25)
    assert two["communication_seconds"] == 0.19
    assert two["communication_share"] == pytest.approx(0.19 / 1.25)
    assert two["parity"]["video"]["relative_l2"] == 3.1e-3
    assert single["speedup"] == 1.0 and single["parity"] is None
    assert (failed["ok"], failed["reason"]) == (False, "TP2: rank 1 ran out of memory")


def test_a_bench_is_told_in_the_words_of_a_sweep(tmp_path: Path) -> None:
    measurements.keep(tmp_path, bench())
    (told,) = measurements.listed(tmp_path, NONE)
    assert [one["name"] for one in told["subjects"]] == ["a", "b"]
    (ratio,) = told["ratios"]
    assert (ratio["of"], ratio["first"], ratio["second"], ratio["step"]) == ("", "a", "b", 1.5)
    assert told["subjects"][0]["efficiency"] is None  # nothing is scaled


def test_nothing_of_the_request_or_the_machine_s_folders_is_told(tmp_path: Path) -> None:
    measurements.keep(tmp_path, sweep())
    said = json.dumps(measurements.listed(tmp_path, NONE))
    assert "secret" not in said and ".safetensors" not in said


def test_the_newest_comes_first_and_a_published_one_only_once(tmp_path: Path) -> None:
    published = tmp_path / "records.jsonl"
    old, new = bench("2026-11-01T00:00:00Z"), sweep("2026-11-30T00:00:00Z")
    lines = [json.dumps(old), "{", json.dumps(new), '{"bench": 1}']
    published.write_text("\n".join(lines) + "\n")
    measurements.keep(tmp_path, new)
    found = measurements.listed(tmp_path, published)
    assert [(one["kind"], one["source"]) for one in found] == [
        ("sweep", "bench"),
        ("bench", "docs/benchmarks"),
    ]


def test_a_damaged_file_tells_nothing_and_a_mended_one_is_read_anew(tmp_path: Path) -> None:
    path = measurements.keep(tmp_path, sweep())
    path.write_text("[]")
    assert measurements.listed(tmp_path, NONE) == []
    path.write_text(json.dumps(sweep()))
    assert len(measurements.listed(tmp_path, NONE)) == 1


def test_what_is_published_in_this_checkout_can_be_read() -> None:
    lines = measurements.PUBLISHED.read_text(encoding="utf-8").splitlines()
    assert len(measurements.listed(Path("no such folder"))) == len(lines) > 0


def test_the_routes_list_and_tell_one(console: Console) -> None:
    path = measurements.keep(console.root, sweep("2099-01-01T00:00:00Z"))
    rest = client(console)
    first = rest.get("/api/v1/measurements").json()["measurements"][0]
    assert first["id"] == path.stem and first["subjects"] == ["single", "U2", "TP2"]
    assert rest.get(f"/api/v1/measurements/{path.stem}").json()["subjects"][1]["ranks"] == 2
    missing = rest.get("/api/v1/measurements/none")
    assert missing.status_code == 404 and "there is no measurement" in missing.json()["detail"]
