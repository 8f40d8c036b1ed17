"""Everything that the planner is given, gathered from the console."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from app import families, ltx_planning, models, needs, preflight
from app.backends import Probe, Publisher, unavailable
from app.errors import WrongState
from app.estimate import Estimate
from app.jobs import JobStore
from app.machine import Machine, machine_of
from app.measuring import Measurer
from app.past import past_of
from app.plan_fields import plan_fields
from app.planner import estimate
from app.plans import Plans
from app.session import Session
from app.stored import plain
from app.telemetry import Telemetry
from app.validated import Validated, known
from runtime.messages import LTXRequest, Plan, Request

SECTIONS = ("attention", "linear", "elementwise")
_LOADED = ("ready", "busy")  # "loading" holds memory too


class Planning:
    """Plans by name, what a request needs, what this machine can run; any thread may ask."""

    def __init__(
        self, root: Path, jobs: JobStore, hub: Publisher, telemetry: Telemetry, session: Session
    ) -> None:
        self._root, self._jobs, self._telemetry, self._session = root, jobs, telemetry, session
        self.plans = Plans(root / "plans", session.plan)
        self._measurer = Measurer()
        self._probe = Probe(root, hub)
        self._validated = Validated(jobs, root)

    def machine(self) -> Machine:
        """As the newest sample shows it."""
        loaded = self._session.engine_state().state in (*_LOADED, "loading")
        return machine_of(self._telemetry.info(), self._telemetry.latest(), engine_loaded=loaded)

    def estimate(self, request: Request, plan: Plan) -> Estimate:
        """Reads the references in a child, the first time they are asked about.

        ValueError when request and plan are of two families, or for a prompt that no queue takes:
        there is nothing to estimate.
        """
        families.check_pair(request, plan)
        preflight.check_length(request)  # and nothing is kept of one that is megabytes long
        found = models.look(plan)
        measured = (
            ltx_planning.measured(request, plan, found)
            if isinstance(request, LTXRequest)
            else self._measurer.measure(request, plan.models.tokenizer)
        )
        readable = not measured.problem and not any(r.problem for r in measured.references)
        machine, status = self.machine(), self._session.engine_state()
        return estimate(
            request,
            plan,
            machine,
            found,
            measured,
            past_of(
                self._session,
                self._jobs,
                self._root,
                request,
                plan,
                measured.total if readable else None,
            ),
            disk_free=preflight.disk_free(self._root),
            loaded=status.plan == plan and status.state in _LOADED,
            unavailable=unavailable(self._probe.stored(machine.name), plain(plan)),
        )

    def refusal(self, plan: Plan) -> str:
        """Why this machine cannot run the plan, whatever the request; "" if nothing is known."""
        machine = self.machine()
        try:
            preflight.check_models(plan)
        except ValueError as error:
            return str(error)
        said = unavailable(self._probe.stored(machine.name), plain(plan))
        return next(iter(said), needs.lacking(plan, machine))

    def check_memory(self, request: Request, plan: Plan) -> None:
        """ValueError for what cannot fit on the GPU or run there, for a caller without `force`."""
        if plan.device != "cuda":
            return
        found = self.estimate(request, plan)
        reason = found.needs_force
        if reason:
            short = any(
                n.reason == reason and n.available is not None for n in (found.vram, found.ram)
            )
            advice = "Choose less, another plan" if short else "Choose another plan"
            raise ValueError(f"{reason} {advice}, or queue it with force.")

    def backends(self) -> dict[str, Any]:
        """What the Backends panel shows; starts the probe when there is none of this machine."""
        machine = self.machine()
        found = self._probe.stored(machine.name)
        if found is None and not self._probe.reason and not self._busy():
            self._probe.start(machine.name)
        devices = [device["name"] for device in found["devices"]] if found else []
        states = self._validated.states(["cpu", "cuda", *devices])
        told = known()
        sections = {
            name: [
                backend
                | {
                    "known": _plain(told.get(backend["name"])),
                    "here": _plain(states.get(backend["name"])),
                }
                for backend in (found or {}).get(name, ())
            ]
            for name in SECTIONS
        }
        return {
            **(found or {"probed": 0.0, "machine": None, "devices": [], "layouts": []}),
            **sections,
            "running": self._probe.running,
            "reason": self._probe.reason,
            "fields": [asdict(field) for field in plan_fields()],
        }

    def probe(self) -> None:
        """Asks this machine again."""
        if self._busy():
            raise WrongState("a job is running; probe this machine when it has ended")
        self._probe.start(self.machine().name)

    def _busy(self) -> bool:
        return any(job.state != "queued" for job in self._jobs.queue())


def _plain(value: Any) -> Any:
    return None if value is None else asdict(value)
