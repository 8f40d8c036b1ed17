"""What an LTX golden is, told from the names it stores: its header has no word for it."""

from __future__ import annotations

import re
from collections.abc import Iterable

UNKNOWN = "ltx"
# The first pattern that any stored name matches; whole runs have inputs of a forward as well
_STORED = {
    "ltx_sampler": r".+\.step\.\d+\.x\.video",
    "ltx_schedule": r"stage1",
    "ltx_forward": r"in\.video_latent",
    "ltx_rope": r"video_self\.freqs_f32",
    "ltx_connectors": r"in\.valid_hidden_states_bsdl",
    "ltx_dequant": r"dequant\..+",
    "ltx_linear": r".+\.act_codes",
}


def kind_of(names: Iterable[str]) -> str:
    """The kind of a golden with these tensors, or UNKNOWN."""
    stored = list(names)
    for kind, pattern in _STORED.items():
        if any(re.fullmatch(pattern, name) for name in stored):
            return kind
    return UNKNOWN
