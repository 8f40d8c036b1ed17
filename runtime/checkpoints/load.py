"""Fills a module built on the meta device from a checkpoint, strictly, one tensor at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from runtime.checkpoints.base import UNQUANTISED, Checkpoint, LayerQuant, PackedWeight
from runtime.checkpoints.header import CheckpointError

DtypeOf = Callable[[str, torch.dtype], torch.dtype]
BuildLinear = Callable[[PackedWeight, nn.Module], nn.Module]
LoadProgress = Callable[[int, int], None]

_LISTED = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """Bytes read from the file and the seconds until they were on the device."""

    bytes: int
    seconds: float


def load_into(
    module: nn.Module,
    checkpoint: Checkpoint,
    *,
    device: torch.device | str,
    dtype_of: DtypeOf,
    build_linear: BuildLinear,
    converted: frozenset[str] = frozenset(),
    ignore: frozenset[str] = frozenset(),
    later: frozenset[str] = frozenset(),
    progress: LoadProgress | None = None,
) -> LoadReport:
    """Load every tensor of `checkpoint` into `module` on `device`.

    A quantised layer's submodule is replaced by build_linear(packed, old module); every other
    parameter and persistent buffer becomes tensor(name).to(dtype_of(name, stored dtype)).
    `converted`: unquantised linears that go to build_linear as well, in dtype_of's dtype.
    `ignore`: tensor names of the file that are left unread; `later`: those that have to fit, but
    are not read now (`fill` reads them). `progress`(bytes done, bytes in all).
    Raises CheckpointError before anything is read when tensors are missing, left over or of a wrong
    shape (contract 1.3, 1.4, 8), and for a tensor that holds NaN or infinity.
    """
    began = time.perf_counter()
    names = [name for name in checkpoint.names() if name not in ignore]
    check_fits(module, checkpoint, names)
    total = fill(
        module,
        checkpoint,
        [name for name in names if name not in later],
        device=device,
        dtype_of=dtype_of,
        build_linear=build_linear,
        converted=converted,
        progress=progress,
    )
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    return LoadReport(bytes=total, seconds=time.perf_counter() - began)


def fill(
    module: nn.Module,
    checkpoint: Checkpoint,
    names: Sequence[str],
    *,
    device: torch.device | str,
    dtype_of: DtypeOf,
    build_linear: BuildLinear,
    converted: frozenset[str] = frozenset(),
    progress: LoadProgress | None = None,
) -> int:
    """Load these tensors, as load_into does, of a checkpoint that fits; returns their bytes.

    names: of whole layers. Raises CheckpointError for a tensor that holds NaN or infinity.
    """
    by_layer = _layer_names(names, [*checkpoint.layers, *converted])
    total = sum(_nbytes(checkpoint, name) for name in names)
    done = 0
    for unit in _units(names, by_layer):
        if unit in by_layer:
            if unit in converted:
                packed = _unquantised(checkpoint, unit, by_layer[unit], device, dtype_of)
            else:
                packed = checkpoint.packed(unit, device)
            for suffix, tensor in packed.tensors.items():
                _check_finite(f"{unit}.{suffix}", tensor)
            module.set_submodule(unit, build_linear(packed, module.get_submodule(unit)))
            done += sum(_nbytes(checkpoint, name) for name in by_layer[unit])
        else:
            dtype = dtype_of(unit, checkpoint.dtype(unit))
            tensor = checkpoint.tensor(unit, device).to(dtype)
            _check_finite(unit, tensor)
            _assign(module, unit, tensor)
            done += _nbytes(checkpoint, unit)
        if progress is not None:
            progress(done, total)
    return total


def _unquantised(
    checkpoint: Checkpoint,
    layer: str,
    names: Iterable[str],
    device: torch.device | str,
    dtype_of: DtypeOf,
) -> PackedWeight:
    rows, columns = checkpoint.shape(f"{layer}.weight")
    return PackedWeight(
        layer=layer,
        quant=LayerQuant(format=UNQUANTISED),
        shape=(rows, columns),
        tensors={
            name.rpartition(".")[2]: checkpoint.tensor(name, device).to(
                dtype_of(name, checkpoint.dtype(name))
            )
            for name in names
        },
    )


def _layer_names(names: Iterable[str], layers: Iterable[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {layer: [] for layer in layers}
    for name in names:
        layer = name.rpartition(".")[0]
        if layer in found:
            found[layer].append(name)
    return {layer: own for layer, own in found.items() if own}  # none: all of it is ignored


def _units(names: Iterable[str], by_layer: dict[str, list[str]]) -> list[str]:
    """Layers and single tensors in file order, each once."""
    seen: dict[str, None] = {}
    for name in names:
        layer = name.rpartition(".")[0]
        seen[layer if layer in by_layer else name] = None
    return list(seen)


def check_fits(module: nn.Module, checkpoint: Checkpoint, names: Sequence[str]) -> None:
    """CheckpointError unless these tensors of the checkpoint are the module's, none read."""
    wanted = {name: tuple(t.shape) for name, t in module.state_dict(keep_vars=True).items()}
    found = set(names)
    scales = {
        name
        for name in names
        if name.rpartition(".")[0] in checkpoint.layers
        and name.rpartition(".")[2] not in ("weight", "bias")
    }
    problems = _listed("missing", [name for name in wanted if name not in found])
    problems += _listed("unexpected", [n for n in names if n not in wanted and n not in scales])
    if problems:
        raise CheckpointError(f"the checkpoint does not fit the model: {'; '.join(problems)}")
    for name, shape in wanted.items():
        layer, _, suffix = name.rpartition(".")
        packed = suffix == "weight" and layer in checkpoint.layers
        got = _logical(checkpoint, layer) if packed else checkpoint.shape(name)
        if got != shape:
            raise CheckpointError(
                f"{name} has shape {list(got)} in the checkpoint, the model wants {list(shape)}"
            )
        if not packed and not checkpoint.dtype(name).is_floating_point:
            raise CheckpointError(
                f"{name} is {checkpoint.dtype(name)} in the checkpoint, without a marker that says "
                f"how it is quantised; it must be a floating-point tensor"
            )


def _check_finite(name: str, tensor: torch.Tensor) -> None:
    """One reduction without a copy; FP8 is left out, since torch has no reduction of it."""
    if tensor.is_meta or not tensor.is_floating_point() or tensor.itemsize == 1:
        return
    if not tensor.numel():
        return
    low, high = torch.aminmax(tensor)
    if not bool(torch.isfinite(low) & torch.isfinite(high)):
        raise CheckpointError(
            f"{name} holds NaN or infinity as {str(tensor.dtype).removeprefix('torch.')}; "
            f"the file is damaged, or its values do not fit that type"
        )


def _logical(checkpoint: Checkpoint, layer: str) -> tuple[int, ...]:
    rows, columns = checkpoint.shape(f"{layer}.weight")
    return (rows, 2 * columns if checkpoint.layers[layer].format == "nvfp4" else columns)


def _listed(word: str, names: list[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return [f"{len(names)} tensors {word}: {', '.join(sorted(names)[:_LISTED])}{more}"]


def _nbytes(checkpoint: Checkpoint, name: str) -> int:
    return checkpoint.dtype(name).itemsize * torch.Size(checkpoint.shape(name)).numel()


def _assign(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    if leaf in owner._parameters:
        owner._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
    else:
        owner._buffers[leaf] = tensor
