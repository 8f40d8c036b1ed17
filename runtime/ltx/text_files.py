"""The projection from the Gemma tower's states to both streams, from its files (section 5)."""

from __future__ import annotations

from pathlib import Path

import torch

from runtime.checkpoints.header import CheckpointError
from runtime.ltx.components import read_tensors
from runtime.ltx.config import LTXConfig
from runtime.ltx.text import TextProjection
from runtime.ltx.text_folder import check_projection, projection_files


def read_projection(folder: Path, config: LTXConfig, states: int) -> TextProjection:
    """On the CPU in the stored dtype, from whichever of the two places holds it whole.

    states: hidden states of the tower. CheckpointError if there is none or it does not fit.
    """
    files, names, place = projection_files(folder)
    tensors = read_tensors(files, names)
    with torch.device("meta"):
        projection = TextProjection(config, states)
    for name, own in projection.state_dict().items():
        check_projection(place, name, tuple(tensors[name].shape), tuple(own.shape))
        if not bool(torch.isfinite(tensors[name]).all()):
            raise CheckpointError(f"{place}: the projection's {name} holds NaN or infinity")
    projection.load_state_dict(tensors, strict=True, assign=True)
    return projection
