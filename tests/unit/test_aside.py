"""Jobs in a thread of their own: order, a queue that ends, failures, cancelling."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import pytest

from runtime.cancel import Cancelled
from runtime.media import aside as module
from runtime.media.aside import Aside


def go_on() -> None:
    """The cancel check of a caller that never cancels."""


def test_jobs_run_in_order_in_another_thread() -> None:
    done: list[tuple[int, bool]] = []
    here = threading.get_ident()
    with Aside("jobs", waiting=2, check_cancel=go_on) as aside:
        for i in range(20):
            aside.put(lambda i=i: done.append((i, threading.get_ident() == here)))
        aside.finish()
    assert done == [(i, False) for i in range(20)]


def fail() -> None:
    raise OSError("no space")


def test_a_failing_job_surfaces_and_nothing_runs_after_it() -> None:
    ran: list[int] = []
    with (
        pytest.raises(OSError, match="no space"),
        Aside("jobs", waiting=1, check_cancel=go_on) as aside,
    ):
        aside.put(fail)
        aside.put(partial(ran.append, 1))
        aside.finish()
    assert ran == []


def test_the_last_jobs_failure_surfaces_too() -> None:
    with (
        pytest.raises(OSError, match="no space"),
        Aside("jobs", waiting=1, check_cancel=go_on) as aside,
    ):
        aside.put(go_on)
        aside.put(fail)
        aside.finish()


def until_stopped(aside: Aside) -> None:
    assert aside.stopped.wait(timeout=10)


@pytest.mark.parametrize("waits_in", [Aside.finish, lambda aside: aside.put(go_on)])
def test_a_waiting_caller_can_cancel(waits_in: Callable[[Aside], None]) -> None:
    cancelled = threading.Event()

    def check() -> None:
        if cancelled.is_set():
            raise Cancelled

    with pytest.raises(Cancelled), Aside("jobs", waiting=1, check_cancel=check) as aside:
        aside.put(partial(until_stopped, aside))  # runs
        aside.put(go_on)  # waits
        cancelled.set()
        waits_in(aside)


def test_time_is_counted_on_both_sides() -> None:
    release = threading.Event()
    with Aside("jobs", waiting=1, check_cancel=go_on) as aside:
        aside.put(lambda: release.wait(timeout=10) and None)
        threading.Timer(0.05, release.set).start()
        aside.finish()
    assert aside.busy_seconds >= 0.04 and aside.waited_seconds >= 0.04


@pytest.mark.parametrize("error", [None, Cancelled("enough")])
def test_a_job_that_never_ends_is_left_behind(
    error: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "END_SECONDS", 0.2)
    begun, release = threading.Event(), threading.Event()

    def endless() -> None:
        begun.set()
        release.wait(timeout=30)

    try:
        with (
            pytest.raises(TimeoutError if error is None else Cancelled) as left,
            Aside("mp4", waiting=1, check_cancel=go_on) as aside,
        ):
            aside.put(endless)
            assert begun.wait(timeout=10)
            if error is not None:
                raise error
        said = [str(left.value), *getattr(left.value, "__notes__", ())]
        assert any("mp4: a job that was told to stop has not ended" in text for text in said)
    finally:
        release.set()
