"""launch.py sweep on CPU ranks of the demo model: what its last line tells."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from app import measurements, sweep

ROOT = Path(__file__).parents[2]


def run(store: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "launch.py", "sweep", "--plan", "cpu", "--text-rows", "12"]
    return subprocess.run(
        [*command, "--rounds", "1", "--no-decode", "--store", str(store), *options],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(store)},  # other tests may measure meanwhile
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def small(tmp_path: Path) -> str:
    path = tmp_path / "small.toml"
    path.write_text('prompt = "x"\nwidth = 64\nheight = 64\nframes = 5\nsteps = 2\n')
    return str(path)


def test_a_sweep_tells_time_memory_communication_and_parity_of_each_layout(
    small: str, tmp_path: Path
) -> None:
    done = run(tmp_path, "--request", small, "--layouts", "U2")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    single, two = told["layouts"]
    assert (single["layout"], two["layout"], two["ranks"]) == ("single", "U2", 2)
    assert two["step_seconds"]["n"] == 2
    assert two["speedup"] == pytest.approx(
        single["step_seconds"]["median"] / two["step_seconds"]["median"]
    )
    assert two["efficiency"] == pytest.approx(two["speedup"] / 2)
    assert len(two["rank_peak_bytes"]) == 2 and min(two["rank_peak_bytes"]) > 1 << 26
    assert 0 < two["exposed_communication_share"] < 1 and 0 < two["communication_share"] < 1
    assert single["expected_bytes"] is None and two["nvlink_bytes"] is None
    sent, received = (
        sum(one[way] for one in two["expected_bytes"]) for way in ("sent", "received")
    )
    assert sent == received > 0
    assert "MB expected" in done.stdout and f"{sent / 2e6:.3f}" in done.stdout
    assert two["exposed_communication_seconds"] <= two["communication_seconds"]
    assert single["communication_seconds"] is None  # nothing is sent
    for stream in ("video", "audio"):
        assert two["parity"][stream]["relative_l2"] <= 1e-6
    (shown,) = measurements.listed(tmp_path, published=tmp_path / "none")
    assert [row["name"] for row in shown["subjects"]] == ["single", "U2"]
    assert shown["subjects"][1]["efficiency"] == two["efficiency"]
    assert shown["machine"]["torch"] and shown["shape"]["frames"] == 5
    assert "/" not in json.dumps(shown["shape"]) and "models" not in json.dumps(shown)
    assert not list(tmp_path.glob("h3-*-*"))


def test_a_layout_that_fails_is_told_and_the_others_go_on(small: str, tmp_path: Path) -> None:
    done = run(tmp_path, "--request", small, "--layouts", "U2", "--random-size", "tiny",
               "--random-weights", "no such format")  # fmt: skip
    told = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 1 and not told["ok"]
    assert all("random weights must be" in one["reason"] for one in told["layouts"])
    (shown,) = measurements.listed(tmp_path, published=tmp_path / "none")
    assert [(row["ok"], row["parts"]) for row in shown["subjects"]] == [(False, {})] * 2


def test_all_takes_what_the_machine_can_hold_and_single_comes_first() -> None:
    assert sweep.chosen("all", 2, cuda=True, cfg=1.0) == ["single", "U2", "TP2"]
    assert sweep.chosen("all", 2, cuda=True, cfg=4.0) == ["single", "U2", "TP2", "CFG2"]
    assert sweep.chosen("U4, U2", 4, cuda=True, cfg=1.0) == ["single", "U4", "U2"]


def test_a_layout_that_the_machine_cannot_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="layout U4 needs 4 GPUs, this machine has 2"):
        sweep.chosen("U4", 2, cuda=True, cfg=1.0)


def test_a_layout_with_ranks_for_no_side_is_refused() -> None:
    with pytest.raises(ValueError, match="layout CFG2 gives half of its ranks the negative side"):
        sweep.chosen("U2,CFG2", 2, cuda=True, cfg=1.0)


def test_a_request_with_a_negative_side_is_swept_with_it(small: str, tmp_path: Path) -> None:
    Path(small).write_text(Path(small).read_text() + "cfg = 3.0\n")
    done = run(tmp_path, "--request", small, "--layouts", "CFG2")
    assert done.returncode == 0, done.stderr
    single, two = json.loads(done.stdout.splitlines()[-1])["layouts"]
    assert (two["layout"], two["ranks"]) == ("CFG2", 2)
    assert all(two["parity"][stream]["equal"] for stream in ("video", "audio"))
    assert two["exposed_communication_share"] > 0 == single["exposed_communication_share"]


def test_counted_bytes_stand_beside_the_expected_ones_of_a_step() -> None:
    turn = {"nvlink_bytes": [{"sent": 4_100_000, "received": 4_000_000}] * 2}
    counted = sweep._counted({"gpu": turn, "stages": {}, "steps": [[1.0, 1.0]]})
    assert counted == [{"sent": 2_050_000, "received": 2_000_000}] * 2
    expected = [{"sent": 2_000_000, "received": 2_000_000}] * 2
    one = {"ranks": 2, "expected_bytes": expected, "nvlink_bytes": counted}
    assert sweep._bytes_sent(one) == ("2.000", "2.050 (102.5%)")
    assert sweep._bytes_sent({**one, "nvlink_bytes": None}) == ("2.000", "-")
    assert sweep._bytes_sent({**one, "expected_bytes": None}) == ("-", "-")


@pytest.mark.parametrize(
    ("gpu", "decode"), [({}, 0.0), ({"nvlink_bytes": [{"sent": 1, "received": 1}]}, 0.5)]
)
def test_nothing_is_told_of_links_that_are_not_counted_or_carried_tiles(
    gpu: dict[str, object], decode: float
) -> None:
    stages = {"video VAE decode": {"max": decode}} if decode else {}
    assert sweep._counted({"gpu": gpu, "stages": stages, "steps": [[1.0]]}) is None
