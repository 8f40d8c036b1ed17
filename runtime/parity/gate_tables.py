"""The table that a gate prints of one case."""

from __future__ import annotations

from collections.abc import Iterator

from runtime.parity.gate_judge import STREAMS, Verdict

_ROW = "{:>4} {:>8} {:>10} {:>10} {:>12} {:>12}  {}"


def lines(verdict: Verdict) -> Iterator[str]:
    """The table of one case."""
    yield f"{verdict.case}: {verdict.status}" + (f" ({verdict.reason})" if verdict.reason else "")
    yield f"  {verdict.label}"
    if verdict.changed:
        yield f"  {', '.join(verdict.changed)}"
    if verdict.limits is None:
        return
    yield f"  limits {_both(verdict.limits.of)} = {verdict.limits.why}"
    yield _ROW.format("step", "sigma", "video", "audio", "video x0", "audio x0", "relative L2")
    for index, step in enumerate(verdict.steps):
        beyond = [s for s in STREAMS if step.velocity[s].relative_l2 > verdict.limits.of[s]]
        yield _ROW.format(
            index + 1,
            f"{step.sigma:.4f}",
            *(f"{step.velocity[s].relative_l2:.2e}" for s in STREAMS),
            *(f"{step.denoised[s].relative_l2:.2e}" for s in STREAMS),
            (f"BEYOND: {', '.join(beyond)}" if beyond else "within")
            + (", by the cache" if index in verdict.skipped else ""),
        )
    yield f"  worst step {verdict.worst_step + 1}: {_worst(verdict)}"
    if verdict.free is not None:
        figures = {s: verdict.free[s].relative_l2 for s in STREAMS}
        cosines = ", ".join(f"{s} {verdict.free[s].cosine:.5f}" for s in STREAMS)
        yield f"  free run, final latents: {_both(figures)}; cosine {cosines}"
    yield from _blocks(verdict)


def _blocks(verdict: Verdict) -> Iterator[str]:
    if not verdict.blocks:
        return
    yield "  relative L2 of the target rows after each block (growth over the block before)"
    before = dict.fromkeys(STREAMS, 0.0)
    for index, block in enumerate(verdict.blocks):
        grown = [f"{s} {block[s]:.2e} ({block[s] - before[s]:+.2e})" for s in STREAMS]
        yield f"    block {index:2}: {', '.join(grown)}"
        before = block
    yield f"  largest jump: {jumps(verdict)}"


def jumps(verdict: Verdict) -> str:
    """ "video block 3, audio block 1": where the error of each stream grows most."""
    found = []
    for stream in STREAMS:
        errors = [block[stream] for block in verdict.blocks]
        growth = [b - a for a, b in zip([0.0, *errors], errors, strict=False)]
        found.append(f"{stream} block {max(range(len(growth)), key=growth.__getitem__)}")
    return ", ".join(found)


def _worst(verdict: Verdict) -> str:
    step = verdict.steps[verdict.worst_step]
    assert verdict.limits is not None
    of = verdict.limits.of
    return ", ".join(f"{s} {step.velocity[s].relative_l2:.2e} of {of[s]:.2e}" for s in STREAMS)


def _both(figures: dict[str, float]) -> str:
    return ", ".join(f"{stream} {figures[stream]:.2e}" for stream in STREAMS)
