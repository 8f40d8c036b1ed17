"""`torchrun ... -m runtime.rank`: one request on the ranks of several hosts, without a console.

    torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        -m runtime.rank --plan PLAN --request REQUEST --out DIR

The worker is the engine's; torchrun makes the ranks, and its rendezvous is where they meet. Every
host needs the plan's files, and the same plan, request and versions: all are compared before the
first step. Rank 0 tells its events as JSON lines on stdout, and writes into DIR. A rank that fails
ends with status 1, and torchrun ends the rest; a hang is found by the exchange's own limit.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from runtime.families import FAMILIES, need_h3
from runtime.layouts import Layout, check_guidance
from runtime.lifeline import leave
from runtime.messages import (
    Beat,
    Command,
    Event,
    Failure,
    Generate,
    Idle,
    Plan,
    Ref2VARequest,
    Reference,
)
from runtime.parity.plans import expanded, read_plan
from runtime.team import Meeting
from runtime.worker import Worker

_FROM_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class OneRequest:
    """The worker's pipe to a console, where there is none: one command, then the end."""

    def __init__(self, command: Command, rank: int) -> None:
        self._commands: list[Command | None] = [command, None]
        self._rank = rank

    def poll(self) -> bool:
        """Nobody cancels: torchrun is ended instead."""
        return False

    def recv(self) -> Command | None:
        """The request, then None."""
        return self._commands.pop(0)

    def send(self, said: Event | Beat | Idle, /) -> None:
        """To stdout; a rank that failed ends at once, as the others wait for it in an exchange.

        So does one whose stdout nobody reads any more: the worker would take it for the end of a
        console, and end well.
        """
        if isinstance(said, Beat | Idle):
            return
        try:
            print(json.dumps({type(said).__name__: asdict(said)}, default=str), flush=True)
        except OSError as error:
            print(f"rank {self._rank}: nobody reads stdout ({error})", file=sys.stderr, flush=True)
            os._exit(1)
        if isinstance(said, Failure):
            print(f"rank {self._rank}: {said.reason}", file=sys.stderr, flush=True)
            os._exit(1)


def main(argv: Sequence[str]) -> int:
    """0 once the request has ended well; 2 for what torchrun or the files lack."""
    parser = argparse.ArgumentParser(prog="python -m runtime.rank", description=__doc__)
    parser.add_argument("--plan", required=True, help="a TOML file or a name in presets/plans")
    parser.add_argument("--request", required=True, help="a TOML file")
    parser.add_argument("--out", required=True, help="folder of the results, of rank 0")
    parser.add_argument("--no-media", action="store_true", help="float frames in place of an mp4")
    args = parser.parse_args(argv)
    try:
        plan, request = read_plan(args.plan), read_request(expanded(args.request))
        out = expanded(args.out)
        need_h3(plan, "runtime.rank")
        check_guidance(plan.layout, request.cfg)
        meeting = _meeting(plan)
        if meeting.rank == 0:
            out.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        print(f"runtime.rank: {error}", file=sys.stderr)
        return 2
    command = Generate(request=request, out=out, media=not args.no_media, preview=False)
    pipe = OneRequest(command, meeting.rank)
    Worker(plan, FAMILIES, meeting, pipe).serve()
    return 0


def read_request(path: Path) -> Ref2VARequest:
    """As a run folder's request.toml; paths are relative to the file. ValueError says why not."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        references = tuple(_reference(path.parent, one) for one in table.pop("references", ()))
        return Ref2VARequest(id=path.stem, references=references, **table)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, TypeError) as error:
        raise ValueError(f"{path} is no request: {error}") from error


def _reference(folder: Path, table: dict[str, Any]) -> Reference:
    paths: dict[str, Any] = {
        name: folder / expanded(table[name]) for name in ("path", "soundtrack") if name in table
    }
    return Reference(**{**table, **paths})


def _meeting(plan: Plan) -> Meeting:
    """From torchrun's environment, its only way to say who is who."""
    missing = [name for name in _FROM_TORCHRUN if name not in os.environ]
    if missing:
        raise ValueError(f"{', '.join(missing)} not set; start it with torchrun")
    ranks, needed = int(os.environ["WORLD_SIZE"]), Layout.parse(plan.layout).ranks
    if ranks != needed:
        raise ValueError(
            f"layout {plan.layout} needs {needed} ranks, torchrun started {ranks}; change the "
            f"plan's layout or --nnodes and --nproc-per-node"
        )
    return Meeting(
        rank=int(os.environ["RANK"]),
        ranks=ranks,
        local=int(os.environ["LOCAL_RANK"]),
        store="env://",
    )


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
