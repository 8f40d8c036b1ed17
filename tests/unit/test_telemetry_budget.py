"""The sampler stays under its share of a core, with made-up GPUs, a made-up clock and meter."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from app.nvml_sample import GpuSample
from app.sampler import REST, WORK, Sampler, limit
from tests.fake_nvml import FakeNvml, h200s

OWN_SECONDS = 0.0015  # of a tick besides NVML: psutil, JSON


@dataclass
class World:
    """A sampler at work: what it used of the CPU, and what it sampled."""

    nvml: FakeNvml
    cpu: float = 0.0
    now: float = 100.0
    taken: list[tuple[float, list[GpuSample]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.nvml.spend = self._spend
        self.sampler = Sampler(self.nvml, {}, meter=lambda: self.cpu)
        self.sampler.gpus.open()
        self.go(30.0)  # until what is free of charge at the start has passed

    def go(
        self, seconds: float, *, hz: float = 1.0, links: bool = False, gb_s: float = 0.0
    ) -> float:
        """So many seconds with `gb_s` over every NVLink and PCIe; the share of a core used."""
        began, used, self.taken = self.now, self.cpu, []
        while self.now < began + seconds:
            samples = self.sampler.tick(
                self.now, hz=hz, busy=gb_s > 0, links=links, ram_used=1, ram_total=2
            )
            self._spend(OWN_SECONDS)
            self.taken.append((self.now, samples))
            pause = self.sampler.pause(hz)
            self.now += pause
            for gpu in self.nvml.gpus:
                gpu.counters["nvlink_tx"] += round(gb_s * pause * 1e9 / 1024)
                gpu.counters["pcie_rx"] += round(gb_s * pause * 1e9)
        return (self.cpu - used) / (self.now - began)

    def oldest(self, group: str) -> float:
        """The greatest age of this group over all GPUs and samples."""
        return max(gpu["ages"][group] for _, samples in self.taken for gpu in samples)

    def _spend(self, seconds: float) -> None:
        self.cpu += seconds


@pytest.mark.parametrize("count", [1, 2, 8, 64])
@pytest.mark.parametrize("gb_s", [0.0, 10.0])
def test_once_a_second_costs_less_than_one_per_cent_of_a_core(count: int, gb_s: float) -> None:
    world = World(h200s(count))
    assert 0.001 < world.go(120.0, gb_s=gb_s) < REST
    assert len(world.taken) > 100


@pytest.mark.parametrize("count", [1, 2, 8])
def test_ten_times_a_second_costs_less_than_five(count: int) -> None:
    world = World(h200s(count))
    assert 0.005 < world.go(60.0, hz=10, gb_s=10.0) < WORK
    assert len(world.taken) > 500


def test_nothing_starves_on_eight_gpus_at_work() -> None:
    world = World(h200s(8))
    world.go(20.0, gb_s=10.0)
    world.go(180.0, gb_s=10.0)
    oldest = {group: world.oldest(group) for group in ("state", "load", "nvlink", "pcie", "energy")}
    assert oldest["state"] == 0
    assert oldest["load"] <= 3 and max(oldest["nvlink"], oldest["pcie"]) <= 10
    assert oldest["energy"] <= 180


def test_two_gpus_at_work_are_read_whole_each_second() -> None:
    world = World(h200s(2))
    world.go(10.0, gb_s=10.0)
    world.go(60.0, gb_s=10.0)
    assert world.oldest("state") == world.oldest("load") == 0
    assert world.oldest("nvlink") <= 1 and world.oldest("pcie") <= 1


def test_rates_are_those_of_the_time_between_two_readings() -> None:
    world = World(h200s(8))
    world.go(20.0, gb_s=10.0)
    world.go(60.0, gb_s=10.0)
    rates = {gpu["nvlink_tx"] for _, samples in world.taken for gpu in samples}
    assert all(rate == pytest.approx(10e9, rel=1e-4) for rate in rates)


def test_fresh_rates_times_the_time_since_the_reading_before_are_the_bytes() -> None:
    world = World(h200s(8))
    world.go(20.0, hz=10, gb_s=10.0)
    moved, times = 0.0, list[float]()
    world.go(30.0, hz=10, gb_s=10.0)
    for now, samples in world.taken:
        if samples[3]["ages"]["nvlink"] == 0:
            moved += (samples[3]["nvlink_tx"] or 0) * (now - times[-1] if times else 0.0)
            times.append(now)
    assert moved == pytest.approx(10e9 * (times[-1] - times[0]), rel=1e-4)


def test_all_links_are_read_while_somebody_looks_within_their_own_limit() -> None:
    world = World(h200s(8))
    assert world.go(60.0, links=True, gb_s=10.0) < WORK == limit(1.0, links=True)
    links = [link for gpu in world.sampler.gpus.links for link in gpu]
    assert len(links) == 8 * 18
    assert all(sent == pytest.approx(10e9 / 18, rel=1e-3) for sent, _ in links)
    assert all(got == 0 for _, got in links)


def test_a_run_that_begins_has_its_energy_read_soon() -> None:
    world = World(h200s(8))
    world.go(60.0)
    world.sampler.hasten("energy")
    world.go(10.0)
    assert max(gpu["ages"]["energy"] for gpu in world.taken[-1][1]) <= 10


def test_a_dear_driver_makes_samples_rarer_and_not_dearer() -> None:
    world = World(h200s(1))
    world.nvml.spend = lambda seconds: world._spend(100 * seconds)
    assert world.go(600.0) < REST
    assert len(world.taken) < 500
