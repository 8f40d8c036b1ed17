"""Streams of a GPU on which the turns of a block's attention run, an earlier turn first.

A kernel's last blocks leave processors free: on 132 of them, attention of 20,094 rows in turns of
4, 20 and 4 heads takes as long as 34.0 rounds of blocks, and has 33.3. In one stream the next turn
waits for the last block; in lanes of falling priority its blocks fill what is free.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

# Torch has priorities 0 to -3; the line between ranks comes before all lanes, as its kernels are
# one block that others wait for.
LINE, FIRST, LAST = -3, -2, 0


@functools.cache
def _stream(device: torch.device, priority: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=priority)


def _lane(device: torch.device, place: int) -> torch.cuda.Stream:
    return _stream(device, min(FIRST + place, LAST))


@contextmanager
def in_lane(device: torch.device, place: int) -> Iterator[None]:
    """What is queued within runs in the lane of the turn at `place`, after what is queued now.

    Memory that it makes belongs to the lane: it may be let go once the current stream has joined
    it, and whatever else reads it.
    """
    lane = _lane(device, place)
    lane.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(lane):
        yield


def join(device: torch.device, places: Iterable[int]) -> None:
    """The current stream goes on after what is queued in these lanes."""
    for place in places:
        torch.cuda.current_stream(device).wait_stream(_lane(device, place))
