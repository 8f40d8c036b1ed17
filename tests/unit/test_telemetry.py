"""Telemetry over made-up drivers: whole, silent, unified, lost, absent, reset."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml
import pytest

from app import bench_watch, telemetry
from app.nvml import Gpus
from app.recording import mend
from app.telemetry import Telemetry
from app.telemetry_ring import Sample
from tests.fake_nvml import GIB, FakeGpu, FakeNvml, h200s

HOST = {"ram_used": 30 * GIB, "ram_total": 120 * GIB}


class Hub:
    """Remembers what was published."""

    def __init__(self, readers: int = 1) -> None:
        self.readers = readers
        self.events: list[tuple[str, dict[str, Any]]] = []

    def publish(self, kind: str, data: dict[str, Any], owner: str = "") -> None:
        self.events.append((kind, data))


def opened(nvml: FakeNvml, **environment: str) -> Gpus:
    gpus = Gpus(nvml, environment)
    gpus.open()
    return gpus


def read(gpus: Gpus, now: float, *, links: bool = False) -> list[Any]:
    """A sample for which everything is read."""
    for key in gpus.wanted(1.0, busy=True, links=links):
        gpus.read(key, now)
    return gpus.samples(now, **HOST)


def until(met: Callable[[], Any], seconds: float = 10.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := met()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return value


def test_one_gpu_is_read_in_plain_units() -> None:
    nvml = h200s(1)
    nvml.gpus[0].throttle = pynvml.nvmlClocksEventReasonSwPowerCap | 0x40 | 0x1
    (sample,) = read(opened(nvml), 1.0)
    assert (sample["power"], sample["power_limit"], sample["energy"]) == (96.0, 700.0, 5000.0)
    assert (sample["sm_clock"], sample["mem_clock"]) == (345, 3201)
    assert (sample["temp"], sample["mem_temp"], sample["util"]) == (34, 41, 0)
    assert (sample["mem_used"], sample["mem_total"]) == (4 * GIB, 141 * GIB)
    assert sample["throttle"] == ["power cap", "hardware thermal"]
    assert not sample["lost"] and not sample["unified"]


def test_counters_become_bytes_per_second_and_nvlink_counts_kib_over_all_links() -> None:
    nvml = h200s(1)
    gpu, gpus = nvml.gpus[0], opened(nvml)
    first = read(gpus, 10.0)[0]
    gpu.counters.update(nvlink_tx=2 * 1024, pcie_rx=3000)
    second = read(gpus, 12.0)[0]
    assert (first["nvlink_tx"], first["pcie_rx"]) == (None, None)  # a rate needs two readings
    assert (second["nvlink_tx"], second["pcie_rx"]) == (1 << 20, 1500)


def test_the_rates_times_their_spans_are_the_bytes_that_were_moved() -> None:
    nvml = h200s(1)
    gpus, times = opened(nvml), (0.0, 0.1, 0.25, 1.0, 1.1)
    nvml.gpus[0].counters["nvlink_tx"] = 7
    moved, sent = 0.0, 0
    before = times[0]
    for now in times:
        rate = read(gpus, now)[0]["nvlink_tx"]
        moved += (rate or 0) * (now - before)
        before = now
        nvml.gpus[0].counters["nvlink_tx"] += 1_000_000
        sent += 1_000_000 * 1024
    assert moved == pytest.approx(sent - 1_000_000 * 1024, rel=1e-6)  # the last is not read


def test_each_link_has_a_rate_of_its_own_a_few_at_a_time() -> None:
    nvml = h200s(1)
    gpus = opened(nvml)
    nvml.gpus[0].counters["nvlink_rx"] = 18
    for now in range(6):
        read(gpus, float(now), links=True)
    nvml.gpus[0].counters["nvlink_rx"] = 18 * 13
    read(gpus, 6.0, links=True)
    assert gpus.links == [[(0, 2 * 1024)] * 3 + [(None, None)] * 15]


def test_links_are_read_only_while_they_are_looked_at() -> None:
    gpus = opened(h200s(1))
    asked = {links: gpus.wanted(1.0, busy=True, links=links) for links in (False, True)}
    assert {group for _, group in set(asked[True]) - set(asked[False])} == {"links"}


def test_a_counter_that_was_reset_gives_no_rate_once() -> None:
    nvml = h200s(1)
    counters, gpus = nvml.gpus[0].counters, opened(nvml)
    rates = []
    for now, value in enumerate((5000, 6000, 100, 1100)):
        counters["pcie_tx"] = value
        rates.append(read(gpus, float(now))[0]["pcie_tx"])
    assert rates == [None, 1000, None, 1000]


def test_counters_of_a_bus_that_never_moved_are_not_reported() -> None:
    gpus = opened(h200s(2))
    read(gpus, 1.0)
    sample = read(gpus, 2.0)[0]
    assert sample["nvlink_tx"] is None and sample["ages"]["nvlink"] == 0


def test_beside_a_counter_that_moves_zero_is_a_true_zero() -> None:
    nvml = h200s(2)
    gpus = opened(nvml)
    nvml.gpus[0].counters["nvlink_rx"] = 1
    read(gpus, 1.0)
    sender, peer = read(gpus, 2.0)
    assert (sender["nvlink_tx"], peer["nvlink_tx"], peer["nvlink_rx"]) == (0, 0, 0)
    assert sender["pcie_tx"] is None  # another bus
    assert gpus.totals[1] == {"nvlink_tx": 0, "nvlink_rx": 0}


def test_another_models_counters_prove_nothing() -> None:
    nvml = FakeNvml([FakeGpu(index=0), FakeGpu(index=1, name="NVIDIA RTX PRO 6000")])
    gpus = opened(nvml)
    nvml.gpus[0].counters["pcie_rx"] = 1
    read(gpus, 1.0)
    assert read(gpus, 2.0)[1]["pcie_rx"] is None


def test_what_was_not_read_yet_has_no_age_and_what_is_not_reported_has_one() -> None:
    gpus = opened(FakeNvml([FakeGpu(index=0, unsupported={"field 138", "field 139"})]))
    assert gpus.samples(0.5, **HOST)[0]["ages"] == {}
    sample = read(gpus, 1.0)[0]
    assert sample["nvlink_tx"] is None and sample["ages"]["nvlink"] == 0
    assert sample["pcie_tx"] is None and "pcie" not in sample["ages"]  # a rate needs two


def test_between_two_readings_a_number_stays_and_its_age_grows() -> None:
    gpus = opened(h200s(1))
    (key,) = (key for key in gpus.wanted(1.0, busy=False, links=False) if key[1] == "state")
    gpus.read(key, 1.0)
    (sample,) = gpus.samples(1.5, **HOST)
    assert sample["power"] == 96.0 and sample["ages"] == {"state": 0.5}


def test_a_bus_that_moves_is_read_each_tick_and_one_that_rests_seldom() -> None:
    nvml = h200s(1)
    gpus = opened(nvml)

    def period(busy: bool) -> float:
        return next(
            period
            for (_, group), period in gpus.wanted(1.0, busy=busy, links=False).items()
            if group == "nvlink"
        )

    first = period(False)
    read(gpus, 1.0)
    read(gpus, 2.0)
    assert (first, period(True), period(False)) == (1.0, 2.0, 10.0)
    nvml.gpus[0].counters["nvlink_tx"] = 1 << 20
    read(gpus, 3.0)
    assert period(False) == 1.0


def test_a_gpu_that_supports_nothing_is_all_none_and_is_not_asked_twice() -> None:
    nvml = FakeNvml([FakeGpu(index=0, unsupported={"*"}), FakeGpu(index=1)])
    gpus = opened(nvml)
    mute, other = read(gpus, 1.0)
    told = ("lost", "unified", "mem_used", "mem_total", "ages")
    values = {key: value for key, value in mute.items() if key not in told}
    assert set(values.values()) == {None} and mute["lost"] is False
    assert other["power"] == 96.0
    nvml.calls.clear()
    read(gpus, 2.0)
    once = nvml.calls.count("nvmlDeviceGetUtilizationRates")
    assert once == 1  # the other GPU's


@pytest.mark.parametrize("how", ["not supported", "zero"])
def test_unified_memory_is_the_hosts_memory(how: str) -> None:
    gpu = FakeGpu(index=0, name="NVIDIA GB10", links=0)
    if how == "zero":
        gpu.total = 0
    else:
        gpu.unsupported = {"nvmlDeviceGetMemoryInfo", "field 197", "field 198"}
    (sample,) = read(opened(FakeNvml([gpu])), 1.0)
    assert sample["unified"]
    assert (sample["mem_used"], sample["mem_total"]) == (30 * GIB, 120 * GIB)
    assert sample["pcie_tx"] is None
    assert ("pcie" in sample["ages"]) == (how == "not supported")  # has no meaning there


def test_memory_that_fails_otherwise_is_unknown_and_not_unified() -> None:
    class Failing(FakeNvml):
        def nvmlDeviceGetMemoryInfo(self, gpu: FakeGpu) -> Any:  # noqa: N802
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)

    (sample,) = read(opened(Failing([FakeGpu(index=0)])), 1.0)
    assert (sample["mem_total"], sample["unified"]) == (None, False)


def test_a_gpu_lost_midway_is_said_and_the_others_go_on() -> None:
    nvml = h200s(3)
    gpus = opened(nvml)
    read(gpus, 1.0)
    nvml.gpus[1].lost = True
    samples = read(gpus, 2.0)
    assert [sample["lost"] for sample in samples] == [False, True, False]
    assert samples[1]["power"] is None and samples[2]["power"] == 96.0
    assert gpus.incomplete


@pytest.mark.parametrize("gone", [False, True])
def test_a_lost_gpu_keeps_its_place_and_is_found_again(gone: bool) -> None:
    nvml = h200s(3)
    gpus = opened(nvml)
    read(gpus, 1.0)
    nvml.gpus[1].lost, nvml.gpus[1].gone = True, gone
    read(gpus, 2.0)
    gpus.open()
    assert [sample["lost"] for sample in read(gpus, 3.0)] == [False, True, False]
    nvml.gpus[1].lost = nvml.gpus[1].gone = False
    gpus.open()
    assert [sample["lost"] for sample in read(gpus, 4.0)] == [False] * 3
    assert [facts.nvml_index for facts in gpus.facts] == [0, 1, 2]
    assert nvml.opened == 1


def test_a_gpu_that_appears_later_comes_last_and_takes_no_number_of_another() -> None:
    nvml = h200s(3)
    nvml.gpus[0].gone = True
    gpus = opened(nvml)
    assert [f.cuda for f in gpus.facts] == [0, 1]
    nvml.gpus[0].gone = False
    gpus.open()
    assert [f.uuid for f in gpus.facts] == [nvml.gpus[i].uuid for i in (1, 2, 0)]
    assert [f.cuda for f in gpus.facts] == [0, 1, None]


def test_a_lost_gpu_stays_in_the_topology_as_it_was_joined() -> None:
    nvml = h200s(2)
    gpus = opened(nvml)
    nvml.gpus[1].lost = True
    read(gpus, 1.0)
    gpus.open()
    assert gpus.topology[0][1].kind == "NV18"


def test_looking_for_a_lost_gpu_leaves_no_gap_in_the_others_rates() -> None:
    nvml = h200s(2)
    gpus = opened(nvml)
    read(gpus, 1.0)
    nvml.gpus[1].lost = True
    read(gpus, 2.0)
    gpus.open()
    nvml.gpus[0].counters["pcie_tx"] = 500
    assert read(gpus, 3.0)[0]["pcie_tx"] == 500


def test_without_a_driver_there_is_a_reason_and_no_gpu() -> None:
    gpus = opened(FakeNvml(driver=False))
    assert "no NVIDIA driver" in gpus.reason
    assert read(gpus, 1.0) == []


def test_a_driver_without_gpus_is_a_reason_too() -> None:
    assert opened(FakeNvml()).reason == "the NVIDIA driver shows no GPU"


def test_pcie_rates_without_counters_come_from_a_thread() -> None:
    nvml = FakeNvml([FakeGpu(index=0, unsupported={"field 197", "field 198"})])
    gpus = opened(nvml)
    start = time.monotonic()
    first = read(gpus, 1.0)[0]
    assert time.monotonic() - start < 0.02 and first["pcie_tx"] is None
    rates = until(lambda: (s := read(gpus, 2.0)[0])["pcie_tx"] and (s["pcie_tx"], s["pcie_rx"]))
    assert rates == (2000 * 1024, 2001 * 1024)
    gpus.close()
    assert "pcie" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize(
    ("visible", "order"),
    [
        (None, [(0, 0), (1, 1), (2, 2), (3, 3)]),
        ("3,1", [(0, 3), (1, 1), (None, 0), (None, 2)]),
        ("GPU-00000002,0", [(0, 2), (1, 0), (None, 1), (None, 3)]),
        ("1,9,2", [(0, 1), (None, 0), (None, 2), (None, 3)]),
        ("", [(None, 0), (None, 1), (None, 2), (None, 3)]),
    ],
)
def test_gpus_are_in_cudas_order_and_hidden_ones_follow(
    visible: str | None, order: list[tuple[int | None, int]]
) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    facts = opened(h200s(4), **environment).facts
    assert [(gpu.cuda, gpu.nvml_index) for gpu in facts] == order


def test_cudas_numbers_of_unlike_gpus_are_known_only_in_bus_order() -> None:
    nvml = FakeNvml([FakeGpu(index=0, name="small"), FakeGpu(index=1, name="large")])
    assert [gpu.cuda for gpu in opened(nvml).facts] == [None, None]
    assert [gpu.cuda for gpu in opened(nvml, CUDA_DEVICE_ORDER="PCI_BUS_ID").facts] == [0, 1]


def test_the_topology_counts_links_through_a_switch() -> None:
    rows = opened(h200s(3)).topology
    assert [[link.kind for link in row] for row in rows] == [
        ["X", "NV18", "NV18"],
        ["NV18", "X", "NV18"],
        ["NV18", "NV18", "X"],
    ]
    assert rows[0][1].peer is True


def test_without_links_the_topology_names_the_way_over_pcie() -> None:
    nvml = FakeNvml([FakeGpu(index=index, links=0) for index in (0, 1, 4)])
    rows = opened(nvml).topology
    assert [link.kind for link in rows[0]] == ["X", "PHB", "SYS"]


def test_the_thread_samples_marks_and_publishes() -> None:
    hub = Hub()
    with Telemetry(hub, nvml=h200s(2), environment={}) as watched:
        until(watched.latest)
        watched.mark("denoise", "stage", "run1")
    kinds = [kind for kind, _ in hub.events]
    assert {"telemetry", "mark"} == set(kinds)
    sample = next(data for kind, data in hub.events if kind == "telemetry")
    assert len(sample["gpus"]) == 2 and sample["ram_total"] > sample["ram_used"] > 0
    assert "telemetry" not in {thread.name for thread in threading.enumerate()}


def test_nothing_is_published_while_nobody_listens() -> None:
    hub = Hub(readers=0)
    with Telemetry(hub, nvml=h200s(1), environment={}) as watched:
        until(watched.latest)
    assert hub.events == []


def test_a_benchmark_is_sampled_ten_times_a_second() -> None:
    with Telemetry(Hub(), nvml=h200s(1), environment={}) as watched:
        until(watched.latest)
        with watched.benchmarking(), watched.benchmarking():
            assert watched.hz == 10
            start = time.time()
            time.sleep(1.05)
        assert watched.hz == 1
        times = [entry["t"] for entry in watched.slice(start, time.time())]
        assert 7 <= len(times) <= 11


def test_the_bytes_of_a_turn_are_not_those_of_the_warm_up_before_it() -> None:
    """Links at rest are read every ten seconds: what moved since the last reading is not missed."""
    nvml = h200s(2)
    for gpu in nvml.gpus:
        gpu.counters["nvlink_tx"] = 7
    with Telemetry(Hub(), nvml=nvml, environment={}) as watched:
        until(lambda: watched._gpus.read_at("nvlink") > 0)
        time.sleep(1.1)
        for gpu in nvml.gpus:
            gpu.counters["nvlink_tx"] += 1_000_000  # the warm-up
        assert watched.totals()[0]["nvlink_tx"] == 7 * 1024
        with bench_watch.turn(watched) as seen:
            nvml.gpus[0].counters["nvlink_tx"] += 500
            found = seen()
    assert [one["sent"] for one in found["nvlink_bytes"]] == [500 * 1024, 0]


@pytest.mark.parametrize(
    "gpu",
    [
        FakeGpu(index=0, links=0),
        FakeGpu(index=0, unsupported={"field 138", "field 139"}),  # links that are not counted
    ],
)
def test_totals_without_nvlink_are_not_waited_for(gpu: FakeGpu) -> None:
    with Telemetry(Hub(), nvml=FakeNvml([gpu]), environment={}) as watched:
        until(watched.latest)
        began = time.monotonic()
        watched.totals_now()
        assert time.monotonic() - began < 1


def test_a_rate_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    with Telemetry(Hub(), nvml=h200s(1), environment={}) as watched:
        watched.set_rate(5, seconds=1)
        assert watched.hz == 5
        now = time.monotonic()
        monkeypatch.setattr(telemetry.time, "monotonic", lambda: now + 2)
        assert watched.hz == 1


@pytest.mark.parametrize("hz", [0, 11, float("nan")])
def test_a_rate_outside_the_limits_is_refused(hz: float) -> None:
    with (
        Telemetry(Hub(), nvml=FakeNvml(driver=False), environment={}) as watched,
        pytest.raises(ValueError, match=r"hz must be 0\.2 to 10, got"),
    ):
        watched.set_rate(hz)


def kept_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_run_keeps_its_samples_and_marks_in_order(tmp_path: Path) -> None:
    file = tmp_path / "telemetry.jsonl"
    with (
        Telemetry(Hub(), nvml=h200s(1), environment={}) as watched,
        watched.recording(file, fast=True) as recording,
    ):
        assert watched.hz == 10
        watched.mark("run", "run", "r1")
        assert [entry.get("mark") for entry in kept_lines(file)] == ["run"]  # at once
        since = time.time()
        until(lambda: len(watched.slice(since, time.time())) >= 4)
        assert sum("gpus" in entry for entry in kept_lines(file)) == 1  # one a second
    entries = kept_lines(file)
    assert [entry["t"] for entry in entries] == sorted(entry["t"] for entry in entries)
    assert {"run"} == {entry["mark"] for entry in entries if "mark" in entry}
    assert sum("gpus" in entry for entry in entries) >= 4  # all, as the ring has them still
    assert recording.trouble == ""


def test_a_run_longer_than_the_ring_keeps_what_was_written_as_it_went(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "telemetry.jsonl"
    with Telemetry(Hub(), nvml=FakeNvml(driver=False), environment={}) as watched:
        with watched.recording(file, fast=False):
            watched.mark("run", "run", "r1")
            real = time.time
            monkeypatch.setattr(telemetry.time, "time", lambda: real() + 1801)
            watched.mark("run ends", "run", "r1")
        watched.mark("later", "run", "r2")
    assert [e["mark"] for e in kept_lines(file) if "mark" in e] == ["run", "run ends"]


def test_a_disk_that_takes_no_telemetry_is_said_and_ends_nothing(tmp_path: Path) -> None:
    with Telemetry(Hub(), nvml=FakeNvml(driver=False), environment={}) as watched:
        with watched.recording(tmp_path / "nowhere" / "t.jsonl", fast=False) as recording:
            watched.mark("run", "run", "r1")
        since = time.time()
        watched.set_rate(10)
        until(lambda: watched.slice(since, time.time()))
    assert "is not kept whole" in recording.trouble


def test_a_line_that_a_kill_cut_short_is_dropped(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    file.write_bytes(b'{"t":1}\n{"t":2}\n{"t":')
    mend(file)
    mend(file)
    mend(tmp_path / "missing")
    assert file.read_bytes() == b'{"t":1}\n{"t":2}\n'


def test_a_page_gets_what_is_new_thinned_with_the_newest_kept() -> None:
    with Telemetry(Hub(), nvml=FakeNvml(driver=False), environment={}) as watched:
        watched.set_rate(10)
        until(lambda: len(json.loads(watched.since(0))["samples"]) >= 7)
        whole = json.loads(watched.since(0))["samples"]
        few = json.loads(watched.since(0, most=3))["samples"]
        rest = json.loads(watched.since(whole[-2]["t"]))["samples"]
    assert len(few) <= 3 and few[-1]["t"] >= whole[-1]["t"]
    assert rest[0]["t"] == whole[-1]["t"]


def test_only_half_an_hour_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    with Telemetry(Hub(), nvml=FakeNvml(driver=False), environment={}) as watched:
        first: Sample = until(watched.latest)
        real = time.time
        monkeypatch.setattr(telemetry.time, "time", lambda: real() + 1801)
        watched.set_rate(10)
        until(lambda: watched.latest() != first)
        kept = json.loads(watched.since(0))["samples"]
    assert kept[0]["t"] > first["t"] + 1800
