"""A benchmark takes turns, counts honestly and says in a sentence what it cannot do."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from app import bench, bench_child, bench_watch, measurements, runs
from app.bench_child import BenchFailed, Child
from app.bench_lock import alone
from app.bench_table import lines
from launch import main
from runtime.bench.base import setup_of
from runtime.bench.profile import class_of, tell, union_seconds
from runtime.clock import StageClock

TINY = ("--plan", "cpu", "--request", "demo", "--text-rows", "7", "--runs", "2")


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured is kept in the test's folder, and other tests may measure meanwhile."""
    monkeypatch.setattr(runs, "FOLDER", tmp_path / "runs")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@contextmanager
def unwatched() -> Iterator[Callable[[], dict[str, Any]]]:
    yield lambda: {"reason": "nothing looks"}


class Fake:
    """A subject whose turns take the given seconds, one step each."""

    def __init__(self, name: str, log: list[str], seconds: Sequence[float], rows: int = 9) -> None:
        self.name, self._log, self._rows = name, log, rows
        self._seconds = iter(seconds)

    def load(self) -> dict[str, Any]:
        self._log.append(f"load {self.name}")
        return {"ready": {"load_seconds": 1.0, "resolved": {}}, "rows": self._rows}

    def ask(self, command: str) -> dict[str, Any]:
        self._log.append(f"{command} {self.name}")
        seconds = next(self._seconds)
        return {
            "seconds": seconds + 0.5,
            "steps": [seconds],
            "parts": {"GEMM": [seconds / 2]},
            "stages": {"video VAE decode": 0.25},
            "peak_allocated_bytes": 7,
            "peak_reserved_bytes": 8,
            "rows": self._rows,
        }


def measured(*subjects: Fake, runs: int) -> tuple[list[bench.Measured], str]:
    return bench.measure(subjects, runs=runs, profile=False, watch=unwatched, say=lambda text: None)


def test_two_subjects_take_turns_after_both_are_loaded_and_warm() -> None:
    log: list[str] = []
    _, order = measured(Fake("x", log, [9, 1, 1]), Fake("y", log, [9, 2, 2]), runs=2)
    assert log == ["load x", "load y", *(["turn x", "turn y"] * 3)]
    assert order == "A B A B"


def test_the_warm_up_is_no_part_of_the_numbers() -> None:
    (one,), _ = measured(Fake("x", [], [99, 1, 3, 2]), runs=3)
    told = bench.summary(one)
    assert told["step_seconds"] == {"median": 2, "min": 1, "max": 3, "n": 3}
    assert told["warm_up"]["steps"] == [99]


def test_a_ratio_is_that_of_the_medians_with_the_spread_of_the_rounds() -> None:
    (a, b), _ = measured(Fake("x", [], [9, 1, 2, 4]), Fake("y", [], [9, 2, 6, 4]), runs=3)
    found = bench.ratios(a, b)
    assert found["step"] == 4 / 2
    assert found["rounds"] == {"median": 2, "min": 1, "max": 3, "n": 3}


def test_time_outside_is_what_neither_steps_nor_decoders_took() -> None:
    (one,), _ = measured(Fake("x", [], [9, 2]), runs=1)
    assert bench.summary(one)["outside_seconds"]["median"] == pytest.approx(0.25)


def test_subjects_of_different_rows_are_not_compared() -> None:
    with pytest.raises(ValueError, match=r"different numbers of rows \(x 9 and y 10\)"):
        measured(Fake("x", [], [1, 1]), Fake("y", [], [1, 1], rows=10), runs=1)


def sample(power: float | None, clock: int = 1900) -> dict[str, Any]:
    return {"gpus": [{"power": power, "sm_clock": clock, "temp": 60, "throttle": ["power cap"]}]}


def test_power_and_clocks_are_those_of_the_samples_in_the_turn() -> None:
    told = bench_watch.told([sample(500.0), sample(600.0, 1800)], "")  # type: ignore[list-item]
    found = bench.gpu_summary([told, {"reason": "too short"}])
    assert found["power_watts"] == {"median": 550, "min": 500, "max": 600, "n": 2}
    assert (found["sm_clock_mhz"]["min"], found["throttled"]) == (1800, ["power cap"])


def test_a_gpu_that_is_lost_or_found_between_turns_ends_no_benchmark() -> None:
    def of(*power: float | None) -> dict[str, Any]:
        return {"gpus": [gpu for watts in power for gpu in sample(watts)["gpus"]]}

    first = bench_watch.told([of(500.0, 90.0, 80.0)], "")  # type: ignore[list-item]
    lost = bench_watch.told([of(600.0, None, 70.0)], "")  # type: ignore[list-item]
    assert [gpu["power_watts"] for gpu in lost["each"]] == [[600], [], [70]]
    assert bench.gpu_summary([lost])["each"][1]["power_watts"] is None
    found = bench.gpu_summary([first, lost])["each"]
    assert [gpu["power_watts"] for gpu in found] == [550, 90, 75]
    more = bench_watch.told([of(400.0), of(500.0, 1.0)], "")  # type: ignore[list-item]
    assert [gpu["power_watts"] for gpu in more["each"]] == [[400, 500]]
    assert len(bench.gpu_summary([first, more])["each"]) == 1


def test_bytes_over_nvlink_are_the_difference_of_two_readings() -> None:
    before = [{"nvlink_tx": 10, "nvlink_rx": 20}, {"nvlink_tx": 1, "nvlink_rx": 2}]
    after = [{"nvlink_tx": 15, "nvlink_rx": 26}, {"nvlink_tx": 3, "nvlink_rx": 2}]
    moved = bench_watch.moved(before, after)
    assert moved == [{"sent": 5, "received": 6}, {"sent": 2, "received": 0}]
    told = {**bench_watch.told([sample(500.0)], ""), "nvlink_bytes": moved}  # type: ignore[list-item]
    more = {**told, "nvlink_bytes": [{"sent": 7, "received": 6}, {"sent": 2, "received": 4}]}
    found = bench.gpu_summary([told, more])["nvlink_bytes"]
    assert found == [{"sent": 6, "received": 6}, {"sent": 2, "received": 2}]
    assert bench_watch.moved([{}], after) == bench_watch.moved([], []) == []
    assert "nvlink_bytes" not in bench.gpu_summary([bench_watch.told([sample(500.0)], "")])  # type: ignore[list-item]


@pytest.mark.parametrize("samples", [[], [{"gpus": []}], [sample(None)]])
def test_a_gpu_that_tells_nothing_has_a_reason_and_no_number(samples: list[Any]) -> None:
    found = bench.gpu_summary([bench_watch.told(samples, "no driver")])
    assert found == {"reason": "no driver"}


def kernel(name: str, ts: float, dur: float, launch: int, cat: str = "kernel") -> dict[str, Any]:
    return {"cat": cat, "name": name, "ts": ts, "dur": dur, "args": {"correlation": launch}}


def trace() -> list[Mapping[str, Any]]:
    """A step of 100 us with three kernels, one of them beside another; the last is launched later.

    The second of two launches at 400 us is outside the range though its kernel is on the GPU.
    """
    launches = [
        {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": ts, "args": {"correlation": n}}
        for n, ts in enumerate((1, 2, 3, 400))
    ]
    named = {"cat": "user_annotation", "name": "denoise, step 1", "ts": 0, "dur": 50}
    return [
        named,
        *launches,
        kernel("nvjet_tst_128x256", 10, 40, 0),
        kernel("cudnn_generated_fort_native_sdpa_sm90", 40, 30, 1),
        kernel("strange", 80, 5, 2),
        kernel("nvjet_tst_128x256", 90, 1000, 3),
    ]


def test_a_profile_adds_up_to_the_step_with_idle_and_what_overlapped() -> None:
    told = tell(trace(), "denoise, step 1", 100e-6)
    seconds = told["seconds"]
    assert seconds["GEMM"] == pytest.approx(40e-6)
    assert seconds["attention"] == pytest.approx(30e-6)
    assert seconds["idle"] == pytest.approx(35e-6)  # 0-10, 70-80, 85-100
    assert told["overlap_seconds"] == pytest.approx(10e-6)
    assert sum(seconds.values()) - told["overlap_seconds"] == pytest.approx(100e-6)


def test_a_kernel_of_no_class_is_shown_by_its_name() -> None:
    told = tell(trace(), "denoise, step 1", 100e-6)
    assert told["top"]["unclassified"] == [("strange", pytest.approx(5e-6))]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("void flash_fwd_kernel<...cutlass...>", "attention"),
        ("nvjet_hsh_256x128_64x4_2x1_v_bz_TNT", "GEMM"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32", "GEMM"),
        ("void at::native::elementwise_kernel<direct_copy_kernel_cuda>", "copy"),
        ("void at::native::vectorized_elementwise_kernel<AddFunctor>", "elementwise"),
        ("_norm_modulate_row", "elementwise"),
        ("dequantize_nvfp4_kernel", "quantisation"),
    ],
)
def test_kernels_are_classified_by_name(name: str, found: str) -> None:
    assert class_of(kernel(name, 0, 1, 0)) == found


def test_spans_that_overlap_count_once() -> None:
    assert union_seconds([(0, 10), (5, 20), (6, 7), (30, 40)]) == pytest.approx(30e-6)


def test_a_trace_without_the_step_is_refused() -> None:
    with pytest.raises(ValueError, match="no range 'denoise, step 2'"):
        tell(trace(), "denoise, step 2", 1.0)


def last_line(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


def test_two_plans_are_measured_and_the_last_line_is_json(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    record = tmp_path / "records.jsonl"
    assert main(["bench", *TINY, "--against", "cpu", "--record-to", str(record)]) == 0
    told = last_line(capsys)
    first, second = told["subjects"]
    assert (told["order"], told["rows"], first["rows"]) == ("A B A B", 129, second["rows"])
    assert first["step_seconds"]["n"] == 4  # two turns of two steps
    assert set(first["parts"]) == {"attention", "GEMM", "communication", "other"}
    assert first["stages"]["video VAE decode"]["min"] > 0
    assert first["resolved"]["attention"].startswith("torch")
    assert told["ratio"]["rounds"]["n"] == 2
    assert json.loads(record.read_text()) == told


def test_the_second_request_is_measured_on_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--plan", "cpu", "--request", "demo", "--no-media", "--steps", "1", "--repeat-request"]
    assert main(["bench", *asked]) == 0
    (one,) = last_line(capsys)["subjects"]
    assert one["rows"] > 100
    assert one["stages"]["text encode"]["n"] == 1
    assert one["outside_seconds"]["median"] < one["seconds"]["median"]


def test_random_weights_have_the_stored_types_of_their_format(
    capsys: pytest.CaptureFixture[str],
) -> None:
    weights = ["--random-weights", "pruned_nvfp4", "--random-size", "tiny", "--no-decode"]
    assert main(["bench", *TINY, *weights]) == 0
    (one,) = last_line(capsys)["subjects"]
    assert "linear nvfp4_dequant" in one["resolved"]
    assert one["stages"] == {}


def test_diffusers_takes_turns_on_the_same_rows(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("diffusers", reason="pip install -e .[peers]")
    peer = ["--peer", "diffusers", "--peer-attention", "native", "--no-decode"]
    weights = ["--random-weights", "full_bf16", "--random-size", "tiny"]
    assert main(["bench", *TINY, *peer, *weights]) == 0
    told = last_line(capsys)
    assert [one["rows"] for one in told["subjects"]] == [129, 129]
    assert told["subjects"][1]["resolved"]["attention"] == "native"


REFUSED = {
    ("--plan", "cpu"): "give --request, or --text-rows",
    ("--plan", "nope", "--text-rows", "3"): "no preset 'nope'",
    ("--plan", "cpu", "--text-rows", "3", "--runs", "0"): "--runs must be 1 to 1000, got 0",
    ("--plan", "cpu", "--peer", "diffusers", "--request", "demo"): "give --text-rows",
    ("--plan", "cpu", "--request", "demo", "--no-decode"): "--no-decode belongs to --text-rows",
    ("--plan", "cpu", "--text-rows", "-1"): "--text-rows must be 1 or more",
    ("--plan", "cpu", "--against", "h200x1_sdpa", "--text-rows", "3"): "one device",
    ("--plan", "cpu", "--text-rows", "3", "--random-weights", "x"): "SIZE:FORMAT",
    ("--plan", "cpu", "--text-rows", "3", "--random-weights", "pruned_bf16", "--random-size",
     "tiny", "--request", "demo", "--profile"): "--profile reads the GPU's kernels",
}  # fmt: skip


@pytest.mark.parametrize("options", REFUSED)
def test_what_cannot_be_measured_is_told_in_one_sentence(
    options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *options]) == 2
    *_, sentence = capsys.readouterr().err.strip().splitlines()
    assert sentence.startswith("launch.py bench: ")
    assert REFUSED[options] in sentence


def test_a_subject_that_dies_is_named_with_its_last_words() -> None:
    child = Child("x", {"subject": "plan"})
    try:
        child.kill()
        with pytest.raises(BenchFailed, match="x: its process ended"):
            child.load()
    finally:
        child.close()


def test_a_subject_that_died_before_its_turn_is_closed_without_an_error() -> None:
    """The question that it did not take must not cost the caller its last line."""
    child = Child("x", {"subject": "plan"})
    child.kill()
    child._process.wait()
    with pytest.raises(BenchFailed, match="x: its process ended"):
        child.ask("turn")
    child.close()


def test_a_subject_on_several_ranks_ends_with_all_of_them_and_status_0(tmp_path: Path) -> None:
    setup = a_setup(tmp_path)
    setup["plan"]["layout"] = "U2"
    setup["request"] |= {"width": 64, "height": 64, "frames": 5, "steps": 1}
    with Child("U2", setup) as child:
        child.load()
        assert len(child.ask("turn")["rank_peak_bytes"]) == 2
        (other,) = [p for p in psutil.Process(child._process.pid).children() if is_rank(p)]
    assert (child._process.returncode, child.fault) == (0, "")
    assert not other.is_running()


def is_rank(process: psutil.Process) -> bool:
    """multiprocessing also has a process that watches resources."""
    return "spawn_main" in " ".join(process.cmdline())


def test_a_subject_that_fails_after_its_last_answer_has_a_fault(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its numbers are whole: they are told, and so is that."""
    orderly = Child.close

    def killed(child: Child) -> None:
        if not child._process.poll():
            os.kill(child._process.pid, signal.SIGTERM)
        orderly(child)

    monkeypatch.setattr(Child, "close", killed)
    assert main(["bench", *TINY]) == 0
    said = capsys.readouterr()
    assert "note: cpu: after its last answer its process failed (status -15" in said.err
    assert json.loads(said.out.splitlines()[-1])["ok"]


def test_a_subject_that_has_told_why_it_ends_has_no_second_fault() -> None:
    with Child("x", {"request": {"family": "none"}}) as child, pytest.raises(BenchFailed):
        child.load()
    assert child._process.returncode == 1 and child.fault == ""
    child.close()  # once more


def test_a_rank_that_does_not_end_well_is_named_and_one_that_does_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from runtime.bench import ranks
    from runtime.team import ALONE

    now = 0.0  # seconds
    monkeypatch.setattr(ranks, "time", SimpleNamespace(monotonic=lambda: now))

    class Rank:
        def __init__(self, exitcode: int | None) -> None:
            self.exitcode = exitcode

        def join(self, seconds: float) -> None:
            nonlocal now
            now += seconds if self.exitcode is None else 0

    subject = object.__new__(ranks.RanksSubject)
    subject._closing, subject._team = threading.Event(), ALONE
    subject._others = [Rank(0), Rank(-11), Rank(None), Rank(None)]  # type: ignore[list-item]
    with pytest.raises(
        RuntimeError,
        match=r"^after its last turn rank 2 ended with status -11, rank 3 did not end, rank 4 did",
    ):
        subject.close()
    assert 0 < now < bench_child._ENDING_SECONDS  # else the parent kills it before it tells
    subject._others = [Rank(0)]  # type: ignore[list-item]
    subject.close()


@pytest.mark.parametrize("place", ["nowhere/records.jsonl", "."])
def test_a_record_that_cannot_be_written_is_refused_before_anything_is_measured(
    place: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["bench", *TINY, "--record-to", str(tmp_path / place)]) == 2
    said = capsys.readouterr().err
    assert "the result cannot be added to" in said and "loading" not in said


def test_a_setup_crosses_to_the_child_and_back() -> None:
    from app import presets
    from app.stored import plain

    plan = presets.load_plan(presets.find("plans", "cpu"))
    request = presets.load_request(presets.find("requests", "demo"), id="x")
    told = {"subject": "plan", "plan": plain(plan), "request": plain(request), "text_rows": 1}
    told |= {"weights": "", "decode": True, "media": False, "out": "/tmp/x", "attention": "native"}
    found = setup_of(json.loads(json.dumps(told)))
    assert (found.plan, found.request) == (plan, request)


def test_the_table_has_a_column_per_subject_and_the_ratio() -> None:
    (a, b), _ = measured(Fake("x", [], [9, 1]), Fake("y", [], [9, 2]), runs=1)
    text = "\n".join(lines([bench.summary(a), bench.summary(b)], bench.ratios(a, b)))
    assert "a step of y takes 2.000 times as long as one of x" in text
    assert "not reported: nothing looks" in text


def test_a_second_benchmark_on_the_machine_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with alone("launch.py sweep"):
        assert main(["bench", *TINY]) == 2
    assert "launch.py sweep (process" in (said := capsys.readouterr().err)
    assert "is measuring on this machine" in said
    with alone("launch.py bench"):  # the one that has ended holds nothing
        pass


def test_a_killed_subject_leaves_no_folder_behind(tmp_path: Path) -> None:
    """Ctrl-C in a turn: what the killed process had for the turn is removed with it."""
    setup = {"plan": {}, "subject": "plan"}
    with pytest.raises(KeyboardInterrupt), Child("x", setup) as child:
        (scratch,) = tmp_path.glob("h3-bench-*")
        (scratch / "h3-bench-of-the-turn").mkdir()
        assert child._process.poll() is None
        raise KeyboardInterrupt
    assert not scratch.exists() and child._process.poll() is not None


def test_a_turn_writes_below_the_folder_that_its_parent_removes(tmp_path: Path) -> None:
    from runtime.bench.ours import PlanSubject

    subject = object.__new__(PlanSubject)
    subject._turns, subject._setup = 0, setup_of(a_setup(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    with subject._folder() as out:
        assert out.parent == tmp_path / "scratch"


def test_a_turn_s_peak_is_what_a_run_s_record_has(tmp_path: Path) -> None:
    """The pipeline counts it, with the pool of graphs and the windows of copy engines."""
    from runtime.bench.ours import PlanSubject
    from runtime.team import ALONE

    class Pipeline:
        team, meter = ALONE, None

        def denoise(self, *given: object, clock: StageClock, **more: object) -> None:
            self.clock = clock

        def peak_bytes(self, clock: StageClock) -> int:
            assert clock is self.clock
            return 7

    subject = object.__new__(PlanSubject)
    subject._turns, subject._setup, subject._device = (
        0,
        setup_of(a_setup(tmp_path)),
        torch.device("cpu"),
    )
    subject._pipeline, subject._sides = Pipeline(), (None, None)  # type: ignore[assignment]
    assert subject.turn().peak_allocated_bytes == 7


def a_setup(scratch: Path) -> dict[str, Any]:
    from app import presets
    from app.stored import plain

    request = presets.load_request(presets.find("requests", "demo"), id="x", changes={})
    return {
        "subject": "plan",
        "plan": plain(presets.load_plan(presets.find("plans", "cpu"))),
        "request": plain(request),
        "text_rows": 7,
        "weights": "",
        "decode": False,
        "media": False,
        "out": "",
        "attention": "",
        "scratch": str(scratch),
    }


def test_what_was_measured_is_kept_where_the_console_looks(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["bench", *TINY, "--no-decode"]) == 0
    told = last_line(capsys)
    (shown,) = measurements.listed(tmp_path / "runs", published=tmp_path / "none")
    assert (shown["kind"], shown["when"], shown["rows"]) == ("bench", told["when"], 129)
    (subject,) = shown["subjects"]
    assert subject["step_seconds"] == told["subjects"][0]["step_seconds"]
    assert set(subject["parts"]) == {"attention", "GEMM", "communication", "other"}


def test_a_result_that_could_not_be_kept_is_refused_before_it_is_measured(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["bench", *TINY, "--store", str(tmp_path / "file" / "runs")]) == 2
    assert "give --store another folder" in capsys.readouterr().err
