"""A process that reads one file nobody vouches for: python -m runtime.media.probe_child ...

probe FILE: prints what the file holds as JSON. probe FILE THUMB also writes a WebP of it (sounds
have none). record FILE: prints the run record of an mp4 that was written here.
A file that cannot be read is one sentence on stderr and exit status 2.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from runtime.media.info import MediaInfo
from runtime.media.mp4 import read_run_metadata
from runtime.media.probe import probe
from runtime.media.thumbs import write_image_thumb, write_video_thumb

MOST_RECORD = 4 << 20  # characters of JSON


def main(arguments: Sequence[str]) -> int:
    """Runs one command; see the file's docstring."""
    command, *paths = arguments
    file, *others = map(Path, paths)
    try:
        if command == "record":
            print(_record(file))
            return 0
        info = probe(file)
        for thumb in others:
            _thumb(info, file, thumb)
        print(json.dumps(asdict(info)))
    except ValueError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 2
    return 0


def _thumb(info: MediaInfo, file: Path, thumb: Path) -> None:
    if info.kind == "image":
        write_image_thumb(file, thumb)
    elif info.kind == "video":
        write_video_thumb(file, thumb)


def _record(file: Path) -> str:
    text = json.dumps(read_run_metadata(file))
    if len(text) > MOST_RECORD:
        raise ValueError(f"the run record of {file} is too long to be one of ours")
    return text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
