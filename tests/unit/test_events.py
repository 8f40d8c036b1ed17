"""The hub: who is told what, in which order, and what a page that was away gets."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from app.events import Hub


def run(test: Callable[[], Awaitable[Any]]) -> Any:
    """The coroutine's result, within ten seconds."""

    async def limited() -> Any:
        return await asyncio.wait_for(test(), 10)

    return asyncio.run(limited())


async def take(stream: AsyncIterator[str], count: int) -> list[tuple[str, str, Any]]:
    """The next events as (id, kind, data); retry, bare ids and comments are passed over."""
    found = []
    async for block in stream:
        lines = dict(
            line.split(": ", 1) for line in block.splitlines() if line[:1] not in (":", "")
        )
        if "event" in lines:
            found.append((lines["id"], lines["event"], json.loads(lines["data"])))
        if len(found) == count:
            break
    return found


async def opened(hub: Hub, name: str = "local", **options: Any) -> AsyncIterator[str]:
    """A stream that is listening."""
    stream = hub.stream(name, admin=options.pop("admin", False), **options)
    assert (await anext(stream)).startswith("retry: ")
    return stream


def test_events_come_in_order_with_ids_from_any_thread() -> None:
    async def test() -> None:
        hub = Hub()
        stream = await opened(hub)
        sender = threading.Thread(target=lambda: [hub.publish("job", {"n": n}) for n in range(50)])
        sender.start()
        got = await take(stream, 50)
        sender.join()
        assert [data["n"] for _, _, data in got] == list(range(50))
        assert [id for id, _, _ in got] == [f"{hub.boot}-{n}" for n in range(1, 51)]

    run(test)


def test_an_owner_s_events_reach_the_owner_and_admins_only() -> None:
    async def test() -> None:
        hub = Hub()
        anna, ben = await opened(hub, "anna"), await opened(hub, "ben")
        chief = await opened(hub, "chief", admin=True)
        hub.publish("job", {"of": "anna"}, owner="anna")
        hub.publish("queue", {"of": "all"})
        assert [data["of"] for _, _, data in await take(anna, 2)] == ["anna", "all"]
        assert [data["of"] for _, _, data in await take(chief, 2)] == ["anna", "all"]
        assert [data["of"] for _, _, data in await take(ben, 1)] == ["all"]

    run(test)


def test_a_page_that_comes_back_gets_what_it_missed_and_only_its_own() -> None:
    async def test() -> None:
        hub = Hub()
        for n in range(6):
            hub.publish("job", {"n": n}, owner="ben" if n == 4 else "")
        again = await opened(hub, "anna", last=f"{hub.boot}-3")
        hub.publish("job", {"n": 6})
        assert [data["n"] for _, _, data in await take(again, 3)] == [3, 5, 6]

    run(test)


def test_a_fresh_page_learns_where_it_stands_before_anything_happens() -> None:
    async def test() -> None:
        hub = Hub()
        hub.publish("job", {})
        stream = await opened(hub)
        assert await anext(stream) == f"id: {hub.boot}-1\n\n"

    run(test)


@pytest.mark.parametrize(
    "last", ["{boot}-1", "{boot}-99", "0badb007-5", "{boot}-", "nonsense", "{boot}-" + "9" * 5000]
)
def test_an_id_that_is_not_kept_gets_a_reset_and_then_what_is_new(last: str) -> None:
    async def test() -> None:
        hub = Hub(kept=3)
        for n in range(8):
            hub.publish("job", {"n": n})
        stream = await opened(hub, last=last.format(boot=hub.boot))
        hub.publish("job", {"n": 8})
        (id, kind, _), (_, _, data) = await take(stream, 2)
        assert (id, kind, data) == (f"{hub.boot}-8", "reset", {"n": 8})

    run(test)


def test_a_page_that_is_too_slow_gets_a_reset_and_its_stream_ends() -> None:
    async def test() -> None:
        hub = Hub(most_waiting=10)
        slow, quick = await opened(hub), await opened(hub)
        assert await anext(slow) == await anext(quick)
        for n in range(10):
            hub.publish("job", {"n": n})
        assert len(await take(quick, 10)) == 10
        hub.publish("job", {"n": 10})
        assert [kind for _, kind, _ in await take(slow, 99)] == ["reset"]
        assert [data["n"] for _, _, data in await take(quick, 1)] == [10]
        assert hub.readers == 1

    run(test)


def test_a_quiet_stream_is_kept_alive_by_comments() -> None:
    async def test() -> None:
        hub = Hub(keep_alive_seconds=0.02)
        stream = await opened(hub)
        await anext(stream)
        assert await anext(stream) == ": still here\n\n"

    run(test)


def test_a_stream_that_is_closed_is_forgotten() -> None:
    async def test() -> None:
        hub = Hub()
        stream = await opened(hub)
        assert hub.readers == 1
        await stream.aclose()  # type: ignore[attr-defined]
        assert hub.readers == 0

    run(test)


def test_closing_the_hub_ends_every_stream_at_once_and_later_ones_too() -> None:
    async def test() -> None:
        hub = Hub(keep_alive_seconds=60)
        stream = await opened(hub)
        threading.Timer(0.05, hub.close).start()
        assert await asyncio.wait_for(take(stream, 1), 2) == []
        assert await take(hub.stream("late", admin=False), 1) == []

    run(test)


def test_publishing_after_the_loop_is_gone_hurts_nobody() -> None:
    hub = Hub()

    async def leave_open() -> AsyncIterator[str]:
        return await opened(hub)

    stream = run(leave_open)
    hub.publish("job", {})
    hub.close()
    del stream


def test_a_number_that_is_none_is_refused_where_it_is_made() -> None:
    with pytest.raises(ValueError, match="JSON"):
        Hub().publish("telemetry", {"cpu": float("nan")})


def test_any_text_stays_one_line_of_the_stream() -> None:
    async def test() -> None:
        hub = Hub()
        stream = await opened(hub)
        text = "a\nb\r\n\ndata: x\u2028\ud800"
        hub.publish("job", {"prompt": text})
        ((_, _, data),) = await take(stream, 1)
        assert data["prompt"] == text

    run(test)
