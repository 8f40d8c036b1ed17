"""Whether the folders of an LTX plan hold every tensor of the classes that load them.

diffusers and transformers know which those are. The console loads neither: a child builds the
classes without weights, once for what a folder holds, and its tokenizer is opened in another.
"""

from __future__ import annotations

import hashlib
import json
import threading
from pathlib import Path

from app import families, ltx_prompt
from app.children import ChildFailed, run_child
from runtime.ltx.folders import CONFIG, shapes_of, tensor_files
from runtime.ltx.text_folder import INDEX
from runtime.messages import Plan

_SECONDS = 180.0  # both libraries are imported, and a disk may be cold
_FOLDER = "\0"  # stands for the folder in what is kept: another may hold the same
_asking = threading.Lock()  # who asks the same meanwhile finds the answer
_known: dict[str, str] = {}


def check(plan: Plan) -> None:
    """ValueError with one sentence for a folder that its class, or a tokenizer, cannot be made of.

    The models of the plan have been found to be right by their headers (preflight.check_models).
    """
    todo = f"change [models] in plan {plan.name}"
    for problem in problems(plan).values():
        if problem:
            raise ValueError(f"{problem}; {todo}")
    try:
        ltx_prompt.check_tokenizer(plan)
    except ChildFailed:  # which is no fault of the file for sure
        raise
    except ValueError as error:
        raise ValueError(f"{error}; {todo}") from error


def problems(plan: Plan) -> dict[str, str]:
    """By role of each folder why it cannot be loaded, "" where it can.

    ValueError if that cannot be found out, as without the extra `ltx`.
    """
    folders = {role: Path(getattr(plan.models, role)) for role in families.LTX.folders}
    held = {role: _held(role, folder) for role, folder in folders.items()}
    with _asking:
        new = {role: folders[role] for role in held if held[role] not in _known}
        if new:
            told = json.loads(
                run_child(
                    "runtime.ltx.fit",
                    what=f"looking into the folders of plan {plan.name}",
                    seconds=_SECONDS,
                    memory_bytes=0,
                    stdin=json.dumps(new, default=str).encode(),
                )
            )
            for role, folder in new.items():
                _known[held[role]] = told[role].replace(str(folder), _FOLDER)
        return {role: _known[held[role]].replace(_FOLDER, str(folders[role])) for role in held}


def _held(role: str, folder: Path) -> str:
    """The same for folders of the same config.json, index and tensors, but for their numbers."""
    files = tensor_files(folder)
    shapes = shapes_of(files, files)
    tensors = sorted((name, files[name].name, shape) for name, shape in shapes.items())
    told = [path.read_bytes() for path in (folder / CONFIG, folder / INDEX) if path.is_file()]
    content = (role, told, tensors)
    return hashlib.sha256(repr(content).encode()).hexdigest()
