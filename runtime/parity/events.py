"""Progress of `launch.py parity --events`: one JSON object a line on stdout, from any process.

{"event": "begin", "cases": [names]}, {"event": "case", "case", "index"}, {"event": "step", "case",
"index", "run", "done", "total"}, {"event": "result", "case", "index", "status", ...} per case, and
last {"event": "end", "cases", "passed", "bit_equal", "failed", "unsupported", "cpu"}.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping


def emit(event: str, facts: Mapping[str, object]) -> None:
    """One write to the descriptor itself: lines of several processes never mix."""
    line = json.dumps({"event": event, **facts}, ensure_ascii=False, allow_nan=False)
    os.write(sys.__stdout__.fileno() if sys.__stdout__ else 1, f"{line}\n".encode())
