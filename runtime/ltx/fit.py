"""Do the folders around an LTX denoiser hold what their classes load? `python -m runtime.ltx.fit`.

{role: folder} as JSON comes on stdin, {role: why not, "" where it does} goes to stdout; 2 and a
sentence where diffusers or transformers is not installed. Their classes are built without weights,
and no number of a folder is read.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from runtime.checkpoints.header import CheckpointError
from runtime.kernels.unavailable import Unavailable
from runtime.ltx.components import check_fits
from runtime.ltx.folders import OF_ROLE
from runtime.ltx.text_tower import check_tower

BAD_INPUT = 2


def main() -> int:
    """The entry of the child."""
    asked = json.load(sys.stdin)
    try:
        told = {role: problem_of(role, Path(folder)) for role, folder in asked.items()}
    except Unavailable as error:
        print(error, file=sys.stderr)
        return BAD_INPUT
    print(json.dumps(told))
    return 0


def problem_of(role: str, folder: Path) -> str:
    """Why the loader of this role of [models] would refuse the folder, "" if it would not.

    Unavailable without the extra `ltx`.
    """
    try:
        if role == "text_encoder":
            check_tower(folder)
        else:
            check_fits(folder, OF_ROLE[role])
    except CheckpointError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    sys.exit(main())
