"""Plan field transport = copy_engine: ranks write their messages into each other's memory.

A GPU's copy engines do it, which take no processor from what is computed meanwhile: NCCL's kernels
do, and hide two fifths of an exchange behind attention, copies all of it (docs/experiments.md).
torch's symmetric memory maps the windows and meets; one host, GPUs that reach each other's memory.

Run on two GPUs. The order of meeting, writing and reading is tested on CPU ranks that share memory
as well (tests/unit/test_parallel_copies.py).
"""

from __future__ import annotations

import functools
import math
import os
import socket
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.kernels.elementwise.base import Copy
from runtime.kernels.unavailable import Unavailable
from runtime.messages import Plan
from runtime.parallel.mesh import BACKSTOP, Group, Landing, Mesh

NAME = "transport copy_engine"
# Of one evaluation: three messages there, one for all that comes back, and what is predicted; with
# memory low seven, as groups of heads differ in size. Two sides of a request have their own rows.
MOST_WINDOWS = 16
# Nothing here writes to all at once, and a fault of NVLink multicast outlives the program.
_NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


class Window(Protocol):
    """As many bytes in each member's memory, to which all members write."""

    def of(self, member: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """That member's, contiguous from the first byte on."""

    def meet(self) -> None:
        """The current stream goes on once those of all members are here."""


@dataclass(frozen=True, slots=True)
class Ends:
    """What a member says of an exchange, in values."""

    to: tuple[int, ...]
    of: tuple[int, ...]


class CopyEngine:
    """Exchanges of one group. agree: every member's value, on every member; open: a window of so
    many bytes, of all members at once; copy: to another member's memory.

    What an exchange returns lies in its window, which the next one of the same shapes and place
    writes over: its readers must be in the current stream by then.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        agree: Callable[[Ends], list[Ends]],
        open: Callable[[int], Window],
        settled: Callable[[], None],
        copy: Copy,
    ) -> None:
        self._rank, self._size = rank, size
        self._agree, self._open, self._settled, self._copy = agree, open, settled, copy
        self._agreed: dict[Ends, list[Landing]] = {}
        self._windows: OrderedDict[Hashable, tuple[Window, int]] = OrderedDict()

    @property
    def num_bytes(self) -> int:
        """Of this member's windows; symmetric memory is not of torch's allocator."""
        return sum(num_bytes for _, num_bytes in self._windows.values())

    def exchange(self, sent_N: Tensor, to: Sequence[int], of: Sequence[int], place: int) -> Tensor:
        """As mesh.Group.exchange, in the current stream."""
        pieces, landings = sent_N.split(list(to)), self._landings(Ends(tuple(to), tuple(of)))
        received = self.put(pieces, landings, place)
        self._copy(received[landings[self._rank].part], pieces[self._rank])
        return received

    def put(self, pieces: Sequence[Tensor], landings: Sequence[Landing], place: int) -> Tensor:
        """As mesh.Group.put but for the member's own piece, in the current stream."""
        dtype = pieces[self._rank].dtype
        window = self._window(landings, place, dtype)
        window.meet()  # whoever reads what the last exchange left has read it
        for distance in range(1, self._size):  # each member from another
            member = (self._rank + distance) % self._size
            shape, part = landings[member]
            self._copy(window.of(member, shape, dtype)[part], pieces[member])
        window.meet()  # everything is there
        return window.of(self._rank, landings[self._rank].shape, dtype)

    def _landings(self, ends: Ends) -> list[Landing]:
        """Sizes tell of all members, so all ask for new ones in the same call."""
        if ends not in self._agreed:
            every = self._agree(ends)
            assert all(one.to[self._rank] == n for one, n in zip(every, ends.of, strict=True))
            found = []
            for member, other in enumerate(every):
                start = sum(other.of[: self._rank])
                mine = slice(start, start + ends.to[member])
                found.append(Landing((sum(other.of),), (mine,)))
            self._agreed[ends] = found
        return self._agreed[ends]

    def _window(self, landings: Sequence[Landing], place: int, dtype: torch.dtype) -> Window:
        shapes = tuple(landing.shape for landing in landings)  # the same on all members
        key = (shapes, place, dtype)
        if key not in self._windows:
            if len(self._windows) == MOST_WINDOWS:
                self._settled()
                self._windows.popitem(last=False)
            num_bytes = dtype.itemsize * max(map(math.prod, shapes))
            self._windows[key] = self._open(num_bytes), num_bytes
        self._windows.move_to_end(key)
        return self._windows[key][0]


def lines(x: Tensor) -> Tensor:
    """[lines, values] that one copy of an engine can read or write, a view.

    RuntimeError, torch's, for lines that do not lie equally far from each other.
    """
    assert x.stride(-1) == 1 or x.shape[-1] == 1, "a line is contiguous"
    return x.view(math.prod(x.shape[:-1]), x.shape[-1])


def copy_lines(into: Tensor, source: Tensor) -> None:
    """into[...] = source by a copy engine, in the current stream; of one shape and dtype, CUDA.

    Both are `lines`. torch's own copy of such views is a kernel.
    """
    from cuda.bindings import runtime as cuda  # torch's CUDA builds need it

    to, of = lines(into), lines(source)
    assert to.shape == of.shape and to.dtype == of.dtype
    if not to.numel():
        return
    item = to.itemsize
    (failed,) = cuda.cudaMemcpy2DAsync(
        to.data_ptr(),
        to.stride(0) * item,
        of.data_ptr(),
        of.stride(0) * item,
        to.shape[1] * item,
        to.shape[0],
        cuda.cudaMemcpyKind.cudaMemcpyDefault,
        torch.cuda.current_stream(of.device).cuda_stream,
    )
    if failed != cuda.cudaError_t.cudaSuccess:
        raise RuntimeError(f"cudaMemcpy2DAsync: {failed.name}")


class SymmetricWindow:
    """torch's symmetric memory."""

    def __init__(self, members: dist.ProcessGroup, device: torch.device, num_bytes: int) -> None:
        from torch.distributed import _symmetric_memory as symmetric

        os.environ.setdefault(_NO_MULTICAST, "1")  # read when the first window is mapped
        self._own = symmetric.empty(num_bytes, dtype=torch.uint8, device=device)
        # It is filled with zeros, and the words in which members meet with it, on the default
        # stream: whoever signalled before that would wait for ever. Nobody goes on from the
        # rendezvous before all are in it. What that lays on the device (the members' addresses)
        # may be on its way in the same stream, and the line does not wait for that one.
        torch.cuda.synchronize(device)
        self._handle: Any = symmetric.rendezvous(self._own, members)
        torch.cuda.synchronize(device)

    def of(self, member: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A view; another member's memory has this process's device too."""
        found: Tensor = self._handle.get_buffer(member, tuple(shape), dtype)
        return found

    def meet(self) -> None:
        """A kernel of one block waits; with CUDA's error after the time that NCCL has."""
        self._handle.barrier(0, round(1000 * BACKSTOP.total_seconds()))


def copies(plan: Plan, mesh: Mesh) -> bool:
    """Are there rows to exchange so?"""
    return plan.transport == "copy_engine" and mesh.rows.size > 1


def by_copy_engine(group: Group, device: torch.device) -> Group:
    """The same group, whose exchanges go by copy engines; every member calls it at the same time.

    Unavailable, on all members, where one cannot reach another's memory.
    """
    assert group.members is not None, "a rank alone exchanges nothing"
    gathered = functools.partial(_gathered, group.members, group.size)
    index = torch.cuda.current_device() if device.index is None else device.index
    places = gathered((socket.gethostname(), index))
    reasons = [reason for reason in gathered(_obstacle(places, group.rank)) if reason]
    if reasons:
        raise Unavailable(NAME, f"{reasons[0]}; choose transport collective")
    engine = CopyEngine(
        group.rank,
        group.size,
        agree=gathered,
        open=functools.partial(SymmetricWindow, group.members, torch.device("cuda", index)),
        settled=functools.partial(torch.cuda.synchronize, index),
        copy=copy_lines,
    )
    return replace(group, copies=engine)


def _gathered(members: dist.ProcessGroup, size: int, value: Any) -> list[Any]:
    found = [None] * size
    dist.all_gather_object(found, value, group=members)
    return found


def _obstacle(places: Sequence[tuple[str, int]], rank: int) -> str:
    """Why this rank does not reach the others' memory; "" where it does. places: host and GPU."""
    host, own = places[rank]
    for other_host, other in places:
        if other_host != host:
            return f"ranks on hosts {host} and {other_host} share no memory"
        if other != own and not torch.cuda.can_device_access_peer(own, other):
            return f"GPU {own} does not reach the memory of GPU {other}"
    return ""
