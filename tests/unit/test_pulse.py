"""When a rank hangs: silent, in a step that does not end, in a tile that does not end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from runtime import pulse
from runtime.clock import DENOISE, MUX, VIDEO_VAE_DECODE, StageClock
from runtime.engine import Engine, Lost
from runtime.messages import Beat, Event, Failure, Progress, Ready, Ref2VARequest, Result
from runtime.pulse import Heart, Pulse
from tests import fakes, stuck_decode
from tests.denoiser_parts import demo_plan

SILENCE = 3.0
BOTH = [0, 1]


@dataclass
class Now:
    """A clock that the test turns."""

    seconds: float = 100.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Now:
    clock = Now()
    monkeypatch.setattr(time, "monotonic", clock)
    return clock


def beating(seen: Pulse, now: Now, seconds: float, beats: list[Beat]) -> str:
    """What is wrong, if anything, by the end of that time, in which the beats do not change."""
    for _ in range(int(seconds)):
        now.seconds += 1
        for rank, beat in enumerate(beats):
            seen.hear(rank, beat)
        if found := seen.trouble(BOTH):
            return found[1]
    return ""


def test_a_tile_may_take_five_times_the_slowest_and_a_minute_at_least(now: Now) -> None:
    seen = Pulse(2, 20.0, 120.0)
    first = Beat(tiles=1, in_tile=True)
    assert beating(seen, now, 599, [first, first]) == ""  # kernels are compiled
    later = [Beat(tiles=2, in_tile=True, slowest=2.0), Beat(tiles=2, in_tile=True)]
    assert beating(seen, now, 60, later) == ""
    assert beating(seen, now, 2, later) == "rank 1 hung (no tile has ended for 61 s)"
    seen = Pulse(2, 20.0, 120.0)
    slow = [Beat(tiles=2, in_tile=True, slowest=30.0), Beat(tiles=2, in_tile=True, slowest=1.0)]
    assert beating(seen, now, 150, slow) == ""
    assert "no tile has ended for 151 s" in beating(seen, now, 2, slow)


def test_until_rank_0_has_ended_one_the_others_are_given_time(now: Now) -> None:
    """On a GPU they do not wait for what they began."""
    seen = Pulse(2, 20.0, 120.0)
    beats = [Beat(tiles=1, in_tile=True), Beat(tiles=3, in_tile=True, slowest=0.01)]
    assert beating(seen, now, 599, beats) == ""


def test_a_tile_that_is_told_starts_the_time_anew(now: Now) -> None:
    seen = Pulse(2, 20.0, 120.0)
    beats = [Beat(tiles=2, in_tile=True, slowest=2.0), Beat(tiles=5, slowest=0.1)]
    for _ in range(3):
        assert beating(seen, now, 50, beats) == ""
        seen.hear(0, None)  # Progress
    assert "rank 0 hung" in beating(seen, now, 62, beats)


@pytest.mark.parametrize("beat", [Beat(), Beat(steps=9, seconds=1.0), Beat(tiles=7, slowest=1.0)])
def test_outside_of_steps_and_tiles_a_rank_that_beats_may_take_any_time(
    now: Now, beat: Beat
) -> None:
    assert beating(Pulse(2, 20.0, 120.0), now, 5000, [beat, beat]) == ""


def test_a_rank_that_gets_no_tile_waits_for_what_rank_0_decodes_encodes_and_writes(
    now: Now,
) -> None:
    """More ranks than batches of tiles: the last step was the last that it told of."""
    seen = Pulse(2, 20.0, 120.0)
    waits = Beat(steps=9, in_step=True, seconds=1.0)
    for rank_0 in (
        Beat(steps=9, seconds=1.0),  # the sound, the mp4
        Beat(steps=9, seconds=1.0, tiles=2, in_tile=True, slowest=30.0),
    ):
        assert beating(seen, now, 149, [rank_0, waits]) == ""
    assert beating(Pulse(2, 20.0, 120.0), now, 22, [waits, waits]) != ""


def test_time_in_which_the_engine_itself_stood_still_does_not_count(now: Now) -> None:
    """Stopped with all its ranks (Ctrl-Z, a paused container), it may be the first to go on."""
    seen = Pulse(2, 20.0, 120.0)
    beats = [Beat(steps=2, in_step=True, seconds=1.0), Beat(tiles=1, in_tile=True, slowest=1.0)]
    assert beating(seen, now, 10, beats) == ""
    now.seconds += 5000
    assert seen.trouble(BOTH) is None
    assert beating(seen, now, 5, beats) == ""
    for _ in range(21):
        now.seconds += 1
        found = seen.trouble(BOTH)
    assert found is not None and "silent for 21 s" in found[1]


def test_a_heart_tells_tiles_and_steps_apart(now: Now) -> None:
    told: list[Beat] = []
    clock = StageClock(watched=Heart(told.append, VIDEO_VAE_DECODE).stage)
    with clock.stage(DENOISE, step=0):
        now.seconds += 4
    with clock.stage(MUX, exclusive=True):
        for seconds in (3, 2):
            with clock.stage(VIDEO_VAE_DECODE):
                now.seconds += seconds
            now.seconds += 7  # the encoder
    assert told == [
        Beat(steps=1, in_step=True),
        Beat(steps=1, seconds=4.0),
        Beat(steps=1, seconds=4.0, tiles=1, in_tile=True),
        Beat(steps=1, seconds=4.0, tiles=1, slowest=3.0),
        Beat(steps=1, seconds=4.0, tiles=2, in_tile=True, slowest=3.0),
        Beat(steps=1, seconds=4.0, tiles=2, slowest=3.0),
    ]


def decoding(way: str) -> Iterator[Engine]:
    """Two started ranks of the demo model."""
    plan = demo_plan(name=way, text_encoder="resident", threads=1, layout="U2")
    with Engine(plan, families=stuck_decode.FAMILIES, silence_seconds=SILENCE) as engine:
        assert isinstance(list(engine.start())[-1], Ready)
        yield engine


def request(frames: int) -> Ref2VARequest:
    """Of 288 lines: two tiles a clip, one for each rank."""
    return Ref2VARequest(
        id="r", prompt="a calm sea", width=64, height=288, frames=frames, steps=2, seed=5
    )


def test_a_rank_that_stops_in_an_exchange_of_the_decode_hangs(tmp_path: Path) -> None:
    """It and rank 0 beat on: each waits for the other."""
    for engine in decoding("stuck 3"):
        tiles, began = 0, 0.0
        for event in engine.generate(request(73), out=tmp_path, media=False, preview=False):
            if isinstance(event, Progress) and event.stage == VIDEO_VAE_DECODE:
                tiles, began = event.done, time.monotonic()
        assert isinstance(event, Failure) and (event.rank, event.stage) == (1, VIDEO_VAE_DECODE)
        assert event.reason.startswith("rank 1 hung (no tile has ended for ")
        assert tiles == 4  # of two rounds
        assert 3 * SILENCE - 1 < time.monotonic() - began < 3 * SILENCE + 20
        assert not engine.alive


def test_slow_tiles_are_waited_for(tmp_path: Path) -> None:
    """Each takes longer than a rank may be silent."""
    for engine in decoding("slow 5"):
        *_, last = engine.generate(request(39), out=tmp_path, media=False, preview=False)
        assert isinstance(last, Result), last


def test_a_console_that_stood_still_finds_no_rank_hanging(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stops within a step; what the ranks said of later ones lies in their pipes.

    That is read first, were the time to count.
    """
    monkeypatch.setattr(pulse, "_LOOK_SECONDS", 100.0)
    stood: list[int] = []
    read = Engine._read

    def slow(engine: Engine, number: int) -> Event | Lost | None:
        said = read(engine, number)
        if said is None and not stood and engine._pulse._beats[number].steps == 2:
            stood.append(number)
            time.sleep(2 * SILENCE)
        return said

    monkeypatch.setattr(Engine, "_read", slow)
    plan = fakes.plan(layout="U2")
    with Engine(plan, families=fakes.FAMILIES, silence_seconds=SILENCE) as engine:
        list(engine.start())
        asked = fakes.request("slow", steps=20)
        *_, last = engine.generate(asked, out=tmp_path, media=False, preview=False)
    assert stood and isinstance(last, Result), last
