"""Composition root: `python launch.py COMMAND ...` imports one command module and runs it."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

from runtime.packed_files import unpack_demo
from runtime.quoted import brief


@dataclass(frozen=True, slots=True)
class Command:
    """A command's module has add_arguments(parser) and run(args) -> exit status."""

    module: str
    help: str


DESCRIPTION = "MiniMax H3 from ComfyUI checkpoints; COMMAND --help tells its options."

COMMANDS: Mapping[str, Command] = {
    "serve": Command("panels.serve", "open the console in a browser"),
    "generate": Command("app.cli.generate", "prompt and references in, video with sound out"),
    "parity": Command("runtime.parity.command", "run golden files and name the first wrong tensor"),
    "decode": Command("app.cli.decode", "decode saved latents to a video"),
    "gate": Command("runtime.parity.gate", "compare two plans per step, video and audio apart"),
    "bench": Command("app.cli.bench", "measure a plan, alone or in turns with another or a peer"),
    "sweep": Command("app.cli.sweep", "measure every layout of GPUs against a single one"),
    "compare": Command("runtime.parity.compare", "compare frames, latents, goldens or videos"),
    "inspect": Command("app.cli.inspect", "say what a checkpoint file holds"),
    "doctor": Command("app.cli.doctor", "say whether this machine can run a plan"),
    "selftest": Command("runtime.selftest.command", "test every backend against its reference"),
    "make-demo": Command("runtime.checkpoints.demo_command", "write a random checkpoint set"),
}


def main(argv: Sequence[str]) -> int:
    """Run one command; a ValueError or OSError becomes one sentence on stderr and status 2.

    Status 130 after Ctrl-C or SIGTERM, which may come while the command is still being imported.
    """
    try:
        return _run(argv)
    except KeyboardInterrupt:
        print(f"launch.py {' '.join(argv[:1])}: stopped", file=sys.stderr)
        return 130


def _run(argv: Sequence[str]) -> int:
    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            super().error(brief(message, argv))

    parser = Parser(prog="launch.py", description=DESCRIPTION)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    chosen = argv[0] if argv else ""
    for name, command in COMMANDS.items():
        sub = commands.add_parser(name, help=command.help, description=command.help)
        if name == chosen:  # the others stay unimported: torch alone costs seconds
            module = importlib.import_module(command.module)
            module.add_arguments(sub)
            sub.set_defaults(run=module.run)
    args = parser.parse_args(argv)
    try:
        unpack_demo()
        status: int = args.run(args)
    except BrokenPipeError:  # the reader of a pipe left, as in `launch.py inspect FILE | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, OSError) as error:
        print(f"launch.py {chosen}: {brief(_sentence(error), argv)}", file=sys.stderr)
        return 2
    return status


def _sentence(error: ValueError | OSError) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror.lower()}{f': {error.filename}' if error.filename else ''}"
    return str(error)


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _interrupt)  # ended by a service manager: as by Ctrl-C
    sys.exit(main(sys.argv[1:]))
