"""CUDA graphs of a callable over tensors: one per exact key, replayed over buffers of its own.

A graph reads and writes the addresses that it was captured with. So the operands of a call are
copied into buffers that belong to the graph before each replay, and its results are copied out
after it: nothing of an earlier request is read, and nothing that a caller holds is written. What
else the callable reads must outlive the graph: weights, and what `holding` returns. What it does on
the host (branches, sizes, Python numbers) is frozen at capture and must be in the key.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from runtime.kernels.unavailable import Unavailable

MOST_GRAPHS = 4  # two sides, and a schedule whose number of distinct times changes once

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A captured call: `replay` runs it again, into the same `results`."""

    replay: Callable[[], None]
    results: Tensors


class Recorder(Protocol):
    """How a call is captured: CudaRecorder, or what a test puts in its place."""

    pool_bytes: int  # device memory that the captured calls' own tensors lie in

    def warm_up(self, call: Callable[[], Tensors]) -> Tensors:
        """Runs the call once, uncaptured, as a capture may neither compile nor wait."""

    def record(self, call: Callable[[], Tensors]) -> Recording:
        """Captures the call without running it."""

    def settle(self) -> None:
        """Waits until no recording runs any more."""


class CudaRecorder:
    """Captures on a GPU; all graphs share one memory pool, as only one of them runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self.pool_bytes = 0
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, call: Callable[[], Tensors]) -> Tensors:
        """On a stream of its own, as captures are; the results are good for the current stream."""
        current, side = torch.cuda.current_stream(self._device), torch.cuda.Stream(self._device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            results = call()
        current.wait_stream(side)
        for result in results:
            result.record_stream(current)
        return results

    def record(self, call: Callable[[], Tensors]) -> Recording:
        """Unavailable if something in the call cannot be captured."""
        self.settle()
        torch.cuda.empty_cache()  # of the warm-up: else its activations stay beside the graph's
        before = torch.cuda.memory_reserved(self._device)
        graph = torch.cuda.CUDAGraph()
        try:
            # thread_local: the thread that reads finished steps queries events meanwhile
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                results = call()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._pool = torch.cuda.graph_pool_handle()  # a pool whose capture failed stays closed
            said = str(error.__context__ or error).splitlines()[0]  # leaving it fails as well
            raise Unavailable(
                "graphs", f"a step of this plan cannot be captured ({said}); set graphs to false"
            ) from error
        self.pool_bytes += max(0, torch.cuda.memory_reserved(self._device) - before)
        return Recording(replay=graph.replay, results=results)

    def settle(self) -> None:
        """Waits for the device."""
        torch.cuda.synchronize(self._device)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Graph:
    operands: list[Tensor]
    recording: Recording
    held: Sequence[Tensor]


class Graphs:
    """The graphs of one callable, the least recently used of more than `most` given up."""

    def __init__(self, recorder: Recorder, most: int = MOST_GRAPHS) -> None:
        self._recorder, self._most = recorder, most
        self._graphs: dict[Hashable, _Graph] = {}

    def __len__(self) -> int:
        return len(self._graphs)

    @property
    def pool_bytes(self) -> int:
        """Device memory of the graphs' pool, which torch counts as allocated in no replay."""
        return self._recorder.pool_bytes

    def run(
        self,
        key: Hashable,
        call: Callable[[Sequence[Tensor]], Tensors],
        operands: Sequence[Tensor],
        holding: Callable[[], Sequence[Tensor]],
    ) -> Tensors:
        """What call(operands) returns, in new tensors.

        The first call of a key runs uncaptured and is captured; shapes, strides and dtypes of the
        operands belong to the key. `call` must not write into its operands. `holding`, asked after
        the capture: tensors besides the operands that the graph reads and its maker may drop.
        """
        full = (key, tuple((t.shape, t.stride(), t.dtype) for t in operands))
        graph = self._graphs.pop(full, None)
        if graph is None:
            return self._first(full, call, operands, holding)
        self._graphs[full] = graph  # the last is the one used last
        torch._foreach_copy_(graph.operands, list(operands))
        graph.recording.replay()
        return tuple(result.clone() for result in graph.recording.results)

    def _first(
        self,
        full: Hashable,
        call: Callable[[Sequence[Tensor]], Tensors],
        operands: Sequence[Tensor],
        holding: Callable[[], Sequence[Tensor]],
    ) -> Tensors:
        own = _copies(operands)
        results = self._recorder.warm_up(lambda: call(own))
        recording = self._recorder.record(lambda: call(own))
        self._graphs[full] = _Graph(operands=own, recording=recording, held=holding())
        if len(self._graphs) > self._most:
            # After the capture: a pool without a graph could not be used again.
            self._recorder.settle()
            del self._graphs[next(iter(self._graphs))]
        return results


def _copies(operands: Sequence[Tensor]) -> list[Tensor]:
    """Buffers of the same strides where an operand is dense, else contiguous ones.

    Strides can choose the GEMM kernel, and with it the bits. Not inference tensors: a replay
    outside inference mode writes them as well.
    """
    with torch.inference_mode(False):
        own = [torch.empty_like(t) for t in operands]
    torch._foreach_copy_(own, list(operands))
    return own
