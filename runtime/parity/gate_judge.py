"""One gate: plan P against plan Q on one case, its limits and its verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from torch import Tensor

from runtime.checkpoints.base import UNQUANTISED, Checkpoint
from runtime.h3.denoise import Latents
from runtime.h3.linears import is_narrow
from runtime.kernels.unavailable import Unavailable
from runtime.messages import Plan
from runtime.parity.gate_cases import Case
from runtime.parity.gate_classes import EXACT, GateClass, class_of, classes_of, differing, guidance
from runtime.parity.gate_ranks import evaluations
from runtime.parity.gate_references import References, let_go
from runtime.parity.gate_runs import Trajectory, refusal
from runtime.parity.metrics import Comparison, compare

STREAMS = ("video", "audio")
PASSED, FAILED, UNAVAILABLE, IDLE = "passed", "FAILED", "unavailable", "not exercised"
FP32_FLOOR = 1e-6  # a limit below fp32's own rounding would say nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """How far P is from Q in one tensor."""

    relative_l2: float
    cosine: float
    max_abs: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """One forced evaluation, by stream; gated is the velocity, `denoised` is shown."""

    sigma: float
    velocity: dict[str, Figures]
    denoised: dict[str, Figures]
    within: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the velocity of a stream may be off by, and how that number came about."""

    classes: tuple[str, ...]
    of: dict[str, float]  # by stream
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a gate found on one case; status: passed | FAILED | unavailable | not exercised."""

    case: str
    label: str
    status: str
    reason: str = ""
    changed: tuple[str, ...] = ()  # "attention sage1 against sage2"
    limits: Limits | None = None
    steps: tuple[StepFigures, ...] = ()
    free: dict[str, Figures] | None = None  # the final latents of both plans' own runs
    blocks: tuple[dict[str, float], ...] = ()  # relative L2 of the rows after each block
    skipped: tuple[int, ...] = ()  # steps, from 0, that P's step cache answered when forced

    def worst(self, stream: str) -> float:
        """The largest relative L2 of the stream's velocity; 0 without steps."""
        return max((step.velocity[stream].relative_l2 for step in self.steps), default=0.0)

    @property
    def worst_step(self) -> int:
        """The step, from 0, that is nearest to its limit or furthest beyond it."""
        assert self.limits is not None
        of = self.limits.of

        def share(step: StepFigures) -> float:
            return max(step.velocity[s].relative_l2 / of[s] for s in STREAMS)

        return max(range(len(self.steps)), key=lambda k: share(self.steps[k]))


def stored_formats(checkpoint: Checkpoint) -> frozenset[str]:
    """Of the layers whose backend a plan names; with UNQUANTISED where a block has such layers."""
    quantised = checkpoint.layers
    found = {quant.format for quant in quantised.values() if not quant.full_precision}
    weights = (n.removesuffix(".weight") for n in checkpoint.names() if n.endswith(".weight"))
    if any(is_narrow(layer) and layer not in quantised for layer in weights):
        found.add(UNQUANTISED)
    return frozenset(found)


def judge(p: Plan, q: Plan, case: Case, references: References, block_step: int = -1) -> Verdict:
    """Q runs and is let go, then the yardstick, then P; block_step: whose blocks are compared.

    Unavailable when Q cannot run here: without a reference there is no verdict.
    """
    names = differing(p, q, stored_formats(case.open()))
    changed = tuple(f"{n} {getattr(p, n)} against {getattr(q, n)}" for n in names)
    if not names and p != q and _settings(p) != _settings(q):
        return Verdict(
            case=case.name,
            label=case.label,
            status=IDLE,
            reason="the checkpoint has no layer that the two plans compute differently",
        )
    if reason := refusal(p, case):
        return Verdict(
            case=case.name, label=case.label, status=UNAVAILABLE, reason=reason, changed=changed
        )
    reference = references.free(q, case, block_step)
    held = classes_of(p, q, names)
    limits = _limits(p, q, case, reference, held, references)
    try:
        forced, own = evaluations(p, case, reference, block_step)
    except Unavailable as error:  # a shape that its kernel refuses
        return Verdict(
            case=case.name,
            label=case.label,
            status=UNAVAILABLE,
            reason=str(error),
            changed=changed,
        )
    if "cache" in names and p.cache != "off" and not forced.skipped:
        return Verdict(
            case=case.name,
            label=case.label,
            status=IDLE,
            reason=f"the cache answered none of {case.num_steps} steps",
            changed=changed,
        )
    steps = tuple(
        _step(there.sigma, got.velocity, there.velocity, got.denoised, there.denoised, limits)
        for got, there in zip(forced.steps, reference.steps, strict=True)
    )
    let_go(p.device)
    return Verdict(
        case=case.name,
        label=case.label,
        status=PASSED if all(step.within for step in steps) else FAILED,
        changed=changed,
        limits=limits,
        steps=steps,
        free=_pair(own.final, reference.final),
        blocks=_blocks(forced, reference),
        skipped=forced.skipped,
    )


def _settings(plan: Plan) -> dict[str, object]:
    return {name: v for name, v in asdict(plan).items() if name not in ("name", "models")}


def _limits(
    p: Plan,
    q: Plan,
    case: Case,
    reference: Trajectory,
    held: Sequence[GateClass],
    references: References,
) -> Limits:
    """The classes' limits, added as squares."""
    dtype = "fp32" if p.dtype == q.dtype == "fp32" else "bf16"
    squares = dict.fromkeys(STREAMS, 0.0)
    said: dict[str, None] = {}
    measured: dict[str, dict[str, float] | None] = {}
    for one in held:
        if one.name not in measured:
            measured[one.name] = _yardstick(p, q, case, reference, one, said, references)
        distance = measured[one.name]
        guided = _guided(case)
        if distance is None:
            said[f"{one.name}: fixed {one.fixed(dtype):.2g}"] = None
        for stream in STREAMS:
            limit = (
                one.fixed(dtype) * guided
                if distance is None
                else one.factor * max(distance[stream], FP32_FLOOR)
            )
            squares[stream] += limit**2
    return Limits(
        classes=tuple(one.name for one in held),
        of={stream: math.sqrt(value) for stream, value in squares.items()},
        why="; ".join(said),
    )


def _yardstick(
    p: Plan,
    q: Plan,
    case: Case,
    reference: Trajectory,
    one: GateClass,
    said: dict[str, None],
    references: References,
) -> dict[str, float] | None:
    """The worst step of the class's yardstick, by stream; None where there is none.

    One that is itself beyond the class's fixed limit is broken, here or in Q: a limit made of it
    would let anything pass. One at distance 0 ran Q's own kernel (in fp32 on CUDA, sdpa_cudnn is
    sdpa): a limit made of it would let nothing pass.
    """
    most = one.fixed("fp32" if q.dtype == "fp32" else "bf16") * _guided(case)
    for other in _candidates(p, q, one):
        try:
            forced = references.yardstick(q, other, case, reference)
        except Unavailable:
            continue
        pairs = list(zip(forced.steps, reference.steps, strict=True))
        found = {
            s: max(_pair(a.velocity, b.velocity)[s].relative_l2 for a, b in pairs) for s in STREAMS
        }
        against = f"{other} against {q.attention}, this run"
        if not all(distance <= most for distance in found.values()):
            said[f"{one.name}: no yardstick is {against}: {max(found.values()):.2g} off"] = None
            continue
        if not any(found.values()):
            said[f"{one.name}: no yardstick is {against}: the same bits"] = None
            continue
        said[f"{one.name}: {one.factor:g} x {against}"] = None
        return found
    return None


def _guided(case: Case) -> float:
    """What a fixed limit is multiplied by on this case."""
    return 1.0 if case.negative is None else guidance()


def _candidates(p: Plan, q: Plan, one: GateClass) -> list[str]:
    """Attention backends whose distance from Q's is the yardstick; P's own would prove itself."""
    if p.dtype != q.dtype:  # a yardstick of one dtype says nothing about the other
        return []
    exact = class_of("attention", q.attention, q.kj_mode).name == EXACT
    names = [name for name in one.yardsticks(q.device) if name != p.attention]
    if exact:
        return [name for name in names if name != q.attention]
    # Q is lossy itself: its own distance from SDPA serves if Q is the yardstick
    return ["sdpa"] if one.name != EXACT and q.attention in names else []


def _step(
    sigma: float,
    velocity: Latents,
    velocity_q: Latents,
    denoised: Latents,
    denoised_q: Latents,
    limits: Limits,
) -> StepFigures:
    found = _pair(velocity, velocity_q)
    return StepFigures(
        sigma=sigma,
        velocity=found,
        denoised=_pair(denoised, denoised_q),
        within=all(found[s].relative_l2 <= limits.of[s] for s in STREAMS),
    )


def _pair(got: Latents, want: Latents) -> dict[str, Figures]:
    return {s: _figures(getattr(got, s), getattr(want, s)) for s in STREAMS}


def _figures(got: Tensor, want: Tensor) -> Figures:
    found: Comparison = compare("", got, want, run="gate", stage="")
    return Figures(relative_l2=found.relative_l2, cosine=found.cosine, max_abs=found.max_abs)


def _blocks(forced: Trajectory, reference: Trajectory) -> tuple[dict[str, float], ...]:
    if len(forced.blocks) != len(reference.blocks):  # a step cache ran fewer
        return ()
    return tuple(
        {
            stream: _figures(a[i].float(), b[i].float()).relative_l2
            for i, stream in enumerate(STREAMS)
        }
        for a, b in zip(forced.blocks, reference.blocks, strict=True)
    )
