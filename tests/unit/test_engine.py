"""The engine with a fake family in a real spawned process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from PIL import Image

from runtime.engine import Engine
from runtime.messages import Failure, Note, Preview, Progress, Ready, Result, StageTime
from runtime.meter import PARTS
from tests import fakes

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def shared() -> Iterator[Engine]:
    """One started engine for the tests that leave it running."""
    with Engine(fakes.plan(), families=fakes.FAMILIES) as engine:
        assert isinstance(list(engine.start())[-1], Ready)
        yield engine


@pytest.fixture
def own() -> Iterator[Engine]:
    """A started engine that the test may break."""
    with Engine(fakes.plan(), families=fakes.FAMILIES) as engine:
        list(engine.start())
        yield engine


def test_events_come_in_order_and_a_result_is_the_last(shared: Engine, tmp_path: Path) -> None:
    events = list(shared.generate(fakes.request(), out=tmp_path))
    steps = [e.done for e in events if isinstance(e, Progress) and e.stage == "denoise"]
    assert steps == [1, 2, 3, 4]
    assert [isinstance(e, Result) for e in events] == [False] * (len(events) - 1) + [True]
    assert events[-1].video == tmp_path / "result.mp4" and events[-1].video.stat().st_size > 1000


def test_stage_times_of_the_result_name_every_step_and_add_up(
    shared: Engine, tmp_path: Path
) -> None:
    *events, result = shared.generate(fakes.request(), out=tmp_path, media=False)
    assert [s.step for s in result.stages if s.stage == "denoise"] == [0, 1, 2, 3]
    assert result.stages[-1].stage == "end to end"
    whole = [s for s in result.stages[:-1] if s.stage not in PARTS]
    assert result.stages[-1].seconds >= sum(s.seconds for s in whole) > 0.1
    assert all(s.start + s.seconds <= result.stages[-1].seconds + 1e-3 for s in whole)
    live = [e for e in events if isinstance(e, StageTime)]
    assert live == list(result.stages[: len(live)]) and len(live) >= 4


def test_a_preview_of_every_step_is_a_webp_of_the_clip_s_length(
    shared: Engine, tmp_path: Path
) -> None:
    events = list(shared.generate(fakes.request(), out=tmp_path, media=False))
    shown = [e for e in events if isinstance(e, Preview)]
    assert [e.step for e in shown] == [0, 1, 2, 3]
    with Image.open(shown[-1].path) as animation:
        assert animation.n_frames == 7 and animation.size == (4, 4)


def test_without_media_and_preview_no_file_is_written(shared: Engine, tmp_path: Path) -> None:
    *events, result = shared.generate(fakes.request(), out=tmp_path, media=False, preview=False)
    assert result.video is None and not list(tmp_path.iterdir())
    assert not any(isinstance(event, Preview) for event in events)


def test_cancel_at_step_2_stops_before_step_4_and_names_the_stage(
    shared: Engine, tmp_path: Path
) -> None:
    steps = []
    for event in shared.generate(fakes.request("slow", steps=9), out=tmp_path):
        if isinstance(event, Progress) and event.stage == "denoise":
            steps.append(event.done)
            if event.done == 2:
                shared.cancel("r1")
    assert isinstance(event, Failure) and event.cancelled
    assert steps in ([1, 2], [1, 2, 3])


def test_a_late_cancel_does_not_touch_the_next_request(shared: Engine, tmp_path: Path) -> None:
    list(shared.generate(fakes.request(id="first"), out=tmp_path, media=False))
    shared.cancel("first")
    *_, last = shared.generate(fakes.request(id="second"), out=tmp_path, media=False)
    assert isinstance(last, Result) and last.request_id == "second"


def test_a_reader_that_goes_away_cancels_its_request(shared: Engine, tmp_path: Path) -> None:
    reader = shared.generate(fakes.request("slow", id="left", steps=50), out=tmp_path)
    next(reader)
    reader.close()
    *events, last = shared.generate(fakes.request(id="next"), out=tmp_path, media=False)
    assert isinstance(last, Result) and last.request_id == "next"
    assert all(getattr(e, "request_id", "next") == "next" for e in events)


def test_a_non_finite_tensor_fails_with_stage_step_and_tensor(
    shared: Engine, tmp_path: Path
) -> None:
    *_, last = shared.generate(fakes.request("fail"), out=tmp_path)
    assert (last.stage, last.reason) == (
        "denoise, step 2",
        "video velocity at step 2 has 3 non-finite values",
    )


def test_an_unforeseen_error_is_one_sentence_with_its_traceback_apart(
    shared: Engine, tmp_path: Path
) -> None:
    *_, last = shared.generate(fakes.request("crash"), out=tmp_path)
    assert last.reason == "RuntimeError: matrix sizes do not match"
    assert "Traceback" in last.details and not last.cancelled


def test_a_full_disk_is_a_failure_of_the_stage_that_wrote(shared: Engine, tmp_path: Path) -> None:
    *_, last = shared.generate(fakes.request("full"), out=tmp_path)
    assert (last.stage, last.reason) == ("mux", "no space left on device")


def test_a_failed_request_frees_its_tensors_and_the_next_one_works(
    shared: Engine, tmp_path: Path
) -> None:
    list(shared.generate(fakes.request("fail"), out=tmp_path))
    *events, last = shared.generate(fakes.request(), out=tmp_path, media=False)
    assert isinstance(last, Result)
    assert "tensor of the last request: freed" in [e.text for e in events if isinstance(e, Note)]


def test_a_killed_rank_is_reported_and_the_engine_starts_again(own: Engine, tmp_path: Path) -> None:
    first = own.pids
    for event in own.generate(fakes.request("slow"), out=tmp_path):
        if isinstance(event, Progress) and event.stage == "denoise":
            os.kill(first[0], signal.SIGKILL)
    assert isinstance(event, Failure) and event.stage == "denoise"
    assert event.reason.startswith("rank 0 died (exit code -9")
    assert not own.alive
    assert isinstance(list(own.start())[-1], Ready) and own.pids != first
    assert isinstance(list(own.generate(fakes.request(), out=tmp_path))[-1], Result)


def test_the_death_of_one_of_two_ranks_ends_both(tmp_path: Path) -> None:
    with Engine(fakes.plan(layout="U2"), families=fakes.FAMILIES) as engine:
        assert [type(e) for e in engine.start()].count(Ready) == 1
        pids = engine.pids
        for event in engine.generate(fakes.request("slow"), out=tmp_path, media=False):
            if isinstance(event, Progress) and event.stage == "denoise":
                os.kill(pids[1], signal.SIGKILL)
        assert event.reason.startswith("rank 1 died")
        assert not any(psutil.pid_exists(pid) for pid in pids)


def test_an_engine_that_cannot_load_says_why_and_leaves_no_process() -> None:
    engine = Engine(fakes.plan("broken"), families=fakes.FAMILIES)
    *_, last = engine.start()
    assert isinstance(last, Failure) and last.stage == "load"
    assert last.reason.startswith("dit.safetensors is truncated")
    assert not engine.alive and engine.pids == ()


def test_an_unknown_family_is_refused_by_name() -> None:
    *_, last = Engine(fakes.plan(), families={"h3": "runtime.h3.pipeline"}).start()
    assert last.reason == "plan field family must be one of h3, got 'fake'"


def test_close_may_be_called_twice_and_leaves_no_process(own: Engine) -> None:
    (pid,) = own.pids
    own.close()
    own.close()
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize(
    ("plan", "do"),
    [
        ("long load", "engine._spawn()"),  # the rank's Python starts
        ("long load", "[e for _, e in zip(range(3), engine.start())]"),  # it loads
        ("fake", "list(engine.start())"),  # it waits
        ("fake", "list(engine.start()); next(engine.generate(fakes.request('slow'), out=out))"),
    ],
)
def test_a_console_killed_outright_leaves_no_process(plan: str, do: str, tmp_path: Path) -> None:
    code = (
        "import pathlib, sys, time; sys.path.insert(0, '.')\n"
        "from runtime.engine import Engine; from tests import fakes\n"
        "if __name__ == '__main__':\n"
        f"    out = pathlib.Path({str(tmp_path)!r})\n"
        f"    engine = Engine(fakes.plan({plan!r}), families=fakes.FAMILIES)\n"
        f"    kept = {do}; print(flush=True); time.sleep(60)\n"
    )
    shared_memory = set(os.listdir("/dev/shm"))
    script = [sys.executable, "-c", code]
    with subprocess.Popen(script, cwd=ROOT, stdout=subprocess.PIPE, text=True) as console:
        assert console.stdout is not None
        console.stdout.readline()
        family = psutil.Process(console.pid).children(recursive=True)
        assert family
        console.kill()
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive, "a process outlived its console"
    until = time.monotonic() + 10
    while (left := set(os.listdir("/dev/shm")) - shared_memory) and time.monotonic() < until:
        time.sleep(0.1)  # other programs of this machine make and remove theirs meanwhile
    assert not left


def test_the_console_side_of_the_engine_never_imports_torch() -> None:
    code = "import sys, runtime.engine; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_a_rank_does_not_end_it(
    shared: Engine, tmp_path: Path, number: signal.Signals
) -> None:
    for event in shared.generate(fakes.request(), out=tmp_path, media=False):
        if isinstance(event, Progress) and event.stage == "denoise":
            os.kill(shared.pids[0], number)
    assert isinstance(event, Result)


def test_a_cancel_that_overtakes_its_request_stops_it_at_once(own: Engine, tmp_path: Path) -> None:
    own.cancel("soon")
    *events, last = own.generate(fakes.request("slow", id="soon", steps=9), out=tmp_path)
    assert isinstance(last, Failure) and last.cancelled
    assert not any(isinstance(e, Progress) and e.stage == "denoise" for e in events)
    assert isinstance(list(own.generate(fakes.request(), out=tmp_path))[-1], Result)


def test_a_load_ends_at_once_when_it_is_killed() -> None:
    with Engine(fakes.plan("long load"), families=fakes.FAMILIES) as engine:
        began = time.monotonic()
        for event in engine.start():
            if isinstance(event, Progress) and event.done == 2:
                (pid,) = engine.pids
                engine.cancel("r1")  # a load does not hear it
                engine.kill()
        assert isinstance(event, Failure)
        assert (
            event.reason == "the engine was stopped during load; the engine must be started again"
        )
        assert time.monotonic() - began < 20 and not psutil.pid_exists(pid)


def test_a_kill_while_the_ranks_are_spawned_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(fakes.plan("long load"), families=fakes.FAMILIES)
    close = engine.close

    def close_then_be_killed() -> None:
        close()
        engine.kill()  # from another thread, between the check and the spawn

    monkeypatch.setattr(engine, "close", close_then_be_killed)
    *_, last = engine.start()
    assert isinstance(last, Failure) and last.reason.startswith("the engine was stopped")


def resources() -> tuple[int, frozenset[str], frozenset[int]]:
    """Open descriptors, shared memory and living children of this process."""
    children = psutil.Process().children(recursive=True)
    return (
        len(os.listdir("/proc/self/fd")),
        frozenset(os.listdir("/dev/shm")),
        frozenset(child.pid for child in children),
    )


def test_three_kills_and_restarts_leave_nothing_behind(tmp_path: Path) -> None:
    with Engine(fakes.plan(), families=fakes.FAMILIES) as engine:
        list(engine.start())
        engine.close()
        before, memory = resources(), psutil.Process().memory_info().rss
        for round in range(3):
            assert isinstance(list(engine.start())[-1], Ready)
            (pid,) = engine.pids
            for event in engine.generate(fakes.request("slow"), out=tmp_path / str(round)):
                if isinstance(event, Progress) and event.stage == "denoise":
                    os.kill(pid, signal.SIGKILL)
            assert isinstance(event, Failure)
            engine.close()
            assert not psutil.pid_exists(pid)
        assert resources() == before
        assert psutil.Process().memory_info().rss < memory + (8 << 20)
