"""AdaLN weights of a full checkpoint that never stay on the device: read, used once, dropped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from runtime.checkpoints.base import Checkpoint
from runtime.checkpoints.header import CheckpointError
from runtime.h3.config import H3Config
from runtime.h3.model import H3Model
from runtime.h3.modulation import Lend

PART = "adaln_proj"


def offloaded_names(checkpoint: Checkpoint, cfg: H3Config) -> frozenset[str]:
    """The tensors of the file that stay there; CheckpointError for a pruned one, which has few."""
    if cfg.pruned:
        raise CheckpointError(
            "plan field adaln is offloaded, which is for a full checkpoint's 26 GB of AdaLN "
            "weights; this one is pruned and its AdaLN takes little memory: set adaln to resident"
        )
    return frozenset(name for name in checkpoint.names() if PART in name.split("."))


def lender(model: H3Model, names: frozenset[str], read: Callable[[Sequence[str]], object]) -> Lend:
    """Lends an AdaLN layer: `read` fills its tensors in `model`, and they go when it is left.

    The file is read again, from the page cache as a rule (10 GiB/s), in place of 26 GB of host
    memory: once for each new schedule.
    """
    paths = {layer: path for path, layer in model.named_modules() if path.endswith(PART)}

    @contextmanager
    def lend(layer: nn.Module) -> Iterator[None]:
        path = f"{paths[layer]}.linear"
        empty = model.get_submodule(path)
        try:
            read([name for name in sorted(names) if name.startswith(f"{path}.")])
            yield
        finally:
            model.set_submodule(path, empty)  # a quantised one was put in its place
            for name, parameter in empty.named_parameters(recurse=False):
                held = torch.empty_like(parameter, device="meta")
                empty.register_parameter(name, nn.Parameter(held, requires_grad=False))

    return lend
