"""launch.py sweep on CPU ranks of the demo model: what its last line tells."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app import bench, bench_child, measurements, sweep
from app.cli import sweep as command
from app.presets import find, load_plan
from runtime.messages import Plan

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


@pytest.fixture
def split(tmp_path: Path) -> str:
    """A plan of the demo model for three ranks that share rows."""
    path = tmp_path / "split.toml"
    text = (ROOT / "presets/plans/cpu.toml").read_text()
    path.write_text('row_split = "1:2:3"\n' + text.replace("../demo", str(ROOT / "presets/demo")))
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
    ranks = two["summary"]["ranks"]
    assert len(ranks) == 2 and two["imbalance_seconds"] >= 0 and single["imbalance_seconds"] is None
    assert all(min(of.values(), key=lambda x: x["min"])["min"] > 0 for of in ranks)
    waits = [of["waiting_seconds"] for of in ranks]
    assert two["exposed_communication_seconds"] <= min(wait["median"] for wait in waits)
    assert told["gpus"] == []
    assert single["communication_seconds"] is None  # nothing is sent
    for stream in ("video", "audio"):
        assert two["parity"][stream]["relative_l2"] <= 1e-6
    (shown,) = measurements.listed(tmp_path, published=tmp_path / "none")
    assert [row["name"] for row in shown["subjects"]] == ["single", "U2"]
    assert shown["subjects"][1]["efficiency"] == two["efficiency"]
    assert shown["machine"]["torch"] and shown["shape"]["frames"] == 5
    assert "/" not in json.dumps(shown["shape"]) and "models" not in json.dumps(shown)
    assert not list(tmp_path.glob("h3-*-*"))


def test_what_a_rank_waits_for_a_slower_one_is_no_exposed_communication() -> None:
    def of(waited: list[float]) -> dict[str, Any]:
        return {"attention": [1.0, 1.0], "GEMM": [0.5, 0.5], "communication": waited,
                "other": [0.1, 0.2]}  # fmt: skip

    turn = {"rank_parts": [of([0.3, 0.1]), of([0.1, 0.25])]}
    found = bench._of_ranks([turn, turn])
    assert found["exposed_seconds"] == {"median": 0.1, "min": 0.1, "max": 0.1, "n": 4}
    assert found["imbalance_seconds"]["median"] == pytest.approx((0.2 + 0.15) / 2)
    assert found["ranks"][1]["computing_seconds"]["max"] == pytest.approx(1.7)
    step = {"median": 2.0}
    own = {"communication": {"median": 0.2}}
    told = sweep.communication({"step_seconds": step, "parts": own, **found})
    assert told["exposed_communication_share"] == 0.05
    before = sweep.communication({"step_seconds": step, "parts": own})  # a record of before
    assert (before["exposed_communication_share"], before["imbalance_seconds"]) == (0.1, None)
    assert bench._of_ranks([{**turn, "rank_parts": []}]) == {}


def test_each_gpu_alone_stands_under_the_table() -> None:
    layouts = [
        {"layout": "single", "ok": True, "ranks": 1, "step_seconds": {"median": 2.0}},
        {"layout": "U2", "ok": True, "ranks": 2, "step_seconds": {"median": 1.0}},
    ]
    gpus = [
        {"gpu": 0, "ok": True, "step_seconds": {"median": 2.0}},
        {"gpu": 1, "ok": True, "step_seconds": {"median": 2.1}},
        {"gpu": 2, "ok": False, "reason": "no room"},
    ]
    assert sweep.gpu_lines(layouts, gpus) == [
        "single on GPU 0: 2.0000 s; U2 2.000x",
        "single on GPU 1: 2.1000 s; U2 2.100x",
        "single on GPU 2 failed: no room",
    ]
    assert sweep.gpu_lines(layouts[:1], gpus[:1]) == ["single on GPU 0: 2.0000 s"]


def test_each_gpu_is_a_start_of_single_with_that_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    order = command._order(["single", "U2"], each_gpu=True)
    assert order == [("single", 0), ("single", 1), ("U2", 0)]
    assert [command._label(*one) for one in order] == ["single", "single on GPU 1", "U2"]
    assert command._order(["single", "U4"], each_gpu=False) == [("single", 0), ("U4", 0)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert bench_child._only_gpu(1) == {"CUDA_VISIBLE_DEVICES": "5"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-ab, GPU-cd")
    assert bench_child._only_gpu(1) == {"CUDA_VISIBLE_DEVICES": "GPU-cd"}
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert bench_child._only_gpu(1) == {"CUDA_VISIBLE_DEVICES": "1"}
    assert bench_child._only_gpu(0) == {}


def test_each_gpu_of_a_plan_on_the_cpu_is_refused(small: str, tmp_path: Path) -> None:
    done = run(tmp_path, "--request", small, "--layouts", "U2", "--each-gpu")
    assert done.returncode == 2 and "the device of the plan is cpu" in done.stderr


def test_a_layout_that_fails_is_told_and_the_others_go_on(small: str, tmp_path: Path) -> None:
    done = run(tmp_path, "--request", small, "--layouts", "U2", "--random-size", "tiny",
               "--random-weights", "no such format")  # fmt: skip
    told = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 1 and not told["ok"]
    assert all("random weights must be" in one["reason"] for one in told["layouts"])
    (shown,) = measurements.listed(tmp_path, published=tmp_path / "none")
    assert [(row["ok"], row["parts"]) for row in shown["subjects"]] == [(False, {})] * 2


def plan_with(device: str = "cuda", **fields: Any) -> Plan:
    return replace(load_plan(find("plans", "cpu")), device=device, **fields)


def test_all_takes_what_the_machine_can_hold_and_single_comes_first() -> None:
    plan = plan_with()
    assert sweep.chosen(plan, "all", 2, cfg=1.0) == ["single", "U2", "TP2"]
    assert sweep.chosen(plan, "all", 2, cfg=4.0) == ["single", "U2", "TP2", "CFG2"]
    assert sweep.chosen(plan, "U4, U2", 4, cfg=1.0) == ["single", "U4", "U2"]
    assert sweep.left_out(plan, 8, cfg=4.0) == []


def test_all_takes_what_the_split_of_rows_fits_and_says_what_it_does_not() -> None:
    two, three = plan_with(row_split="9984:10110"), plan_with(row_split="1:2:3")
    assert sweep.chosen(two, "all", 4, cfg=4.0) == [
        *("single", "U2", "TP2", "TP3", "TP4", "TP2xU2", "CFG2", "CFG2xU2", "CFG2xTP2")
    ]
    assert sweep.left_out(two, 4, cfg=4.0) == [
        "all leaves out U3, U4: plan field row_split has 2 parts, 9984:10110, and layout U3 shares "
        "rows among 3 ranks; give it 3 parts, or none"
    ]
    of_three = ["single", "U3", "TP2", "TP3", "TP4", "CFG2", "CFG2xTP2"]
    assert sweep.chosen(three, "all", 4, cfg=4.0) == of_three
    assert "U2, U4, TP2xU2, CFG2xU2:" in sweep.left_out(three, 4, cfg=4.0)[0]


@pytest.mark.parametrize(
    ("fields", "left", "words"),
    [
        ({"cache": "easy_cache"}, ["single", "CFG2"], "U2, TP2: plan field cache must be off"),
        ({"device": "cpu", "transport": "copy_engine"}, ["single"], "U2, TP2, CFG2: plan field"),
        ({"gather": "packed_nvfp4"}, ["single", "TP2", "CFG2"], "U2: plan field nvfp4 must be"),
    ],
)
def test_all_leaves_out_what_another_field_forbids(
    fields: dict[str, Any], left: list[str], words: str
) -> None:
    plan = plan_with(**fields)
    assert sweep.chosen(plan, "all", 2, cfg=4.0) == left
    (told,) = sweep.left_out(plan, 2, cfg=4.0)
    assert words in told


def test_a_named_layout_that_the_plan_cannot_be_with_is_refused() -> None:
    with pytest.raises(ValueError, match="layout U4 shares rows among 4 ranks; give it 4 parts"):
        sweep.chosen(plan_with(row_split="9984:10110"), "U2,U4", 4, cfg=1.0)
    with pytest.raises(ValueError, match="cache must be off with layout TP2"):
        sweep.chosen(plan_with(cache="easy_cache"), "TP2", 2, cfg=1.0)


def test_the_command_says_before_it_measures_what_all_leaves_out(
    small: str,
    split: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(command, "_devices", lambda plan: 2)
    monkeypatch.setattr(command, "alone", lambda name: nullcontext())
    asked = []

    def measured(
        args: object, plan: object, request: object, order: list[tuple[str, int]], folder: Path
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        asked.append([name for name, _ in order])
        print("measuring", file=sys.stderr)
        return [command._failure("single", "stand-in")], []

    monkeypatch.setattr(command, "_measured", measured)
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    options = ["--plan", split, "--request", small, "--store", str(tmp_path)]
    assert command.run(parser.parse_args(options)) == 1
    assert asked == [["single", "TP2"]]
    note, then = capsys.readouterr().err.splitlines()
    assert note.startswith("note: all leaves out U2: plan field row_split") and then == "measuring"
    with pytest.raises(ValueError, match="row_split has 3 parts, 1:2:3, and layout U2 shares"):
        command.run(parser.parse_args([*options, "--layouts", "U2"]))
    assert len(asked) == 1


def test_a_layout_that_the_machine_cannot_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="layout U4 needs 4 GPUs, this machine has 2"):
        sweep.chosen(plan_with(), "U4", 2, cfg=1.0)


def test_a_layout_with_ranks_for_no_side_is_refused() -> None:
    with pytest.raises(ValueError, match="layout CFG2 gives half of its ranks the negative side"):
        sweep.chosen(plan_with(), "U2,CFG2", 2, cfg=1.0)


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
