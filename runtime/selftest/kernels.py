"""Every backend on the tested device against fp32 and against its own arithmetic on the CPU."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from runtime.checkpoints.base import PackedWeight
from runtime.kernels import attention, elementwise, linear
from runtime.kernels.attention import AttentionBackend, AttentionOptions, PackedRows
from runtime.kernels.elementwise.eager import Eager
from runtime.kernels.linear.dequant import dequantise
from runtime.kernels.unavailable import Unavailable
from runtime.probes.base import FAR_OFF, random, relative_l2
from runtime.probes.elementwise import HEADS as STEP_HEADS
from runtime.probes.elementwise import ROWS as STEP_ROWS
from runtime.probes.elementwise import WIDTH as STEP_WIDTH
from runtime.probes.elementwise import steps
from runtime.probes.linear import STORED, packed_layer
from runtime.selftest.base import CPU, Finding, Trial, found, median_milliseconds

WIDTH = 128
HEADS = {"cuda": 4, "cpu": 2}
ROWS = {"cuda": (1024, 1021), "cpu": (256, 253)}  # a whole number of every kernel's tiles, and not
CONDITIONING = 64  # of these rows
LINEAR_ROWS = 333
TIMED = {"cuda": (56, 4096), "cpu": (2, 256)}  # heads and rows of the attention that is timed
# Even scores are the worst case of a sparse kernel: its CPU reference is 0.26 off on these numbers.
SPARSE, SPARSE_FAR_OFF = ("sol", "sol_nvlabs"), 0.4
_BACKENDS = Path(__file__).parents[2] / "presets" / "backends.toml"


def findings(device: torch.device) -> Iterator[Finding]:
    """One per backend and field, as each is done."""
    listed = tomllib.loads(_BACKENDS.read_text(encoding="utf-8"))["backend"]
    lossy = {name for name, entry in listed.items() if entry.get("lossy")}

    def test(name: str, field: str, trial: Callable[[], Trial]) -> Finding:
        far = SPARSE_FAR_OFF if name in SPARSE else FAR_OFF
        return found(name, field, lossy=name in lossy, trial=trial, far_off=far)

    for name in attention.BACKENDS:
        yield test(name, "attention", lambda name=name: _attention(name, device))  # type: ignore[misc]
    for name in elementwise.BACKENDS:
        yield test(name, "elementwise", lambda name=name: _elementwise(name, device))  # type: ignore[misc]
    for name in linear.BACKENDS:
        for stored in linear.linear_backend(name).formats:
            if stored in STORED:
                field = STORED[stored][1]
                yield test(name, field, lambda n=name, s=stored: _linear(n, s, device))  # type: ignore[misc]


def _attention(name: str, device: torch.device) -> Trial:
    backend = attention.attention_backend(name)
    options = AttentionOptions(rows=PackedRows(conditioning=CONDITIONING))
    attend = backend.load(device, options)
    whole, ragged = ROWS[device.type]
    exact, reference = _deviations(backend, device, options, attend, whole)
    note = ""
    try:
        others = _deviations(backend, device, options, attend, ragged)
        exact, reference = _larger(exact, others[0]), _larger(reference, others[1])
    except Unavailable as error:  # said so, and did not run: a plan is told the same
        note = f"; refuses {ragged} rows: {error.reason}"
    heads, rows = TIMED[device.type]
    q, k, v = (x.to(device) for x in _qkv(backend, heads, rows))
    return Trial(
        route=backend.route(device, options) + note,
        exact_deviation=exact,
        reference_deviation=reference if reference >= 0 else None,
        milliseconds=median_milliseconds(device, lambda: attend(q, k.clone(), v)),
    )


def _deviations(
    backend: AttentionBackend,
    device: torch.device,
    options: AttentionOptions,
    attend: attention.Attend,
    rows: int,
) -> tuple[float, float]:
    """From fp32, and from its own arithmetic on the CPU: -1 where it has none, or is that."""
    q, k, v = _qkv(backend, HEADS[device.type], rows)
    got = attend(*(x.clone().to(device) for x in (q, k, v))).float().cpu()
    scores = q.float() @ k.float().transpose(-1, -2) * WIDTH**-0.5
    exact = relative_l2(got, (scores.softmax(-1) @ v.float()).transpose(1, 2).flatten(2))
    if device == CPU:
        return exact, -1.0
    try:
        reference = backend.load(CPU, options)(q.clone(), k.clone(), v.clone())
    except Unavailable:
        return exact, -1.0
    return exact, relative_l2(got, reference.float())


def _qkv(backend: AttentionBackend, heads: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """[1,H,S,d] as the model hands them over, on the CPU."""
    half = torch.bfloat16 in backend.dtypes
    dtype = torch.bfloat16 if half else backend.dtypes[0]
    q, k, v = random(3, rows, heads, WIDTH, device=CPU).to(dtype)
    return q[None].transpose(1, 2), k[None].transpose(1, 2), v[None].transpose(1, 2)


def _larger(a: float, b: float) -> float:
    return b if not b <= a else a  # NaN is the largest


def _elementwise(name: str, device: torch.device) -> Trial:
    backend = elementwise.elementwise_backend(name)
    ops = backend.load(device)
    given = [random(STEP_ROWS, 3 * STEP_HEADS * STEP_WIDTH, device=CPU) for _ in range(3)]
    rounded = [x.to(torch.bfloat16) for x in given]
    got = [y.float().cpu() for y in steps(ops, *(x.to(device) for x in rounded))]
    exact = steps(Eager(), *given)
    eager = steps(Eager(), *(x.clone() for x in rounded))
    return Trial(
        route=backend.route(device),
        exact_deviation=max(map(relative_l2, got, exact)),
        reference_deviation=None if device == CPU else max(map(relative_l2, got, eager)),
    )


def _linear(name: str, stored: str, device: torch.device) -> Trial:
    backend = linear.linear_backend(name)
    if reason := backend.reason(device):
        raise Unavailable(name, reason)
    packed = packed_layer(stored, CPU)
    x = random(LINEAR_ROWS, packed.shape[1], device=CPU).to(torch.bfloat16)
    module = backend.build(packed_layer(stored, device))
    there = x.to(device)
    got = module(there).float().cpu()
    own = reference(backend, packed, x)
    return Trial(
        route=backend.route(device),
        exact_deviation=relative_l2(got, x.float() @ dequantise(packed, torch.float32).t()),
        reference_deviation=None if device == CPU or own is None else relative_l2(got, own.float()),
        milliseconds=median_milliseconds(device, lambda: module(there)),
    )


def reference(backend: linear.LinearBackend, packed: PackedWeight, x: Tensor) -> Tensor | None:
    """The backend's own arithmetic on the CPU; None where it has none there."""
    if backend.reference is not None:
        return backend.reference(packed, x)
    return None if backend.reason(CPU) else backend.build(packed)(x)
