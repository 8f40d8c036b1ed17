"""The Prometheus page keeps the rules of its text format, and the telemetry routes answer."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from app import metrics, presets
from app.access import LOCAL
from app.jobs import Job, JobStore
from app.routes import metrics as metrics_route
from app.routes import telemetry as telemetry_route
from app.runner import EngineStatus
from app.telemetry import Telemetry
from runtime.media.files import write_json_atomic
from tests import fakes
from tests.fake_nvml import FakeNvml, h200s

NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
VALUE = r"[-+]?(?:[0-9.]+(?:e[-+]?[0-9]+)?|Inf|NaN)"
LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\["\\n])*"'
SAMPLE = re.compile(rf"({NAME})(?:\{{({LABEL}(?:,{LABEL})*)\}})? ({VALUE})")


class Hub:
    readers = 2

    def publish(self, kind: str, data: dict[str, Any], owner: str = "") -> None:
        json.dumps(data, allow_nan=False)


@pytest.fixture
def nvml() -> FakeNvml:
    return h200s(2)


@pytest.fixture
def console(tmp_path: Path, nvml: FakeNvml) -> Iterator[Any]:
    with Telemetry(Hub(), nvml=nvml, environment={}) as telemetry:
        jobs = JobStore(tmp_path)
        session = SimpleNamespace(engine_state=lambda: EngineStatus(state="busy"))
        while telemetry.latest() is None:
            time.sleep(0.01)
        yield SimpleNamespace(
            root=tmp_path, jobs=jobs, session=session, telemetry=telemetry, hub=Hub()
        )
        jobs.close()


@pytest.fixture
def client(console: Any) -> TestClient:
    host = FastAPI()
    host.include_router(telemetry_route.router(console, lambda: LOCAL), prefix="/api/v1")
    host.include_router(metrics_route.router(console, lambda: LOCAL))
    return TestClient(host)


def parsed(text: str) -> dict[str, dict[str, float]]:
    """Family -> labels -> value, refusing whatever Prometheus would refuse or warn of."""
    families: dict[str, dict[str, float]] = {}
    current, kind = "", ""
    assert text.endswith("\n") and "\r" not in text
    for line in text.splitlines():
        if match := re.fullmatch(rf"# HELP ({NAME}) (?:[^\\\n]|\\[\\n])+", line):
            assert match[1] not in families, "one block per family"
            current, kind = match[1], ""
            families[current] = {}
        elif match := re.fullmatch(rf"# TYPE ({NAME}) (gauge|counter)", line):
            assert match[1] == current and not kind and not families[current]
            kind = match[2]
            assert (kind == "counter") == current.endswith("_total")
        else:
            match = SAMPLE.fullmatch(line)
            assert match, line
            assert match[1] == current and kind
            assert (match[2] or "") not in families[current], "a label set comes once"
            families[current][match[2] or ""] = float(match[3])
    assert all(families.values())
    return families


@pytest.mark.parametrize(
    "broken",
    [
        "a 1\n",
        '# HELP a b\n# TYPE a gauge\na{x="1\n"} 1\n',
        "# HELP a b\n# TYPE a gauge\na 1\na 2\n",
        "# HELP a b\n# TYPE a counter\na 1\n",
        '# HELP a b\n# TYPE a gauge\na{x="\\t"} 1\n',
        "# HELP a b\n# TYPE a gauge\na 1",
    ],
)
def test_the_checker_refuses_a_broken_page(broken: str) -> None:
    with pytest.raises(AssertionError):
        parsed(broken)


def test_the_page_keeps_the_rules_and_tells_gpus_in_base_units(console: Any) -> None:
    page = parsed(metrics.render(console))
    gpu = f'gpu="{console.telemetry.info()["gpus"][1]["uuid"]}"'
    assert page["h3_gpu_power_watts"][gpu] == 96
    assert page["h3_gpu_sm_clock_hertz"][gpu] == 345e6
    assert page["h3_gpu_up"] == dict.fromkeys(page["h3_gpu_up"], 1)
    assert page["h3_engine_state"]['state="busy"'] == 1
    assert sum(page["h3_engine_state"].values()) == 1
    assert page["h3_pages"][""] == 2
    assert page["process_resident_memory_bytes"][""] > 1e7


def test_names_with_quotes_and_line_breaks_are_escaped(console: Any, nvml: FakeNvml) -> None:
    nvml.gpus[0].name = 'a "b"\\c\nd'
    with Telemetry(Hub(), nvml=nvml, environment={}) as telemetry:
        while telemetry.latest() is None:
            time.sleep(0.01)
        console.telemetry = telemetry
        (labels, _) = parsed(metrics.render(console))["h3_gpu_info"]
    assert r'name="a \"b\"\\c\nd"' in labels


def test_counters_of_the_buses_are_bytes_and_silent_ones_are_left_out(
    console: Any, nvml: FakeNvml
) -> None:
    assert "h3_gpu_nvlink_bytes_total" not in metrics.render(console)
    nvml.gpus[0].counters["nvlink_tx"] = 3
    seen = console.telemetry.latest()
    console.telemetry.set_rate(10)
    while console.telemetry.latest() == seen:
        time.sleep(0.01)
    values = parsed(metrics.render(console))["h3_gpu_nvlink_bytes_total"].values()
    assert sorted(values) == [0, 0, 0, 3 * 1024]  # beside one that moves, 0 is true


def test_without_a_driver_the_page_has_no_gpu_and_is_still_right(tmp_path: Path) -> None:
    with Telemetry(Hub(), nvml=FakeNvml(driver=False), environment={}) as telemetry:
        session = SimpleNamespace(engine_state=lambda: EngineStatus())
        jobs = JobStore(tmp_path)
        here = SimpleNamespace(
            root=tmp_path, jobs=jobs, session=session, telemetry=telemetry, hub=Hub()
        )
        page = parsed(metrics.render(here))  # type: ignore[arg-type]
        jobs.close()
    assert not any("gpu" in name for name in page)


def test_jobs_are_counted_and_the_last_runs_stages_told(console: Any) -> None:
    plan = presets.load_plan(presets.find("plans", "cpu"))
    for id, state in (("a", "done"), ("b", "queued"), ("c", "queued")):
        console.jobs.add(
            Job(
                id=id,
                kind="generate",
                owner="local",
                plan=plan,
                request=fakes.request(id=id),
                task={},
                created=time.time(),
            )
        )
        console.jobs.update(id, state=state, ended=99.5 if state == "done" else 0.0)
    stage = {"stage": "denoise", "seconds": 1.25, "rank": 0, "step": -1}
    (console.root / "a").mkdir()
    write_json_atomic(console.root / "a" / "run.json", {"stages": [stage]})
    page = parsed(metrics.render(console))
    assert page["h3_jobs"]['kind="generate",state="queued"'] == 2
    assert page["h3_jobs"]['kind="parity",state="done"'] == 0
    assert page["h3_queue_length"][""] == 2
    assert page["h3_last_run_stage_seconds"] == {'stage="denoise"': 1.25}
    assert page["h3_last_run_end_timestamp_seconds"][""] == 99.5


def test_the_metrics_route_names_the_format(client: TestClient) -> None:
    answer = client.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert parsed(answer.text)["h3_host_memory_total_bytes"]


def test_the_telemetry_routes_give_samples_devices_and_take_a_rate(client: TestClient) -> None:
    everything = client.get("/api/v1/telemetry").json()
    assert {"now", "hz", "samples", "marks"} == set(everything)
    newest = everything["samples"][-1]
    assert len(newest["gpus"]) == 2
    later = client.get("/api/v1/telemetry", params={"since": newest["t"] + 60}).json()
    assert later["samples"] == []
    info = client.get("/api/v1/telemetry/info").json()
    assert info["reason"] == "" and info["topology"][0][1] == {"kind": "NV18", "peer": True}
    assert len(client.get("/api/v1/telemetry/links").json()["gpus"]) == 2
    assert client.post("/api/v1/telemetry/rate", json={"hz": 5}).json() == {"hz": 5.0}
    assert client.get("/api/v1/telemetry", params={"most": 0}).status_code == 422
