"""The three evaluations of a gate: a plan's own trajectory, another plan forced on it, and blocks.

Everything that is compared is kept on the host, so that one denoiser at a time is on the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from runtime.caches import COMPUTED
from runtime.h3.cached import CachedModel
from runtime.h3.conditioning import Conditioning
from runtime.h3.denoise import Latents, Side, StepResult, draw_noise, predicted, sample
from runtime.h3.graphed import eagerly
from runtime.h3.load import load_denoiser
from runtime.h3.model import H3Model
from runtime.kernels.unavailable import Unavailable
from runtime.layouts import Layout
from runtime.messages import Plan
from runtime.parallel.mesh import ALONE, Group, Mesh
from runtime.parallel.sides import Sides
from runtime.parity.gate_cases import Case

Blocks = list[tuple[Tensor, Tensor]]  # video rows, audio rows after each block


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One guided evaluation, fp32 on the host; velocity: of the network, before the solver."""

    sigma: float
    x: Latents
    velocity: Latents
    denoised: Latents


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """A plan's own run: every step and the clean pair; blocks of the step that was asked for."""

    steps: tuple[Step, ...]
    final: Latents
    blocks: Blocks = field(default_factory=list)
    skipped: tuple[int, ...] = ()  # steps, from 0, that a step cache answered


class Run:
    """One plan's denoiser on one case; `free` and `forced` begin with fresh sides."""

    def __init__(self, plan: Plan, case: Case, mesh: Mesh = ALONE) -> None:
        """Unavailable when a backend of the plan cannot run here; mesh: its ranks."""
        self.plan, self.case, self.sides = plan, case, Sides.of(mesh)
        self._caches: list[CachedModel] = []
        self.device = torch.device(plan.device)
        self.model: H3Model = load_denoiser(case.open(), plan, self.device, mesh=mesh)[0]

    @torch.inference_mode()
    def free(self, block_step: int = -1) -> Trajectory:
        """The sampler on its own; block_step: whose block outputs are kept, -1 for none."""
        case, steps, taps = self.case, list[Step](), self._velocities()
        blocks: Blocks = []

        def on_step(result: StepResult) -> None:
            steps.append(
                Step(
                    sigma=result.sigma,
                    x=_host(result.x),
                    velocity=taps.guided(case.cfg),
                    denoised=_host(result.denoised),
                )
            )

        def timed(step: int) -> AbstractContextManager[None]:
            if step != block_step:
                return nullcontext()
            return block_outputs(self.model, positive, blocks)

        positive, negative = self._sides()
        final = sample(
            positive,
            negative,
            cfg=case.cfg,
            sampler=case.sampler,
            sigmas=case.sigmas,
            noise=draw_noise(case.target, case.seed),
            start=case.start,
            on_step=on_step,
            timed=timed,
            tap=taps.see,
            sides=self.sides,
        )
        return Trajectory(
            steps=tuple(steps), final=_host(final), blocks=blocks, skipped=self._skipped()
        )

    @torch.inference_mode()
    def forced(self, reference: Trajectory, block_step: int = -1) -> Trajectory:
        """One evaluation at every x and sigma of another trajectory; `final` is that one's."""
        positive, negative = self._sides()
        here = [side for side in (positive, negative) if side is not None]
        first, *others = [here[self.sides.own]] if self.sides.shared else here
        first.build_tables(self.case.sigmas[:-1], others)
        steps: list[Step] = []
        blocks: Blocks = []
        for number, there in enumerate(reference.steps):
            taps, x = self._velocities(), there.x.packed().to(self.device)
            watch = block_outputs(self.model, positive, blocks)
            with watch if number == block_step else nullcontext():
                guided = predicted(
                    positive,
                    negative,
                    self.case.cfg,
                    x,
                    self.case.sigmas[number],
                    there.x,
                    number,
                    taps.see,
                    self.sides,
                )
            steps.append(
                Step(
                    sigma=there.sigma,
                    x=there.x,
                    velocity=taps.guided(self.case.cfg),
                    denoised=_host(there.x.unpack(guided)),
                )
            )
        return Trajectory(
            steps=tuple(steps), final=reference.final, blocks=blocks, skipped=self._skipped()
        )

    def _sides(self) -> tuple[Side, Side | None]:
        self._caches = []
        sides = [
            self._side(name, conditioning)
            for name, conditioning in (
                ("positive", self.case.positive),
                ("negative", self.case.negative),
            )
            if conditioning is not None
        ]
        return sides[0], sides[1] if len(sides) > 1 else None

    def _side(self, name: str, conditioning: Conditioning) -> Side:
        case = self.case
        made = Side(
            self.model,
            conditioning,
            case.target,
            seed=case.seed,
            shifts=case.shifts,
            device=self.device,
        )
        if self.plan.cache != "off":
            self._caches.append(CachedModel(self.model, self.plan, case.num_steps, name))
            made.evaluate = self._caches[-1]
        return made

    def _velocities(self) -> _Velocities:
        return _Velocities(self.sides, self.device)

    def _skipped(self) -> tuple[int, ...]:
        """The steps that a cache answered on either side."""
        told = [step for cache in self._caches for step in cache.steps]
        own = {step.step for step in told if step.kind != COMPUTED}
        if self._caches and self.sides.shared:
            flags = torch.tensor([number in own for number in range(self.case.num_steps)])
            either = sum(self.sides.both(flags.float().to(self.device)))
            own = set(torch.as_tensor(either).nonzero().flatten().tolist())
        return tuple(sorted(own))


class _Reads(Exception):
    """A checkpoint's first tensor was read: nothing has refused."""


def refusal(plan: Plan, case: Case) -> str:
    """Why the plan cannot run here, before a reference has taken its minutes; "" if it can.

    Of a layout its first rank is asked; nothing is sent before the weights are there.
    """
    layout = Layout.parse(plan.layout)
    if layout.guidance > 1 and case.negative is None:
        return f"the case has no negative side, which half of the ranks of {layout.name} would have"

    def first(done: int, total: int) -> None:
        raise _Reads

    try:
        device, mesh = torch.device(plan.device), _first_rank(layout)
        load_denoiser(case.open(), plan, device, first, mesh=mesh)
    except Unavailable as error:
        return str(error)
    except _Reads:
        pass
    return ""


def _first_rank(layout: Layout) -> Mesh:
    """The sizes of its groups, without the others."""
    return Mesh(
        rows=Group(size=layout.ulysses),
        weights=Group(size=layout.tensor),
        evaluation=Group(size=layout.of_a_side),
        sides=Group(size=layout.guidance),
        everyone=Group(size=layout.ranks),
    )


class _Velocities:
    """The network's own velocities of one step, by side: what the solver is fed hides errors.

    Audio is carried on the video's sigma: there x itself is most of the sampler's velocity.
    """

    def __init__(self, sides: Sides, device: torch.device) -> None:
        self._sides, self._device = sides, device
        self._seen: dict[tuple[str, str], Tensor] = {}

    def see(self, name: str, value: Tensor) -> None:
        """A tap of `sample`: step_00/net_pos/v_video."""
        *_, side, tensor = name.split("/")
        if tensor.startswith("v_"):
            self._seen[side, tensor] = value.float().cpu()

    def guided(self, cfg: float) -> Latents:
        """Both streams, the negative side taken in as guidance takes it."""
        found = []
        for name in ("v_video", "v_audio"):
            value, other = self._of_both(name)
            if other is not None:
                value = other + (value - other) * cfg
            found.append(value)
        return Latents(video=found[0], audio=found[1])

    def _of_both(self, name: str) -> tuple[Tensor, Tensor | None]:
        """Of the positive and the negative side; None where there is none."""
        if not self._sides.shared:
            return self._seen["net_pos", name], self._seen.get(("net_neg", name))
        own = self._seen["net_neg" if self._sides.own else "net_pos", name]
        positive, negative = self._sides.both(own.to(self._device))
        return positive.cpu(), negative.cpu()


@contextmanager
def block_outputs(model: H3Model, side: Side, kept: Blocks) -> Iterator[None]:
    """Keeps the target rows after every block of the first evaluation inside, on the host."""
    (a0, a1, _), (v0, v1, _) = side.inputs.segments[-2:]

    def keep(_: nn.Module, args: object, out: Tensor) -> None:
        if len(kept) < len(model.blocks):
            kept.append((out[v0:v1].cpu().clone(), out[a0:a1].cpu().clone()))

    handles = [block.register_forward_hook(keep) for block in model.blocks]
    try:
        with eagerly(model):
            yield
    finally:
        for handle in handles:
            handle.remove()


def _host(pair: Latents) -> Latents:
    return Latents(video=pair.video.float().cpu().clone(), audio=pair.audio.float().cpu().clone())
