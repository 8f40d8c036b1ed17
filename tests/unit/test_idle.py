"""The console's memory, as `launch.py serve` runs it; its CPU is for `python -m tests.idle`."""

from __future__ import annotations

from tests import idle


def test_an_idle_console_is_small_and_has_no_torch() -> None:
    report = idle.run(0.5)
    assert report["rss_bytes"] < idle.MOST_BYTES and not report["torch_loaded"]
