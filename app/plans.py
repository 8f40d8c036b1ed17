"""The plans that can be chosen by name: presets, and those that an admin has saved."""

from __future__ import annotations

import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import Literal

from app import presets
from app.errors import Missing, WrongState
from runtime.media.files import write_bytes_atomic
from runtime.messages import Plan
from runtime.quoted import quoted

Origin = Literal["preset", "user", "session"]

MOST_SAVED = 200
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,59}")


class Plans:
    """The folder `folder`, made when the first plan is saved; any thread may call."""

    def __init__(self, folder: Path, session: Plan) -> None:
        """session: the plan that the console was started with; it may be of no folder."""
        self.folder = folder
        self._session = session
        self._lock = threading.Lock()

    def names(self) -> dict[str, Origin]:
        """Every name with where it comes from; a preset's cannot be taken by another."""
        saved = (path.stem for path in self.folder.glob("*.toml") if _NAME.fullmatch(path.stem))
        found: dict[str, Origin] = dict.fromkeys(presets.names("plans"), "preset")
        for name in sorted(saved):
            found.setdefault(name, "user")
        found.setdefault(self._session.name, "session")
        return found

    def get(self, name: str) -> Plan:
        """The plan of a name; Missing lists the names, ValueError tells a damaged file."""
        if name == self._session.name:
            return self._session
        names = self.names()
        if name not in names:
            raise Missing(f"there is no plan {quoted(name)}; there are {', '.join(names)}")
        folder = presets.FOLDER / "plans" if names[name] == "preset" else self.folder
        return presets.load_plan(folder / f"{name}.toml")

    def save(self, name: str, plan: Plan) -> Plan:
        """Writes the plan whole or not at all; replaces a user's plan of that name."""
        check_name(name)
        plan = replace(plan, name=name)
        with self._lock:
            self._check_free(name)
            self.folder.mkdir(parents=True, exist_ok=True)
            write_bytes_atomic(self.folder / f"{name}.toml", presets.dump_plan(plan).encode())
        return plan

    def delete(self, name: str) -> None:
        """Removes a user's plan; jobs keep their own copy of it."""
        origin = self.names().get(name)
        if origin is None:
            raise Missing(f"there is no plan {quoted(name)} to delete")
        if origin != "user":
            raise WrongState(f"plan {name} is a {origin} plan; only saved plans can be deleted")
        with self._lock:
            (self.folder / f"{name}.toml").unlink(missing_ok=True)

    def _check_free(self, name: str) -> None:
        names = self.names()
        origin = names.get(name, "user")
        if origin != "user":
            raise WrongState(f"{name} is the name of a {origin} plan; save it under another name")
        saved = sum(found == "user" for found in names.values())
        if name not in names and saved >= MOST_SAVED:
            raise WrongState(f"{saved} plans are saved, the most that are kept; delete some")


def check_name(name: str) -> None:
    """ValueError unless it can be the name of a saved plan."""
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"a plan's name has 1 to 60 of a-z, 0-9, _ and -, and begins with a letter or digit; "
            f"got {quoted(name)}"
        )
