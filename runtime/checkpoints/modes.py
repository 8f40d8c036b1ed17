"""Tells Ref2VA from FL2VA weights by the hash of their time path (no torch)."""

from __future__ import annotations

import hashlib
import json
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, cast

from runtime.checkpoints.header import CheckpointError, Header, read_bytes
from runtime.checkpoints.roles import present

Mode = Literal["ref2va", "fl2va", "unknown"]
MODES = ("ref2va", "fl2va")
KNOWN_MODELS = Path(__file__).resolve().parents[2] / "presets" / "known_models.toml"


def mode_of(header: Header, known: Path = KNOWN_MODELS) -> Mode:
    """Mode of a DiT file according to `known`; "unknown" for other files and unlearnt weights."""
    digest = time_path_hash(header)
    return "unknown" if digest is None else _entries(known).get(digest, "unknown")


def time_path_hash(header: Header) -> str | None:
    """sha256 of `adaln_t_table`, or of the time_embedder tensors in name order, else None."""
    prefix = present(header.tensors.keys()).get("dit")
    if prefix is None or not header.path.is_file():  # a random in-memory checkpoint has no file
        return None
    table = f"{prefix}adaln_t_table"
    embedder = sorted(n for n in header.tensors if n.startswith(f"{prefix}time_embedder."))
    names = [table] if table in header.tensors else embedder
    digest = hashlib.sha256()
    for name in names:
        digest.update(read_bytes(header, header.tensors[name]))
    return digest.hexdigest() if names else None


def learn(header: Header, mode: str, known: Path = KNOWN_MODELS) -> bool:
    """Add the file's time path to `known` as `mode`; False when it was there already.

    The list is replaced atomically. Raises CheckpointError when the file is no DiT or is known as
    the other mode.
    """
    if mode not in MODES:
        raise ValueError(f"mode must be {' or '.join(MODES)}, got {mode!r}")
    digest = time_path_hash(header)
    if digest is None:
        raise CheckpointError(f"{header.path} is not an H3 DiT; only a DiT has a mode")
    listed = _entries(known).get(digest)
    if listed == mode:
        return False
    if listed is not None:
        raise CheckpointError(
            f"{header.path} is listed as {listed} in {known}; delete that entry to change it"
        )
    text = known.read_text() if known.exists() else ""
    name = json.dumps(header.path.name, ensure_ascii=False)
    text += f'\n[[model]]\nmode = "{mode}"\nsha256 = "{digest}"\nfile = {name}\n'
    partial = known.with_name(f".{known.name}.{os.getpid()}.partial")
    with partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(known)
    return True


def _entries(known: Path) -> Mapping[str, Mode]:
    if not known.exists():
        return {}
    try:
        listed = tomllib.loads(known.read_text()).get("model", [])
        entries = {str(entry["sha256"]): str(entry["mode"]) for entry in listed}
    except (tomllib.TOMLDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{known} must hold [[model]] tables with mode and sha256: {error}"
        ) from error
    for mode in entries.values():
        if mode not in MODES:
            raise ValueError(f"{known}: mode must be {' or '.join(MODES)}, got {mode!r}")
    return cast(Mapping[str, Mode], entries)
