"""The documents: commands parse, named paths exist, tree and figures are those of the checkout."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import shlex
from fnmatch import fnmatch
from itertools import pairwise
from pathlib import Path

import pytest

from app import presets
from launch import COMMANDS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = ("README.md", *sorted(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md")))
SUFFIXES = (".md", ".py", ".toml", ".txt", ".png", ".sh", ".json")
EXAMPLES_OF_NEW_FILES = "docs/extending.md"  # its files are for the reader to make
PLACEHOLDER = "NAME"
PARTS = ("attention", "GEMM", "other")
FILES_OF_A_RUN = ("run.json", "request.toml", "plan.toml", "result.json", "parity.json", "N.json")


def ignored(top: str) -> bool:
    """Git ignores this name at the top of the checkout, or it is git's own."""
    rules = (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    return top == ".git" or any(fnmatch(top, rule.strip("/")) for rule in rules if rule)


def blocks(text: str) -> list[str]:
    return re.findall(r"^```\w*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def command_lines(text: str) -> list[str]:
    """`python launch.py ...` at the start of a line of a block, or between backticks."""
    lines = [line for block in blocks(text) for line in block.splitlines()]
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S))
    return [line for line in (*lines, *spans) if line.startswith("python launch.py ")]


def named_paths(text: str) -> list[str]:
    """What looks like a file of the checkout: words with a slash or a known suffix."""
    code = " ".join([*blocks(text), *re.findall(r"`([^`\n]+)`", text)])
    links = re.findall(r"\]\(([^)]+)\)", text)
    words = [word.strip('",;:()[]') for word in [*code.split(), *links]]
    return [
        word
        for word in dict.fromkeys(words)
        if re.fullmatch(r"[\w.][\w./-]*", word)
        and word.endswith(SUFFIXES)
        and not word.endswith(FILES_OF_A_RUN)
        and PLACEHOLDER not in word
        and "NNNN" not in word  # numbered pictures of a parity run
    ]


def tree() -> list[str]:
    """The entries of the block under "Files", as paths."""
    (block,) = blocks(README[README.index("## Files") : README.index("## Not here yet")])
    paths, parent = [], ""
    for line in block.splitlines():
        name = line.split()[0]
        nested = line.startswith("  ")
        parent = parent if nested else name
        paths.append(f"{parent}{name}" if nested else name)
    return paths


ALL_COMMANDS = [line for d in DOCUMENTS for line in command_lines((ROOT / d).read_text("utf-8"))]


@pytest.mark.parametrize("line", ALL_COMMANDS)
def test_a_command_of_the_documents_parses(line: str) -> None:
    name, *arguments = shlex.split(line, comments=True)[2:]
    parser = argparse.ArgumentParser(exit_on_error=False)
    importlib.import_module(COMMANDS[name].module).add_arguments(parser)
    try:
        parser.parse_args(arguments)
    except (argparse.ArgumentError, SystemExit) as error:
        pytest.fail(f"{line}: {error}")


@pytest.mark.parametrize("kind", ["requests", "plans"])
def test_every_preset_that_a_command_names_exists(kind: presets.Kind) -> None:
    option = f"--{kind[:-1]}"
    named = [
        after
        for line in ALL_COMMANDS
        for before, after in pairwise(shlex.split(line))
        if before == option
    ]
    assert named
    for name in named:
        presets.find(kind, name)


def test_every_command_has_an_example() -> None:
    lines = [line for block in blocks(README) for line in block.splitlines()]
    shown = {line.split()[2] for line in lines if line.startswith("python launch.py ")}
    assert shown == set(COMMANDS)


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if d != EXAMPLES_OF_NEW_FILES])
def test_every_path_that_is_named_exists(document: str) -> None:
    paths = named_paths((ROOT / document).read_text(encoding="utf-8"))
    gone = [p for p in paths if not ignored(p.split("/")[0]) and not exists(p)]
    assert not gone


def exists(path: str) -> bool:
    """As it stands, or a file whose folder the sentence names before it (`engine.py`)."""
    if "/" in path:
        return (ROOT / path).exists()
    return (ROOT / path).exists() or any((ROOT / "runtime").rglob(path))


def test_the_tree_lists_every_top_level_folder_and_nothing_else() -> None:
    folders = {f"{p.name}/" for p in ROOT.iterdir() if p.is_dir() and not ignored(p.name)}
    listed = {path for path in tree() if path.count("/") == 1 and path.endswith("/")}
    assert listed == folders
    assert all((ROOT / path).exists() for path in tree())


def test_the_speed_table_is_the_benchmark_record() -> None:
    lines = (ROOT / "docs/benchmarks/records.jsonl").read_text().splitlines()
    results = [json.loads(line) for line in lines]  # of benches and of sweeps, which have layouts
    subjects = [one for result in results for one in result.get("subjects", ())]
    told = README.split("## Speed")[1].split("## Files")[0]
    found = 0
    for one in subjects:
        step = f"| {one['step_seconds']['median']:.3f} s |"
        for row in (line for line in told.splitlines() if step in line):
            found += 1
            parts = [one["parts"][name]["median"] for name in PARTS if name in one["parts"]]
            assert " / ".join(f"{seconds:.3f}" for seconds in parts) in row
            assert f"{one['peak_allocated_bytes'] / 2**30:.1f} GiB" in row
    assert found == len([line for line in told.splitlines() if line.startswith("|")]) - 2


def test_the_readme_stays_short() -> None:
    assert len(README.splitlines()) < 200
