"""Files that the checkout holds compressed with xz, unpacked beside themselves before first use.

Random weights keep two thirds to five sixths of their size, yet the checkout has a limit. No torch.
"""

from __future__ import annotations

import lzma
import os
import threading
from pathlib import Path

from runtime.media.files import write_bytes_atomic

_LOCK = threading.Lock()  # the threads of a process would write the same part
_DEMO = Path(__file__).parents[1] / "presets" / "demo"


def unpack_demo() -> None:
    """The demo model's checkpoints, for every command of launch.py and for the tests.

    In a checkout of another user's nothing is written: a plan that needs them is refused later.
    """
    if os.access(_DEMO, os.W_OK):
        unpack(_DEMO, _DEMO)


def unpack(folder: Path, into: Path) -> None:
    """Every `NAME.xz` of `folder` as `into`/NAME, whole or not at all.

    One that exists stays, unless it is older than what is packed: an update of the checkout.

    OSError where `into` cannot be written; ValueError of one sentence for a damaged file.
    """
    with _LOCK:
        for packed in sorted(folder.glob("*.xz")):
            _unpack(packed, into / packed.stem)


def _unpack(packed: Path, path: Path) -> None:
    if path.exists() and path.stat().st_mtime_ns >= packed.stat().st_mtime_ns:
        return
    try:
        data = lzma.decompress(packed.read_bytes())
    except (lzma.LZMAError, EOFError) as error:
        raise ValueError(
            f"{packed} is damaged ({error}); restore it from the repository"
        ) from error
    write_bytes_atomic(path, data)
