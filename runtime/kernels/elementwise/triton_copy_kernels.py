"""A Triton kernel that copies between strided tensors of contiguous runs; needs `triton`.

torch's own copy of such views counts the offset of every value: it moved 1.5 TB/s on an H200, which
has 4.8 (docs/benchmarks/h200x2_sweep_202611.md: the messages of two ranks).
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

OUTER = 3  # most dims around a run
RUNS, VALUES = 4, 1024  # of a program


@triton.jit
def _copy_runs(
    into,
    source,
    count,
    n1,
    n2,
    run,
    i0,
    i1,
    i2,
    s0,
    s1,
    s2,
    RUNS: tl.constexpr,
    VALUES: tl.constexpr,
):
    parts = tl.cdiv(run, VALUES)
    at = (tl.program_id(0) // parts * RUNS + tl.arange(0, RUNS))[:, None]
    cols = (tl.program_id(0) % parts * VALUES + tl.arange(0, VALUES))[None, :]
    mask = (at < count) & (cols < run)
    third = (at % n2).to(tl.int64)
    second = ((at // n2) % n1).to(tl.int64)
    first = (at // (n1 * n2)).to(tl.int64)
    value = tl.load(source + first * s0 + second * s1 + third * s2 + cols, mask=mask)
    tl.store(into + first * i0 + second * i1 + third * i2 + cols, value, mask=mask)


def copy(into: Tensor, source: Tensor) -> None:
    """into[...] = source, of the same shape and dtype; they do not overlap.

    ValueError for other shapes or dtypes, and for strides that leave more than three dims around
    runs that are contiguous in both.
    """
    if into.shape != source.shape or into.dtype != source.dtype:
        raise ValueError(
            f"a copy keeps shape and dtype, got {tuple(source.shape)} {source.dtype} into "
            f"{tuple(into.shape)} {into.dtype}"
        )
    if not into.numel():
        return
    sizes, to, of = merged(into.shape, into.stride(), source.stride())
    if to[-1] != 1 or of[-1] != 1 or len(sizes) > OUTER + 1:
        raise ValueError(
            f"the Triton copy takes runs in at most {OUTER} dims, got {tuple(source.shape)} of "
            f"strides {source.stride()} into {into.stride()}"
        )
    missing = OUTER + 1 - len(sizes)
    n0, n1, n2, run = [1] * missing + sizes
    count = n0 * n1 * n2
    grid = (triton.cdiv(count, RUNS) * triton.cdiv(run, VALUES),)
    to, of = [0] * missing + to, [0] * missing + of
    _copy_runs[grid](
        into, source, count, n1, n2, run, *to[:-1], *of[:-1], RUNS=RUNS, VALUES=VALUES, num_warps=4
    )


def merged(
    sizes: Sequence[int], to: Sequence[int], of: Sequence[int]
) -> tuple[list[int], list[int], list[int]]:
    """Sizes and both strides with as few dims as they have; at least one."""
    kept: list[tuple[int, int, int]] = []
    for size, a, b in zip(sizes, to, of, strict=True):
        if size == 1:
            continue
        if kept and (kept[-1][1], kept[-1][2]) == (size * a, size * b):
            kept[-1] = (kept[-1][0] * size, a, b)
        else:
            kept.append((size, a, b))
    kept = kept or [(1, 1, 1)]
    return [k[0] for k in kept], [k[1] for k in kept], [k[2] for k in kept]
