"""Makes small checkpoint files for tests: random tiny ones, and edited copies of them."""

from __future__ import annotations

import itertools
import json
import re
import struct
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from runtime.checkpoints.base import PackedWeight
from runtime.checkpoints.demo import write_random
from runtime.checkpoints.file import IndexedCheckpoint
from runtime.checkpoints.published import published

Tensors = dict[str, Tensor]


def tiny(folder: Path, role: str, format: str, seed: int = 0) -> Path:
    """A tiny random checkpoint in the published key layout."""
    path = folder / f"{role}_{format}_{seed}.safetensors"
    write_random(path, role, size="tiny", format=format, seed=seed)
    return path


def read_all(path: Path) -> tuple[Tensors, dict[str, str]]:
    """All tensors as the safetensors library reads them, and the metadata."""
    with safe_open(str(path), framework="pt") as file:
        return {n: file.get_tensor(n).clone() for n in file.keys()}, file.metadata() or {}  # noqa: SIM118


def edited(
    path: Path,
    edit: Callable[[Tensors], object] = lambda tensors: None,
    *,
    metadata: Mapping[str, str] | None = None,
    rename: Callable[[str], str] = lambda name: name,
) -> Path:
    """A copy in which `edit` has changed the tensors, under other names or metadata."""
    tensors, old = read_all(path)
    edit(tensors)
    out = path.with_name(f"edited_{path.name}")
    renamed = {rename(name): tensor for name, tensor in tensors.items()}
    save_file(renamed, str(out), metadata=dict(old if metadata is None else metadata))
    return out


def marker(**options: object) -> Tensor:
    """A `.comfy_quant` tensor."""
    return torch.tensor(list(json.dumps(options).encode()), dtype=torch.uint8)


def raw_file(path: Path, header: object, payload: bytes = b"") -> Path:
    """A file with this header JSON, right or wrong."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + payload)
    return path


def sparse(folder: Path, role: str, format: str) -> Path:
    """A full-size file with a real header and markers, and holes for weights."""
    layout = published(role, size="full", format=format)
    path = folder / f"{role}_{format}.safetensors"
    with path.open("wb") as file:
        file.write(layout.header())
        position = file.tell()
        for spec in layout.tensors:
            if spec.marker:
                file.seek(position)
                file.write(spec.marker.encode())
            position += spec.nbytes
        file.truncate(position)
    return path


class Packed(nn.Module):
    """What a test builds in place of a quantised layer."""

    def __init__(self, packed: PackedWeight) -> None:
        super().__init__()
        self.packed = packed


def meta_module(checkpoint: IndexedCheckpoint) -> nn.Module:
    """A module on the meta device with a parameter for every tensor the checkpoint has."""
    root = nn.Module()
    for name in checkpoint.names():
        layer, _, leaf = name.rpartition(".")
        quantised = layer in checkpoint.layers
        if quantised and leaf not in ("weight", "bias"):
            continue
        owner = root
        for part in filter(None, layer.split(".")):
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        packed = quantised and leaf == "weight"
        shape = checkpoint.logical_shape(layer) if packed else checkpoint.shape(name)
        value = torch.empty(shape, device="meta")
        owner.register_parameter(leaf, nn.Parameter(value, requires_grad=False))
    return root


@cache
def expected_layouts() -> dict[str, tuple[int, dict[str, tuple[str, tuple[int, ...]]]]]:
    """The goldens' tiny checkpoints: "role format" -> (file bytes, name -> (dtype, shape))."""
    found: dict[str, tuple[int, dict[str, tuple[str, tuple[int, ...]]]]] = {}
    text = Path(__file__).parent / "assets" / "tiny_layouts.txt"
    for line in text.read_text().splitlines():
        first, second, third = line.split(" ", 2)
        if first == "#":
            format, size = third.split()
            table: dict[str, tuple[str, tuple[int, ...]]] = {}
            found[f"{second} {format}"] = (int(size), table)
            continue
        shape = () if second == "-" else tuple(map(int, second.split("x")))
        table.update(dict.fromkeys(_expand(third), (first, shape)))
    return found


def _expand(pattern: str) -> list[str]:
    """blocks.{0-2}.norm{1,2} -> all six names."""
    pieces = re.split(r"\{([\d,-]+)\}", pattern)
    choices = [_numbers(p) if i % 2 else [p] for i, p in enumerate(pieces)]
    return ["".join(parts) for parts in itertools.product(*choices)]


def _numbers(text: str) -> list[str]:
    if "-" in text:
        low, high = map(int, text.split("-"))
        return [str(n) for n in range(low, high + 1)]
    return text.split(",")
