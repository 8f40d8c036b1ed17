"""Who gets how much: contiguous shares whose sizes differ by one at most; nothing is padded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class RowShares:
    """How many rows each rank has in the running evaluation; set before its blocks run."""

    counts: tuple[int, ...] = ()


def shares(total: int, parts: int) -> tuple[int, ...]:
    """Sizes of `parts` shares in order, the larger ones first: 56 on 6 is 10, 10, 9, 9, 9, 9."""
    least, more = divmod(total, parts)
    return tuple(least + (part < more) for part in range(parts))


def ranges(counts: Sequence[int]) -> tuple[slice, ...]:
    """Where each share lies."""
    found, start = [], 0
    for count in counts:
        found.append(slice(start, start + count))
        start += count
    return tuple(found)


def row_shares(num_rows: int, parts: int, split: Sequence[float] = ()) -> tuple[int, ...]:
    """The rows of each rank; ValueError where a rank would have none.

    split: in which proportion, () for shares that differ by one at most.
    """
    if num_rows < parts:
        raise ValueError(
            f"the request has {num_rows} packed rows, too few for {parts} ranks that share them; "
            f"choose a layout with at most {num_rows}"
        )
    if not split or parts == 1:
        return shares(num_rows, parts)
    assert len(split) == parts, "check_split comes first"
    return _in_proportion(num_rows, split)


def _in_proportion(num_rows: int, split: Sequence[float]) -> tuple[int, ...]:
    """Whole rows next to the exact shares; the largest remainders are rounded up."""
    exact = [num_rows * part / sum(split) for part in split]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(split)), key=lambda rank: counts[rank] - exact[rank])
    for rank in by_remainder[: num_rows - sum(counts)]:
        counts[rank] += 1
    if min(counts) == 0:
        words = ":".join(f"{part:.9f}".rstrip("0").rstrip(".") for part in split)  # as it is given
        raise ValueError(
            f"the request has {num_rows} packed rows, and plan field row_split {words} leaves none "
            f"for rank {counts.index(0)} of those that share them; choose parts nearer to each "
            f"other, or none"
        )
    return tuple(counts)


def head_shares(num_heads: int, parts: int) -> tuple[int, ...]:
    """The heads of each rank; ValueError where a rank would have none."""
    if num_heads < parts:
        raise ValueError(
            f"the model has {num_heads} heads here, too few for {parts} ranks that share them; "
            f"choose a layout with at most {num_heads}"
        )
    return shares(num_heads, parts)


def unit_shares(width: int, parts: int, units: Sequence[int]) -> tuple[int, ...]:
    """Features of each rank in whole units, of the first of `units` that leaves no rank without.

    14336 on 6 in units of 128: 19, 19, 19, 19, 18, 18 of them. ValueError if none fits.
    """
    for unit in units:
        if width % unit == 0 and width // unit >= parts:
            return tuple(unit * count for count in shares(width // unit, parts))
    raise ValueError(
        f"{width} features cannot be shared among {parts} ranks in whole units of "
        f"{' or '.join(map(str, units))}; choose a layout with fewer tensor parallel ranks"
    )
