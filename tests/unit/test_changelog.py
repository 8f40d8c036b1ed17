"""The changelog and the package say the same version."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
HEADING = re.compile(r"^## \[(\d+)\.(\d+)\.(\d+)\] - (?:unreleased|\d{4}-\d\d-\d\d)$")


def headings() -> list[str]:
    lines = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.startswith("## ")]


def version(heading: str) -> tuple[int, ...]:
    match = HEADING.match(heading)
    assert match, f"{heading!r} is not '## [x.y.z] - date' with a date or the word unreleased"
    return tuple(int(part) for part in match.groups())


def test_the_newest_version_is_that_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert ".".join(map(str, version(headings()[0]))) == project["version"]


def test_versions_go_down_and_each_stands_once() -> None:
    found = [version(heading) for heading in headings()]
    assert found == sorted(set(found), reverse=True)
